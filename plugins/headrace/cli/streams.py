"""`headrace streams list` and `show`: the streams, or one with its receivers and positions."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import typer

from headrace.cli.commands import examples
from headrace.cli.options import AsJson, LedgerUrl, StreamName, opened
from headrace.cli.output import print_json, print_table
from headrace.clock import time_text
from headrace.receiver.input_health import InputTrouble, input_troubles, receiver_state

if TYPE_CHECKING:
    from headrace.ledger import Ledger
    from headrace.ledger.models import JobRow, PositionRow, ReceiverRow, StreamRow


@examples("streams list", "streams list --json", "streams list --ledger sqlite:////srv/orders/ledger.db")
def list_streams(*, ledger: LedgerUrl, as_json: AsJson = False) -> None:
    """List the streams with their health, lag, rate and delay."""
    with opened(ledger) as found:
        rows = [_summary(found, row) for row in found.streams.all()]
    if as_json:
        print_json(rows)
    else:
        print_table(
            (
                *("stream", "wanted", "health", "receiver job", "lag", "lag s", "records/s", "last batch"),
                *("began after", "done after", "oldest unfinished"),
            ),
            [
                (
                    *(r["name"], r["desired_state"], r["health"], r["job"], _lag(r), r["lag_seconds"], r["rate"]),
                    *(time_text(r["last_batch_ms"]), _after(r["scheduling_delay_seconds"])),
                    *(_after(r["total_delay_seconds"]), _oldest(r["oldest_unfinished"])),
                )
                for r in rows
            ],
        )
        for row in rows:
            if row["unadopted"] is not None:
                typer.echo(f"{row['name']}: {row['unadopted']}")


@examples("streams show orders")
def show_stream(name: StreamName, *, ledger: LedgerUrl, as_json: AsJson = False) -> None:
    """Show one stream: its health, its receiver job, receivers and positions."""
    with opened(ledger) as found:
        _show(found, name, as_json=as_json)


def _receiver_state(receiver: ReceiverRow, unasked: Collection[InputTrouble], now_ms: int) -> str:
    if receiver.state.ended:
        return receiver.state.value
    if not receiver.alive(now_ms):
        return "lease lost"
    return receiver_state(receiver, unasked) if receiver.paused_reason is None else "paused"


def _summary(ledger: Ledger, row: StreamRow) -> dict[str, Any]:
    from headrace.monitoring.stream_status import NOT_RECEIVED, stream_status
    from headrace.receiver.definition_adoption import unadopted

    job = ledger.jobs.current(row.name)
    state = _job_state(job, ledger.now_ms())
    newest = ledger.batches.page(row.name, limit=1)
    status = stream_status(ledger, row)
    return {
        "name": row.name,
        "desired_state": row.desired_state.value,
        "job": "waiting for its inputs" if state == "running" and NOT_RECEIVED in status.health else state,
        **status.to_json(),
        "last_batch_ms": newest[0].batch_time_ms if newest else None,
        "unclaimed": len(ledger.blocks.unclaimed(row.name)),
        "slow_runs": _slow_runs(ledger, row),
        "revision": row.revision,
        "job_revision": None if job is None else job.attributes.get("revision"),
        "unadopted": unadopted(ledger, row.name),
    }


def _job_state(job: JobRow | None, now_ms: int) -> str:
    if job is None:
        return "none"
    return job.state.value if job.alive(now_ms) or job.state.ended else f"{job.state.value}, lease lost"


def _lag(summary: dict[str, Any]) -> str | None:
    """The number of records that are not yet in the log, as text; None if there is no figure."""
    if summary["lag"] is None or not summary["lag_unknown"]:
        return None if summary["lag"] is None else f"{summary['lag']:,}"
    return f"at least {summary['lag']:,}" if summary["lag"] else "unknown"


def _numbers(summary: dict[str, Any]) -> str:
    """The stream's lag, rate and delays in sentences."""
    seconds = "" if summary["lag_seconds"] is None else f" ({summary['lag_seconds']:.0f} s)"
    reported = f"Lag: {_lag(summary) or 'unknown'} records{seconds}, received: {summary['rate']:,} records/s."
    if summary["total_delay_seconds"] is not None:
        reported += (
            f" The last batch began {_after(summary['scheduling_delay_seconds'])} and was done "
            f"{_after(summary['total_delay_seconds'])} after its time."
        )
    oldest = summary["oldest_unfinished"]
    return reported if oldest is None else f"{reported} Oldest unfinished batch: {_oldest(oldest)}."


