"""Allocates batches: seals a batch time, and makes exactly its blocks the batch.

A batch can also be built from Kafka by timestamps, for a time before the stream's zero time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from dataclasses import replace as changed

from sqlalchemy import Connection, delete, exists, insert, select, update

from headrace.blocks import TopicPartition
from headrace.clock import time_text, times_text
from headrace.ledger.batches.batch_states import fence_attempts, find_batch, require_batch
from headrace.ledger.batches.tables import (
    BatchInputRow,
    BatchRow,
    batch_attempts,
    batch_inputs,
    batch_outputs,
    batches,
    replays,
)
from headrace.ledger.clock_corrections import CLOCK_SKEW_MS, take_back
from headrace.ledger.database import LockedStream, Repository, chunks, insert_all
from headrace.ledger.errors import AllocationConflictError, BatchRemovedError, BatchTimeError
from headrace.ledger.events import record
from headrace.ledger.model import partition_key
from headrace.ledger.receiving.blocks import is_late, stored_blocks
from headrace.ledger.receiving.tables import StoredBlock, positions, unclaimed_times
from headrace.ledger.states import BatchState, EventKind
from headrace.ledger.tables import StreamRow, streams

_OF_EVENT = ("blocks", "records", "payload_bytes", "late_records", "built", "absorbed", "interval_ms")
# What a batch without ranges keeps when it gets them.
_OF_EMPTY = ("stream", "batch_time_ms", "absorbed", "attempt", "abandoned_steps", "change", "result")


class Allocations(Repository):
    """Seals batch times and allocates their blocks."""

    def seal(self, stream_name: str, batch_time_ms: int) -> int:
        """Close batch times up to this one for new blocks, in its own transaction. Returns the time sealed until.

        Blocks that a clock ahead has put into times still to come are taken back first.

        Raises:
            BatchTimeError: the time is not an interval end, or is in the future.
            BatchRemovedError: it was removed with the stream's history.
        """
        with self._database.write_stream(stream_name) as (connection, before):
            locked, _ = take_back(connection, before)
            return _seal(connection, locked, batch_time_ms)

    def blocks_of(self, stream_name: str, batch_time_ms: int, *, absorb: Iterable[int] = ()) -> list[StoredBlock]:
        """Return the blocks of the batch time and the times that it absorbed, by time, then in the order of addition.

        After `seal` they are final. Their rows are deleted when the log is cleaned.

        Args:
            absorb: the times that the batch shall absorb, if it is not allocated yet.
        """
        with self._database.read() as connection:
            batch = find_batch(connection, stream_name, batch_time_ms)
            absorbed = absorb if batch is None else batch.absorbed
            return stored_blocks(connection, stream_name, [*absorbed, batch_time_ms])

    def allocate(
        self,
        stream_name: str,
        batch_time_ms: int,
        *,
        manifest_uri: str,
        manifest_sha256: str,
        blocks_expected: int = 0,
        absorb: Collection[int] = (),
        inputs: Sequence[BatchInputRow] | None = None,
        replace_empty: bool = False,
    ) -> BatchRow:
        """Allocate the batch in one transaction: seal, take the blocks, sum up the inputs.

        An existing batch is returned unchanged, whatever the arguments, unless it is empty and ``replace_empty``.

        Args:
            blocks_expected: the number of blocks in the manifest, including those of absorbed times.
            absorb: earlier unclaimed batch times whose blocks this batch takes over (coalescing).
            inputs: the offset ranges of a batch before the stream's zero time that is built from Kafka. It has no
                blocks, and each offset counts as a record. Ranges without offsets are left out.
            replace_empty: with ``inputs``, replace a batch of this time that has neither blocks nor ranges. Its
                attempts are fenced, and its outputs must be written again.

        Raises:
            AllocationConflictError: the manifest does not match, since blocks were added after it was written or a time
                to absorb was claimed; or ``inputs`` hold offsets that another batch has or will have.
            BatchTimeError: the time is not an interval end or is in the future; or it has ``inputs`` and is after the
                stream's zero time.
            BatchRemovedError: the time was removed with the stream's history.
        """
        with self._database.write_stream(stream_name) as (connection, locked):
            existing = find_batch(connection, stream_name, batch_time_ms)
            if existing is not None and not (replace_empty and inputs and is_empty(connection, existing)):
                return existing
            _seal(connection, locked, batch_time_ms)
            absorbed = sorted(set(absorb))
            _check_absorbed(connection, stream_name, batch_time_ms, absorbed)
            taken = stored_blocks(connection, stream_name, [*absorbed, batch_time_ms])
            ranges = None if inputs is None else check_ranges(connection, locked, batch_time_ms, inputs)
            if len(taken) != blocks_expected:
                raise AllocationConflictError(
                    f"Batch {time_text(batch_time_ms)} of stream {stream_name!r} has {len(taken)} blocks, "
                    f"its manifest {blocks_expected}.",
                    remedy="Seal the batch time before you list its blocks for the manifest.",
                )
            row = BatchRow(
                stream=stream_name,
                batch_time_ms=batch_time_ms,
                interval_ms=locked.row.batch_interval_ms,
                state=BatchState.ALLOCATED,
                revision=locked.row.revision,
                manifest_uri=manifest_uri,
                manifest_sha256=manifest_sha256,
                allocated_at_ms=locked.now_ms,
                blocks=len(taken),
                records=sum(block.info.records for block in taken)
                if ranges is None
                else sum(each.records for each in ranges),
                payload_bytes=sum(block.info.payload_bytes for block in taken),
                absorbed=tuple(absorbed),
                late_records=late_records(locked.row, taken),
                built=ranges is not None,
            )
            insert_all(connection, batches, (row.absorbs(time_ms).to_columns() for time_ms in absorbed))
            if existing is None:
                connection.execute(insert(batches).values(row.to_columns()))
            else:
                replace(connection, row, locked.now_ms)
            taken_ranges = sum_inputs(stream_name, batch_time_ms, taken) if ranges is None else ranges
            insert_all(connection, batch_inputs, (each.to_columns() for each in taken_ranges))
            for part in chunks([*absorbed, batch_time_ms]):
                connection.execute(
                    delete(unclaimed_times).where(
                        unclaimed_times.c.stream == stream_name, unclaimed_times.c.batch_time_ms.in_(part)
                    )
                )
            payload = {name: getattr(row, name) for name in _OF_EVENT}
            record(
                connection, stream_name, locked.now_ms, EventKind.BATCH_ALLOCATED, payload, batch_time_ms=batch_time_ms
            )
            return require_batch(connection, stream_name, batch_time_ms)


def _seal(connection: Connection, locked: LockedStream, batch_time_ms: int) -> int:
    stream = locked.row
    if batch_time_ms % stream.batch_interval_ms != 0 or batch_time_ms <= 0:
        raise BatchTimeError(
            f"{time_text(batch_time_ms)} is not a batch time of stream {stream.name!r}: "
            f"batch times are multiples of {stream.batch_interval_ms} ms since the Unix epoch.",
            remedy=f"The next one is {time_text(stream.batch_time_after(batch_time_ms))}.",
        )
    if batch_time_ms > locked.now_ms + CLOCK_SKEW_MS:
        raise BatchTimeError(
            f"Batch time {time_text(batch_time_ms)} of stream {stream.name!r} is "
            f"{batch_time_ms - locked.now_ms} ms in the future by the ledger's clock.",
            remedy="Wait until then.",
        )
    if stream.has_removed(batch_time_ms):
        raise BatchRemovedError(stream.name, batch_time_ms, until_ms=stream.removed_until_ms)
    if batch_time_ms <= stream.sealed_until_ms:
        return stream.sealed_until_ms
    connection.execute(update(streams).where(streams.c.name == stream.name).values(sealed_until_ms=batch_time_ms))
    return batch_time_ms


def _check_absorbed(connection: Connection, stream_name: str, batch_time_ms: int, absorbed: Sequence[int]) -> None:
    if not absorbed:
        return
    later = [time_ms for time_ms in absorbed if time_ms >= batch_time_ms]
    claimed: set[int] = set()
    for part in chunks(absorbed):
        query = select(batches.c.batch_time_ms).where(
            batches.c.stream == stream_name, batches.c.batch_time_ms.in_(part)
        )
        claimed.update(connection.execute(query).scalars())
    refused = sorted({*later, *claimed})
    if refused:
        raise AllocationConflictError(
            f"Batch {time_text(batch_time_ms)} of stream {stream_name!r} cannot absorb {times_text(refused)}: "
            "a batch absorbs only earlier batch times that have no batch.",
            remedy="Read the unclaimed times again, and write a new manifest.",
        )


def late_records(stream: StreamRow, taken: Iterable[StoredBlock]) -> int:
    """Return how many of the blocks' records came too late for the batch of their timestamps."""
    return sum(block.info.records for block in taken if is_late(stream, block.info, block.batch_time_ms))


