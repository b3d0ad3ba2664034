"""Reads a stream's state from its newest checkpoint and its history, as rows of the ledger.

A row's field that the document lacks takes the row's default, and a field that the row lacks is ignored. So a row can
get a new field without a new version of the format.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from headrace.batch.checkpoint import Checkpoint, find_newest
from headrace.batch.history_files import HistoryError, history_numbers, history_path, read_history
from headrace.blocks import ReceiverId, TopicPartition
from headrace.ledger.batch_tables import BatchRow, FiledReplay, ReplayDefinitionRow
from headrace.ledger.rebuild import FoundBatch
from headrace.ledger.receiving_tables import MovedBlock, PositionRow, TopicRow
from headrace.ledger.states import BatchState, DesiredState, PartitionState
from headrace.ledger.tables import GapRow, StreamRevision, StreamRow
from headrace.wal.storage import LogStorage

Row = TypeVar("Row")


@dataclass(frozen=True)
class SavedReceiver:
    """A receiver's epochs, and the sequence of the last block accepted in the newest epoch."""

    receiver_id: ReceiverId
    epoch: int
    job_epoch: int
    last_accepted_sequence: int


@dataclass(frozen=True)
class SavedState:
    """A stream's state in the newest valid checkpoint and the history.

    ``batches`` are by batch time, without their inputs: these are in the manifests. ``revisions`` are the definitions
    that the checkpoint's batches name, and the current one. ``passed_over`` says by path what is wrong with newer
    checkpoints. ``lease_ms`` is the receiver job's, None if there was no job. ``segments`` are the log's files at that
    time, each with the latest batch time of its blocks, None while it was open.
    """

    checkpoint: Checkpoint
    stream: StreamRow
    revisions: Sequence[StreamRevision]
    batches: Mapping[int, FoundBatch]
    topics: Sequence[TopicRow]
    positions: Sequence[PositionRow]
    receivers: Sequence[SavedReceiver]
    gaps: Sequence[GapRow]
    moved_blocks: Sequence[MovedBlock]
    runs: Mapping[str, int]
    replay_definitions: Sequence[ReplayDefinitionRow]
    segments: Mapping[str, int | None]
    lease_ms: int | None
    passed_over: Mapping[str, str] = field(default_factory=dict)


def read_saved_state(folder: LogStorage) -> SavedState:
    """Read the newest valid checkpoint in the stream's folder, and the history.

    Raises:
        CheckpointError: no checkpoint can be read.
        HistoryError: a history file is damaged, of another version, or missing.
    """
    found = find_newest(folder)
    checkpoint, state = found.checkpoint, found.checkpoint.state
    name = checkpoint.stream
    job = state["job"]
    return SavedState(
        checkpoint=checkpoint,
        stream=_stream_row(state["stream"]),
        revisions=[_revision(fields) for fields in state["revisions"]],
        batches=_batches(folder, checkpoint),
        topics=[_load(TopicRow, fields) for fields in state["topics"]],
        positions=[_position_row(fields) for fields in state["positions"]],
        receivers=[
            SavedReceiver(
                ReceiverId(name, fields["input_id"], fields["index"]),
                fields["epoch"],
                fields["job_epoch"],
                fields["last_accepted_sequence"],
            )
            for fields in state["receivers"]
        ],
        gaps=[_gap_row(fields) for fields in state["gaps"]],
        moved_blocks=[MovedBlock(*fields) for fields in state["moved_blocks"]],
        runs=state["runs"],
        replay_definitions=[_load(ReplayDefinitionRow, fields) for fields in state["replay_definitions"]],
        segments=state["segments"],
        lease_ms=None if job is None else job["lease_ms"],
        passed_over=found.passed_over,
    )


def _batches(folder: LogStorage, checkpoint: Checkpoint) -> dict[int, FoundBatch]:
    """The batches of the history files and of the checkpoint. In order of writing time, later documents win."""
    stream = _stream_row(checkpoint.state["stream"])
    # Older files hold removed batches; they are deleted later than the batches.
    numbers = [number for number in history_numbers(folder) if number >= stream.history_from]
    expected = checkpoint.state["history"]
    there = [number for number in numbers if number <= expected["newest"]]
    if len(there) < expected["files"]:
        raise HistoryError(
            f"{folder.url}/{history_path(0).partition('/')[0]} has {len(there)} of the {expected['files']} files that "
            f"the checkpoint {checkpoint.path} knows of.",
            remedy="With the ledger there, `headrace streams recover` writes them again; else restore them from a "
            "copy.",
        )
    saved: dict[int, FoundBatch] = {}
    for number in [number for number in numbers if number < checkpoint.written_at_ms]:
        saved |= _found_batches(read_history(folder, number), number)
    saved |= _found_batches(checkpoint.state["batches"], 0)
    for number in [number for number in numbers if number >= checkpoint.written_at_ms]:
        saved |= _found_batches(read_history(folder, number), number)
    return {batch_time_ms: batch for batch_time_ms, batch in saved.items() if not stream.has_removed(batch_time_ms)}


def _found_batches(documents: Sequence[Mapping[str, Any]], number: int) -> dict[int, FoundBatch]:
    found = {}
    for fields in documents:
        row = _batch_row(fields)
        replays = tuple(_replay(each) for each in fields["replays"])
        found[row.batch_time_ms] = FoundBatch(row, (), fields["outputs"], replays, number, fields["revisions"])
    return found


def _stream_row(fields: Mapping[str, Any]) -> StreamRow:
    row = _load(StreamRow, fields)
    return dataclasses.replace(row, outputs=tuple(row.outputs), desired_state=DesiredState(row.desired_state))


def _revision(fields: Mapping[str, Any]) -> StreamRevision:
    row = _load(StreamRevision, fields)
    return dataclasses.replace(row, outputs=tuple(row.outputs))


def _batch_row(fields: Mapping[str, Any]) -> BatchRow:
    row = _load(BatchRow, fields)
    return dataclasses.replace(
        row,
        state=BatchState(row.state),
        absorbed=tuple(row.absorbed),
        required=None if row.required is None else tuple(row.required),
        steps=None if row.steps is None else tuple(row.steps),
    )


def _replay(fields: Mapping[str, Any]) -> FiledReplay:
    row = _load(FiledReplay, fields)
    return dataclasses.replace(row, state=BatchState(row.state), outputs=tuple(row.outputs))


def _position_row(fields: Mapping[str, Any]) -> PositionRow:
    row = _load(PositionRow, {**fields, "partition": TopicPartition(**fields["partition"])})
    return dataclasses.replace(row, state=PartitionState(row.state))


def _gap_row(fields: Mapping[str, Any]) -> GapRow:
    return _load(GapRow, {**fields, "partition": TopicPartition(**fields["partition"])})


def _load(kind: type[Row], fields: Mapping[str, Any]) -> Row:
    known = {each.name for each in dataclasses.fields(kind)}  # type: ignore[arg-type]
    return kind(**{name: value for name, value in fields.items() if name in known})
