"""Reads everything that a ledger can be rebuilt from: checkpoint, manifests, results and log.

Of each manifest only what a rebuild needs is kept. In the default history of 30 days, batches of 10 s have 260,000
manifests. One of 50 blocks with 4 partitions takes 42 kB of memory, and what is kept of it 2 kB: most blocks are in
segments that were deleted long ago.
"""

from __future__ import annotations

import hashlib
import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property

from headrace.batch.checkpoint import CheckpointError, CheckpointVersionError, SavedState, read_saved_state
from headrace.batch.manifest import FOLDER, LOG_FOLDER, Manifest, ManifestError, ManifestVersionError, manifest_time
from headrace.batch.results import FOLDER as RESULTS
from headrace.batch.results import FoundResults, read_results, result_name
from headrace.blocks import BlockHandle, BlockInfo, InputPartition, OffsetRange, ReceiverId, TopicPartition
from headrace.ledger.batches.tables import BatchInputRow, BatchRow
from headrace.ledger.receiving.tables import EpochEnd, PositionRow
from headrace.ledger.states import BatchState
from headrace.ledger.tables import GapRow
from headrace.receiver.tracker import JobSign, find_sign
from headrace.stream_folder import Mark, read_mark
from headrace.wal.frame import SegmentName, segments_in
from headrace.wal.log_storage import LogStorage
from headrace.wal.recovery import header_of, scan_log
from headrace.wal.scan import RecoveryMode, ScannedFrame

Progress = Callable[[str], None]
Span = tuple[int, int]
"""The offsets ``[start, until)`` of a partition."""


def partition_of(row: PositionRow | BatchInputRow | GapRow) -> InputPartition:
    """The partition that the row is about."""
    return row.input_id, row.partition


def spans_of(info: BlockInfo) -> list[tuple[InputPartition, Span]]:
    """The block's partitions, each with the block's offsets there; without partitions of which it has no offset."""
    return [((info.receiver.input_id, r.partition), (r.from_offset, r.until_offset)) for r in info.filled]


def last_epoch_end(ranges: Iterable[OffsetRange]) -> EpochEnd | None:
    """The end of the last of these ranges of a partition that has a leader epoch, and this epoch; None without any."""
    known = [(r.until_offset, r.leader_epoch) for r in ranges if r.leader_epoch is not None and r.records]
    if not known:
        return None
    until, leader_epoch = max(known)
    return EpochEnd(leader_epoch, until)


@dataclass(frozen=True, slots=True)
class FoundFrame:
    """A block in the log. ``accepted``: whether later writes of its writer prove it accepted; None: no later write.

    ``first_sequence`` is that of the first block of the same write; None: this one is the first. The ledger had
    accepted all blocks of a write, or none."""

    info: BlockInfo
    accepted: bool | None
    first_sequence: int | None = None

    @property
    def write(self) -> tuple[ReceiverId, int, int]:
        """Identifies the write: the receiver, its epoch, and the sequence of the write's first block."""
        first = self.info.sequence if self.first_sequence is None else self.first_sequence
        return self.info.receiver, self.info.epoch, first


@dataclass(frozen=True, slots=True)
class LostPart:
    """A damaged or missing part of the log; ``what`` describes it.

    ``ranges`` are the offsets that were in it. None: not known, so they may be any offsets of the input. ``is_tail``: a
    torn tail, from which most likely no block had been accepted. ``is_missing``: a whole segment is missing.
    """

    segment: str
    what: str
    ranges: tuple[OffsetRange, ...] | None
    is_tail: bool = False
    is_missing: bool = False

    @property
    def is_vague_tail(self) -> bool:
        """Whether it is a tail with unknown offsets, which most likely held no accepted block."""
        return self.is_tail and self.ranges is None

    def may_hold(self, key: InputPartition, span: Span) -> bool:
        """Whether it may have held any of these offsets of the partition."""
        input_id, partition = key
        start, until = span
        name = SegmentName.parse(self.segment)
        if start >= until or name is None or name.input_id != input_id:
            return False
        return self.ranges is None or any(
            r.partition == partition and r.from_offset < until and start < r.until_offset for r in self.ranges
        )


