"""Checks the newest checkpoint: it is readable, holds what the ledger says, and is not ahead of the ledger."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, field
from typing import Any

from headrace.batch.checkpoint import Checkpoint, CheckpointError, checkpoint_paths, read_newest
from headrace.batch.history_files import HistoryError, history_numbers, history_path, read_history
from headrace.blocks import ReceiverId, TopicPartition
from headrace.clock import time_text
from headrace.fsck.coverage import partition_text
from headrace.fsck.findings import Finding, Problem
from headrace.ledger.models import BatchRow
from headrace.ledger.snapshots import StreamSnapshot
from headrace.ledger.states import BatchState
from headrace.wal.errors import StoredFileMissingError
from headrace.wal.storage import LogStorage


@dataclass
class CheckpointObservation:
    """The newest checkpoint that can be read, and newer ones that cannot."""

    newest: Checkpoint | None = None
    unreadable: list[str] = field(default_factory=list)
    error: str = ""
    lost_history: dict[int, str] = field(default_factory=dict)
    """History files that do not hold what they should: the problem by file number."""
    filed_before: set[int] = field(default_factory=set)
    """Batches that the newest checkpoint does not hold, and a history file holds in an earlier state: they changed
    (their replay ended) after that checkpoint, and the next one will hold them."""

    def judge(self, snapshot: StreamSnapshot) -> Iterator[Finding]:
        """The findings by this snapshot."""
        for path in self.unreadable:
            what = f"It is damaged; the newest that can be read is {self.newest.path if self.newest else 'none'}."
            yield Finding(Problem.CHECKPOINT_UNREADABLE, path, what)
        for number in sorted(self.lost_history.keys() & set(snapshot.filed.values())):
            yield Finding(Problem.CHECKPOINT_UNREADABLE, history_path(number), self.lost_history[number])
        held = [batch.batch_time_ms for batch in snapshot.batches if batch.checkpointed_at_ms is not None]
        if self.newest is None:
            if held:
                what = f"{len(held)} batches are said to be in one. {self.error}"
                yield Finding(Problem.CHECKPOINT_UNREADABLE, "checkpoints", what)
            return
        for batch in _missing(snapshot, self.newest):
            if batch.batch_time_ms not in self.filed_before:
                where = f"{batch.checkpoint_uri}, and the newest, {self.newest.path}, does not hold it."
                yield Finding(Problem.CHECKPOINT_BEHIND, time_text(batch.batch_time_ms), f"It is said to be in {where}")
        for name, what in _ahead(snapshot, self.newest.state):
            yield Finding(Problem.LEDGER_SET_BACK, name, f"{what} ({self.newest.path})")


def observe_checkpoints(folder: LogStorage, snapshot: StreamSnapshot) -> CheckpointObservation:
    """Read the newest checkpoint in the stream's folder, and the history files that the ledger names.

    Raises:
        StorageError: the store cannot be read.
    """
    found = CheckpointObservation()
    paths = checkpoint_paths(folder)
    try:
        found.newest = read_newest(folder)
    except CheckpointError as error:
        found.error = error.what
        found.unreadable = paths
    else:
        found.unreadable = [path for path in paths if path > found.newest.path]
    for number in sorted(set(snapshot.filed.values())):
        wanted = {time_ms for time_ms, place in snapshot.filed.items() if place == number}
        try:
            missing = wanted - _times_in(folder, number)
        except (HistoryError, StoredFileMissingError) as error:
            found.lost_history[number] = error.what
        else:
            if missing:
                found.lost_history[number] = f"It does not hold {len(missing)} batches that it should."
    if found.newest is not None:
        found.filed_before = _filed(folder, {batch.batch_time_ms for batch in _missing(snapshot, found.newest)})
    return found


def _filed(folder: LogStorage, times: Set[int]) -> set[int]:
    """Which of the batches any history file holds, in their present or an earlier state."""
    held: set[int] = set()
    for number in reversed(history_numbers(folder) if times else []):
        if times <= held:
            break
        with contextlib.suppress(HistoryError, StoredFileMissingError):
            held |= times & _times_in(folder, number)
    return held


def _times_in(folder: LogStorage, number: int) -> set[int]:
    return {batch["batch_time_ms"] for batch in read_history(folder, number)}


def _missing(snapshot: StreamSnapshot, checkpoint: Checkpoint) -> Iterator[BatchRow]:
    """Completed, uncleaned batches that are marked as checkpointed, and in neither the history nor this checkpoint."""
    states = {each["batch_time_ms"]: each["state"] for each in checkpoint.state.get("batches", ())}
    for batch in snapshot.batches:
        if (
            batch.state is BatchState.COMPLETED
            and batch.checkpointed_at_ms is not None
            and batch.cleaned_at_ms is None
            and batch.batch_time_ms not in snapshot.filed
            and batch.batch_time_ms not in states
        ):
            yield batch


def _ahead(snapshot: StreamSnapshot, state: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    stream = state["stream"]
    for name in ("job_epoch", "sealed_until_ms", "revision", "removed_until_ms"):
        says, has = stream.get(name, 0), getattr(snapshot.stream, name)
        if says > has:
            yield snapshot.stream.name, f"The checkpoint's {name} is {says}, the ledger's {has}."
    positions = {(row.input_id, row.partition): row.next_offset for row in snapshot.positions}
    for row in state.get("positions", ()):
        key = (row["input_id"], TopicPartition(**row["partition"]))
        if row["next_offset"] > positions.get(key, -1):
            what = f"The checkpoint's position is {row['next_offset']}, the ledger's {positions.get(key, 'not there')}."
            yield partition_text(key), what
    epochs = {row.receiver_id: row.epoch for row in snapshot.receivers}
    for row in state.get("receivers", ()):
        receiver = ReceiverId(snapshot.stream.name, row["input_id"], row["index"])
        if row["epoch"] > epochs.get(receiver, 0):
            yield (
                f"receiver {receiver}",
                f"The checkpoint's epoch is {row['epoch']}, the ledger's {epochs.get(receiver)}.",
            )
    for row in state.get("batches", ()):
        if row["batch_time_ms"] not in snapshot.batch and not snapshot.stream.has_removed(row["batch_time_ms"]):
            yield (
                time_text(row["batch_time_ms"]),
                f"The checkpoint holds it as {row['state']}, and the ledger has no such batch.",
            )
