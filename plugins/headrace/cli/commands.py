"""The table of all commands: `headrace NOUN VERB`. A command is imported when it is called, or when help lists it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperGroup

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True)
class Noun:
    """A group of commands: its help, and its verbs as ``module:function``, in the order of the help.

    A noun with one command and no verb has this command in the place of the verbs.
    """

    help: str
    verbs: Mapping[str, str] | str


COMMANDS: dict[str, Noun] = {
    "streams": Noun(
        "Streams: their states; start, stop, check and recover them.",
        {
            "list": "headrace.cli.streams:list_streams",
            "show": "headrace.cli.streams:show_stream",
            "start": "headrace.cli.start_stop:start",
            "stop": "headrace.cli.start_stop:stop",
            "check": "headrace.cli.check:check",
            "fsck": "headrace.cli.fsck:fsck",
            "recover": "headrace.cli.recover:recover",
        },
    ),
    "batches": Noun(
        "Batches of a stream: list them, show one, run one again, or abandon one.",
        {
            "list": "headrace.cli.batches:list_batches",
            "show": "headrace.cli.batches:show",
            "unclaimed": "headrace.cli.batches:unclaimed",
            "preview": "headrace.cli.batch_preview:preview",
            "export": "headrace.cli.batch_preview:export",
            "run": "headrace.cli.batch_run:run",
            "abandon": "headrace.cli.batches:abandon",
        },
    ),
    "replay": Noun("Past batches with other code: compare the documents.", {"diff": "headrace.cli.replay_diff:diff"}),
    "dead-letters": Noun(
        "Dead letters, the documents that Elasticsearch refused: list them, show one, or index them again.",
        {
            "list": "headrace.cli.dead_letters:list_letters",
            "show": "headrace.cli.dead_letters:show",
            "replay": "headrace.cli.dead_letters:replay",
        },
    ),
    "trace": Noun("One record's way, from Kafka to its documents.", "headrace.cli.trace:trace"),
    "events": Noun("Events: what happened to a stream.", {"list": "headrace.cli.events:list_events"}),
    "aliases": Noun(
        "Aliases that streams write through: move one to an index that a replay wrote.",
        {"swap": "headrace.cli.aliases:swap"},
    ),
    "ledger": Noun("The ledger: its schema.", {"migrate": "headrace.cli.ledger:migrate"}),
    "stack": Noun(
        "Kafka, Elasticsearch, Postgres and Airflow on this machine, for a first day and for tests.",
        {
            "up": "headrace.cli.stack:up",
            "down": "headrace.cli.stack:down",
            "status": "headrace.cli.stack:status",
            "env": "headrace.cli.stack_environment:env",
        },
    ),
}
"""Noun to its commands, in the order of the help."""


class Nouns(Mapping[str, Any]):
    """The groups and commands of `COMMANDS`, made when they are looked up."""

    def __getitem__(self, name: str) -> Any:
        noun = COMMANDS[name]
        if isinstance(noun.verbs, str):
            return Verbs({name: noun.verbs})[name]
        verbs: Any = Verbs(noun.verbs)
        return TyperGroup(name=name, commands=verbs, help=noun.help, no_args_is_help=True)

    def __iter__(self) -> Iterator[str]:
        return iter(COMMANDS)

    def __len__(self) -> int:
        return len(COMMANDS)


class Verbs(Mapping[str, Any]):
    """The commands of one noun, imported when they are looked up."""

    def __init__(self, targets: Mapping[str, str]) -> None:
        self._targets = targets

    def __getitem__(self, name: str) -> Any:
        module, _, function = self._targets[name].partition(":")
        command = typer.main.get_command(single_command(getattr(import_module(module), function)))
        command.name = name
        return command

    def __iter__(self) -> Iterator[str]:
        return iter(self._targets)

    def __len__(self) -> int:
        return len(self._targets)


def examples(*lines: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command examples for its help, each without the word headrace."""

    def marked(function: Callable[..., None]) -> Callable[..., None]:
        _EXAMPLES[function] = lines
        return function

    return marked


def examples_of(function: Callable[..., None]) -> tuple[str, ...]:
    """The examples of the command that runs ``function``."""
    return _EXAMPLES.get(function, ())


def single_command(function: Callable[..., None]) -> typer.Typer:
    """An application whose only command is ``function``."""
    single = typer.Typer(add_completion=False, pretty_exceptions_show_locals=False)
    lines = examples_of(function)
    epilog = "\n".join(["Examples:", *(f"  headrace {line}" for line in lines)]) if lines else None
    single.command(epilog=epilog)(function)
    return single


_EXAMPLES: dict[Callable[..., None], tuple[str, ...]] = {}