@dataclass(frozen=True)
class FolderContents:
    """The contents of the stream's folder.

    ``saved`` is empty if no checkpoint can be read.
    ``frames`` are in the order of writing, receiver by receiver. ``positions`` are those in the segments' headers, by
    input and partition. ``segments`` are sizes in bytes by path. ``manifests`` are by batch time, ``damaged_manifests``
    by path; ``results`` are those of the batches. ``notices`` say what was skipped. ``last_sign_ms`` is the latest time
    of writing that the files record, and ``lease_ms`` is the longest lease of a receiver job in them, 0 if there is
    none. ``mark`` is that of the lost ledger, and ``job_epoch`` the
    epoch of the receiver job whose sign is there.
    """

    stream: str
    saved: SavedState
    frames: Sequence[FoundFrame]
    positions: Mapping[InputPartition, Sequence[int]]
    segments: Mapping[str, int]
    epochs: Mapping[ReceiverId, int]
    manifests: Mapping[int, Sequence[FoundManifest]]
    damaged_manifests: Mapping[str, str]
    results: FoundResults
    lost: Sequence[LostPart]
    notices: Sequence[str]
    last_sign_ms: int
    lease_ms: int
    mark: Mark | None = None
    job_epoch: int = 0

    @cached_property
    def listed(self) -> frozenset[BlockHandle]:
        """The blocks in the log that a manifest lists."""
        return frozenset(
            handle for of_time in self.manifests.values() for manifest in of_time for handle in manifest.in_log
        )

    @cached_property
    def accounted(self) -> Mapping[InputPartition, Sequence[Span]]:
        """The offsets that a manifest or one of the checkpoint's gaps accounts for."""
        spans = listed_spans(self.manifests)
        for gap in self.saved.gaps:
            if gap.batch_time_ms is None:
                spans[partition_of(gap)].append((gap.from_offset, gap.until_offset))
        return spans


def read_folder(folder: LogStorage, stream_name: str, *, mode: RecoveryMode, progress: Progress) -> FolderContents:
    """Read the stream's folder: checkpoint, manifests, results, and every frame of the log.

    Raises:
        WalError: the log is damaged, and the mode does not skip damage.
        CheckpointVersionError, ManifestVersionError, ResultVersionError: a file is of another version.
    """
    notices: list[str] = []
    # The mark first: a rebuilt ledger is behind one that a process of the lost ledger leaves from now on.
    mark = read_mark(folder)
    saved = _read_saved(folder, notices)
    log = folder.below(LOG_FOLDER)
    names = segments_in(log.paths())

    def is_removed(time_ms: int) -> bool:
        return saved.stream is not None and saved.stream.has_removed(time_ms)

    manifests = read_manifests(folder, [name.path for name in names], is_removed=is_removed, progress=progress)
    progress("reading the results")
    paths = [path for path in folder.paths(RESULTS) if (of := result_name(path)) and not is_removed(of[0])]
    results = read_results(folder, paths)
    progress(f"reading the log, {len(names)} segments")
    frames, lost = _read_frames(log, mode, notices, _deleted(saved, manifests.by_time, results))
    epochs: dict[ReceiverId, int] = defaultdict(int)
    positions: dict[InputPartition, list[int]] = defaultdict(list)
    for name in names:
        receiver_id = ReceiverId(stream_name, name.input_id, name.index)
        epochs[receiver_id] = max(epochs[receiver_id], name.epoch)
        for partition, offset in _opening_positions(log, name, mode).items():
            positions[name.input_id, partition].append(offset)
    signs = [saved.written_at_ms, *(name.opened_ms for name in names), *(frame.info.cut_time_ms for frame in frames)]
    leases = [saved.lease_ms]
    sign = _sign(folder, notices)
    if sign is not None:
        signs.append(sign.written_ms)
        leases.append(sign.lease_ms)
    for (input_id, index), (epoch, _) in (mark.receivers if mark is not None else {}).items():
        receiver_id = ReceiverId(stream_name, input_id, index)
        epochs[receiver_id] = max(epochs[receiver_id], epoch)
    return FolderContents(
        stream=stream_name,
        saved=saved,
        frames=frames,
        positions=positions,
        segments={name.path: log.size(name.path) for name in names},
        epochs=epochs,
        manifests=manifests.by_time,
        damaged_manifests=manifests.damaged,
        results=results,
        lost=lost,
        notices=notices,
        last_sign_ms=max(signs),
        lease_ms=max(leases),
        mark=mark,
        job_epoch=0 if sign is None else sign.epoch,
    )


def _sign(folder: LogStorage, notices: list[str]) -> JobSign | None:
    try:
        return find_sign(folder)
    except ValueError as error:
        notices.append(f"It is unknown when the receiver job last ran: {error}.")
        return None


def _read_saved(folder: LogStorage, notices: list[str]) -> SavedState:
    try:
        saved = read_saved_state(folder)
    except CheckpointVersionError:
        raise
    except CheckpointError as error:
        notices.append(error.what)
        return SavedState()
    notices += [f"The checkpoint {path} is passed over: {why}." for path, why in saved.passed_over.items()]
    return saved