@dataclass(slots=True)
class _Taken:
    """The running sum of a batch's input from one partition."""

    from_offset: int
    until_offset: int
    records: int = 0
    blocks: int = 0


def sum_inputs(stream_name: str, batch_time_ms: int, taken: Iterable[StoredBlock]) -> list[BatchInputRow]:
    """Return the inputs of a batch with these blocks, one for each partition."""
    sums: dict[tuple[str, TopicPartition], _Taken] = {}
    for block in taken:
        for r in block.info.ranges:
            key = (block.info.receiver.input_id, r.partition)
            total = sums.setdefault(key, _Taken(r.from_offset, r.until_offset))
            total.from_offset = min(total.from_offset, r.from_offset)
            total.until_offset = max(total.until_offset, r.until_offset)
            total.records += r.records
            total.blocks += 1
    return [
        BatchInputRow(
            stream_name,
            batch_time_ms,
            input_id,
            partition,
            total.from_offset,
            total.until_offset,
            total.records,
            total.blocks,
        )
        for (input_id, partition), total in sums.items()
    ]


def is_empty(connection: Connection, batch: BatchRow) -> bool:
    """Whether the batch has neither blocks nor ranges, and is neither absorbed nor abandoned."""
    if batch.blocks or batch.built or batch.state in (BatchState.ABSORBED, BatchState.ABANDONED):
        return False
    has_inputs = exists().where(
        batch_inputs.c.stream == batch.stream, batch_inputs.c.batch_time_ms == batch.batch_time_ms
    )
    return not connection.execute(select(has_inputs)).scalar_one()


