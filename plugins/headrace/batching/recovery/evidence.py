"""What is there to rebuild a ledger from: read once, before anything is concluded from it."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from headrace.batching.checkpoint import CheckpointError, CheckpointVersionError
from headrace.batching.kept_state import KeptState, read_kept
from headrace.batching.manifest import FOLDER, LOG_FOLDER, Manifest, ManifestError
from headrace.blocks import BlockHandle, BlockInfo, ReceiverId, TopicPartition
from headrace.ledger.rows import BatchRow
from headrace.ledger.states import BatchState
from headrace.wal.log_scan import header_of, scan_log
from headrace.wal.scan import RecoveryMode, ScannedFrame
from headrace.wal.segments import SegmentName, segments_in
from headrace.wal.storage import LogStorage

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class FoundFrame:
    """A block in the log. ``accepted``: what later frames of its writer say of it; None: there is none."""

    info: BlockInfo
    accepted: bool | None


@dataclass(frozen=True, slots=True)
class FoundManifest:
    """A manifest's file. ``path`` is below the stream's folder."""

    path: str
    sha256: str
    manifest: Manifest


@dataclass(frozen=True)
class Evidence:
    """What the stream's folder holds.

    ``frames`` are in the order of writing, receiver by receiver. ``positions`` are those with which segments were
    opened, by input and partition. ``manifests`` are by batch time, ``damaged_manifests`` by path. ``notices`` say what
    was passed over. ``last_sign_ms`` is the latest time that anything of it was written, as far as it says so.
    """

    stream: str
    kept: KeptState | None
    frames: Sequence[FoundFrame]
    positions: Mapping[tuple[str, TopicPartition], Sequence[int]]
    segments: Mapping[str, int]
    epochs: Mapping[ReceiverId, int]
    manifests: Mapping[int, Sequence[FoundManifest]]
    damaged_manifests: Mapping[str, str]
    notices: Sequence[str]
    last_sign_ms: int


def gather(folder: LogStorage, stream: str, *, mode: RecoveryMode, progress: Progress) -> Evidence:
    """Read the stream's folder: checkpoint and history, manifests, and every frame of the log.

    Raises:
        WalError: the log is damaged, and the mode does not pass over it.
        CheckpointVersionError, HistoryError, ManifestError: something is of another version, or of the history missing.
    """
    notices: list[str] = []
    kept = _read_kept(folder, notices)
    progress("reading the manifests")
    manifests, damaged = _read_manifests(folder)
    log = folder.below(LOG_FOLDER)
    names = segments_in(log.list())
    progress(f"reading the log, {len(names)} segments")
    frames = _read_frames(log, mode, notices, _deleted(kept, manifests))
    epochs: dict[ReceiverId, int] = defaultdict(int)
    positions: dict[tuple[str, TopicPartition], list[int]] = defaultdict(list)
    for name in names:
        receiver_id = ReceiverId(stream, name.input_id, name.index)
        epochs[receiver_id] = max(epochs[receiver_id], name.epoch)
        for partition, offset in _opening_positions(log, name).items():
            positions[name.input_id, partition].append(offset)
    signs = [name.opened_ms for name in names] + [frame.info.cut_time_ms for frame in frames]
    if kept is not None:
        signs.append(kept.checkpoint.written_at_ms)
    return Evidence(
        stream=stream,
        kept=kept,
        frames=frames,
        positions=positions,
        segments={name.path: log.size(name.path) for name in names},
        epochs=epochs,
        manifests=manifests,
        damaged_manifests=damaged,
        notices=notices,
        last_sign_ms=max(signs, default=0),
    )


def _read_kept(folder: LogStorage, notices: list[str]) -> KeptState | None:
    try:
        kept = read_kept(folder)
    except CheckpointVersionError:
        raise
    except CheckpointError as error:
        notices.append(error.what)
        return None
    notices += [f"The checkpoint {path} is passed over: {why}." for path, why in kept.passed_over.items()]
    return kept


def _read_manifests(folder: LogStorage) -> tuple[dict[int, list[FoundManifest]], dict[str, str]]:
    found: dict[int, list[FoundManifest]] = defaultdict(list)
    damaged: dict[str, str] = {}
    for path in folder.list(FOLDER):
        if not path.endswith(".json"):
            continue
        data = folder.read(path)
        try:
            manifest = Manifest.from_bytes(data, f"{folder.url}/{path}")
        except ManifestError as error:
            if "version" in str(error.what):
                raise
            damaged[path] = error.what
        else:
            sha256 = hashlib.sha256(data).hexdigest()
            found[manifest.batch_time_ms].append(FoundManifest(path, sha256, manifest))
    return found, damaged


def _deleted(kept: KeptState | None, manifests: Mapping[int, Sequence[FoundManifest]]) -> Callable[[str], bool]:
    """Which segments cleanup has deleted, if they are gone: those of which every batch is over.

    The checkpoint says that of those it has. Where newer checkpoints are damaged, it may not know it yet.
    """
    unfinished: dict[str, bool] = {}
    for time_ms, of_time in manifests.items():
        batch = None if kept is None else kept.batches.get(time_ms)
        is_over = kept is None or batch is None or bool(kept.passed_over) or is_done(batch.row)
        for handle in handles_in(of_time):
            unfinished[handle.segment] = unfinished.get(handle.segment, False) or not is_over
    return lambda segment: not unfinished.get(segment, True)


def is_done(row: BatchRow) -> bool:
    """Whether the batch's log may go."""
    completed = row.state is BatchState.COMPLETED and row.checkpointed_at_ms is not None
    return completed or row.state is BatchState.ABANDONED


def _read_frames(
    log: LogStorage, mode: RecoveryMode, notices: list[str], deleted: Callable[[str], bool]
) -> list[FoundFrame]:
    scan = scan_log(log, mode=mode, deleted=deleted)
    # The payloads go at once: the frames' headers of a long log fit in memory, its records do not.
    frames = [FoundFrame(_block_info(settled.frame), settled.accepted) for settled in scan.settled()]
    notices += [str(tail) for tail in scan.torn_tails]
    notices += [error.what for error in scan.damage]
    notices += [
        f"Segment {path} was opened by a writer that had been replaced: nothing in it counts."
        for path in scan.superseded
    ]
    return frames


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
    )


def _opening_positions(log: LogStorage, name: SegmentName) -> Mapping[TopicPartition, int]:
    header = header_of(log, name.path)
    return {} if header is None else header.positions


def handles_in(manifests: Sequence[FoundManifest]) -> Iterator[BlockHandle]:
    """The blocks that manifests list."""
    for found in manifests:
        for blocks in found.manifest.inputs.values():
            for block in blocks:
                yield block.handle
