"""`headrace batches`, `abandon` and `events`: what became of a stream's records."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.cli.batch_account import show_batch
from headrace.cli.batch_time import milliseconds
from headrace.cli.ledger_option import AsJson, LedgerUrl, StreamName, opened
from headrace.cli.output import duration_text, print_json, print_table, time_text

if TYPE_CHECKING:
    from headrace.ledger.rows import EventRow

BatchTime = Annotated[
    str | None,
    typer.Argument(help="One batch, by its time: epoch milliseconds or ISO 8601, such as 2026-11-21T14:05Z."),
]


def batches(
    name: StreamName,
    batch_time: BatchTime = None,
    *,
    ledger: LedgerUrl,
    limit: Annotated[int, typer.Option(help="How many, the newest first.", min=1)] = 20,
    as_json: AsJson = False,
) -> None:
    """List a stream's batches and the batch times that nobody ran, or tell all of one batch."""
    with opened(ledger) as found:
        if batch_time is not None:
            show_batch(found, name, milliseconds(batch_time, "BATCH_TIME"), as_json=as_json)
            return
        found.streams.get(name)
        rows = found.batches.list(name, limit)
        unclaimed = found.blocks.unclaimed(name)
        open_ms = found.streams.get(name).batch_time_after(found.now_ms())
    waiting = [time for time in unclaimed if time.batch_time_ms < open_ms]
    if as_json:
        print_json({"batches": rows, "unclaimed": waiting})
        return
    print_table(
        ("batch time", "state", "attempt", "blocks", "records", "late", "took", "checkpointed", "cleaned", "error"),
        [
            (
                time_text(row.batch_time_ms),
                row.state.value,
                row.attempt,
                row.blocks,
                row.records,
                row.late_records,
                duration_text(row.started_at_ms, row.completed_at_ms),
                "yes" if row.checkpointed_at_ms else "no",
                "yes" if row.cleaned_at_ms else "no",
                row.error,
            )
            for row in rows
        ],
    )
    if waiting:
        typer.echo(
            "Unclaimed batch times: blocks that no batch has taken yet. If no DAG run is coming to them, backfill them."
        )
        print_table(
            ("batch time", "blocks", "records"), [(time_text(t.batch_time_ms), t.blocks, t.records) for t in waiting]
        )


def abandon(
    name: StreamName,
    batch_time: Annotated[str, typer.Argument(help="The batch's time: epoch milliseconds or ISO 8601.")],
    *,
    ledger: LedgerUrl,
    reason: Annotated[str, typer.Option(help="Why; it stands with the gap.")],
    as_json: AsJson = False,
) -> None:
    """Give up a batch that can never succeed: its offset ranges become a gap, and the log may let go of it. Final."""
    if not reason.strip():
        raise typer.BadParameter("say why; it is all that later tells of these records", param_hint="--reason")
    with opened(ledger) as found:
        batch = found.batches.abandon(name, milliseconds(batch_time, "BATCH_TIME"), reason)
    if as_json:
        print_json(batch)
    else:
        told = (
            f"Batch {time_text(batch.batch_time_ms)} of {name} is abandoned: {batch.records:,} records are a gap now."
        )
        typer.echo(told)


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
            rows = found.events.list(name, last, kinds)


def _print_event(row: EventRow, *, as_json: bool) -> None:
    if as_json:
        import json

        fields = {"id": row.event_id, "at_ms": row.at_ms, "kind": row.kind, "batch_time_ms": row.batch_time_ms}
        typer.echo(json.dumps({**fields, "payload": row.payload}))
        return
    batch = f" [{time_text(row.batch_time_ms)}]" if row.batch_time_ms else ""
    told = ", ".join(f"{key}={value}" for key, value in row.payload.items() if value not in (None, [], {}))
    typer.echo(f"{time_text(row.at_ms)} {row.kind}{batch} {told}")
