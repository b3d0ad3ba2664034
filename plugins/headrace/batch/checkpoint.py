"""A checkpoint file: the state of a stream that is in neither the log nor the manifests (rule 10 of the design).

Together with these and the history files (`headrace.batch.history_files`), a checkpoint is enough to rebuild a lost
ledger. It holds the definition, the topics' incarnations, the positions, the gaps, the writers' epochs, and the batches
that no history file holds in their present state. It is a document with a checksum (`headrace.batch.manifest`)
in the stream's ``checkpoints`` folder. It is named by the time it was written, so the newest name is the newest state,
whichever batch was run last.

`read_saved_state` reads the newest checkpoint and the history as rows of the ledger. A row's field that the document
lacks takes the row's default, and a field that the row lacks is ignored. So a row can get a new field without a new
version of the format.
"""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import tenacity

from headrace.batch.history_files import (
    HistoryError,
    batches_to_json,
    file_batches,
    history_numbers,
    history_path,
    read_history,
)
from headrace.batch.manifest import DocumentDamagedError, decode_document, encode_document
from headrace.blocks import ReceiverId, TopicPartition
from headrace.clock import time_text
from headrace.errors import HeadraceError
from headrace.ledger.batch_tables import BatchRow, FiledReplay, ReplayDefinitionRow
from headrace.ledger.errors import BatchStateError
from headrace.ledger.rebuild import FoundBatch
from headrace.ledger.receiving_tables import MovedBlock, PositionRow, TopicRow
from headrace.ledger.states import BatchState, DesiredState, PartitionState
from headrace.ledger.tables import GapRow, StreamRevision, StreamRow
from headrace.stream_context import StreamContext
from headrace.wal.errors import StorageError, StoredFileMissingError
from headrace.wal.storage import LogStorage

VERSION = 2
FOLDER = "checkpoints"
_NAME = re.compile(rf"{FOLDER}/\d{{13}}-\d+\.json")
KEEP = 10
"""Checkpoints that are kept, as in Spark: the newest, and older ones to fall back to."""


class CheckpointError(HeadraceError):
    """There is no checkpoint that can be read."""


class CheckpointVersionError(CheckpointError):
    """A checkpoint is of a version that this headrace does not read."""


@dataclass(frozen=True)
class Checkpoint:
    """A stream's state as of ``written_at_ms`` of the ledger's clock; ``state`` is plain JSON."""

    stream: str
    written_at_ms: int
    batch_time_ms: int
    state: Mapping[str, Any]

    @property
    def path(self) -> str:
        """The path below the stream's folder. Names sort by time: thirteen digits last until the year 2286."""
        return f"{FOLDER}/{self.written_at_ms:013d}-{self.batch_time_ms}.json"

    def write(self, storage: LogStorage) -> None:
        """Write the checkpoint into the stream's folder, atomically and durably."""
        storage.write_atomically(
            self.path,
            encode_document(
                {
                    "version": VERSION,
                    "stream": self.stream,
                    "written_at_ms": self.written_at_ms,
                    "batch_time_ms": self.batch_time_ms,
                    "state": self.state,
                }
            ),
        )


@dataclass(frozen=True)
class FoundCheckpoint:
    """The newest valid checkpoint, and what is wrong with each newer one, by path."""

    checkpoint: Checkpoint
    passed_over: Mapping[str, str]


def checkpoint_paths(storage: LogStorage) -> list[str]:
    """The paths of the checkpoints in the stream's folder, oldest first; other files are ignored."""
    return sorted(path for path in storage.paths(FOLDER) if _NAME.fullmatch(path))


def written_at(path: str) -> int:
    """When the checkpoint at ``path`` was written, in milliseconds since the epoch."""
    return int(path.rpartition("/")[2].partition("-")[0])


def batch_time_of(path: str) -> int:
    """The batch time after which the checkpoint at ``path`` was written, in milliseconds since the epoch."""
    return int(path.rpartition("-")[2].partition(".")[0])


def read_newest(storage: LogStorage) -> Checkpoint:
    """The newest valid checkpoint; see `find_newest`."""
    return find_newest(storage).checkpoint


