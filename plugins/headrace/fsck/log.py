"""Checks the stream's files against the ledger: the log's segments, the manifests, and the newest checkpoint.

Files are observed once; what was observed is judged by snapshots of the ledger (`headrace.fsck.findings.Judgement`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from headrace.batch.checkpoint import Checkpoint, CheckpointError, checkpoint_paths, read_newest
from headrace.batch.manifest import Manifest, ManifestError
from headrace.batch.results import FOLDER as RESULTS
from headrace.batch.results import lost_results, result_name
from headrace.blocks import BlockHandle, OffsetRange, ReceiverId, TopicPartition
from headrace.clock import time_text
from headrace.fsck.coverage import partition_text
from headrace.fsck.findings import Finding, Problem
from headrace.ledger.batches.tables import BatchRow
from headrace.ledger.receiving.tables import StoredBlock
from headrace.ledger.snapshots import StreamSnapshot
from headrace.ledger.states import BatchState
from headrace.wal.errors import (
    DamagedFrameError,
    PayloadError,
    SegmentMissingError,
    StoredFileMissingError,
    WalError,
    ranges_text,
)
from headrace.wal.frame import FrameHeader, segments_in
from headrace.wal.log_storage import LogStorage
from headrace.wal.reader import read_block
from headrace.wal.recovery import LogScan, scan_log
from headrace.wal.scan import RecoveryMode
from headrace.wal.storage import open_storage

# Cleanup may delete a file between the listing and the reading; then the receiver's log is read again.
_TRIES = 10

Place = tuple[str, int]
"""A segment's path and a byte in it."""


@dataclass
class LogObservation:
    """What in the log does not agree with the ledger; ``frames`` is the number of blocks read."""

    missing: set[str] = field(default_factory=set)
    files: set[str] = field(default_factory=set)
    unreadable: dict[Place, str] = field(default_factory=dict)
    differing: dict[Place, str] = field(default_factory=dict)
    accepted: dict[Place, tuple[OffsetRange, ...]] = field(default_factory=dict)
    damage: list[DamagedFrameError] = field(default_factory=list)
    frames: int = 0

    def judge(self, snapshot: StreamSnapshot) -> Iterator[Finding]:
        """The findings by this snapshot. A segment that is being removed may be missing."""
        needed: dict[str, dict[int, StoredBlock]] = defaultdict(dict)
        for block in snapshot.blocks:
            handle = block.info.handle
            if snapshot.segment[handle.segment].removing_at_ms is None:
                needed[handle.segment][handle.offset] = block
        for path in sorted(self.missing & needed.keys()):
            blocks = needed[path].values()
            reported = ranges_text(r for block in blocks for r in block.info.ranges)
            yield Finding(Problem.SEGMENT_MISSING, path, f"It held {len(blocks)} blocks that are needed: {reported}.")
        for problem, reported_of in (
            (Problem.BLOCK_UNREADABLE, self.unreadable),
            (Problem.BLOCK_DIFFERS, self.differing),
        ):
            for (path, offset), why in sorted(reported_of.items()):
                held = needed.get(path, {}).get(offset)
                if held is not None and path not in self.missing:
                    name = f"block {held.block_id} at {path}:{offset}"
                    yield Finding(
                        problem, name, f"{why} It is in batch {time_text(snapshot.owner_ms(held.batch_time_ms))}."
                    )
        for path in sorted(self.files):
            segment = snapshot.segment.get(path)
            if segment is not None and segment.removed_at_ms is not None:
                yield Finding(
                    Problem.SEGMENT_RETURNED, path, "The ledger has recorded its removal, but the file exists."
                )
        yield from self._unknown(snapshot, needed)
        yield from self._elsewhere(snapshot, needed)

    def _unknown(self, snapshot: StreamSnapshot, needed: dict[str, dict[int, StoredBlock]]) -> Iterator[Finding]:
        unknown: dict[str, list[Place]] = defaultdict(list)
        for path, offset in sorted(self.accepted):
            segment = snapshot.segment.get(path)
            if offset not in needed.get(path, {}) and (segment is None or segment.removing_at_ms is None):
                unknown[path].append((path, offset))
        for path, places in unknown.items():
            reported = ranges_text(r for place in places for r in self.accepted[place])
            what = f"{len(places)} blocks from byte {places[0][1]} on are not in the ledger: {reported}."
            yield Finding(Problem.BLOCK_UNKNOWN, path, what)

    def _elsewhere(self, snapshot: StreamSnapshot, needed: dict[str, dict[int, StoredBlock]]) -> Iterator[Finding]:
        for error in self.damage:
            segment = snapshot.segment.get(error.segment)
            if segment is not None and segment.removing_at_ms is not None:
                continue
            if error.offset not in needed.get(error.segment, {}):
                yield Finding(Problem.LOG_DAMAGED, f"{error.segment}:{error.offset}", f"{error.reason}.")