def _lag_of(position: PositionRow, receivers: Collection[ReceiverRow]) -> int | None:
    """The partition's lag in its receiver's last report, None if it is not known or the partition is not active."""
    owner = (position.input_id, -1 if position.receiver_index is None else position.receiver_index)
    owners = {(row.receiver_id.input_id, row.receiver_id.index): row for row in receivers}
    if position.state.value != "active" or owner not in owners:
        return None
    return owners[owner].lag_of(position.partition)


def _after(seconds: float | None) -> str | None:
    return None if seconds is None else f"{seconds:.1f} s"


def _oldest(unfinished: dict[str, Any] | None) -> str | None:
    if unfinished is None:
        return None
    error = f": {unfinished['error']}" if unfinished["error"] else ""
    return f"{time_text(unfinished['batch_time_ms'])}, {unfinished['state']}{error}"


def _slow_runs(ledger: Ledger, row: StreamRow) -> str | None:
    from headrace.monitoring.stream_status import slow_runs
    from headrace.stream import Stream

    found = slow_runs(ledger, row.name, coalesces=Stream.from_json(row.definition).coalesces)
    return None if found is None else str(found)


def _show(ledger: Ledger, name: str, *, as_json: bool) -> None:
    row = ledger.streams.get(name)
    job = ledger.jobs.current(name)
    receivers = ledger.receivers.all(name)
    positions = ledger.positions.all(name)
    if as_json:
        print_json(
            {
                **_summary(ledger, row),
                "stream": row,
                "receiver_job": job,
                "receivers": receivers,
                "positions": positions,
            }
        )
        return
    summary = _summary(ledger, row)
    typer.echo(f"Stream {name}, wanted {summary['desired_state']}; receiver job {summary['job']}", nl=False)
    typer.echo("" if job is None else f", held by {job.holder} since {time_text(job.acquired_at_ms)}")
    typer.echo(f"It is {summary['health']}. {_numbers(summary)}")
    if summary["unadopted"] is not None:
        typer.echo(str(summary["unadopted"]))
    now_ms = ledger.now_ms()
    for trouble in summary["troubles"]:
        typer.echo(f"Trouble: {trouble}")
    unasked = input_troubles(job, receivers, now_ms)
    if summary["slow_runs"]:
        typer.echo(f"Behind: {summary['slow_runs']}.")
    for receiver in receivers:
        if receiver.paused_reason is not None and receiver.alive(now_ms):
            typer.echo(f"Paused: receiver {receiver.receiver_id}: {receiver.paused_reason}")
    print_table(
        (
            *("receiver", "state", "lag", "records/s", "host", "heartbeat", "sealed through", "restarts", "late"),
            "last error",
        ),
        [
            (
                receiver.receiver_id,
                _receiver_state(receiver, unasked, now_ms),
                receiver.stats.get("total_lag") if not receiver.stats.get("lag_unknown") else "unknown",
                receiver.stats.get("rate"),
                receiver.host,
                time_text(receiver.heartbeat_ms),
                time_text(receiver.sealed_through_ms),
                receiver.restarts,
                receiver.stats.get("late_records"),
                receiver.last_error,
            )
            for receiver in receivers
        ],
    )
    by_timestamp = row.batch_by == "timestamp"
    print_table(
        (
            *("input", "topic", "partition", "incarnation", "next offset", "lag", "receiver", "state"),
            *(("latest timestamp", "drained at") if by_timestamp else ()),
            "error",
        ),
        [
            (
                position.input_id,
                position.partition.topic,
                position.partition.partition,
                position.partition.incarnation,
                position.next_offset,
                _lag_of(position, receivers),
                position.receiver_index,
                position.state.value,
                *(
                    (time_text(position.watermark_ms or None), time_text(position.drained_ms or None))
                    if by_timestamp
                    else ()
                ),
                position.error,
            )
            for position in positions
        ],
    )
