"""The options and arguments that the commands about streams share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from headrace.ledger import Ledger

_LEDGER = typer.Option(
    "--ledger",
    envvar="HEADRACE_LEDGER",
    help='The ledger: a SQLAlchemy URL, or "connection:<id>" with AIRFLOW_CONN_<ID> set.',
)
LedgerUrl = Annotated[str, _LEDGER]
OptionalLedgerUrl = Annotated[str | None, _LEDGER]
StreamName = Annotated[str, typer.Argument(help="The stream's name.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@contextmanager
def opened(url: str) -> Iterator[Ledger]:
    """Open the ledger at this URL. Never creates one: a mistyped path must not create an empty database.

    Raises:
        LedgerError: there is no ledger, or it is of another version.
    """
    from headrace.ledger import Ledger

    with Ledger.open(url, create=False) as ledger:
        yield ledger