def observe_log(log: LogStorage, snapshot: StreamSnapshot) -> LogObservation:
    """Read the whole log once, and compare it with an earlier snapshot.

    Raises:
        StorageError: the store cannot be read.
    """
    observation = LogObservation()
    paths = log.paths()
    names = segments_in(paths)
    there = {name.path for name in names}
    observation.files = {path for path, row in snapshot.segment.items() if row.removed_at_ms is not None} & there
    known: dict[str, dict[int, StoredBlock]] = defaultdict(dict)
    for block in snapshot.blocks:
        known[block.info.handle.segment][block.info.handle.offset] = block
    for input_id, index in sorted({(name.input_id, name.index) for name in names}):
        _read_receiver(log, ReceiverId(snapshot.stream.name, input_id, index), known, observation)
    for path, blocks in known.items():
        if not log.exists(path):
            observation.missing.add(path)
            continue
        for block in blocks.values():
            # `_compare` removed the blocks that the scan found; only the others are left.
            _read_by_handle(log, block, observation)
    return observation


def _read_receiver(
    log: LogStorage, receiver: ReceiverId, known: dict[str, dict[int, StoredBlock]], observation: LogObservation
) -> None:
    for _ in range(_TRIES):
        scan = scan_log(log, receiver=receiver, mode=RecoveryMode.SKIP_ANY_CORRUPTED_RECORDS)
        try:
            _compare(scan, known, observation)
        except SegmentMissingError:
            continue
        observation.damage += scan.damage
        return


def _compare(scan: LogScan, known: dict[str, dict[int, StoredBlock]], observation: LogObservation) -> None:
    for settled in scan.settled():
        handle, header = settled.frame.handle, settled.frame.header
        observation.frames += 1
        block = known.get(handle.segment, {}).pop(handle.offset, None)
        if block is None:
            if settled.accepted:
                observation.accepted[handle.segment, handle.offset] = header.ranges
            continue
        try:
            settled.frame.batch()
        except (DamagedFrameError, PayloadError) as error:
            observation.unreadable[handle.segment, handle.offset] = str(error)
        else:
            _compare_header(handle, header, block, observation)


def _read_by_handle(log: LogStorage, block: StoredBlock, observation: LogObservation) -> None:
    handle = block.info.handle
    try:
        header, _ = read_block(log, handle)
    except WalError as error:
        observation.unreadable[handle.segment, handle.offset] = error.what
    else:
        _compare_header(handle, header, block, observation)


def _compare_header(handle: BlockHandle, header: FrameHeader, block: StoredBlock, observation: LogObservation) -> None:
    info = block.info
    # The ledger does not store empty ranges.
    ranges = tuple(r for r in header.ranges if r.until_offset > r.from_offset)
    pairs = {
        "writer": ((info.receiver, info.epoch), (header.receiver, header.epoch)),
        "sequence": (info.sequence, header.sequence),
        "length": (info.handle.length, handle.length),
        "records": (info.records, header.records),
        "cut time": (info.cut_time_ms, header.cut_time_ms),
        "event time": (info.event_time_ms, header.event_time_ms),
        "offset ranges": (ranges_text(info.ranges), ranges_text(ranges)),
    }
    reported = [
        f"{name} {said} in the ledger and {has} in the log" for name, (said, has) in pairs.items() if said != has
    ]
    if not reported and info.ranges != ranges:
        reported = ["other offset ranges, or other numbers of records in them"]
    if reported:
        observation.differing[handle.segment, handle.offset] = f"It has {', '.join(reported)}."


