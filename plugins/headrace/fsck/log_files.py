"""Checks the log's files: every block in the ledger is in the log and matches, and every block that the log proves
accepted is in the ledger."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from headrace.blocks import BlockHandle, OffsetRange, ReceiverId
from headrace.clock import time_text
from headrace.fsck.findings import Finding, Problem
from headrace.ledger.models import StoredBlock
from headrace.ledger.snapshots import StreamSnapshot
from headrace.wal.errors import DamagedFrameError, PayloadError, SegmentMissingError, WalError, ranges_text
from headrace.wal.frame import FrameHeader, segments_in
from headrace.wal.reader import read_block
from headrace.wal.recovery import LogScan, scan_log
from headrace.wal.scan import RecoveryMode
from headrace.wal.storage import LogStorage

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
                yield Finding(Problem.SEGMENT_RETURNED, path, "Its removal is recorded, and the file is there.")
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
    found = LogObservation()
    paths = log.paths()
    names = segments_in(paths)
    there = {name.path for name in names}
    found.files = {path for path, row in snapshot.segment.items() if row.removed_at_ms is not None} & there
    known: dict[str, dict[int, StoredBlock]] = defaultdict(dict)
    for block in snapshot.blocks:
        known[block.info.handle.segment][block.info.handle.offset] = block
    for input_id, index in sorted({(name.input_id, name.index) for name in names}):
        _read_receiver(log, ReceiverId(snapshot.stream.name, input_id, index), known, found)
    for path, blocks in known.items():
        if not log.exists(path):
            found.missing.add(path)
            continue
        for block in blocks.values():
            # `_compare` removed the blocks that the scan found; only the others are left.
            _read_by_handle(log, block, found)
    return found


def _read_receiver(
    log: LogStorage, receiver: ReceiverId, known: dict[str, dict[int, StoredBlock]], found: LogObservation
) -> None:
    for _ in range(_TRIES):
        scan = scan_log(log, receiver=receiver, mode=RecoveryMode.SKIP_ANY_CORRUPTED_RECORDS)
        try:
            _compare(scan, known, found)
        except SegmentMissingError:
            continue
        found.damage += scan.damage
        return


def _compare(scan: LogScan, known: dict[str, dict[int, StoredBlock]], found: LogObservation) -> None:
    for settled in scan.settled():
        handle, header = settled.frame.handle, settled.frame.header
        found.frames += 1
        block = known.get(handle.segment, {}).pop(handle.offset, None)
        if block is None:
            if settled.accepted:
                found.accepted[handle.segment, handle.offset] = header.ranges
            continue
        try:
            settled.frame.batch()
        except (DamagedFrameError, PayloadError) as error:
            found.unreadable[handle.segment, handle.offset] = str(error)
        else:
            _compare_header(handle, header, block, found)


def _read_by_handle(log: LogStorage, block: StoredBlock, found: LogObservation) -> None:
    handle = block.info.handle
    try:
        header, _ = read_block(log, handle)
    except WalError as error:
        found.unreadable[handle.segment, handle.offset] = error.what
    else:
        _compare_header(handle, header, block, found)


def _compare_header(handle: BlockHandle, header: FrameHeader, block: StoredBlock, found: LogObservation) -> None:
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
        found.differing[handle.segment, handle.offset] = f"It has {', '.join(reported)}."