def replace(connection: Connection, batch: BatchRow, now_ms: int) -> None:
    """Replace an empty batch with ``batch``, which has ranges. Its earlier outputs and replays no longer count."""
    stream, batch_time_ms = batch.stream, batch.batch_time_ms
    fence_attempts(connection, stream, batch_time_ms, now_ms)
    of_batch = (batch_attempts.c.stream == stream, batch_attempts.c.batch_time_ms == batch_time_ms)
    targets = connection.execute(select(batch_attempts.c.target).where(*of_batch).distinct()).scalars().all()
    if targets:
        key = (replays.c.stream == stream, replays.c.batch_time_ms == batch_time_ms)
        connection.execute(delete(replays).where(*key, replays.c.target.in_(targets)))
    connection.execute(
        delete(batch_outputs).where(batch_outputs.c.stream == stream, batch_outputs.c.batch_time_ms == batch_time_ms)
    )
    connection.execute(
        update(batches)
        .where(batches.c.stream == stream, batches.c.batch_time_ms == batch_time_ms)
        .values(
            **{name: value for name, value in batch.to_columns().items() if name not in _OF_EMPTY},
            change=batches.c.change + 1,
        )
    )


def check_ranges(
    connection: Connection, locked: LockedStream, batch_time_ms: int, inputs: Iterable[BatchInputRow]
) -> list[BatchInputRow]:
    """Check the ranges and return the non-empty ones as the batch's inputs; each offset counts as a record.

    Raises:
        BatchTimeError: the batch time is after the stream's zero time.
        AllocationConflictError: the time has blocks, or a range holds offsets that another batch has, or that the
            stream's receivers have read or will read.
    """
    stream = locked.row
    if batch_time_ms > stream.zero_time_ms:
        raise BatchTimeError(
            f"Batch {time_text(batch_time_ms)} of stream {stream.name!r} cannot be built from Kafka: "
            f"it comes after the stream's zero time, {time_text(stream.zero_time_ms)}.",
            remedy="Its records are in the log: run it as any other.",
        )
    taken = [
        changed(
            row,
            stream=stream.name,
            batch_time_ms=batch_time_ms,
            records=row.until_offset - row.from_offset,
            blocks=0,
        )
        for row in inputs
        if row.until_offset > row.from_offset
    ]
    claimed = exists().where(unclaimed_times.c.stream == stream.name, unclaimed_times.c.batch_time_ms == batch_time_ms)
    if connection.execute(select(claimed)).scalar_one():
        raise AllocationConflictError(
            f"Batch {time_text(batch_time_ms)} of stream {stream.name!r} has blocks in the log, so it cannot be "
            "built from Kafka.",
            remedy="Run it without from_kafka.",
        )
    for row in taken:
        _check_range(connection, row)
    return taken


def _check_range(connection: Connection, row: BatchInputRow) -> None:
    what = f"{row.partition.topic}-{row.partition.partition}: offsets [{row.from_offset}, {row.until_offset})"
    named = {"input_id": row.input_id, **partition_key(row.partition)}
    starting = connection.execute(
        select(positions.c.starting_offset).where(
            positions.c.stream == row.stream, *(positions.c[name] == value for name, value in named.items())
        )
    ).scalar_one_or_none()
    if starting is not None and row.until_offset > starting:
        raise AllocationConflictError(
            f"{what} reach beyond {starting}, where the stream began to receive.",
            remedy="What the stream receives belongs to its own batches; build only from the offsets before.",
        )
    other = connection.execute(
        select(batch_inputs)
        .where(
            batch_inputs.c.stream == row.stream,
            *(batch_inputs.c[name] == value for name, value in named.items()),
            batch_inputs.c.until_offset > row.from_offset,
        )
        .order_by(batch_inputs.c.until_offset)
        .limit(1)
    ).one_or_none()
    if other is not None and other.from_offset < row.until_offset:
        overlapped = BatchInputRow.from_row(other)
        raise AllocationConflictError(
            f"{what} overlap [{overlapped.from_offset}, {overlapped.until_offset}) of batch "
            f"{time_text(overlapped.batch_time_ms)}.",
            remedy="A record belongs to one batch: leave out the offsets that have one.",
        )
