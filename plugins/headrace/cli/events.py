"""`headrace events list`: what happened to a stream."""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from headrace.cli.options import LedgerUrl, StreamName, examples, opened
from headrace.cli.output import echo, print_json, print_table
from headrace.clock import time_text
from headrace.ledger import EventKind

if TYPE_CHECKING:
    from headrace.ledger import Ledger
    from headrace.ledger.tables import EventRow


@examples("events list orders --follow", "events list orders --kind batch_failed --kind job_failed")
def list_events(
    name: StreamName,
    *,
    ledger: LedgerUrl,
    kind: Annotated[
        list[EventKind] | None,
        typer.Option(metavar="KIND", help="Only this kind, such as batch_failed; may be given several times."),
    ] = None,
    blocks: Annotated[
        bool, typer.Option("--blocks", help="Also the events of blocks, of which there are several a second.")
    ] = False,
    limit: Annotated[int, typer.Option(help="How many events, the newest.", min=1)] = 50,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Continue with new events until Ctrl-C.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON; with --follow one object per line.")] = False,
) -> None:
    """List what happened to a stream, newest first. With --follow in the order in which it happens."""
    kinds = set(kind) if kind else {known for known in EventKind if blocks or known is not EventKind.BLOCK_ADDED}
    with opened(ledger) as opened_ledger:
        opened_ledger.streams.get(name)
        rows = opened_ledger.events.latest(name, kinds, limit)
        if follow:
            _follow(opened_ledger, name, kinds, rows[::-1], as_json=as_json)
    if as_json:
        print_json([_fields(row) for row in rows])
        return
    print_table(
        ("at", "event", "batch time", "details"),
        [(time_text(row.at_ms), row.kind, _batch_time(row), _details(row)) for row in rows],
    )


def _follow(
    ledger: Ledger, name: str, kinds: Collection[EventKind], rows: Sequence[EventRow], *, as_json: bool
) -> NoReturn:
    last = 0
    while True:
        for row in rows:
            if as_json:
                echo(json.dumps(_fields(row)))
            else:
                batch = f" [{_batch_time(row)}]" if row.batch_time_ms else ""
                echo(f"{time_text(row.at_ms)} {row.kind}{batch} {_details(row)}")
            last = row.event_id
        time.sleep(1)
        rows = ledger.events.page(name, last, kinds)


def _fields(row: EventRow) -> dict[str, Any]:
    return {
        "id": row.event_id,
        "at_ms": row.at_ms,
        "kind": row.kind,
        "batch_time_ms": row.batch_time_ms,
        "payload": row.payload,
    }


def _batch_time(row: EventRow) -> str | None:
    return time_text(row.batch_time_ms) if row.batch_time_ms else None


def _details(row: EventRow) -> str:
    return ", ".join(f"{key}={value}" for key, value in row.payload.items() if value not in (None, [], {}))
