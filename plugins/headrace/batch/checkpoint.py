"""A checkpoint file: the state of a stream that no other file holds (rule 10 of the design).

It holds what grows with the definition, and nothing that grows with the batches: the definition and its latest
revisions, the topics' incarnations, the positions, the gaps, the writers' epochs. What is in a batch and what became of
it is in the batch's own files, its manifest and its result (`headrace.batch.results`). All these and the log are enough
to rebuild a lost ledger.

It is a document with a checksum (`headrace.batch.manifest`) in the stream's ``checkpoints`` folder, named by the time
it was written. So the newest name is the newest state, whichever batch was run last.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from headrace.batch.manifest import DocumentDamagedError, encode_document, read_document
from headrace.batch.results import load_row, retry_write, write_own_result, write_results
from headrace.blocks import ReceiverId, TopicPartition
from headrace.errors import HeadraceError
from headrace.ledger.batches.tables import ReplayDefinitionRow
from headrace.ledger.receiving.tables import MovedBlock, PositionRow, TopicRow
from headrace.ledger.tables import GapRow, StreamRevision, StreamRow
from headrace.stream_context import StreamContext
from headrace.wal.errors import StoredFileMissingError
from headrace.wal.log_storage import LogStorage

VERSION = 3
FOLDER = "checkpoints"
_NAME = re.compile(rf"{FOLDER}/\d{{13}}-\d+\.json")
KEEP = 2
"""Checkpoints that are kept: the newest, and the one before it to fall back to."""


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
    what = f"The checkpoint {storage.url}/{path}"
    fields = read_document(storage.read(path), VERSION, what, CheckpointVersionError)
    return Checkpoint(fields["stream"], fields["written_at_ms"], fields["batch_time_ms"], fields["state"])


_GAPS = 10_000
"""A checkpoint holds at most this many gaps, the newest."""

_REVISIONS = 20
"""A checkpoint holds at most this many revisions of the definition, the newest."""

_OF_REMOVAL = ("removed_from_ms", "removed_until_ms", "removed_files_ms")


def write_checkpoint(context: StreamContext, batch_time_ms: int) -> Checkpoint | None:
    """Write the batch's result and some of the others that are behind (`write_own_result`), then the stream's
    checkpoint, if it is due after this batch. Returns None if it is not due.

    Raises:
        StorageError: a file could not be written, in three tries.
    """
    write_own_result(context, batch_time_ms)
    return _store_checkpoint(context, batch_time_ms) if checkpoint_is_due(context, batch_time_ms) else None


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
    """Write all result files that are behind, then the stream's checkpoint.

    Raises:
        StorageError: a file could not be written, in three tries.
    """
    write_results(context)
    return _store_checkpoint(context, batch_time_ms)


def _store_checkpoint(context: StreamContext, batch_time_ms: int) -> Checkpoint:
    """Write the stream's checkpoint; keeps the newest two."""
    checkpoint = _make_checkpoint(context, batch_time_ms)
    retry_write(checkpoint.write)(context.storage)
    for path in checkpoint_paths(context.storage)[:-KEEP]:
        context.storage.delete(path)
    return checkpoint