@dataclass(frozen=True, slots=True)
class _Unusable:
    """A manifest file that cannot be used, with the URI and checksum that the ledger had for it."""

    uri: str
    sha256: str
    problem: Problem
    detail: str


@dataclass
class ManifestObservation:
    """Manifests that do not agree with the ledger, by batch time; ``files`` counts the manifests checked."""

    unusable: dict[int, _Unusable] = field(default_factory=dict)
    differing: dict[int, Manifest] = field(default_factory=dict)
    files: int = 0

    def judge(self, snapshot: StreamSnapshot) -> Iterator[Finding]:
        """The findings by this snapshot. Skips files that no batch names any more: an empty batch may be built anew."""
        for batch_time_ms, unusable in self.unusable.items():
            batch = snapshot.batch.get(batch_time_ms)
            if batch is not None and (batch.manifest_uri, batch.manifest_sha256) == (unusable.uri, unusable.sha256):
                yield Finding(unusable.problem, time_text(batch_time_ms), unusable.detail)
        for batch_time_ms, manifest in self.differing.items():
            batch = snapshot.batch.get(batch_time_ms)
            if batch is not None and batch.manifest_uri == manifest.uri:
                for what in differences(snapshot, batch, manifest):
                    yield Finding(Problem.MANIFEST_DIFFERS, time_text(batch_time_ms), f"{manifest.uri}: {what}")


def observe_manifests(snapshot: StreamSnapshot) -> ManifestObservation:
    """Read the manifest of every batch, and compare it with an earlier snapshot.

    Raises:
        StorageError: the store cannot be read.
    """
    observation = ManifestObservation()
    for batch in snapshot.batches:
        if batch.state is BatchState.ABSORBED:
            # Its blocks are in the manifest of the batch that absorbed it.
            continue
        observation.files += 1
        try:
            manifest = Manifest.load(batch.manifest_uri, sha256=batch.manifest_sha256)
        except ManifestError as error:
            problem = Problem.MANIFEST_DAMAGED if _exists(batch.manifest_uri) else Problem.MANIFEST_MISSING
            unusable = _Unusable(batch.manifest_uri, batch.manifest_sha256, problem, error.what)
            observation.unusable[batch.batch_time_ms] = unusable
        else:
            if any(differences(snapshot, batch, manifest)):
                observation.differing[batch.batch_time_ms] = manifest
    return observation


def _exists(uri: str) -> bool:
    folder, _, name = uri.rpartition("/")
    try:
        return open_storage(folder).exists(name)
    except StoredFileMissingError:
        return False


def differences(snapshot: StreamSnapshot, batch: BatchRow, manifest: Manifest) -> Iterator[str]:
    """The differences between a valid manifest and the ledger, in words."""
    reported = (manifest.stream, manifest.batch_time_ms, manifest.interval_ms)
    wanted = (batch.stream, batch.batch_time_ms, batch.interval_ms)
    if reported != wanted:
        yield f"it belongs to stream {reported[0]}, batch {time_text(reported[1])}, interval {reported[2]} ms."
    listed = [
        (input_id, block.handle, block.records, block.payload_bytes, block.ranges)
        for input_id, blocks in manifest.inputs.items()
        for block in blocks
    ]
    if (len(listed), manifest.records) != (batch.blocks, batch.records):
        yield (
            f"it lists {len(listed)} blocks with {manifest.records} records, "
            f"the ledger {batch.blocks} with {batch.records}."
        )
    rows = snapshot.blocks_by_batch.get(batch.batch_time_ms, [])
    if len(rows) == batch.blocks and sorted(map(_as_listed, rows)) != sorted(listed):
        yield "its blocks, or their places, sizes or ranges, are not those of the ledger."
    yield from _other_ranges(snapshot, batch, manifest)


def _as_listed(row: StoredBlock) -> Any:
    info = row.info
    return info.receiver.input_id, info.handle, info.records, info.payload_bytes, info.ranges


