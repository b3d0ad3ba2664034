"""`headrace batches list`, `show`, `abandon` and `unclaimed`: a stream's batches, and batch times without a batch."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.cli.batch_account import show_batch
from headrace.cli.commands import examples
from headrace.cli.options import AsJson, LedgerUrl, StreamName, milliseconds, opened
from headrace.cli.options import batch_time as batch_time_ms
from headrace.cli.output import duration_text, echo, print_json, print_table
from headrace.clock import time_text

if TYPE_CHECKING:
    from headrace.ledger import Ledger
    from headrace.ledger.batch_tables import BatchRow
    from headrace.ledger.receiving_tables import UnclaimedTime

# A batch DAG that runs has allocated a batch within the larger of this time and this many intervals.
_IDLE_MS = 60_000
_IDLE_INTERVALS = 3

BatchTime = Annotated[
    str,
    typer.Argument(metavar="TIME", help="The batch's time, in ISO 8601, such as 2026-11-21T14:05Z."),
]


@examples("batches list orders --limit 50")
def list_batches(
    name: StreamName,
    *,
    ledger: LedgerUrl,
    limit: Annotated[
        int,
        typer.Option(help="How many batches, newest first, and how many unclaimed batch times, oldest first.", min=1),
    ] = 20,
    every: Annotated[
        bool, typer.Option("--all", help="Also batch times that a later batch took over, each in a line of its own.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """List a stream's batches, each with the batch times that it took over, and the unclaimed batch times."""
    from headrace.ledger.batch_pages import BatchOrder, BatchRange
    from headrace.monitoring.unfinished import last_error

    with opened(ledger) as found:
        found.streams.get(name)
        page = found.batch_pages.page(name, BatchRange(folded=not every), BatchOrder.NEWEST, limit)
        rows = [replace(row, error=last_error(found, row)) for row in page.rows]
        waiting = _waiting(found, name, limit=1000)
        who, now_ms = _who_takes(found, name), found.now_ms()
    if as_json:
        print_json({"batches": rows, "unclaimed": waiting})
        return
    print_table(
        ("batch time", "state", "attempt", "blocks", "records", "late", "took", "absorbed", "checkpointed", "cleaned",
         "error"),
        [
            (
                time_text(row.batch_time_ms),
                row.state.value,
                row.attempt,
                row.blocks,
                row.records,
                row.late_records,
                duration_text(row.started_at_ms, row.completed_at_ms),
                _taken_over(row),
                "yes" if row.checkpointed_at_ms else "no",
                "yes" if row.cleaned_at_ms else "no",
                row.error,
            )
            for row in rows
        ],
    )  # fmt: skip
    if waiting:
        _report_waiting(waiting[:limit], who, now_ms)
        if len(waiting) > limit:
            echo(f"And later ones: `headrace batches unclaimed {name}` lists them.")


def _taken_over(row: BatchRow) -> str | None:
    if row.absorbed_by_ms is not None:
        return f"by {time_text(row.absorbed_by_ms)}"
    return f"{len(row.absorbed)} from {time_text(row.first_time_ms)}" if row.absorbed else None


@examples("batches show orders 2026-11-21T14:05Z")
def show(name: StreamName, batch_time: BatchTime, *, ledger: LedgerUrl, as_json: AsJson = False) -> None:
    """Show one batch: its contents, where its records are, its attempts, and the result of each output."""
    with opened(ledger) as found:
        interval_ms = found.streams.get(name).batch_interval_ms
        show_batch(found, name, batch_time_ms(batch_time, "BATCH_TIME", interval_ms=interval_ms), as_json=as_json)