def _deleted(
    saved: SavedState, manifests: Mapping[int, Sequence[FoundManifest]], results: FoundResults
) -> Callable[[str], bool]:
    """Returns a function that says whether a missing segment was deleted by cleanup.

    Cleanup deletes a segment when all batches with its blocks are over, and the results say so. A segment that no
    manifest lists held blocks without a batch, or only blocks of removed batches, or no accepted block. The checkpoint
    lists the first kind.
    """
    over = {time_ms for time_ms, result in results.by_time.items() if is_over(result.row)}
    over |= {absorbed for time_ms in over for absorbed in results.by_time[time_ms].row.absorbed}
    unfinished: dict[str, bool] = {}
    for batch_time_ms, of_time in manifests.items():
        for segment in (segment for manifest in of_time for segment in manifest.segments):
            unfinished[segment] = unfinished.get(segment, False) or batch_time_ms not in over

    listed = saved.segments

    def deleted(segment: str) -> bool:
        if unfinished.get(segment, False):
            return False
        if listed is None or segment in listed:
            last_ms = None if listed is None else listed[segment]
            # It was being written: all of its blocks that a manifest lists are in batches that are over.
            return segment in unfinished if last_ms is None else last_ms in over
        # A newer segment may have held blocks that no manifest lists yet.
        name = SegmentName.parse(segment)
        return segment in unfinished or (name is not None and name.opened_ms <= saved.written_at_ms)

    return deleted


def is_over(row: BatchRow) -> bool:
    """Whether the batch's log may have been deleted, by its result: it was abandoned, or completed once, whatever its
    repetitions have done since."""
    return row.steps is not None or row.state is BatchState.ABANDONED


def _read_frames(
    log: LogStorage, mode: RecoveryMode, notices: list[str], deleted: Callable[[str], bool]
) -> tuple[list[FoundFrame], list[LostPart]]:
    scan = scan_log(log, mode=mode, deleted=deleted)
    # Payloads are dropped at once: the headers of a long log fit in memory, its records do not.
    frames = [
        FoundFrame(_block_info(settled.frame), settled.accepted, settled.frame.header.first_sequence)
        for settled in scan.settled()
    ]
    missing = [error for error in scan.missing if not deleted(error.segment)]
    notices += [str(tail) for tail in scan.torn_tails]
    notices += [error.what for error in [*scan.damage, *missing]]
    notices += [
        f"Segment {path} was opened by a writer that had been replaced: nothing in it counts."
        for path in scan.superseded
    ]
    lost = [
        LostPart(tail.segment, f"the tail of {tail.segment}", tail.ranges, is_tail=True) for tail in scan.torn_tails
    ]
    # In this mode nothing of a receiver is read after its first damage, so any later offsets may be lost.
    is_more = mode is RecoveryMode.POINT_IN_TIME_RECOVERY
    for error in scan.damage:
        what = f"segment {error.segment} is damaged at offset {error.offset}"
        lost.append(LostPart(error.segment, what, None if is_more else error.ranges))
    for gone in missing:
        what = f"segment {gone.segment} is missing"
        lost.append(LostPart(gone.segment, what, None if is_more else gone.ranges, is_missing=True))
    return frames, lost


def _block_info(frame: ScannedFrame) -> BlockInfo:
    header = frame.header
    return BlockInfo(
        receiver=header.receiver,
        epoch=header.epoch,
        sequence=header.sequence,
        cut_time_ms=header.cut_time_ms,
        handle=frame.handle,
        ranges=header.ranges,
        records=header.records,
        payload_bytes=frame.payload.size,
        event_time_ms=header.event_time_ms,
        source_position=header.source_position,
    )


def _opening_positions(log: LogStorage, name: SegmentName, mode: RecoveryMode) -> Mapping[TopicPartition, int]:
    header = header_of(log, name.path, blank_unreadable=mode.passes_over)
    return {} if header is None else header.positions


# An object store takes 10 ms or more for each file.
_READERS = 16
_AT_ONCE = 1_000
_REPORTED_EVERY = 10_000


@dataclass(frozen=True, slots=True)
class FoundManifest:
    """What a rebuild needs of a manifest file; ``path`` is below the stream's folder.

    ``spans`` are the offsets of its blocks, adjacent ones as one. ``epochs`` have, by partition, the end of the last
    range with a known leader epoch, and this epoch. ``segments`` are those of all its ``blocks``, and ``in_log`` its
    blocks in segments that still exist, in the manifest's order. ``is_built``: it holds ranges of Kafka.
    """

    path: str
    sha256: str
    batch_time_ms: int
    interval_ms: int
    inputs: tuple[BatchInputRow, ...]
    spans: tuple[tuple[InputPartition, Span], ...]
    epochs: tuple[tuple[InputPartition, EpochEnd], ...]
    blocks: int
    payload_bytes: int
    segments: tuple[str, ...]
    in_log: tuple[BlockHandle, ...]
    is_built: bool

    @property
    def records(self) -> int:
        """The number of records of all inputs; built ranges count their offsets."""
        return sum(manifest_input.records for manifest_input in self.inputs)


