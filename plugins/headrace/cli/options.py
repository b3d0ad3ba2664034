"""The options and arguments that commands share: their types, and how their texts are read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.clock import time_text

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


def milliseconds(text: str, option: str) -> int:
    """Parse epoch milliseconds or an ISO 8601 time (UTC if it names no zone) into epoch milliseconds.

    Raises:
        BadParameter: the text is neither; the error names ``option``.
    """
    if text.isdigit():
        return int(text)
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is neither epoch milliseconds nor ISO 8601", param_hint=option) from None
    return int((at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp() * 1000)


def batch_time(text: str, option: str, *, interval_ms: int) -> int:
    """Parse a batch time of a stream with this batch interval into epoch milliseconds.

    Raises:
        BadParameter: the text is not a time, or not a batch time; the error names ``option``, and for the latter the
            nearest batch times.
    """
    batch_time_ms = milliseconds(text, option)
    since = batch_time_ms % interval_ms
    if since:
        before, after = time_text(batch_time_ms - since), time_text(batch_time_ms - since + interval_ms)
        raise typer.BadParameter(
            f"{time_text(batch_time_ms)} is no batch time: the one before it is {before}, the one after it {after}",
            param_hint=option,
        )
    return batch_time_ms
