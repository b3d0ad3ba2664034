"""The options and arguments that commands share: their types, and how their texts are read."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace.cli.configuration import FILE, configured_ledger, configured_ledger_if_any
from headrace.clock import SystemClock, time_text

if TYPE_CHECKING:
    from headrace.ledger import Ledger

LEDGER_VARIABLE = "HEADRACE_LEDGER"
AIRFLOW_VARIABLE = "HEADRACE_AIRFLOW"

_UNIT_MS = {"second": 1_000, "minute": 60_000, "hour": 3_600_000, "day": 86_400_000, "week": 604_800_000}
_AGO = re.compile(rf"(\d+) *({'|'.join(_UNIT_MS)})s? ago")


def _ledger_option(configured: Callable[[], str | None]) -> Any:
    def given_or_configured(ctx: typer.Context, given: str) -> str | None:
        # A shell's completion parses too, and must not fail.
        return given if given or ctx.resilient_parsing else configured()

    return typer.Option(
        "--ledger",
        envvar=LEDGER_VARIABLE,
        default_factory=str,
        callback=given_or_configured,
        show_default=FILE,
        metavar="URL",
        help='A SQLAlchemy URL, or "connection:<id>" with AIRFLOW_CONN_<ID> set.',
    )


def stream_names(ctx: typer.Context, incomplete: str) -> list[str]:
    """The names of the ledger's streams, for a shell's completion; none if the ledger does not answer."""
    try:
        with opened(ctx.params.get("ledger") or os.environ.get(LEDGER_VARIABLE) or configured_ledger()) as ledger:
            return [row.name for row in ledger.streams.all() if row.name.startswith(incomplete)]
    except Exception:
        # An error's text would end up in the command line that the user types.
        return []


LedgerUrl = Annotated[str, _ledger_option(configured_ledger)]
OptionalLedgerUrl = Annotated[str | None, _ledger_option(configured_ledger_if_any)]
StreamName = Annotated[str, typer.Argument(metavar="NAME", help="The stream's name.", autocompletion=stream_names)]
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
    """Parse an ISO 8601 time (UTC if it names no zone), "2 hours ago" or epoch milliseconds into epoch milliseconds.

    Raises:
        BadParameter: the text is none of these; the error names ``option``.
    """
    if text.isdigit():
        return int(text)
    if ago := _AGO.fullmatch(text.strip()):
        return SystemClock().now_ms() - int(ago[1]) * _UNIT_MS[ago[2]]
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        raise typer.BadParameter(
            f'{text!r} is no time: give ISO 8601, such as 2026-11-21T14:05Z, or "2 hours ago"', param_hint=option
        ) from None
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