def find_newest(storage: LogStorage) -> FoundCheckpoint:
    """Find the newest valid checkpoint. Skips damaged ones, as Spark's reader does.

    Raises:
        CheckpointVersionError: the newest undamaged one is of another version. An earlier one would be an older state,
            and what was done since would be done again.
        CheckpointError: there is no valid checkpoint; the text names what is wrong with each.
    """
    refused: dict[str, str] = {}
    for path in reversed(checkpoint_paths(storage)):
        try:
            return FoundCheckpoint(_read(storage, path), refused)
        except (DocumentDamagedError, StoredFileMissingError) as error:
            refused[path] = str(error)
    reported = "; ".join(f"{path}: {why}" for path, why in refused.items())
    raise CheckpointError(
        f"{storage.url} has no checkpoint that can be read" + (f" ({reported})." if refused else "."),
        remedy="A checkpoint is written after a completed batch; with the ledger there, `headrace streams recover` "
        "writes one.",
    )


def read_checkpoint(storage: LogStorage, path: str) -> Checkpoint:
    """Read the checkpoint at ``path``, which may not be the newest.

    Raises:
        CheckpointError: it is missing, damaged, or of another version.
    """
    try:
        return _read(storage, path)
    except (DocumentDamagedError, StoredFileMissingError) as error:
        raise CheckpointError(f"The checkpoint {storage.url}/{path} cannot be read: {error}.") from error


def _read(storage: LogStorage, path: str) -> Checkpoint:
    fields = decode_document(storage.read(path))
    version = fields.get("version")
    if version != VERSION:
        raise CheckpointVersionError(
            f"The checkpoint {storage.url}/{path} is of version {version}, this headrace reads version {VERSION}.",
            remedy="Use the headrace that wrote it, or a newer one.",
        )
    return Checkpoint(fields["stream"], fields["written_at_ms"], fields["batch_time_ms"], fields["state"])


logger = logging.getLogger(__name__)

_MANY = 10_000
"""A checkpoint with more batches than this logs a warning."""

_GAPS = 10_000
"""A checkpoint holds at most this many gaps, the newest."""

_OF_REMOVAL = ("removed_from_ms", "removed_until_ms", "removed_files_ms", "history_from")

_SEGMENTS = 100_000
"""A checkpoint names at most this many of the log's files."""

_write_retry = tenacity.retry(
    retry=tenacity.retry_if_exception_type((StorageError, OSError)),
    stop=tenacity.stop_after_attempt(3),
    wait=tenacity.wait_exponential(multiplier=0.2, max=2),
    reraise=True,
)


def write_checkpoint(context: StreamContext, batch_time_ms: int) -> Checkpoint | None:
    """Write the stream's checkpoint if it is due after this batch; see `checkpoint_now`.

    Returns None if it is not due: the next one covers the batch.

    Raises:
        StorageError: it could not be written, in three tries.
    """
    return checkpoint_now(context, batch_time_ms) if checkpoint_is_due(context, batch_time_ms) else None


def checkpoint_is_due(context: StreamContext, batch_time_ms: int) -> bool:
    """Whether the batch ends a checkpoint interval, or the newest checkpoint is of another interval.

    A stream that coalesces may have no batch at the end of an interval, however long it runs.
    """
    interval_ms = context.stream.checkpoint_interval_ms
    if batch_time_ms % interval_ms == 0:
        return True
    newest = checkpoint_paths(context.storage)[-1:]
    return not newest or batch_time_of(newest[0]) // interval_ms != batch_time_ms // interval_ms


def checkpoint_now(context: StreamContext, batch_time_ms: int) -> Checkpoint:
    """Write the stream's checkpoint and mark every completed batch in it as checkpointed; keeps the newest ten.

    Checkpoint and history files together hold every batch. A batch that was left out would be run again after a
    rebuild, although part of its log may be gone. Finished batches move into history files over time, so the checkpoint
    itself holds the waiting, the failed and the latest batches.

    Raises:
        StorageError: it could not be written, in three tries.
    """
    stream_name, folder = context.name, context.storage
    try:
        file_batches(context)
    except (StorageError, OSError) as error:
        # The batches stay in this checkpoint, and the next one tries again.
        logger.warning("%s: finished batches could not be written into the history: %s", stream_name, error)
    checkpoint = _make_checkpoint(context, batch_time_ms)
    _write_retry(checkpoint.write)(folder)
    uri = f"{context.stream.folder_url}/{checkpoint.path}"
    for batch in checkpoint.state["batches"]:
        if batch["state"] == BatchState.COMPLETED and batch["checkpointed_at_ms"] is None:
            try:
                context.ledger.batches.mark_checkpointed(stream_name, batch["batch_time_ms"], uri)
            except BatchStateError as error:
                # A new attempt has begun since the batch was read: a later checkpoint marks it.
                logger.info("%s: batch %s is not marked: %s", stream_name, time_text(batch["batch_time_ms"]), error)
    for path in checkpoint_paths(folder)[:-KEEP]:
        folder.delete(path)
    return checkpoint