@dataclass(frozen=True)
class FoundManifests:
    """The valid manifests by batch time, and what is wrong with the damaged ones, by path."""

    by_time: Mapping[int, Sequence[FoundManifest]]
    damaged: Mapping[str, str]


def read_manifests(
    folder: LogStorage,
    segments: Collection[str],
    *,
    is_removed: Callable[[int], bool],
    progress: Callable[[str], None],
) -> FoundManifests:
    """Read the manifests of all batches but the removed ones.

    Args:
        segments: the paths of the log's segments.
        is_removed: whether the batch of a batch time was removed from the history.

    Raises:
        ManifestVersionError: a manifest is of another version.
    """
    paths = [path for path in folder.paths(FOLDER) if path.endswith(".json") and not _is_removed(path, is_removed)]
    manifests: dict[int, list[FoundManifest]] = defaultdict(list)
    damaged: dict[str, str] = {}
    exists, known = frozenset(segments), dict[InputPartition, InputPartition]()
    for number, (path, data) in enumerate(_contents(folder, paths)):
        if number % _REPORTED_EVERY == 0:
            progress(f"reading the manifests: {number} of {len(paths)}")
        try:
            manifest = Manifest.from_bytes(data, f"{folder.url}/{path}")
        except ManifestVersionError:
            raise
        except ManifestError as error:
            damaged[path] = error.what
        else:
            kept = _kept(manifest, path, hashlib.sha256(data).hexdigest(), segments=exists, known=known)
            manifests[manifest.batch_time_ms].append(kept)
    return FoundManifests(manifests, damaged)


def listed_spans(manifests: Mapping[int, Sequence[FoundManifest]]) -> defaultdict[InputPartition, list[Span]]:
    """The offsets that manifests list, in order, adjacent ones as one: all of them were accepted."""
    spans: dict[InputPartition, list[Span]] = defaultdict(list)
    for of_time in manifests.values():
        for manifest in of_time:
            for key, span in manifest.spans:
                spans[key].append(span)
    return defaultdict(list, {key: _merged(there) for key, there in spans.items()})


def _is_removed(path: str, is_removed: Callable[[int], bool]) -> bool:
    batch_time_ms = manifest_time(path)
    return batch_time_ms is not None and is_removed(batch_time_ms)


def _contents(folder: LogStorage, paths: Sequence[str]) -> Iterator[tuple[str, bytes]]:
    with ThreadPoolExecutor(_READERS) as pool:
        for first in range(0, len(paths), _AT_ONCE):
            part = paths[first : first + _AT_ONCE]
            yield from zip(part, pool.map(folder.read, part), strict=True)


def _kept(
    manifest: Manifest,
    path: str,
    sha256: str,
    *,
    segments: Collection[str],
    known: dict[InputPartition, InputPartition],
) -> FoundManifest:
    """What is kept of a manifest. ``segments`` and ``known`` are the names and partitions that recur in many manifests:
    each is in memory once."""
    ranges: dict[InputPartition, list[OffsetRange]] = defaultdict(list)
    for input_id, blocks in manifest.inputs.items():
        for r in (r for block in blocks for r in block.ranges):
            key = (input_id, r.partition)
            ranges[known.setdefault(key, key)].append(r)
    spans = {key: [(r.from_offset, r.until_offset) for r in there] for key, there in ranges.items()}
    of = (manifest.stream, manifest.batch_time_ms)
    inputs = [
        BatchInputRow(
            *of,
            *key,
            min(spans[key])[0],
            max(r.until_offset for r in there),
            sum(r.records for r in there),
            len(there),
        )
        for key, there in ranges.items()
    ]
    built = [
        BatchInputRow(*of, *known.setdefault(key, key), r.from_offset, r.until_offset, r.weight, 0)
        for key, r in (((input_id, r.partition), r) for input_id, built in manifest.built.items() for r in built)
    ]
    listed = [block for blocks in manifest.inputs.values() for block in blocks]
    return FoundManifest(
        path=path,
        sha256=sha256,
        batch_time_ms=manifest.batch_time_ms,
        interval_ms=manifest.interval_ms,
        inputs=(*inputs, *built),
        spans=tuple((key, span) for key, there in spans.items() for span in _merged(there)),
        epochs=tuple((key, end) for key, there in ranges.items() if (end := last_epoch_end(there)) is not None),
        blocks=len(listed),
        payload_bytes=sum(block.payload_bytes for block in listed),
        segments=tuple(sys.intern(segment) for segment in {block.handle.segment: None for block in listed}),
        in_log=tuple(block.handle for block in listed if block.handle.segment in segments),
        is_built=bool(built),
    )


def _merged(spans: Iterable[Span]) -> list[Span]:
    merged: list[Span] = []
    for start, until in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], until))
        else:
            merged.append((start, until))
    return merged
