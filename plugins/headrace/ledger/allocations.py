"""Allocation: a batch time is sealed, and exactly its blocks become the batch."""

from __future__ import annotations

import builtins
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, delete, insert, select, update

from headrace.blocks import TopicPartition
from headrace.ledger.batch_rows import find_batch, require_batch
from headrace.ledger.blocks import stored_blocks
from headrace.ledger.codec import partition_key
from headrace.ledger.database import LockedStream, Role
from headrace.ledger.errors import AllocationConflictError, BatchTimeError
from headrace.ledger.events import record
from headrace.ledger.rows import BatchInputRow, BatchRow, StoredBlock
from headrace.ledger.states import BatchState, EventKind
from headrace.ledger.tables import batch_inputs, batches, streams, unclaimed_times

# Airflow's clock may be ahead of the ledger's by this much: a batch time is taken for come that long before. Beyond it
# the time is refused, since sealing a time far ahead would leave every block until then without a batch.
CLOCK_SKEW_MS = 5_000


class BatchAllocations(Role):
    """Seals batch times and allocates their blocks."""

    def seal(self, stream: str, batch_time_ms: int) -> int:
        """Close batch times up to this one for new blocks, in a transaction of its own; up to when it is sealed now.

        Raises:
            BatchTimeError: the time is no interval end, or has not come.
        """
        with self._database.write_stream(stream) as (connection, locked):
            return _seal(connection, locked, batch_time_ms)

    def blocks_of(self, stream: str, batch_time_ms: int) -> builtins.list[StoredBlock]:
        """The blocks of the batch time in the order they were added, and those of the times it absorbed, oldest first.

        After `seal` they are final. Their rows go when the log is cleaned.
        """
        with self._database.read() as connection:
            batch = find_batch(connection, stream, batch_time_ms)
            absorbed = () if batch is None else batch.absorbed
            return stored_blocks(connection, stream, [*absorbed, batch_time_ms])

    def allocate(
        self,
        stream: str,
        batch_time_ms: int,
        *,
        manifest_uri: str,
        manifest_sha256: str,
        blocks_expected: int,
        code_version: str | None = None,
        absorb: Collection[int] = (),
    ) -> BatchRow:
        """Make the batch, in one transaction: seal, take the blocks, sum up the inputs. A batch that exists is returned
        as it is, whatever the arguments.

        Args:
            blocks_expected: how many blocks the manifest holds, of this time and the absorbed ones.
            absorb: earlier unclaimed batch times whose blocks this batch takes over (coalescing).

        Raises:
            AllocationConflictError: the manifest does not match: blocks were added after it was drawn up, or a time to
                absorb was claimed.
            BatchTimeError: the time is no interval end, or has not come.
        """
        with self._database.write_stream(stream) as (connection, locked):
            existing = find_batch(connection, stream, batch_time_ms)
            if existing is not None:
                return existing
            _seal(connection, locked, batch_time_ms)
            absorbed = sorted(set(absorb))
            _check_absorbed(connection, stream, batch_time_ms, absorbed)
            taken = stored_blocks(connection, stream, [*absorbed, batch_time_ms])
            if len(taken) != blocks_expected:
                raise AllocationConflictError(
                    f"Batch {batch_time_ms} of stream {stream!r} has {len(taken)} blocks, "
                    f"its manifest {blocks_expected}.",
                    remedy="Seal the batch time first, then draw up the manifest.",
                )
            base = {
                "stream": stream,
                "revision": locked.row.revision,
                "manifest_uri": manifest_uri,
                "manifest_sha256": manifest_sha256,
                "code_version": code_version,
                "interval_ms": locked.row.batch_interval_ms,
                "attempt": 0,
                "allocated_at_ms": locked.now_ms,
            }
            sums = {
                "blocks": len(taken),
                "records": sum(block.info.records for block in taken),
                "payload_bytes": sum(block.info.payload_bytes for block in taken),
            }
            insert_absorbed(connection, base, batch_time_ms, absorbed)
            connection.execute(
                insert(batches).values(
                    **base, **sums, batch_time_ms=batch_time_ms, state=BatchState.ALLOCATED, absorbed=absorbed
                )
            )
            insert_inputs(connection, sum_inputs(stream, batch_time_ms, taken))
            connection.execute(
                delete(unclaimed_times).where(
                    unclaimed_times.c.stream == stream, unclaimed_times.c.batch_time_ms.in_([*absorbed, batch_time_ms])
                )
            )
            payload = {**sums, "absorbed": absorbed}
            record(connection, stream, locked.now_ms, EventKind.BATCH_ALLOCATED, payload, batch_time_ms=batch_time_ms)
            return require_batch(connection, stream, batch_time_ms)


