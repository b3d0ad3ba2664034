"""Writes a stream of a lost ledger into a new one (rule 10 of the design).

`headrace.batch.rebuilt_stream` finds its data.

Attempts are lost with the ledger. A batch gets one ended attempt for each definition that wrote it, and one for each of
its replays; the recorded outputs belong to these. Numbers of later attempts are above every number that an attempt of
the lost ledger had.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from sqlalchemy import Connection, delete, exists, insert, select, update

from headrace.blocks import BlockInfo, ReceiverId, TopicPartition
from headrace.clock import time_text
from headrace.ledger.batch_states import live_attempts
from headrace.ledger.batch_tables import (
    BatchInputRow,
    BatchRow,
    FiledReplay,
    ReplayDefinitionRow,
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
from headrace.ledger.jobs import job_of
from headrace.ledger.receiving_tables import (
    PositionRow,
    TopicRow,
    blocks,
    positions,
    receivers,
    segments,
    topics,
    unclaimed_part,
    unclaimed_times,
)
from headrace.ledger.states import AttemptState, BatchState, EventKind, ReceiverState
from headrace.ledger.streams import insert_revision
from headrace.ledger.tables import (
    Declared,
    GapRow,
    StreamRevision,
    StreamRow,
    gaps,
    listener_cursors,
    receiver_jobs,
    stream_revisions,
    streams,
    totals,
)

# In the order in which their rows can be deleted. Events are kept.
_TABLES = (
    batch_runs,
    replays,
    replay_definitions,
    batch_outputs,
    batch_inputs,
    batch_attempts,
    batches,
    unclaimed_times,
    blocks,
    receivers,
    segments,
    positions,
    topics,
    gaps,
    # The gaps are added again: as events, which are old for listeners, and to the totals.
    listener_cursors,
    totals,
    receiver_jobs,
    stream_revisions,
)


class Rebuild(Repository):
    """Rebuilds a lost ledger."""

    def is_new(self, stream: str) -> bool:
        """Return whether the ledger has received nothing for the stream: it is unknown, or has no block and no record.

        A stream that was registered again may have a receiver job, positions and empty batches.
        """
        with self._database.read() as connection:
            return not _has_received(connection, stream)

    def restore(self, stream: str, rebuilt: FoundStream, *, force: bool = False) -> None:
        """Write the stream, in one transaction, into a ledger that has received nothing for it.

        What the ledger already has of the stream is deleted: a registration, a receiver job, empty batches.

        Args:
            force: also while a receiver job or an attempt at a batch holds a live lease; both are fenced.

        Raises:
            LedgerError: the ledger has blocks of the stream, or batches with records.
            LeaseHeldError: a job or an attempt has a live lease, and not ``force``.
            LedgerConflictError: ``rebuilt`` contradicts itself (a block or a batch time twice).
        """
        with self._database.write() as connection:
            try:
                locked = self._database.lock_stream(connection, stream)
            except StreamNotFoundError:
                pass
            else:
                if _has_received(connection, stream):
                    raise LedgerError(
                        f"The ledger has blocks or batches of stream {stream!r}: it is not lost.",
                        remedy="Rebuild into a new ledger, and keep this one aside.",
                    )
                if not force:
                    _refuse_while_alive(connection, locked)
                for table in _TABLES:
                    connection.execute(delete(table).where(table.c.stream == stream))
            _put_stream(connection, rebuilt)
            for known in rebuilt.revisions:
                insert_revision(connection, stream, known.revision, Declared.of(known), known.created_at_ms)
            locked = self._database.lock_stream(connection, stream)
            insert_positions(connection, rebuilt)
            insert_receivers(connection, locked, rebuilt)
            insert_segments(connection, locked, rebuilt)
            insert_blocks(connection, locked, rebuilt)
            insert_gaps(connection, locked, rebuilt)
            insert_batches(connection, locked, rebuilt)
            payload = {"blocks": len(rebuilt.blocks), "batches": len(rebuilt.batches), **rebuilt.notes}
            record(connection, stream, locked.now_ms, EventKind.LEDGER_REBUILT, payload)


def _has_received(connection: Connection, stream: str) -> bool:
    has_blocks = exists().where(blocks.c.stream == stream)
    has_records = exists().where(batches.c.stream == stream, batches.c.records > 0)
    return bool(
        connection.execute(select(has_blocks)).scalar_one() or connection.execute(select(has_records)).scalar_one()
    )


def _refuse_while_alive(connection: Connection, locked: LockedStream) -> None:
    job = job_of(connection, locked)
    if job is not None and job.alive(locked.now_ms):
        raise LeaseHeldError(
            f"A receiver job of stream {job.stream!r} is alive: {job.holder} (epoch {job.epoch}), since "
            f"{time_text(job.acquired_at_ms)} until {time_text(job.lease_until_ms)}.",
            holder=job.holder,
            since_ms=job.acquired_at_ms,
            until_ms=job.lease_until_ms,
            remedy="Stop it (`headrace streams stop --wait 60`), or wait until its lease has run out.",
        )
    for attempt in live_attempts(connection, locked.row.name, locked.now_ms)[:1]:
        raise LeaseHeldError(
            f"Batch {time_text(attempt.batch_time_ms)} of stream {attempt.stream!r} is being run by "
            f"{attempt.holder}, since "
            f"{time_text(attempt.started_at_ms)} until {time_text(attempt.lease_until_ms)}.",
            holder=attempt.holder,
            since_ms=attempt.started_at_ms,
            until_ms=attempt.lease_until_ms,
            remedy="Pause the stream's batch DAG, and wait until the attempt's lease has run out.",
        )


def _put_stream(connection: Connection, rebuilt: FoundStream) -> None:
    row = rebuilt.stream.to_columns()
    name = row.pop("name")
    if not connection.execute(update(streams).where(streams.c.name == name).values(**row)).rowcount:
        connection.execute(insert(streams).values(name=name, **row))


HOLDER = "a lost ledger"
"""The holder of the attempts in a rebuilt ledger."""


def insert_batches(connection: Connection, locked: LockedStream, rebuilt: FoundStream) -> None:
    """Insert the batches with their inputs, outputs and replays, the runs, and the unclaimed times."""
    stream, now_ms = locked.row.name, locked.now_ms
    insert_all(connection, batches, (_row(batch, rebuilt.last_attempt) for batch in rebuilt.batches))
    insert_all(connection, batch_inputs, (row for batch in rebuilt.batches for row in _inputs(batch)))
    definitions = [{"stream": stream, **row.to_columns()} for row in rebuilt.replay_definitions]
    insert_all(connection, replay_definitions, definitions)
    for batch in rebuilt.batches:
        if batch.row.state is not BatchState.ABSORBED:
            _insert_attempts(connection, locked, rebuilt, batch)
    insert_all(
        connection,
        batch_runs,
        (
            {"stream": stream, "run_id": run_id, "batch_time_ms": time_ms, "at_ms": now_ms}
            for run_id, time_ms in rebuilt.runs.items()
        ),
    )
    insert_all(connection, unclaimed_times, _unclaimed(stream, rebuilt))


def _inputs(batch: FoundBatch) -> Iterator[dict[str, Any]]:
    for batch_input in batch.inputs:
        values = {field.name: getattr(batch_input, field.name) for field in fields(batch_input)}
        yield BatchInputRow(stream=batch.row.stream, batch_time_ms=batch.row.batch_time_ms, **values).to_columns()


def _row(batch: FoundBatch, last_attempt: int) -> dict[str, Any]:
    attempt = 0 if batch.row.state is BatchState.ABSORBED else last_attempt
    return {**batch.row.to_columns(), "attempt": attempt}


def _insert_attempts(connection: Connection, locked: LockedStream, rebuilt: FoundStream, batch: FoundBatch) -> None:
    """Insert the last attempts at the batch, and before them one for each replay."""
    key = {"stream": locked.row.name, "batch_time_ms": batch.row.batch_time_ms}
    attempts: list[dict[str, Any]] = []
    outputs: list[dict[str, Any]] = []
    written = _by_revision(batch)
    first = rebuilt.last_attempt + 1 - len(written)
    numbers = range(first - len(batch.replays), first)
    for number, replay in zip(numbers, batch.replays, strict=True):
        state = AttemptState.COMPLETED if replay.state is BatchState.COMPLETED else AttemptState.FENCED
        of = {"number": number, "target": replay.target, "state": state}
        attempts.append(
            _attempt(locked, key, of, replay.outputs, replay.code_version) | {"replay_revision": replay.revision}
        )
        outputs += _outputs(locked, key, of, replay.recorded, replay.code_version)
    completed = batch.row.state is BatchState.COMPLETED
    state = AttemptState.COMPLETED if completed else AttemptState.FENCED
    for number, (revision, recorded) in enumerate(written, first):
        of = {"number": number, "target": "", "state": state}
        attempts.append(_attempt(locked, key, of, tuple(recorded), batch.row.code_version) | {"revision": revision})
        outputs += _outputs(locked, key, of, recorded, batch.row.code_version)
    insert_all(connection, batch_attempts, attempts)
    insert_all(connection, batch_outputs, outputs)
    insert_all(
        connection,
        replays,
        (
            {
                **key,
                **{name: getattr(replay, name) for name in _REPLAY},
                # The attempt that ran it is lost.
                "state": BatchState.ALLOCATED if replay.state is BatchState.RUNNING else replay.state,
                "attempt": number,
                "outputs": replay.outputs,
            }
            for number, replay in zip(numbers, batch.replays, strict=True)
        ),
    )


def _by_revision(batch: FoundBatch) -> list[tuple[int | None, dict[str, Mapping[str, Any]]]]:
    """Return the recorded outputs by the revision that wrote them, the newest last; one empty group without any."""
    groups: dict[int | None, dict[str, Mapping[str, Any]]] = {}
    for output_id, counts in batch.outputs.items():
        groups.setdefault(batch.revisions.get(output_id), {})[output_id] = counts
    return sorted(groups.items(), key=lambda group: group[0] or 0) or [(None, {})]


_REPLAY = ("target", "revision", "code_version", "started_at_ms", "completed_at_ms", "error")


def _attempt(
    locked: LockedStream, key: dict[str, Any], of: dict[str, Any], outputs: tuple[str, ...], code_version: str | None
) -> dict[str, Any]:
    times = dict.fromkeys(("started_at_ms", "heartbeat_ms", "ended_at_ms"), locked.now_ms)
    return {
        **key,
        **of,
        **times,
        "holder": HOLDER,
        "way": "",
        "source": "log",
        "outputs": outputs,
        "attributes": {},
        "replay_revision": None,
        "revision": None,
        "code_version": code_version,
        "lease_ms": 0,
        "lease_until_ms": 0,
    }


def _outputs(
    locked: LockedStream,
    key: dict[str, Any],
    of: dict[str, Any],
    recorded: Mapping[str, Mapping[str, Any]],
    code_version: str | None,
) -> Iterator[dict[str, Any]]:
    for output_id, counts in recorded.items():
        yield {
            **key,
            "attempt": of["number"],
            "output_id": output_id,
            "target": of["target"],
            "state": AttemptState.COMPLETED,
            "counts": dict(counts),
            "recorded_at_ms": locked.now_ms,
            "code_version": code_version,
        }


def _unclaimed(stream: str, rebuilt: FoundStream) -> Iterator[dict[str, Any]]:
    claimed = {batch.row.batch_time_ms for batch in rebuilt.batches}
    sums: dict[tuple[int, int], list[int]] = defaultdict(lambda: [0, 0, 0])
    for block in rebuilt.blocks:
        if block.batch_time_ms not in claimed:
            sums_of_part = sums[block.batch_time_ms, unclaimed_part(block.info.receiver.index)]
            sums_of_part[0] += 1
            sums_of_part[1] += block.info.records
            sums_of_part[2] += block.info.payload_bytes
    for (time_ms, part), (count, records, payload_bytes) in sums.items():
        yield {
            "stream": stream,
            "batch_time_ms": time_ms,
            "part": part,
            "blocks": count,
            "records": records,
            "payload_bytes": payload_bytes,
        }


@dataclass(frozen=True, slots=True)
class FoundSegment:
    """A segment of the log and its size. Its writer is gone, so it is closed."""

    path: str
    receiver_id: ReceiverId
    epoch: int
    bytes: int | None = None


@dataclass(frozen=True, slots=True)
class FoundBlock:
    """An accepted block of the log, and its batch time."""

    info: BlockInfo
    batch_time_ms: int


@dataclass(frozen=True, slots=True)
class FoundInput:
    """A batch's input from one partition, as in `BatchInputRow`, which takes 20 times the memory."""

    input_id: str
    partition: TopicPartition
    from_offset: int
    until_offset: int
    records: int
    blocks: int