def _make_checkpoint(context: StreamContext, batch_time_ms: int) -> Checkpoint:
    """The stream's current state in the ledger."""
    name, ledger = context.name, context.ledger
    # What was removed is read first: this checkpoint still needs the files of batches that are removed meanwhile.
    before = ledger.streams.get(name)
    # Later than the newest checkpoint's time, so that the order holds for two in one millisecond and after the clock
    # was set back.
    newest = checkpoint_paths(context.storage)[-1:]
    written_at_ms = max(ledger.now_ms(), *(written_at(path) + 1 for path in newest), 0)
    job, row = ledger.jobs.current(name), ledger.streams.get(name)
    return Checkpoint(
        stream=name,
        written_at_ms=written_at_ms,
        batch_time_ms=batch_time_ms,
        state={
            "stream": {**dataclasses.asdict(row), **{name: getattr(before, name) for name in _OF_REMOVAL}},
            "revisions": [dataclasses.asdict(each) for each in ledger.streams.newest_revisions(name, _REVISIONS)],
            # Before the positions: so these include the blocks in each of the segments that are left out.
            "segments": ledger.results.open_segments(name),
            "moved_blocks": [dataclasses.astuple(block) for block in ledger.results.moved(name)],
            "runs": ledger.results.open_runs(name),
            "replay_definitions": [dataclasses.asdict(row) for row in ledger.results.replay_definitions(name)],
            "topics": [dataclasses.asdict(topic) for topic in ledger.topics.all(name)],
            "positions": [dataclasses.asdict(position) for position in ledger.positions.all(name)],
            # Gaps are read after the positions: so they include every loss that a position has skipped.
            "gaps": [dataclasses.asdict(gap) for gap in ledger.gaps.page(name, limit=_GAPS)],
            "job": None if job is None else {"holder": job.holder, "lease_ms": job.lease_ms},
            "receivers": [
                {
                    "input_id": receiver.receiver_id.input_id,
                    "index": receiver.receiver_id.index,
                    "epoch": receiver.epoch,
                    "job_epoch": receiver.job_epoch,
                    "last_accepted_sequence": receiver.last_accepted_sequence,
                }
                for receiver in ledger.receivers.all(name)
            ],
        },
    )


@dataclass(frozen=True)
class SavedReceiver:
    """A receiver's epochs, and the sequence of the last block accepted in the newest epoch."""

    receiver_id: ReceiverId
    epoch: int
    job_epoch: int
    last_accepted_sequence: int


@dataclass(frozen=True)
class SavedState:
    """A stream's state in the newest valid checkpoint, at ``path``. Empty, without a ``stream``: there is none.

    ``revisions`` are the current definition and the newest ones. ``positions`` are by input and partition.
    ``passed_over`` says by path what is wrong with newer checkpoints. ``lease_ms`` is the receiver job's, 0 without a
    job. ``segments`` are the log's files that were being written or had blocks without a batch, each with the latest
    batch time of its blocks, None if it was being written; None instead if they were too many.
    """

    path: str | None = None
    written_at_ms: int = 0
    stream: StreamRow | None = None
    revisions: Sequence[StreamRevision] = ()
    topics: Sequence[TopicRow] = ()
    positions: Mapping[tuple[str, TopicPartition], PositionRow] = field(default_factory=dict)
    receivers: Sequence[SavedReceiver] = ()
    gaps: Sequence[GapRow] = ()
    moved_blocks: Sequence[MovedBlock] = ()
    runs: Mapping[str, int] = field(default_factory=dict)
    replay_definitions: Sequence[ReplayDefinitionRow] = ()
    segments: Mapping[str, int | None] | None = None
    lease_ms: int = 0
    passed_over: Mapping[str, str] = field(default_factory=dict)


def read_saved_state(folder: LogStorage) -> SavedState:
    """Read the newest valid checkpoint in the stream's folder.

    Raises:
        CheckpointError: no checkpoint can be read.
    """
    newest = find_newest(folder)
    checkpoint, state = newest.checkpoint, newest.checkpoint.state
    positions = [load_row(PositionRow, fields) for fields in state["positions"]]
    return SavedState(
        path=checkpoint.path,
        written_at_ms=checkpoint.written_at_ms,
        stream=load_row(StreamRow, state["stream"]),
        revisions=[load_row(StreamRevision, fields) for fields in state["revisions"]],
        topics=[load_row(TopicRow, fields) for fields in state["topics"]],
        positions={(row.input_id, row.partition): row for row in positions},
        receivers=[
            SavedReceiver(
                ReceiverId(checkpoint.stream, fields["input_id"], fields["index"]),
                fields["epoch"],
                fields["job_epoch"],
                fields["last_accepted_sequence"],
            )
            for fields in state["receivers"]
        ],
        gaps=[load_row(GapRow, fields) for fields in state["gaps"]],
        moved_blocks=[MovedBlock(*fields) for fields in state["moved_blocks"]],
        runs=state["runs"],
        replay_definitions=[load_row(ReplayDefinitionRow, fields) for fields in state["replay_definitions"]],
        segments=state["segments"],
        lease_ms=0 if state["job"] is None else state["job"]["lease_ms"],
        passed_over=newest.passed_over,
    )
