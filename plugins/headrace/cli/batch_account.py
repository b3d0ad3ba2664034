"""Prints one batch: its contents, where its records are, its attempts, and the result of each output."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from headrace.cli.output import duration_text, echo, print_json, print_table
from headrace.clock import time_text
from headrace.errors import TAKEN_UP
from headrace.ledger.errors import LedgerError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from headrace.ledger import Ledger
    from headrace.ledger.batch_tables import AttemptRow, BatchOrigin, BatchRow

# The key under which an Elasticsearch output records its concrete index, beside the counts.
_INDEX = "index"


def show_batch(ledger: Ledger, stream_name: str, batch_time_ms: int, *, as_json: bool) -> None:
    """Print the batch, or the blocks that wait for a batch time that is not allocated.

    Raises:
        StreamNotFoundError: there is no such stream.
        LedgerError: the time is before the stream began.
    """
    ids = ledger.streams.get(stream_name).id_of_step
    batch = ledger.batches.find(stream_name, batch_time_ms)
    if batch is None:
        _show_waiting(ledger, stream_name, batch_time_ms, as_json=as_json)
        return
    from headrace.monitoring.batch_detail import became

    origin = ledger.batches.origins(stream_name, [batch_time_ms]).get(batch_time_ms)
    inputs = ledger.batches.inputs(stream_name, batch_time_ms)
    outputs = ledger.attempts.outputs(stream_name, batch_time_ms)
    attempts = ledger.attempts.of_batch(stream_name, batch_time_ms)
    revisions = {attempt.number: attempt.revision for attempt in attempts}
    if as_json:
        # Only the batch's own outputs: those of replays are with their attempts.
        written = [{**asdict(output), "revision": revisions.get(output.attempt)} for output in outputs]
        parts: dict[str, Any] = {"batch": batch, "origin": origin, "inputs": inputs, "outputs": written}
        print_json({**parts, "attempts": attempts})
        return
    for line in account(batch, origin):
        echo(line)
    if later := became(batch, attempts):
        echo(later)
    print_table(
        ("input", "topic", "partition", "from", "until", "records"),
        [
            (i.input_id, i.partition.topic, i.partition.partition, i.from_offset, i.until_offset, i.records)
            for i in inputs
        ],
    )
    print_table(
        ("output", "state", "attempt", "definition", "written to", "counts", "transform and code", "error"),
        [
            (
                ids.get(output.output_id, output.output_id),
                output.state.value,
                output.attempt,
                revisions.get(output.attempt),
                output.counts.get(_INDEX),
                _counts(output.counts),
                output.code_version,
                output.error,
            )
            for output in outputs
        ],
    )
    if len(known := {revisions.get(output.attempt) for output in outputs}) > 1:
        named = ", ".join(
            "unknown" if number is None else str(number) for number in sorted(known, key=lambda n: n or 0)
        )
        echo(f"The outputs of this batch were written under different definitions of the stream: {named}.")
    print_table(
        ("attempt", "at", "replay", "definition", "outputs", "read from", "way", "state", "took", "holder", "error"),
        [_attempt(attempt, ids) for attempt in attempts],
    )


def _show_waiting(ledger: Ledger, stream_name: str, batch_time_ms: int, *, as_json: bool) -> None:
    waiting = next((u for u in ledger.blocks.unclaimed(stream_name) if u.batch_time_ms == batch_time_ms), None)
    row = ledger.streams.get(stream_name)
    if waiting is None and batch_time_ms <= row.zero_time_ms and not row.has_removed(batch_time_ms):
        raise LedgerError(
            f"Stream {stream_name!r} began at {time_text(row.zero_time_ms)}, so it has no batch "
            f"{time_text(batch_time_ms)}.",
            remedy=f"Its first batch is {time_text(row.zero_time_ms + row.batch_interval_ms)}.",
        )
    if as_json:
        print_json({"batch": None, "waiting": waiting})
        return
    if row.has_removed(batch_time_ms):
        echo(
            f"Batch {time_text(batch_time_ms)} of {stream_name} was removed, with all batches up to "
            f"{time_text(row.removed_until_ms)}: the stream keeps its batches for limits.history."
        )
        return
    held = "nothing" if waiting is None else f"{waiting.records:,} records in {waiting.blocks:,} blocks"
    echo(f"Batch {time_text(batch_time_ms)} of {stream_name} is not allocated yet; the log holds {held} for it.")
    if waiting is not None and batch_time_ms <= ledger.now_ms():
        echo("Its DAG run allocates it, or else the next scheduled run; a backfill of its interval does too.")


def account(batch: BatchRow, origin: BatchOrigin | None) -> Iterator[str]:
    """Describe the batch in sentences."""
    yield (
        f"Batch {time_text(batch.batch_time_ms)} of {batch.stream}: {batch.state.value}. "
        f"It holds {batch.records:,} records in {batch.blocks:,} blocks."
    )
    if batch.built:
        yield "It was built from Kafka by timestamps. Its number of records is an upper bound: no block counted them."
    if batch.late_records:
        yield f"{batch.late_records:,} of them arrived after the batch of their timestamps was sealed."
    if batch.absorbed:
        times = ", ".join(time_text(time) for time in batch.absorbed)
        yield f"It took over the blocks of {len(batch.absorbed)} earlier batch time(s) that no run had taken: {times}."
    if batch.absorbed_by_ms is not None:
        yield f"Batch {time_text(batch.absorbed_by_ms)} took its blocks over."
    if origin is not None:
        where = "the log" if origin.source == "log" else "Kafka, by its offset ranges: the log no longer has them"
        # Nothing but the log has these.
        lost = "" if origin.source == "log" else " (Records of a custom receiver cannot be read again.)"
        yield f"Run again, it is read from {where}.{lost} Its manifest is {batch.manifest_uri}."
    for step, reason in batch.abandoned_steps.items():
        yield f"Its output {step} was given up, and lacks its records: {reason}"
    if batch.error:
        yield f"Error: {batch.error}"


def _attempt(attempt: AttemptRow, ids: Mapping[str, str]) -> tuple[object, ...]:
    return (
        attempt.number,
        time_text(attempt.started_at_ms),
        attempt.target or None,
        attempt.revision,
        ", ".join(ids.get(step, step) for step in attempt.outputs),
        attempt.source,
        attempt.way,
        attempt.state.value,
        duration_text(attempt.started_at_ms, attempt.ended_at_ms),
        f"{attempt.holder} (took it up)" if attempt.attributes.get(TAKEN_UP) else attempt.holder,
        attempt.error,
    )


def _counts(counts: dict[str, Any]) -> str:
    return (
        ", ".join(f"{name} {value}" for name, value in counts.items() if name != _INDEX and value not in (0, {}, None))
        or "nothing"
    )