def _seal(connection: Connection, locked: LockedStream, batch_time_ms: int) -> int:
    stream = locked.row
    if batch_time_ms % stream.batch_interval_ms != 0 or batch_time_ms <= 0:
        raise BatchTimeError(
            f"{batch_time_ms} is no batch time of stream {stream.name!r}: "
            f"those are multiples of {stream.batch_interval_ms} ms since the epoch.",
            remedy=f"The next one is {stream.batch_time_after(batch_time_ms)}.",
        )
    if batch_time_ms > locked.now_ms + CLOCK_SKEW_MS:
        raise BatchTimeError(
            f"Batch time {batch_time_ms} of stream {stream.name!r} comes in {batch_time_ms - locked.now_ms} ms.",
            remedy="Wait for it; the time is the ledger's (now_ms).",
        )
    if batch_time_ms <= stream.sealed_until_ms:
        return stream.sealed_until_ms
    connection.execute(update(streams).where(streams.c.name == stream.name).values(sealed_until_ms=batch_time_ms))
    return batch_time_ms


def _check_absorbed(connection: Connection, stream: str, batch_time_ms: int, absorbed: Sequence[int]) -> None:
    if not absorbed:
        return
    later = [time_ms for time_ms in absorbed if time_ms >= batch_time_ms]
    claimed = connection.execute(
        select(batches.c.batch_time_ms).where(batches.c.stream == stream, batches.c.batch_time_ms.in_(absorbed))
    ).scalars()
    refused = sorted({*later, *claimed})
    if refused:
        raise AllocationConflictError(
            f"Batch {batch_time_ms} of stream {stream!r} cannot absorb {', '.join(map(str, refused))}: "
            "only earlier times that nobody claimed.",
            remedy="Read the unclaimed times again and draw up the manifest anew.",
        )


def insert_absorbed(connection: Connection, base: dict[str, Any], batch_time_ms: int, absorbed: Sequence[int]) -> None:
    """A row for every absorbed time, so that nobody claims it again. The batch that took its blocks counts them."""
    rows = [
        {
            **base,
            "batch_time_ms": time_ms,
            "state": BatchState.ABSORBED,
            "blocks": 0,
            "records": 0,
            "payload_bytes": 0,
            "absorbed": [],
            "absorbed_by_ms": batch_time_ms,
        }
        for time_ms in absorbed
    ]
    if rows:
        connection.execute(insert(batches), rows)


@dataclass(slots=True)
class _Taken:
    """What a batch takes of one partition, while it is summed up."""

    from_offset: int
    until_offset: int
    records: int = 0
    blocks: int = 0


def sum_inputs(stream: str, batch_time_ms: int, taken: Iterable[StoredBlock]) -> builtins.list[BatchInputRow]:
    """What a batch of these blocks takes of each partition."""
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
            stream,
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


def insert_inputs(connection: Connection, inputs: Iterable[BatchInputRow]) -> None:
    """Write the inputs of a batch whose row exists, within the caller's transaction."""
    rows = [
        {
            "stream": taken.stream,
            "batch_time_ms": taken.batch_time_ms,
            "input_id": taken.input_id,
            **partition_key(taken.partition),
            "incarnation": taken.partition.incarnation,
            "from_offset": taken.from_offset,
            "until_offset": taken.until_offset,
            "records": taken.records,
            "blocks": taken.blocks,
        }
        for taken in inputs
    ]
    if rows:
        connection.execute(insert(batch_inputs), rows)
