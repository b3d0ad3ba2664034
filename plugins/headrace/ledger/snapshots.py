"""Reads all of a stream's rows at one moment, for checks of their consistency with each other, the log and Kafka."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

from sqlalchemy import Connection, func, select

from headrace.ledger.batches.batch_states import select_attempts
from headrace.ledger.batches.tables import (
    AttemptRow,
    BatchInputRow,
    BatchOutputRow,
    BatchRow,
    ReplayRow,
    batch_attempts,
)
from headrace.ledger.database import Repository
from headrace.ledger.errors import StreamNotFoundError
from headrace.ledger.model import Model
from headrace.ledger.receiving.blocks import stored_block
from headrace.ledger.receiving.tables import (
    PositionRow,
    ReceiverRow,
    SegmentRow,
    StoredBlock,
    TopicRow,
    UnclaimedTime,
    blocks,
    segments,
    unclaimed_sums,
    unclaimed_times,
)
from headrace.ledger.states import AttemptState
from headrace.ledger.tables import GapRow, JobRow, StreamRow, streams

_Row = TypeVar("_Row", bound=Model)


@dataclass(frozen=True)
class StreamSnapshot:
    """A stream's rows as of one transaction, at ``now_ms`` of the ledger's clock.

    ``blocks`` are in the order of addition, ``inputs`` ascend in each partition. ``running`` are the attempts that have
    not ended, including those of replays; ``newest_attempts`` the highest number of each batch's own attempts.
    ``outputs`` are the newest rows of each output, by batch time, replay ("" is the batch itself) and output id.
    """

    now_ms: int
    stream: StreamRow
    jobs: tuple[JobRow, ...]
    receivers: tuple[ReceiverRow, ...]
    topics: tuple[TopicRow, ...]
    positions: tuple[PositionRow, ...]
    segments: tuple[SegmentRow, ...]
    blocks: tuple[StoredBlock, ...]
    batches: tuple[BatchRow, ...]
    inputs: tuple[BatchInputRow, ...]
    running: tuple[AttemptRow, ...]
    newest_attempts: dict[int, int]
    outputs: dict[tuple[int, str], dict[str, BatchOutputRow]]
    replays: tuple[ReplayRow, ...]
    gaps: tuple[GapRow, ...]
    unclaimed: tuple[UnclaimedTime, ...]

    @cached_property
    def batch(self) -> dict[int, BatchRow]:
        """The batches by time."""
        return {row.batch_time_ms: row for row in self.batches}

    @cached_property
    def segment(self) -> dict[str, SegmentRow]:
        """The segments by path, including removed ones."""
        return {row.path: row for row in self.segments}

    @cached_property
    def blocks_by_batch(self) -> dict[int, list[StoredBlock]]:
        """The remaining blocks by the time of the batch that holds them, including absorbed blocks; blocks without a
        batch by their own time."""
        held: dict[int, list[StoredBlock]] = defaultdict(list)
        for block in self.blocks:
            held[self.owner_ms(block.batch_time_ms)].append(block)
        return held

    @cached_property
    def inputs_by_batch(self) -> dict[int, list[BatchInputRow]]:
        """The inputs by batch time."""
        inputs: dict[int, list[BatchInputRow]] = defaultdict(list)
        for row in self.inputs:
            inputs[row.batch_time_ms].append(row)
        return inputs

    def owner_ms(self, batch_time_ms: int) -> int:
        """Return the time of the batch that has this time's blocks: its own, or the batch that absorbed it."""
        batch = self.batch.get(batch_time_ms)
        return batch_time_ms if batch is None or batch.absorbed_by_ms is None else batch.absorbed_by_ms


class Snapshots(Repository):
    """Reads all of a stream in one transaction."""

    def take(self, stream_name: str) -> StreamSnapshot:
        """Read everything except events and ended attempts: up to two kilobytes for each block and each batch input.

        Raises:
            StreamNotFoundError: there is no such stream.
        """
        with self._database.snapshot() as connection:
            return _read(connection, stream_name, self._database.now_ms(connection))


def _read(connection: Connection, stream_name: str, now_ms: int) -> StreamSnapshot:
    row = StreamRow.row(connection, select(streams).where(streams.c.name == stream_name))
    if row is None:
        raise StreamNotFoundError(stream_name)

    def rows(model: type[_Row], *order: str) -> tuple[_Row, ...]:
        columns = model.__table__.c
        query = select(model.__table__).where(columns.stream == stream_name)
        return tuple(model.rows(connection, query.order_by(*(columns[name] for name in order))))

    stored = (
        select(blocks, segments.c.path)
        .join(segments, segments.c.segment_id == blocks.c.segment_id)
        .where(blocks.c.stream == stream_name)
        .order_by(blocks.c.block_id)
    )
    running = select_attempts().where(
        batch_attempts.c.stream == stream_name, batch_attempts.c.state == AttemptState.RUNNING
    )
    unclaimed = unclaimed_sums(stream_name).order_by(unclaimed_times.c.batch_time_ms)
    newest = (
        select(batch_attempts.c.batch_time_ms, func.max(batch_attempts.c.number))
        .where(batch_attempts.c.stream == stream_name, batch_attempts.c.target == "")
        .group_by(batch_attempts.c.batch_time_ms)
    )
    outputs: dict[tuple[int, str], dict[str, BatchOutputRow]] = defaultdict(dict)
    for output in rows(BatchOutputRow, "batch_time_ms", "attempt"):
        outputs[output.batch_time_ms, output.target][output.output_id] = output
    return StreamSnapshot(
        now_ms=now_ms,
        stream=row,
        jobs=rows(JobRow, "epoch"),
        receivers=rows(ReceiverRow, "input_id", "receiver_index"),
        topics=rows(TopicRow, "input_id", "topic"),
        positions=rows(PositionRow, "input_id", "topic"),
        segments=rows(SegmentRow, "segment_id"),
        blocks=tuple(map(stored_block, connection.execute(stored))),
        batches=rows(BatchRow, "batch_time_ms"),
        inputs=rows(BatchInputRow, "input_id", "topic", "topic_id", "partition", "until_offset"),
        running=tuple(AttemptRow.rows(connection, running)),
        newest_attempts={time_ms: number for time_ms, number in connection.execute(newest)},
        outputs=dict(outputs),
        replays=rows(ReplayRow, "target", "batch_time_ms"),
        gaps=rows(GapRow, "gap_id"),
        unclaimed=tuple(UnclaimedTime.rows(connection, unclaimed)),
    )
