"""The `headrace` command."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from headrace import __version__
from headrace.cli.commands import Nouns
from headrace.cli.output import echo
from headrace.errors import HeadraceError


@contextmanager
def errors_as_one_line() -> Iterator[None]:
    """Print a HeadraceError (what happened, and what to do about it) without a stack trace, and exit with code 1."""
    try:
        yield
    except HeadraceError as error:
        echo(f"Error: {error}", err=True)
        sys.exit(1)


class RootGroup(TyperGroup):
    """The nouns of `headrace.cli.commands.COMMANDS`."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{**settings, "commands": Nouns()})

    def invoke(self, ctx: Any) -> Any:
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


if __name__ == "__main__":
    app()