@examples("batches abandon orders 2026-11-21T14:05Z --reason 'its records are damaged'")
def abandon(
    name: StreamName,
    batch_time: BatchTime,
    *,
    ledger: LedgerUrl,
    reason: Annotated[str, typer.Option(help="The reason; it is kept with the gap.")],
    output: Annotated[
        str | None, typer.Option(help="Give up only this output, which may be one that the stream no longer has.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Abandon a batch that can never succeed. Its offset ranges become gaps, and its log may be deleted. Final.

    With --output the batch stays, and no longer needs that output: it completes when the others are written.
    """
    if not reason.strip():
        raise typer.BadParameter("give a reason; nothing else will explain the gap later", param_hint="--reason")
    time_ms = milliseconds(batch_time, "BATCH_TIME")
    with opened(ledger) as found:
        if output is None:
            batch = found.batches.abandon(name, time_ms, reason)
        else:
            batch = found.batches.abandon_output(name, time_ms, found.streams.get(name).step_of(output), reason)
    if as_json:
        print_json(batch)
    elif output is not None:
        echo(
            f"Output {output} of batch {time_text(batch.batch_time_ms)} of {name} is given up: its {batch.records:,} "
            f"records are not written there. The batch is {batch.state.value}."
        )
    else:
        reported = (
            f"Batch {time_text(batch.batch_time_ms)} of {name} is abandoned: {batch.records:,} records are now a gap."
        )
        echo(reported)


@examples("batches unclaimed orders")
def unclaimed(
    name: StreamName,
    *,
    ledger: LedgerUrl,
    limit: Annotated[int, typer.Option(help="How many, oldest first.", min=1)] = 1000,
    as_json: AsJson = False,
) -> None:
    """List the unclaimed batch times: they have passed, or a clock was ahead, and no batch has taken their blocks."""
    with opened(ledger) as found:
        waiting = _waiting(found, name, limit=limit)
        who, now_ms = _who_takes(found, name), found.now_ms()
    if as_json:
        print_json(waiting)
    elif waiting:
        _report_waiting(waiting, who, now_ms)
    else:
        echo(f"Every batch time of {name} that has passed and has blocks has its batch.")


def _waiting(ledger: Ledger, name: str, *, limit: int) -> list[UnclaimedTime]:
    """The times that have passed, and those that lie ahead of the clock."""
    from headrace.ledger.clock_corrections import CLOCK_SKEW_MS

    row, now_ms = ledger.streams.get(name), ledger.now_ms()
    open_ms, last_ms = row.batch_time_after(now_ms), row.batch_time_after(now_ms + CLOCK_SKEW_MS)
    found = ledger.blocks.unclaimed(name, limit)
    return [time for time in found if time.batch_time_ms < open_ms or time.batch_time_ms > last_ms]


def _who_takes(ledger: Ledger, name: str) -> str:
    """Say whether batches are being allocated, and what to do if none is."""
    row = ledger.streams.get(name)
    newest = next(iter(ledger.batches.page(name, limit=1)), None)
    idle_ms = None if newest is None else ledger.now_ms() - newest.allocated_at_ms
    if idle_ms is None or idle_ms > max(_IDLE_MS, _IDLE_INTERVALS * row.batch_interval_ms):
        since = "yet" if newest is None else f"since {time_text(newest.allocated_at_ms)}"
        return (
            f"No batch was allocated {since}: is the batch DAG paused, or do its runs wait or fail before they "
            "allocate one (their logs say why)? Its next runs take them."
        )
    return "The next runs of the batch DAG take them."


def _report_waiting(waiting: list[UnclaimedTime], who: str, ahead_of_ms: int) -> None:
    echo(f"Unclaimed batch times: blocks that no batch has taken yet. {who}")
    if waiting[-1].batch_time_ms > ahead_of_ms:
        echo(
            f"Some are still to come: it is {time_text(ahead_of_ms)} by the ledger's clock, which was ahead when their "
            "blocks were stored. The next batch run moves them back, unless a batch was allocated ahead "
            "(`headrace streams list` says so)."
        )
    print_table(
        ("batch time", "blocks", "records"), [(time_text(t.batch_time_ms), t.blocks, t.records) for t in waiting]
    )
