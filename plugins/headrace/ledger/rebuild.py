"""Filling an empty stream again from what the log, the manifests and the checkpoints say (rule 10 of the design)."""

from __future__ import annotations

import builtins
from collections import defaultdict
from collections.abc import Sequence

from sqlalchemy import Connection, exists, insert, select, update

from headrace.ledger.allocations import insert_absorbed, insert_inputs, late_records, sum_inputs
from headrace.ledger.codec import dump_ranges
from headrace.ledger.database import LockedStream, Role
from headrace.ledger.errors import LedgerError
from headrace.ledger.events import record
from headrace.ledger.found import FoundBatch, FoundStream
from headrace.ledger.rebuilt_positions import insert_all, insert_positions
from headrace.ledger.rows import BatchInputRow, StoredBlock
from headrace.ledger.states import AttemptState, BatchState, EventKind, ReceiverState
from headrace.ledger.tables import (
    batch_outputs,
    batch_runs,
    batches,
    blocks,
    positions,
    receivers,
    segments,
    streams,
    unclaimed_times,
)


class Rebuild(Role):
    """Rebuilds a lost ledger."""

    def restore(self, stream: str, found: FoundStream) -> None:
        """Fill a stream that is registered and otherwise empty, in one transaction. It is sealed up to its last batch.

        Raises:
            StreamNotFoundError: the stream is not registered.
            LedgerError: it has blocks, batches, positions or jobs already.
            LedgerConflictError: what was found contradicts itself (a block or a batch time twice).
        """
        with self._database.write_stream(stream) as (connection, locked):
            _require_empty(connection, locked)
            insert_positions(connection, locked, found)
            _insert_receivers(connection, locked, found)
            _insert_blocks(connection, locked, found)
            _insert_batches(connection, locked, found)
            insert_all(
                connection,
                batch_runs,
                (
                    {"stream": stream, "run_id": run_id, "batch_time_ms": time_ms, "at_ms": locked.now_ms}
                    for run_id, time_ms in found.runs.items()
                ),
            )
            sealed_ms = max((batch.batch_time_ms for batch in found.batches), default=0)
            connection.execute(
                update(streams)
                .where(streams.c.name == stream)
                .values(job_epoch=found.job_epoch, sealed_until_ms=sealed_ms, zero_time_ms=_zero_time_ms(locked, found))
            )
            payload = {"blocks": len(found.blocks), "batches": len(found.batches), **found.notes}
            record(connection, stream, locked.now_ms, EventKind.LEDGER_REBUILT, payload)


def _require_empty(connection: Connection, locked: LockedStream) -> None:
    stream = locked.row.name
    used = [
        table.name
        for table in (blocks, batches, positions, segments)
        if connection.execute(select(exists().where(table.c.stream == stream))).scalar_one()
    ]
    if used or locked.row.job_epoch:
        raise LedgerError(
            f"Stream {stream!r} is not empty: it has {', '.join(used or ['receiver jobs'])}.",
            remedy="Rebuild into a new ledger, and keep the old one aside.",
        )


def _zero_time_ms(locked: LockedStream, found: FoundStream) -> int:
    if found.zero_time_ms is not None:
        return found.zero_time_ms
    times = [block.batch_time_ms for block in found.blocks]
    for batch in found.batches:
        if batch.inputs and not batch.built:
            times += [*batch.absorbed, batch.batch_time_ms]
    return min([locked.row.zero_time_ms, *(time_ms - locked.row.batch_interval_ms for time_ms in times)])


def _insert_receivers(connection: Connection, locked: LockedStream, found: FoundStream) -> None:
    insert_all(
        connection,
        receivers,
        (
            {
                "stream": locked.row.name,
                "input_id": receiver_id.input_id,
                "receiver_index": receiver_id.index,
                "epoch": epoch,
                "job_epoch": found.job_epoch,
                "state": ReceiverState.LOST,
                "host": "",
                "registered_at_ms": locked.now_ms,
                "lease_ms": 0,
                "lease_until_ms": 0,
                "heartbeat_ms": 0,
                "sealed_through_ms": 0,
                "last_accepted_sequence": -1,
                "stats": {},
                "restarts": 0,
                "stop_requested": False,
            }
            for receiver_id, epoch in found.receiver_epochs.items()
        ),
    )