@dataclass(frozen=True, slots=True)
class FoundBatch:
    """A batch to be restored. ``outputs`` has the counts of the recorded outputs, by id; ``revisions`` the revisions of
    the definitions that wrote them, as far as they are known.
    """

    row: BatchRow
    inputs: tuple[FoundInput, ...] = ()
    outputs: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    replays: tuple[FiledReplay, ...] = ()
    revisions: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class FoundStream:
    """A stream to be restored. Blocks are in the order in which they are to be added: ascending in each partition, and
    the blocks of a batch in the order of its manifest.

    ``stream.job_epoch`` and ``receiver_epochs`` are at least the highest that a writer of the lost ledger can have had:
    new epochs are above them, so that no segment's name is used again and old writers stay fenced.
    ``last_attempt`` is above the number of every attempt at a batch: outputs and states refuse lower numbers than they
    know. ``revisions`` are the known definitions, including that of ``stream``.
    ``runs`` are the batch times assigned to runs. ``found_gaps`` are gaps that were not recorded: they were lost with a
    part of the log.
    """

    stream: StreamRow
    revisions: Sequence[StreamRevision]
    receiver_epochs: Mapping[ReceiverId, int]
    last_attempt: int
    topics: Sequence[TopicRow] = ()
    positions: Sequence[PositionRow] = ()
    segments: Sequence[FoundSegment] = ()
    blocks: Sequence[FoundBlock] = ()
    batches: Sequence[FoundBatch] = ()
    replay_definitions: Sequence[ReplayDefinitionRow] = ()
    gaps: Sequence[GapRow] = ()
    found_gaps: Sequence[GapRow] = ()
    runs: Mapping[str, int] = field(default_factory=dict)
    notes: Mapping[str, Any] = field(default_factory=dict)


