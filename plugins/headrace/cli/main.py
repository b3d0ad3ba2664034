"""The `headrace` command, and the table of all commands: `headrace NOUN VERB`.

A command is imported when it is called, or when help lists it. Commands do not import this module: run as
``python -m headrace.cli.main`` it would be a second one.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from headrace import __version__
from headrace.cli.options import examples_of
from headrace.cli.output import echo
from headrace.errors import HeadraceError

if TYPE_CHECKING:
    from collections.abc import Callable


_OBJECTS_BETWEEN_COLLECTIONS = 50_000


@contextmanager
def errors_as_one_line() -> Iterator[None]:
    """Print a HeadraceError (what happened, and what to do about it) without a stack trace, and exit with code 1."""
    try:
        yield
    except HeadraceError as error:
        echo(f"Error: {error}", err=True)
        sys.exit(1)


class RootGroup(TyperGroup):
    """The nouns of `headrace.cli.main.COMMANDS`."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{**settings, "commands": Nouns()})

    def invoke(self, ctx: Any) -> Any:
        # Imports make many objects and no garbage. With the default threshold, 700, they are searched over and over.
        gc.set_threshold(_OBJECTS_BETWEEN_COLLECTIONS)
        with errors_as_one_line():
            return super().invoke(ctx)


app = typer.Typer(
    cls=RootGroup,
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_show_locals=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(asked: bool) -> None:
    if asked:
        echo(f"headrace {__version__}")
        raise typer.Exit


@app.callback()
def headrace(
    *,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Micro-batch ingestion from Kafka to Elasticsearch that Airflow runs and Spark computes."""


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
            "start": "headrace.cli.streams:start",
            "stop": "headrace.cli.streams:stop",
            "reopen": "headrace.cli.streams:reopen",
            "check": "headrace.cli.streams:check",
            "fsck": "headrace.cli.repair:fsck",
            "recover": "headrace.cli.repair:recover",
        },
    ),
    "batches": Noun(
        "Batches of a stream: list them, show one, run one again, or abandon one.",
        {
            "list": "headrace.cli.batches:list_batches",
            "show": "headrace.cli.batches:show",
            "unclaimed": "headrace.cli.batches:unclaimed",
            "preview": "headrace.cli.preview:preview",
            "export": "headrace.cli.preview:export",
            "run": "headrace.cli.batches:run",
            "abandon": "headrace.cli.batches:abandon",
        },
    ),
    "replay": Noun("Past batches with other code: compare the documents.", {"diff": "headrace.cli.preview:diff"}),
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
        "Aliases and indices that streams write to: move an alias to an index that a replay wrote, or accept another "
        "index.",
        {"swap": "headrace.cli.aliases:swap", "accept": "headrace.cli.aliases:accept_index"},
    ),
    "from-connect": Noun(
        "The definition of a stream that does what a connector of Kafka Connect did.",
        "headrace.cli.from_connect:from_connect",
    ),
    "mapping": Noun(
        "The mapping of an output's documents: print it, or create the index.", "headrace.cli.mapping:mapping"
    ),
    "ledger": Noun("The ledger: its schema.", {"migrate": "headrace.cli.repair:migrate"}),
    "stack": Noun(
        "Kafka, Elasticsearch, Postgres and Airflow on this machine, for a first day and for tests.",
        {
            "up": "headrace.cli.stack:up",
            "down": "headrace.cli.stack:down",
            "status": "headrace.cli.stack:status",
            "env": "headrace.cli.stack:env",
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


def single_command(function: Callable[..., None]) -> typer.Typer:
    """An application whose only command is ``function``."""
    single = typer.Typer(add_completion=False, pretty_exceptions_show_locals=False)
    lines = examples_of(function)
    epilog = "\n".join(["Examples:", *(f"  headrace {line}" for line in lines)]) if lines else None
    single.command(epilog=epilog)(function)
    return single


if __name__ == "__main__":
    app()