def _insert_blocks(connection: Connection, locked: LockedStream, found: FoundStream) -> None:
    stream, now_ms = locked.row.name, locked.now_ms
    latest: dict[str, int] = defaultdict(int)
    for block in found.blocks:
        path = block.info.handle.segment
        latest[path] = max(latest[path], block.batch_time_ms)
    insert_all(
        connection,
        segments,
        (
            {
                "stream": stream,
                "path": segment.path,
                "input_id": segment.receiver_id.input_id,
                "receiver_index": segment.receiver_id.index,
                "epoch": segment.epoch,
                "opened_at_ms": now_ms,
                "closed_at_ms": now_ms,
                "last_batch_time_ms": latest[segment.path],
            }
            for segment in found.segments
        ),
    )
    known = select(segments.c.path, segments.c.segment_id).where(segments.c.stream == stream)
    ids = {row.path: row.segment_id for row in connection.execute(known)}
    unknown = {block.info.handle.segment for block in found.blocks} - ids.keys()
    if unknown:
        raise LedgerError(f"Blocks were found in segments that were not: {', '.join(sorted(unknown))}.")
    insert_all(
        connection,
        blocks,
        (
            {
                "stream": stream,
                "batch_time_ms": block.batch_time_ms,
                "input_id": block.info.receiver.input_id,
                "receiver_index": block.info.receiver.index,
                "epoch": block.info.epoch,
                "sequence": block.info.sequence,
                "cut_time_ms": block.info.cut_time_ms,
                "event_time_ms": block.info.event_time_ms,
                "added_at_ms": now_ms,
                "segment_id": ids[block.info.handle.segment],
                "frame_offset": block.info.handle.offset,
                "frame_length": block.info.handle.length,
                "ranges": dump_ranges(r for r in block.info.ranges if r.until_offset > r.from_offset),
                "records": block.info.records,
                "payload_bytes": block.info.payload_bytes,
            }
            for block in found.blocks
        ),
    )


def _insert_batches(connection: Connection, locked: LockedStream, found: FoundStream) -> None:
    stream = locked.row.name
    by_time: dict[int, builtins.list[StoredBlock]] = defaultdict(list)
    for block in found.blocks:
        by_time[block.batch_time_ms].append(StoredBlock(0, block.batch_time_ms, locked.now_ms, block.info))
    claimed: set[int] = set()
    for batch in found.batches:
        times = [*batch.absorbed, batch.batch_time_ms]
        claimed.update(times)
        _insert_batch(connection, locked, batch, [block for time_ms in times for block in by_time[time_ms]])
    insert_all(
        connection,
        unclaimed_times,
        (
            {
                "stream": stream,
                "batch_time_ms": time_ms,
                "blocks": len(taken),
                "records": sum(block.info.records for block in taken),
                "payload_bytes": sum(block.info.payload_bytes for block in taken),
            }
            for time_ms, taken in by_time.items()
            if taken and time_ms not in claimed
        ),
    )


def _insert_batch(
    connection: Connection, locked: LockedStream, batch: FoundBatch, taken: Sequence[StoredBlock]
) -> None:
    left = tuple(sum_inputs(locked.row.name, batch.batch_time_ms, taken))
    inputs = batch.inputs or left
    base = {
        "stream": locked.row.name,
        "interval_ms": locked.row.batch_interval_ms,
        "revision": locked.row.revision,
        "manifest_uri": batch.manifest_uri,
        "manifest_sha256": batch.manifest_sha256,
        "allocated_at_ms": locked.now_ms,
    }
    insert_absorbed(connection, base, batch.batch_time_ms, batch.absorbed)
    done_ms = batch.completed_at_ms or locked.now_ms
    state = BatchState.ALLOCATED
    if batch.checkpoint_uri is not None:
        state = BatchState.COMPLETED
    elif batch.abandoned is not None:
        state = BatchState.ABANDONED
    recorded = dict(batch.outputs)
    if state is BatchState.COMPLETED and not recorded:
        recorded = {step: {} for step in locked.row.outputs}
    late = late_records(locked.row, taken) if batch.late_records is None else batch.late_records
    connection.execute(
        insert(batches).values(
            **base,
            batch_time_ms=batch.batch_time_ms,
            state=state,
            attempt=0,
            code_version=batch.code_version,
            late_records=late,
            built=batch.built,
            steps=list(recorded) if state is BatchState.COMPLETED else None,
            blocks=_count_blocks(batch, inputs, left, len(taken)),
            records=sum(row.records for row in inputs),
            payload_bytes=sum(block.info.payload_bytes for block in taken),
            absorbed=list(batch.absorbed),
            started_at_ms=done_ms if state is BatchState.COMPLETED else None,
            completed_at_ms=done_ms if state is BatchState.COMPLETED else None,
            checkpointed_at_ms=done_ms if state is BatchState.COMPLETED else None,
            checkpoint_uri=batch.checkpoint_uri,
            error=batch.abandoned,
        )
    )
    insert_inputs(connection, inputs)
    insert_all(
        connection,
        batch_outputs,
        (
            {
                "stream": locked.row.name,
                "batch_time_ms": batch.batch_time_ms,
                "attempt": 0,
                "output_id": output_id,
                "target": "",
                "state": AttemptState.COMPLETED,
                "counts": dict(counts),
                "recorded_at_ms": done_ms,
                "code_version": batch.code_version,
            }
            for output_id, counts in recorded.items()
        ),
    )


def _count_blocks(batch: FoundBatch, inputs: Sequence[BatchInputRow], left: Sequence[BatchInputRow], taken: int) -> int:
    """How many blocks the batch took. Inputs count a block once for each of its partitions."""
    if batch.blocks is not None:
        return batch.blocks
    of_batch = sorted((row.input_id, row.partition, row.blocks) for row in inputs)
    if of_batch == sorted((row.input_id, row.partition, row.blocks) for row in left):
        return taken
    # Some are gone: any number above those that are left says so.
    return max(taken + 1, sum(row.blocks for row in inputs)) if not batch.built else 0