def insert_positions(connection: Connection, rebuilt: FoundStream) -> None:
    """Insert the topics and the positions of their partitions, which no receiver owns."""
    insert_all(connection, topics, (topic.to_columns() for topic in rebuilt.topics))
    insert_all(
        connection,
        positions,
        (
            {**row.to_columns(), "stream": rebuilt.stream.name, "receiver_index": None, "wanted_receiver_index": None}
            for row in rebuilt.positions
        ),
    )


def insert_receivers(connection: Connection, locked: LockedStream, rebuilt: FoundStream) -> None:
    """Insert the receivers, whose instances are lost."""
    insert_all(
        connection,
        receivers,
        (
            {
                "stream": locked.row.name,
                "input_id": receiver_id.input_id,
                "receiver_index": receiver_id.index,
                "epoch": epoch,
                "job_epoch": rebuilt.stream.job_epoch,
                "state": ReceiverState.LOST,
                "host": None,
                "registered_at_ms": locked.now_ms,
                "lease_ms": 0,
                "lease_until_ms": 0,
                "heartbeat_ms": 0,
                "sealed_through_ms": 0,
                "last_accepted_sequence": -1,
                "stats": {},
                "restarts": 0,
            }
            for receiver_id, epoch in rebuilt.receiver_epochs.items()
        ),
    )


