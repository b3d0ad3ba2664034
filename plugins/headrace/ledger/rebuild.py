"""Writes a stream of a lost ledger into a new one (rule 10 of the design).

`headrace.batch.rebuilt_stream` finds its rows. `_rows` adds the values that no found row has.

Attempts are lost with the ledger. A batch gets one ended attempt for each definition that wrote it, and one for each of
its replays; the recorded outputs belong to these. Numbers of later attempts are above every number that an attempt of
the lost ledger had.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from sqlalchemy import Connection, Table, delete, exists, insert, select, update

from headrace.blocks import ReceiverId
from headrace.clock import time_text
from headrace.ledger.batches.batch_states import live_attempts
from headrace.ledger.batches.tables import (
    AttemptRow,
    BatchInputRow,
    BatchOutputRow,
    BatchRow,
    FiledReplay,
    ReplayDefinitionRow,
    ReplayRow,
    RunBatchTime,
    batch_attempts,
    batch_inputs,
    batch_outputs,
    batch_runs,
    batches,
    replay_definitions,
    replays,
)
from headrace.ledger.database import LockedStream, Repository, insert_all
from headrace.ledger.errors import LeaseHeldError, LedgerError, StreamNotFoundError
from headrace.ledger.events import add_gap, record
from headrace.ledger.model import Model
from headrace.ledger.receiving.blocks import block_columns
from headrace.ledger.receiving.jobs import held, job_of
from headrace.ledger.receiving.tables import (
    PositionRow,
    ReceiverRow,
    SegmentRow,
    StoredBlock,
    TopicRow,
    blocks,
    closing_values,
    positions,
    receivers,
    segments,
    topics,
    unclaimed_part,
    unclaimed_times,
)
from headrace.ledger.states import AttemptState, BatchState, EventKind, ReceiverState
from headrace.ledger.streams import keep_revision
from headrace.ledger.tables import (
    Declared,
    GapRow,
    StreamRevision,
    StreamRow,
    events,
    gaps,
    samples,
    stream_revisions,
    streams,
)

_KEPT = (events, samples)
# What a stream has, in the order in which the rows can be inserted. Listeners' cursors and totals start again: gaps
# that the rebuild finds are added as events and to the totals.
_TABLES = [table for table in Model.metadata.sorted_tables if "stream" in table.c and table not in _KEPT]


@dataclass(frozen=True, slots=True)
class FoundBatch:
    """A batch to be restored. ``outputs`` has the counts of the recorded outputs, by id; ``revisions`` the revisions of
    the definitions that wrote them, as far as they are known.
    """

    row: BatchRow
    inputs: Sequence[BatchInputRow] = ()
    outputs: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    replays: tuple[FiledReplay, ...] = ()
    revisions: Mapping[str, int] = field(default_factory=dict)

    @property
    def was_allocated(self) -> bool:
        """Whether it may have been run. An absorbed time is not."""
        return self.row.state is not BatchState.ABSORBED


@dataclass(frozen=True, slots=True)
class FoundStream:
    """A stream to be restored. Blocks are in the order in which they are to be added: ascending in each partition, and
    the blocks of a batch in the order of its manifest. Their segments are among ``segments``.

    ``stream.job_epoch`` and ``receiver_epochs`` are at least the highest that a writer of the lost ledger can have had:
    new epochs are above them, so that no segment's name is used again and old writers stay fenced.
    ``last_attempt`` is above the number of every attempt at a batch: outputs and states refuse lower numbers than they
    know. ``revisions`` are the known definitions, including that of ``stream``. ``declared`` is the definition that the
    stream gets instead of its own.
    ``runs`` are the batch times assigned to runs. ``found_gaps`` are gaps that were not recorded: they were lost with a
    part of the log.
    """

    stream: StreamRow
    revisions: Sequence[StreamRevision]
    receiver_epochs: Mapping[ReceiverId, int]
    last_attempt: int
    declared: Declared | None = None
    topics: Sequence[TopicRow] = ()
    positions: Sequence[PositionRow] = ()
    segments: Sequence[SegmentRow] = ()
    blocks: Sequence[StoredBlock] = ()
    batches: Sequence[FoundBatch] = ()
    replay_definitions: Sequence[ReplayDefinitionRow] = ()
    gaps: Sequence[GapRow] = ()
    found_gaps: Sequence[GapRow] = ()
    runs: Mapping[str, int] = field(default_factory=dict)
    notes: Mapping[str, Any] = field(default_factory=dict)


class Rebuild(Repository):
    """Rebuilds a lost ledger."""

    def is_new(self, stream_name: str) -> bool:
        """Return whether the ledger has received nothing for the stream: it is unknown, or has no block and no record.

        A stream that was registered again may have a receiver job, positions and empty batches.
        """
        with self._database.read() as connection:
            return not _has_received(connection, stream_name)

    def restore(self, stream_name: str, found: FoundStream, *, force: bool = False) -> None:
        """Write the stream, in one transaction, into a ledger that has received nothing for it.

        What the ledger already has of the stream is deleted: a registration, a receiver job, empty batches.

        Args:
            force: also while a receiver job or an attempt at a batch holds a live lease; both are fenced.

        Raises:
            LedgerError: the ledger has blocks of the stream, or batches with records.
            LeaseHeldError: a job or an attempt has a live lease, and not ``force``.
            LedgerConflictError: ``found`` contradicts itself (a block or a batch time twice).
        """
        with self._database.write() as connection:
            try:
                locked = self._database.lock_stream(connection, stream_name)
            except StreamNotFoundError:
                connection.execute(insert(streams).values(**found.stream.to_columns()))
                locked = self._database.lock_stream(connection, stream_name)
            else:
                if _has_received(connection, stream_name):
                    raise LedgerError(
                        f"The ledger has blocks or batches of stream {stream_name!r}: it is not lost.",
                        remedy="Rebuild into a new ledger, and keep this one.",
                    )
                if not force:
                    _refuse_while_alive(connection, locked)
                for table in reversed(_TABLES):
                    connection.execute(delete(table).where(table.c.stream == stream_name))
                _update(connection, stream_name, **found.stream.to_columns())
            now_ms, rows = locked.now_ms, _rows(connection, found, locked.now_ms)
            for table in _TABLES:
                # The database gives the rows new numbers.
                number = None if table.autoincrement_column is None else table.autoincrement_column.name
                insert_all(
                    connection,
                    table,
                    (
                        {name: value for name, value in row.items() if name != number} | {"stream": stream_name}
                        for row in rows.get(table, ())
                    ),
                )
            # Their writers are gone.
            connection.execute(
                update(segments).where(segments.c.stream == stream_name).values(**closing_values(now_ms))
            )
            for gap in found.found_gaps:
                span = {"from_offset": gap.from_offset, "until_offset": gap.until_offset}
                add_gap(connection, locked, gap.input_id, gap.partition, **span, reason=gap.reason)
            if found.declared not in (None, Declared.of(found.stream)):
                revision, _ = keep_revision(connection, stream_name, found.declared, now_ms)
                _update(connection, stream_name, **found.declared.columns(), revision=revision, updated_at_ms=now_ms)
            payload = {"blocks": len(found.blocks), "batches": len(found.batches), **found.notes}
            record(connection, stream_name, now_ms, EventKind.LEDGER_REBUILT, payload)


def _update(connection: Connection, stream_name: str, **values: Any) -> None:
    connection.execute(update(streams).where(streams.c.name == stream_name).values(**values))


def _has_received(connection: Connection, stream_name: str) -> bool:
    has_blocks = exists().where(blocks.c.stream == stream_name)
    has_records = exists().where(batches.c.stream == stream_name, batches.c.records > 0)
    return bool(connection.execute(select(has_blocks | has_records)).scalar_one())


def _refuse_while_alive(connection: Connection, locked: LockedStream) -> None:
    job = job_of(connection, locked)
    if job is not None and job.alive(locked.now_ms):
        raise held(job)
    for attempt in live_attempts(connection, locked.row.name, locked.now_ms)[:1]:
        raise LeaseHeldError(
            f"Batch {time_text(attempt.batch_time_ms)} of stream {attempt.stream!r} is being run by "
            f"{attempt.holder} since {time_text(attempt.started_at_ms)}. The attempt's lease ends at "
            f"{time_text(attempt.lease_until_ms)}.",
            holder=attempt.holder,
            since_ms=attempt.started_at_ms,
            until_ms=attempt.lease_until_ms,
            remedy="Pause the stream's batch DAG, and wait until the attempt's lease has run out.",
        )


def _rows(connection: Connection, found: FoundStream, now_ms: int) -> dict[Table, Iterable[Mapping[str, Any]]]:
    """The rows of each table, made one by one: there may be millions."""
    name, job_epoch = found.stream.name, found.stream.job_epoch
    receiving = (
        # Their instances are lost.
        ReceiverRow(receiver, epoch, job_epoch, ReceiverState.LOST, None, now_ms, 0, 0, 0, -1, {}, None, 0)
        for receiver, epoch in found.receiver_epochs.items()
    )
    unowned = (replace(row, receiver_index=None, wanted_receiver_index=None) for row in found.positions)

    def restored() -> Iterator[_RestoredAttempt]:
        return (each for batch in found.batches for each in _attempts(batch, found.last_attempt, now_ms))

    return {
        stream_revisions: ({**row.to_columns(), "digest": Declared.of(row).digest} for row in found.revisions),
        topics: _columns(found.topics),
        positions: _columns(unowned),
        receivers: _columns(receiving),
        segments: _columns(found.segments),
        blocks: _blocks(connection, found, now_ms),
        unclaimed_times: _unclaimed(found),
        gaps: _columns(found.gaps),
        batches: (
            {**batch.row.to_columns(), "attempt": found.last_attempt if batch.was_allocated else 0}
            for batch in found.batches
        ),
        batch_inputs: _columns(row for batch in found.batches for row in batch.inputs),
        batch_runs: _columns(RunBatchTime(name, run_id, time_ms, now_ms) for run_id, time_ms in found.runs.items()),
        batch_attempts: (
            {**attempt.to_columns(), "replay_revision": None if replay is None else replay.revision}
            for attempt, _, replay in restored()
        ),
        batch_outputs: _columns(
            BatchOutputRow(
                name,
                attempt.batch_time_ms,
                attempt.number,
                output_id,
                dict(counts),
                now_ms,
                code_version=attempt.code_version,
                target=attempt.target,
            )
            for attempt, recorded, _ in restored()
            for output_id, counts in recorded.items()
        ),
        replays: _columns(_replay(attempt, replay) for attempt, _, replay in restored() if replay is not None),
        replay_definitions: _columns(found.replay_definitions),
    }


def _columns(rows: Iterable[Model]) -> Iterator[dict[str, Any]]:
    return (row.to_columns() for row in rows)


def _blocks(connection: Connection, found: FoundStream, now_ms: int) -> Iterator[dict[str, Any]]:
    # By now the segments are there, and the database has numbered them.
    known = select(segments.c.path, segments.c.segment_id).where(segments.c.stream == found.stream.name)
    ids = {row.path: row.segment_id for row in connection.execute(known)}
    for block in found.blocks:
        segment_id = ids[block.info.handle.segment]
        yield block_columns(block.info, batch_time_ms=block.batch_time_ms, segment_id=segment_id, now_ms=now_ms)


def _unclaimed(found: FoundStream) -> Iterator[dict[str, Any]]:
    claimed = {batch.row.batch_time_ms for batch in found.batches}
    sums: dict[tuple[int, int], Counter[str]] = defaultdict(Counter)
    for block in found.blocks:
        if block.batch_time_ms not in claimed:
            size = {"blocks": 1, "records": block.info.records, "payload_bytes": block.info.payload_bytes}
            sums[block.batch_time_ms, unclaimed_part(block.info.receiver.index)].update(size)
    return ({"batch_time_ms": time_ms, "part": part, **size} for (time_ms, part), size in sums.items())


HOLDER = "a lost ledger"
"""The holder of the attempts in a rebuilt ledger."""


class _RestoredAttempt(NamedTuple):
    """An attempt with the counts of its recorded outputs by id, and the replay if it is one's attempt."""

    row: AttemptRow
    recorded: Mapping[str, Mapping[str, Any]]
    replay: FiledReplay | None