def _make_checkpoint(context: StreamContext, batch_time_ms: int) -> Checkpoint:
    """The stream's current state in the ledger, with the batches that are in no history file."""
    stream_name, ledger, folder = context.name, context.ledger, context.storage
    # The checkpoint's time is chosen first, later than all existing history files: for a batch that is filed from now
    # on, the file counts. It is also later than the newest checkpoint's, so that the order holds for two checkpoints in
    # one millisecond and after the clock was set back. What was removed is read first too: this checkpoint still needs
    # the history files of batches that are removed meanwhile.
    before = ledger.streams.get(stream_name)
    numbers = [number for number in history_numbers(folder) if number >= before.history_from]
    taken = [*numbers[-1:], *map(written_at, checkpoint_paths(folder)[-1:])]
    written_at_ms = max(ledger.now_ms(), *(number + 1 for number in taken), 0)
    # Batches are read before positions: so the positions include the blocks of every batch in the checkpoint.
    batches = ledger.history.unfiled(stream_name)
    if len(batches) > _MANY:
        logger.warning(
            "%s: %d batches are unfinished, and every checkpoint holds them all, about 600 bytes each. The oldest is "
            "%s. Run them, abandon those that can never succeed, or set a longer checkpoint_interval.",
            stream_name, len(batches), time_text(batches[0].batch_time_ms),
        )  # fmt: skip
    job = ledger.jobs.current(stream_name)
    row, described = ledger.streams.get(stream_name), batches_to_json(ledger, stream_name, batches)
    # Only the definitions by which these batches were written, and the current one.
    named = {row.revision, *(revision for batch in described for revision in batch["revisions"].values())}
    return Checkpoint(
        stream=stream_name,
        written_at_ms=written_at_ms,
        batch_time_ms=batch_time_ms,
        state={
            "stream": {**dataclasses.asdict(row), **{name: getattr(before, name) for name in _OF_REMOVAL}},
            "revisions": [dataclasses.asdict(revision) for revision in ledger.streams.revisions(stream_name, named)],
            "batches": described,
            "history": {"files": len(numbers), "newest": numbers[-1] if numbers else 0},
            "moved_blocks": [dataclasses.astuple(block) for block in ledger.history.moved(stream_name)],
            "runs": ledger.runs.newest(stream_name),
            "replay_definitions": [dataclasses.asdict(row) for row in ledger.history.replay_definitions(stream_name)],
            "topics": [dataclasses.asdict(topic) for topic in ledger.topics.all(stream_name)],
            "positions": [dataclasses.asdict(position) for position in ledger.positions.all(stream_name)],
            # Gaps are read after the positions: so they include every loss that a position has skipped.
            "gaps": [dataclasses.asdict(gap) for gap in ledger.gaps.page(stream_name, limit=_GAPS)],
            # Distinguishes a segment that somebody deleted from those that cleanup deleted.
            "segments": {
                segment.path: segment.last_batch_time_ms
                for segment in ledger.segments.page(stream_name, limit=_SEGMENTS)
                if segment.removing_at_ms is None
            },
            "job": None if job is None else {"holder": job.holder, "lease_ms": job.lease_ms},
            "receivers": [
                {
                    "input_id": receiver.receiver_id.input_id,
                    "index": receiver.receiver_id.index,
                    "epoch": receiver.epoch,
                    "job_epoch": receiver.job_epoch,
                    "last_accepted_sequence": receiver.last_accepted_sequence,
                }
                for receiver in ledger.receivers.all(stream_name)
            ],
        },
    )


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
    newest = find_newest(folder)
    checkpoint, state = newest.checkpoint, newest.checkpoint.state
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
        passed_over=newest.passed_over,
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
    batches = {}
    for fields in documents:
        row = _batch_row(fields)
        replays = tuple(_replay(replay) for replay in fields["replays"])
        batches[row.batch_time_ms] = FoundBatch(row, (), fields["outputs"], replays, number, fields["revisions"])
    return batches


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
    known = {field.name for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    return kind(**{name: value for name, value in fields.items() if name in known})
