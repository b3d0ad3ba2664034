"""`headrace events`: what happened to a stream."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.cli.options import LedgerUrl, StreamName, opened
from headrace.clock import time_text

if TYPE_CHECKING:
    from headrace.ledger.rows import EventRow


def events(
    name: StreamName,
    *,
    ledger: LedgerUrl,
    kind: Annotated[list[str] | None, typer.Option(help="Only this kind; may be given several times.")] = None,
    blocks: Annotated[bool, typer.Option("--blocks", help="The blocks too, several a second.")] = False,
    limit: Annotated[int, typer.Option(help="How many of the newest.", min=1)] = 50,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with new ones until Ctrl-C.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object a line.")] = False,
) -> None:
    """Print what happened to a stream, oldest first."""
    from headrace.ledger import EventKind

    unknown = sorted(set(kind or ()) - {known.value for known in EventKind})
    if unknown:
        raise typer.BadParameter(f"{', '.join(unknown)}: kinds are {', '.join(EventKind)}", param_hint="--kind")
    kinds = {EventKind(k) for k in kind} if kind else {k for k in EventKind if blocks or k is not EventKind.BLOCK_ADDED}
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
        typer.echo(json.dumps({**fields, "payload": row.payload}))
        return
    batch = f" [{time_text(row.batch_time_ms)}]" if row.batch_time_ms else ""
    reported = ", ".join(f"{key}={value}" for key, value in row.payload.items() if value not in (None, [], {}))
    typer.echo(f"{time_text(row.at_ms)} {row.kind}{batch} {reported}")