def _attempts(batch: FoundBatch, last_attempt: int, now_ms: int) -> Iterator[_RestoredAttempt]:
    """One attempt for each replay of the batch, then one for each definition that wrote outputs, the newest last."""
    row = batch.row
    if not batch.was_allocated:
        return
    by_revision: dict[int | None, dict[str, Mapping[str, Any]]] = {}
    for output_id, counts in batch.outputs.items():
        by_revision.setdefault(batch.revisions.get(output_id), {})[output_id] = counts
    of_batch = sorted(by_revision.items(), key=lambda written: written[0] or 0) or [(None, {})]
    ran: list[tuple[FiledReplay | None, int | None, tuple[str, ...], Mapping[str, Mapping[str, Any]]]]
    ran = [(replay, None, replay.outputs, replay.recorded) for replay in batch.replays]
    ran += [(None, revision, tuple(recorded), recorded) for revision, recorded in of_batch]
    for number, (replay, revision, outputs, recorded) in enumerate(ran, last_attempt + 1 - len(ran)):
        result = replay or row
        attempt = AttemptRow(
            stream=row.stream,
            batch_time_ms=row.batch_time_ms,
            number=number,
            holder=HOLDER,
            way="",
            state=AttemptState.COMPLETED if result.state is BatchState.COMPLETED else AttemptState.FENCED,
            outputs=outputs,
            attributes={},
            started_at_ms=now_ms,
            lease_ms=0,
            lease_until_ms=0,
            heartbeat_ms=now_ms,
            ended_at_ms=now_ms,
            error=None,
            target="" if replay is None else replay.target,
            code_version=result.code_version,
            revision=revision,
        )
        yield _RestoredAttempt(attempt, recorded, replay)


def _replay(attempt: AttemptRow, replay: FiledReplay) -> ReplayRow:
    fields = {name: getattr(replay, name) for name in FiledReplay.__dataclass_fields__ if name != "recorded"}
    if replay.state is BatchState.RUNNING:
        # The attempt that ran it is lost.
        fields["state"] = BatchState.ALLOCATED
    return ReplayRow(
        **{**fields, "stream": attempt.stream, "batch_time_ms": attempt.batch_time_ms, "attempt": attempt.number}
    )