def _other_ranges(snapshot: StreamSnapshot, batch: BatchRow, manifest: Manifest) -> Iterator[str]:
    reported: dict[Any, tuple[int, int]] = {}
    for input_id in {*manifest.inputs, *manifest.built}:
        for recorded in manifest.ranges(input_id):
            start, until = reported.get((input_id, recorded.partition), (recorded.from_offset, recorded.until_offset))
            reported[input_id, recorded.partition] = min(start, recorded.from_offset), max(until, recorded.until_offset)
    wanted = {
        (row.input_id, row.partition): (row.from_offset, row.until_offset)
        for row in snapshot.inputs_by_batch.get(batch.batch_time_ms, ())
    }
    for key in sorted({*reported, *wanted}):
        if reported.get(key) != wanted.get(key):
            yield f"its range of {partition_text(key)} is {reported.get(key)}, the ledger's {wanted.get(key)}."


@dataclass
class CheckpointObservation:
    """The newest checkpoint that can be read, and newer ones that cannot."""

    newest: Checkpoint | None = None
    unreadable: list[str] = field(default_factory=list)
    error: str = ""
    lost_results: dict[int, tuple[int, str]] = field(default_factory=dict)
    """Result files that cannot be read: the change that the ledger names, and the problem, by batch time."""
    changes: dict[int, int] = field(default_factory=dict)
    """The highest change of each batch that has a result file, by batch time."""

    def judge(self, snapshot: StreamSnapshot) -> Iterator[Finding]:
        """The findings by this snapshot."""
        for path in self.unreadable:
            what = f"It is damaged; the newest that can be read is {self.newest.path if self.newest else 'none'}."
            yield Finding(Problem.CHECKPOINT_UNREADABLE, path, what)
        for batch_time_ms, (change, what) in self.lost_results.items():
            batch = snapshot.batch.get(batch_time_ms)
            if batch is not None and batch.result == change:
                yield Finding(Problem.RESULT_UNREADABLE, time_text(batch_time_ms), what)
        for batch_time_ms, change in self.changes.items():
            batch = snapshot.batch.get(batch_time_ms)
            if not snapshot.stream.has_removed(batch_time_ms) and (batch is None or batch.change < change):
                has = "the ledger has no such batch" if batch is None else f"the ledger has change {batch.change}"
                what = f"Its result file has change {change}, but {has}."
                yield Finding(Problem.LEDGER_SET_BACK, time_text(batch_time_ms), what)
        if self.newest is None:
            held = [batch.batch_time_ms for batch in snapshot.batches if batch.checkpointed_at_ms is not None]
            if held:
                what = f"{len(held)} batches are checkpointed, but there is no checkpoint. {self.error}"
                yield Finding(Problem.CHECKPOINT_UNREADABLE, "checkpoints", what)
            return
        for name, what in _ahead(snapshot, self.newest.state):
            yield Finding(Problem.LEDGER_SET_BACK, name, f"{what} ({self.newest.path})")


def observe_checkpoints(folder: LogStorage, snapshot: StreamSnapshot) -> CheckpointObservation:
    """Read the newest checkpoint in the stream's folder, and the result files that the ledger names.

    Raises:
        StorageError: the store cannot be read.
    """
    observation = CheckpointObservation()
    paths = checkpoint_paths(folder)
    try:
        observation.newest = read_newest(folder)
    except CheckpointError as error:
        observation.error = error.what
        observation.unreadable = paths
    else:
        observation.unreadable = [path for path in paths if path > observation.newest.path]
    for named in filter(None, map(result_name, folder.paths(RESULTS))):
        observation.changes[named[0]] = max(named[1], observation.changes.get(named[0], 0))
    written = {batch.batch_time_ms: batch.result for batch in snapshot.batches if batch.result}
    lost = lost_results(folder, written)
    observation.lost_results = {time_ms: (written[time_ms], what) for time_ms, what in lost.items()}
    return observation


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
            what = f"The checkpoint's position is {row['next_offset']}, the ledger's {positions.get(key, 'missing')}."
            yield partition_text(key), what
    epochs = {row.receiver_id: row.epoch for row in snapshot.receivers}
    for row in state.get("receivers", ()):
        receiver = ReceiverId(snapshot.stream.name, row["input_id"], row["index"])
        if row["epoch"] > epochs.get(receiver, 0):
            yield (
                f"receiver {receiver}",
                f"The checkpoint's epoch is {row['epoch']}, the ledger's {epochs.get(receiver)}.",
            )
