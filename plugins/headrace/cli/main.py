"""The `headrace` command: a registry of sub-commands, each imported when it is called."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperGroup

from headrace.errors import HeadraceError

COMMANDS = {
    "up": "headrace.cli.stack:up",
    "status": "headrace.cli.stack:status",
    "down": "headrace.cli.stack:down",
    "check": "headrace.cli.check:check",
    "streams": "headrace.cli.streams:streams",
    "start": "headrace.cli.start_stop:start",
    "stop": "headrace.cli.start_stop:stop",
    "batches": "headrace.cli.batches:batches",
    "recover": "headrace.cli.ledger:recover",
    "events": "headrace.cli.events:events",
    "ledger": "headrace.cli.ledger:ledger",
    "fsck": "headrace.cli.fsck:fsck",
    "alias": "headrace.cli.alias:alias",
    "dlq": "headrace.cli.dlq:dlq",
}
"""Name to `module:attribute`: a `typer.Typer` becomes a group, a function a command. The help uses this order."""


@contextmanager
def errors_as_one_line() -> Iterator[None]:
    """Print a HeadraceError (what happened, and what to do about it) without a stack trace, and exit with code 1."""
    try:
        yield
    except HeadraceError as error:
        typer.echo(f"Error: {error}", err=True)
        sys.exit(1)


def single_command(function: Callable[..., None]) -> typer.Typer:
    """An application whose only command is ``function``."""
    single = typer.Typer(add_completion=False, pretty_exceptions_show_locals=False)
    single.command()(function)
    return single


class LazyGroup(TyperGroup):
    """Looks up sub-commands in `COMMANDS`, so that `headrace status` does not import what other commands need."""

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ARG002
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:  # noqa: ARG002
        target = COMMANDS.get(cmd_name)
        if target is None:
            return None
        module, _, attribute = target.partition(":")
        found = getattr(import_module(module), attribute)
        if not isinstance(found, typer.Typer):
            found = single_command(found)
        command = typer.main.get_command(found)
        command.name = cmd_name
        return command

    def invoke(self, ctx: Any) -> Any:
        with errors_as_one_line():
            return super().invoke(ctx)


app = typer.Typer(cls=LazyGroup, no_args_is_help=True, add_completion=False, pretty_exceptions_show_locals=False)


@app.callback()
def headrace() -> None:
    """Micro-batch ingestion from Kafka to Elasticsearch that Airflow runs and Spark computes."""


if __name__ == "__main__":
    app()
