"""Reads everything that a ledger can be rebuilt from: checkpoint, history, manifests and log."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from headrace.batch.checkpoint import CheckpointError, CheckpointVersionError
from headrace.batch.manifest import LOG_FOLDER
from headrace.batch.recovery.found_manifests import FoundManifest, read_manifests
from headrace.batch.saved_state import SavedState, read_saved_state
from headrace.blocks import BlockInfo, OffsetRange, ReceiverId, TopicPartition
from headrace.ledger.batch_tables import BatchRow
from headrace.ledger.states import BatchState
from headrace.receiver.tracker import JobSign, find_sign
from headrace.wal.frame import SegmentName, segments_in
from headrace.wal.recovery import header_of, scan_log
from headrace.wal.scan import RecoveryMode, ScannedFrame
from headrace.wal.storage import LogStorage

Progress = Callable[[str], None]
_OVER = (BatchState.COMPLETED, BatchState.ABANDONED)
"""States in which a batch's log may be deleted, once a checkpoint records them."""


@dataclass(frozen=True, slots=True)
class FoundFrame:
    """A block in the log. ``accepted``: whether later frames of its writer prove it accepted; None: no later frame."""

    info: BlockInfo
    accepted: bool | None


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

    def may_hold(self, place: tuple[str, TopicPartition], span: tuple[int, int]) -> bool:
        """Whether it may have held any of the offsets ``span`` = (start, until) of the partition ``place``."""
        input_id, partition = place
        name = SegmentName.parse(self.segment)
        if name is None or name.input_id != input_id:
            return False
        start, until = span
        return self.ranges is None or any(
            r.partition == partition and r.from_offset < until and start < r.until_offset for r in self.ranges
        )


@dataclass(frozen=True)
class FolderContents:
    """The contents of the stream's folder.

    ``frames`` are in the order of writing, receiver by receiver. ``positions`` are those in the segments' headers, by
    input and partition. ``segments`` are sizes in bytes by path. ``manifests`` are by batch time, ``damaged_manifests``
    by path. ``notices`` say what was skipped. ``last_sign_ms`` is the latest time of writing that the files record, and
    ``lease_ms`` is the longest lease of a receiver job in them, 0 if there is none.
    """

    stream: str
    saved: SavedState | None
    frames: Sequence[FoundFrame]
    positions: Mapping[tuple[str, TopicPartition], Sequence[int]]
    segments: Mapping[str, int]
    epochs: Mapping[ReceiverId, int]
    manifests: Mapping[int, Sequence[FoundManifest]]
    damaged_manifests: Mapping[str, str]
    lost: Sequence[LostPart]
    notices: Sequence[str]
    last_sign_ms: int
    lease_ms: int


def read_folder(folder: LogStorage, stream_name: str, *, mode: RecoveryMode, progress: Progress) -> FolderContents:
    """Read the stream's folder: checkpoint and history, manifests, and every frame of the log.

    Raises:
        WalError: the log is damaged, and the mode does not skip damage.
        CheckpointVersionError, ManifestError: a checkpoint or a manifest is of another version.
        HistoryError: a history file is missing, damaged, or of another version.
    """
    notices: list[str] = []
    saved = _read_saved(folder, notices)
    log = folder.below(LOG_FOLDER)
    names = segments_in(log.paths())
    manifests = read_manifests(
        folder,
        [name.path for name in names],
        is_removed=lambda time_ms: saved is not None and saved.stream.has_removed(time_ms),
        progress=progress,
    )
    progress(f"reading the log, {len(names)} segments")
    frames, lost = _read_frames(log, mode, notices, _deleted(saved, manifests.by_time))
    epochs: dict[ReceiverId, int] = defaultdict(int)
    positions: dict[tuple[str, TopicPartition], list[int]] = defaultdict(list)
    for name in names:
        receiver_id = ReceiverId(stream_name, name.input_id, name.index)
        epochs[receiver_id] = max(epochs[receiver_id], name.epoch)
        for partition, offset in _opening_positions(log, name, mode).items():
            positions[name.input_id, partition].append(offset)
    signs = [name.opened_ms for name in names] + [frame.info.cut_time_ms for frame in frames]
    leases = [0]
    if saved is not None:
        signs.append(saved.checkpoint.written_at_ms)
        leases.append(saved.lease_ms or 0)
    if (sign := _sign(folder, notices)) is not None:
        signs.append(sign.written_ms)
        leases.append(sign.lease_ms)
    return FolderContents(
        stream=stream_name,
        saved=saved,
        frames=frames,
        positions=positions,
        segments={name.path: log.size(name.path) for name in names},
        epochs=epochs,
        manifests=manifests.by_time,
        damaged_manifests=manifests.damaged,
        lost=lost,
        notices=notices,
        last_sign_ms=max(signs, default=0),
        lease_ms=max(leases),
    )


def _sign(folder: LogStorage, notices: list[str]) -> JobSign | None:
    try:
        return find_sign(folder)
    except ValueError as error:
        notices.append(f"It is unknown when the receiver job last ran: {error}.")
        return None


def _read_saved(folder: LogStorage, notices: list[str]) -> SavedState | None:
    try:
        saved = read_saved_state(folder)
    except CheckpointVersionError:
        raise
    except CheckpointError as error:
        notices.append(error.what)
        return None
    notices += [f"The checkpoint {path} is passed over: {why}." for path, why in saved.passed_over.items()]
    return saved


def _deleted(saved: SavedState | None, manifests: Mapping[int, Sequence[FoundManifest]]) -> Callable[[str], bool]:
    """Returns a function that says whether a missing segment was deleted by cleanup: all its batches are finished.

    The checkpoint's list of segments decides. If there is no checkpoint, or newer ones are damaged and the list may be
    outdated, the batches in the manifests decide.
    """
    unfinished: dict[str, bool] = {}
    for batch_time_ms, of_time in manifests.items():
        batch = None if saved is None else saved.batches.get(batch_time_ms)
        is_over = saved is None or batch is None or bool(saved.passed_over) or batch.row.state in _OVER
        for segment in (segment for found in of_time for segment in found.segments):
            unfinished[segment] = unfinished.get(segment, False) or not is_over

    def deleted(segment: str) -> bool:
        if saved is None or saved.passed_over:
            return not unfinished.get(segment, True)
        if segment not in saved.segments:
            # Deleted before the checkpoint, or without an accepted block. A newer segment may have held blocks.
            name = SegmentName.parse(segment)
            return name is not None and name.opened_ms <= saved.checkpoint.written_at_ms
        last_ms = saved.segments[segment]
        if last_ms is None:
            # It was open then: finished only if manifests list its blocks, all in finished batches.
            return not unfinished.get(segment, True)
        last = saved.batches.get(last_ms)
        is_over = last_ms == 0 or (last is not None and last.row.state in {*_OVER, BatchState.ABSORBED})
        return is_over and not unfinished.get(segment, False)

    return deleted


def is_done(row: BatchRow) -> bool:
    """Whether the batch's log may be deleted."""
    completed = row.state is BatchState.COMPLETED and row.checkpointed_at_ms is not None
    return completed or row.state is BatchState.ABANDONED


def _read_frames(
    log: LogStorage, mode: RecoveryMode, notices: list[str], deleted: Callable[[str], bool]
) -> tuple[list[FoundFrame], list[LostPart]]:
    scan = scan_log(log, mode=mode, deleted=deleted)
    # Payloads are dropped at once: the headers of a long log fit in memory, its records do not.
    frames = [FoundFrame(_block_info(settled.frame), settled.accepted) for settled in scan.settled()]
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