def insert_segments(connection: Connection, locked: LockedStream, rebuilt: FoundStream) -> None:
    """Insert the log's segments, each closed, with the latest batch time of its blocks."""
    latest: dict[str, int] = defaultdict(int)
    for block in rebuilt.blocks:
        path = block.info.handle.segment
        latest[path] = max(latest[path], block.batch_time_ms)
    insert_all(
        connection,
        segments,
        (
            {
                "stream": locked.row.name,
                "path": segment.path,
                "input_id": segment.receiver_id.input_id,
                "receiver_index": segment.receiver_id.index,
                "epoch": segment.epoch,
                "opened_at_ms": locked.now_ms,
                "closed_at_ms": locked.now_ms,
                "bytes": segment.bytes,
                "last_batch_time_ms": latest[segment.path],
            }
            for segment in rebuilt.segments
        ),
    )


def insert_blocks(connection: Connection, locked: LockedStream, rebuilt: FoundStream) -> None:
    """Insert the blocks in order. Their segments must exist. Raises LedgerError for a block without one."""
    known = select(segments.c.path, segments.c.segment_id).where(segments.c.stream == locked.row.name)
    ids = {row.path: row.segment_id for row in connection.execute(known)}
    unknown = {block.info.handle.segment for block in rebuilt.blocks} - ids.keys()
    if unknown:
        raise LedgerError(f"Segments of some blocks are missing: {', '.join(sorted(unknown))}.")
    insert_all(
        connection,
        blocks,
        (
            {
                "stream": locked.row.name,
                "batch_time_ms": block.batch_time_ms,
                "input_id": block.info.receiver.input_id,
                "receiver_index": block.info.receiver.index,
                "epoch": block.info.epoch,
                "sequence": block.info.sequence,
                "cut_time_ms": block.info.cut_time_ms,
                "event_time_ms": block.info.event_time_ms,
                "added_at_ms": locked.now_ms,
                "segment_id": ids[block.info.handle.segment],
                "frame_offset": block.info.handle.offset,
                "frame_length": block.info.handle.length,
                "ranges": [r for r in block.info.ranges if r.until_offset > r.from_offset],
                "records": block.info.records,
                "payload_bytes": block.info.payload_bytes,
            }
            for block in rebuilt.blocks
        ),
    )


def insert_gaps(connection: Connection, locked: LockedStream, rebuilt: FoundStream) -> None:
    """Insert the gaps, oldest first; gaps found by the rebuild also get events."""
    insert_all(
        connection,
        gaps,
        (
            {name: value for name, value in gap.to_columns().items() if name != "gap_id"}
            for gap in sorted(rebuilt.gaps, key=lambda gap: gap.gap_id)
        ),
    )
    for gap in rebuilt.found_gaps:
        add_gap(
            connection,
            locked,
            gap.input_id,
            gap.partition,
            from_offset=gap.from_offset,
            until_offset=gap.until_offset,
            reason=gap.reason,
        )
