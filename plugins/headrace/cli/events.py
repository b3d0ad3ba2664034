"""`headrace events list`: what happened to a stream."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.cli.commands import examples
from headrace.cli.options import LedgerUrl, StreamName, opened
from headrace.cli.output import echo
from headrace.clock import time_text
from headrace.ledger import EventKind

if TYPE_CHECKING:
    from headrace.ledger.models import EventRow


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
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per line.")] = False,
) -> None:
    """Print what happened to a stream, oldest first."""
    kinds = set(kind) if kind else {each for each in EventKind if blocks or each is not EventKind.BLOCK_ADDED}
    with opened(ledger) as found:
        found.streams.get(name)
        rows = found.events.latest(name, kinds, limit)[::-1]
        last = 0
        while True:
            for row in rows:
                _print_event(row, as_json=as_json)
                last = row.event_id
            if not follow:
                return
            time.sleep(1)
            rows = found.events.page(name, last, kinds)


def _print_event(row: EventRow, *, as_json: bool) -> None:
    if as_json:
        import json

        fields = {"id": row.event_id, "at_ms": row.at_ms, "kind": row.kind, "batch_time_ms": row.batch_time_ms}
        echo(json.dumps({**fields, "payload": row.payload}))
        return
    batch = f" [{time_text(row.batch_time_ms)}]" if row.batch_time_ms else ""
    reported = ", ".join(f"{key}={value}" for key, value in row.payload.items() if value not in (None, [], {}))
    echo(f"{time_text(row.at_ms)} {row.kind}{batch} {reported}")
