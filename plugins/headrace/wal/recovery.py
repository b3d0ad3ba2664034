"""Reads and repairs a whole log: for a new epoch's writer, for recovery without a ledger, and for checking.

Each segment's header holds the length and the state of the segments before it. So a scan detects a segment that is
missing, was cut short, or grew after its writer was replaced. Only the ledger knows whether the newest segments are all
there. Torn tails are cut off, and a copy of each is kept.
"""

from __future__ import annotations

import contextlib
import json
import logging
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from headrace.blocks import BlockInfo, ReceiverId, TopicPartition
from headrace.wal import frame
from headrace.wal.errors import (
    DamagedFrameError,
    RepairRefusedError,
    SegmentMissingError,
    StorageError,
    StoredFileMissingError,
    is_unreadable,
)
from headrace.wal.frame import (
    FrameFault,
    FrameHeader,
    PreviousSegment,
    PreviousState,
    SegmentEnd,
    SegmentHeader,
    SegmentName,
    receiver_directory,
    segments_in,
)
from headrace.wal.log_storage import LogStorage
from headrace.wal.scan import (
    READ_TRIES,
    SECTOR_BYTES,
    KnownOfSegment,
    ReaderPositions,
    RecoveryMode,
    ScanEvent,
    ScannedFrame,
    SegmentScan,
    TornTail,
    Window,
    scan_segment,
)

Accepted = Callable[[str], Sequence[BlockInfo]]
"""Returns the blocks that the ledger has accepted in the segment with this path."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SettledFrame:
    """A block, and whether the ledger had accepted it (None: undecided, it is of its writer's last write)."""

    frame: ScannedFrame
    accepted: bool | None


class LogScan:
    """One scan of a log. Iterate once over the blocks; afterwards the lists hold what else was found.

    ``torn_tails`` are left by crashes and replaced writers. ``damage`` is the damage found, which some modes do not
    raise. ``missing`` are the segments that the ledger or a later segment names and that do not exist. ``superseded``
    are segments that a writer opened after it was replaced: their blocks do not count. ``open`` are the segments whose
    full length the log does not know: each receiver's newest, unless it was closed.
    """

    def __init__(
        self,
        storage: LogStorage,
        *,
        receiver: ReceiverId | None,
        deleted: Callable[[str], bool],
        accepted: Accepted | None,
        expected: Collection[str],
        mode: RecoveryMode,
    ) -> None:
        self._storage = storage
        self._directory = "" if receiver is None else receiver_directory(receiver)
        self._deleted = deleted
        self._accepted = accepted
        self._expected = segments_in(list(expected))
        self._mode = mode
        self.torn_tails: list[TornTail] = []
        self.damage: list[DamagedFrameError] = []
        self.open: list[str] = []
        self.missing: list[SegmentMissingError] = []
        self.superseded: list[str] = []

    def __iter__(self) -> Iterator[ScannedFrame]:
        return (event for event in self.events() if isinstance(event, ScannedFrame))

    def events(self) -> Iterator[ScanEvent]:
        """The blocks, and the segments' header and end frames between them."""
        there = segments_in(self._storage.paths(self._directory))
        expected = [name for name in self._expected if not self._directory or name.directory == self._directory]
        for _, of_receiver in groupby(sorted({*there, *expected}), key=lambda name: (name.input_id, name.index)):
            yield from self._receiver(list(of_receiver), set(there))

    def settled(self) -> Iterator[SettledFrame]:
        """The blocks, each with whether the ledger accepted it. Later writes show this, since their frames carry the
        last accepted sequence; at most the frames of each epoch's last write stay undecided."""
        held: list[ScannedFrame] = []
        for event in self.events():
            header = event.header if isinstance(event, ScannedFrame) else event
            if held:
                of = held[-1].header
                is_same = (header.receiver, header.epoch) == (of.receiver, of.epoch)
                if not is_same:
                    yield from (SettledFrame(frame, None) for frame in held)
                    held = []
                elif _reports(header, of):
                    accepted = -1 if header.last_accepted_sequence is None else header.last_accepted_sequence
                    yield from (SettledFrame(frame, accepted >= frame.header.sequence) for frame in held)
                    held = []
            if isinstance(event, ScannedFrame):
                held.append(event)
        yield from (SettledFrame(frame, None) for frame in held)

    def _receiver(self, names: list[SegmentName], there: set[SegmentName]) -> Iterator[ScanEvent]:
        """Scan one receiver's segments. ``names`` are those that exist or that the ledger has, ``there`` those that
        exist."""
        files = [name for name in names if name in there]
        passes_over = self._mode.passes_over
        headers = {
            name: header
            for name in files
            if (header := header_of(self._storage, name.path, blank_unreadable=passes_over)) is not None
        }
        said = _said_of_segments(headers)
        last_inherited = _last_inherited(said)
        counted = sorted(name for name in headers if not _is_superseded(name, last_inherited))
        named = {
            name for path, sequence in said.items() if sequence.length and (name := SegmentName.parse(path)) is not None
        }
        positions: Mapping[TopicPartition, int] = {}
        for name in sorted(named.union(names)):
            place = bisect_right(counted, name)
            known = KnownOfSegment(
                accepted=None if self._accepted is None else self._accepted(name.path),
                positions_before=positions,
                positions_after=headers[counted[place]].positions if place < len(counted) else {},
            )
            before = said.get(name.path)
            if name not in there:
                # Cleanup deletes the oldest first, so it most likely deleted a segment before all existing ones.
                is_cleaned = self._deleted(name.path) or (name not in names and (not files or name < files[0]))
                if not self._miss(name.path, before, known, is_cleaned=is_cleaned):
                    return
                continue
            if _is_superseded(name, last_inherited) and not known.accepted:
                # A replaced writer opened it, and the ledger accepts nothing of a stale epoch.
                self.superseded.append(name.path)
                continue
            scan = scan_segment(
                self._storage,
                name.path,
                newest=before is None,
                durable_length=None if before is None else before.length,
                known=known,
                mode=self._mode,
            )
            try:
                yield from self._segment(scan)
            except SegmentMissingError:
                # It was deleted after the listing: by cleanup, if all segments before it are gone too.
                older = (older.path for older in files if older < name)
                is_cleaned = self._deleted(name.path) or not any(map(self._storage.exists, older))
                if not self._miss(name.path, before, known, is_cleaned=is_cleaned):
                    return
                continue
            if scan.damage and self._mode is RecoveryMode.POINT_IN_TIME_RECOVERY:
                return
            positions = scan.next_offsets

    def _segment(self, scan: SegmentScan) -> Iterator[ScanEvent]:
        try:
            yield from scan.events()
        finally:
            self.damage += scan.damage
            if scan.is_open:
                self.open.append(scan.segment)
            if scan.torn_tail is not None:
                self.torn_tails.append(scan.torn_tail)

    def _miss(self, path: str, said: PreviousSegment | None, known: KnownOfSegment, *, is_cleaned: bool) -> bool:
        """Record a missing segment. Returns whether to continue; raises if cleanup did not delete it, by the mode."""
        ranges, exact = known.accepted_between(0, None), True
        if ranges is None:
            ranges, exact = ReaderPositions(path, known).lost_until(known.positions_after)
        length = None if said is None else said.length
        named_by = "the ledger" if said is None else "the header of a later segment"
        error = SegmentMissingError(path, named_by=named_by, length=length, ranges=ranges, exact=exact)
        self.missing.append(error)
        if is_cleaned or self._mode is RecoveryMode.SKIP_ANY_CORRUPTED_RECORDS:
            return True
        if self._mode is RecoveryMode.POINT_IN_TIME_RECOVERY:
            return False
        raise error


def _reports(header: FrameHeader | SegmentHeader | SegmentEnd, before: FrameHeader) -> bool:
    """Whether the header of a later frame reports if the ledger accepted the block before it. One of the same write was
    written before the ledger had the block, and so was an end frame that reports nothing."""
    if isinstance(header, FrameHeader):
        return header.first_sequence > before.sequence
    return not (isinstance(header, SegmentEnd) and header.last_accepted_sequence is None)


def scan_log(
    storage: LogStorage,
    *,
    receiver: ReceiverId | None = None,
    deleted: Callable[[str], bool] = lambda _segment: False,
    accepted: Accepted | None = None,
    expected: Collection[str] = (),
    mode: RecoveryMode = RecoveryMode.TOLERATE_CORRUPTED_TAIL_RECORDS,
) -> LogScan:
    """Scan all blocks of the log (or of one receiver) in the order of writing; ``storage`` is rooted at the log.

    ``deleted`` returns whether a missing segment was deleted on purpose. ``accepted`` and ``expected`` come from a
    ledger. With ``accepted``, bytes on which the ledger relies are never taken for a torn tail, and errors name exactly
    the lost offsets. ``expected`` are the paths of the segments that the ledger has: a log cannot know that its newest
    segments are missing.

    Raises, while iterated, what ``scan_segment`` raises, and SegmentMissingError for a missing segment that is expected
    or that a later one names. The modes that report damage instead of raising it do so here too.
    """
    return LogScan(storage, receiver=receiver, deleted=deleted, accepted=accepted, expected=expected, mode=mode)


def _said_of_segments(headers: Mapping[SegmentName, SegmentHeader]) -> dict[str, PreviousSegment]:
    """What later headers state about each segment. The latest epoch's statement wins: a replaced writer that continues
    to write does not know that its bytes no longer count."""
    said: dict[str, PreviousSegment] = {}
    for name in sorted(headers):
        said |= {previous.segment: previous for previous in headers[name].previous}
    return said


def header_of(storage: LogStorage, segment: str, *, blank_unreadable: bool = False) -> SegmentHeader | None:
    """The segment's header; None if there is none or it is damaged: the scan of that segment reports this.

    Raises:
        StorageError: the storage cannot be read. With ``blank_unreadable`` a bad sector does not raise it.
    """
    try:
        with storage.open(segment) as file:
            header = Window(file, read_ahead=SECTOR_BYTES, blank_unreadable=blank_unreadable).header(
                frame.segment_id(segment)
            )
    except (FrameFault, StoredFileMissingError):
        return None
    return header if isinstance(header, SegmentHeader) else None


def _last_inherited(said: dict[str, PreviousSegment]) -> dict[int, SegmentName]:
    """For each epoch, the last segment that the next epoch's writer found."""
    last: dict[int, SegmentName] = {}
    for previous in said.values():
        name = SegmentName.parse(previous.segment)
        if name is not None and previous.state is PreviousState.INHERITED:
            last[name.epoch] = max(name, last.get(name.epoch, name))
    return last


def _is_superseded(name: SegmentName, last_inherited: Mapping[int, SegmentName]) -> bool:
    heir = last_inherited.get(name.epoch)
    return heir is not None and name > heir


@dataclass(frozen=True, slots=True)
class LogRecovery:
    """Earlier segments that no later header names yet, oldest first, with the torn tails and the damage found in them.

    A torn tail's ``kept`` is None where it could not be cut off."""

    segments: tuple[PreviousSegment, ...] = ()
    torn_tails: tuple[TornTail, ...] = ()
    damage: tuple[DamagedFrameError, ...] = ()


def recover_log(
    storage: LogStorage,
    names: list[SegmentName],
    accepted: Accepted | None = None,
    *,
    progress: Callable[[], None] = lambda: None,
) -> LogRecovery:
    """Reads the newest of ``names`` (in the order of writing) and cuts its torn tail off. Continues with older segments
    until one has a readable header, which names its own predecessors. The writers of ``names`` must be fenced.

    ``accepted`` returns the blocks that the ledger has accepted in a segment. Their bytes are never cut off.
    ``progress`` is called after each frame that was read.
    """
    segments: list[PreviousSegment] = []
    torn_tails: list[TornTail] = []
    damage: list[DamagedFrameError] = []
    for name in reversed(names):
        known = KnownOfSegment(accepted=None if accepted is None else accepted(name.path))
        try:
            scan, error = _read_through(storage, name.path, known, progress)
            length = scan.valid_bytes
            if error is not None:
                # This writer does not repair damage. The whole length is declared, so that every reader finds it too.
                length = max(storage.size(name.path), known.accepted_end)
                logger.error("The log of earlier writers is damaged: %s", error)
                damage.append(error)
            if scan.torn_tail is not None:
                torn_tails.append(_cut_off(storage, scan, scan.torn_tail))
            elif length:
                # A killed writer's last frame may never have been synced; the next header declares it as durable.
                storage.sync(name.path)
        except (SegmentMissingError, StoredFileMissingError):
            continue  # Cleanup has deleted it, before the file was opened or between two reads.
        segments.append(PreviousSegment(name.path, length, PreviousState.INHERITED))
        if scan.opening is not None:
            break
    return LogRecovery(tuple(reversed(segments)), tuple(reversed(torn_tails)), tuple(reversed(damage)))


def _read_through(
    storage: LogStorage, path: str, known: KnownOfSegment, progress: Callable[[], None]
) -> tuple[SegmentScan, DamagedFrameError | None]:
    """Scan a segment to its end or to the first damage. Bytes that the disk does not read in ``READ_TRIES`` tries are
    damage too: otherwise no writer could continue."""
    tries = 0
    while True:
        tries += 1
        scan = scan_segment(storage, path, newest=True, known=known)
        try:
            for _ in scan:
                progress()
        except DamagedFrameError as error:
            return scan, error
        except StorageError as error:
            if not is_unreadable(error):
                raise
            if tries == READ_TRIES:
                # The file is read in large pieces, so more than the bad sector is reported as lost.
                lost = known.accepted_between(scan.valid_bytes, None)
                return scan, DamagedFrameError(path, scan.valid_bytes, error.what.rstrip("."), lost, exact=False)
            logger.warning("%s It is read again.", error)
        else:
            return scan, None


def _cut_off(storage: LogStorage, scan: SegmentScan, tail: TornTail) -> TornTail:
    try:
        tail = cut_off(storage, scan, tail)
    except (RepairRefusedError, StorageError, OSError) as error:
        # The next header holds the segment's length, so readers ignore a tail that was not cut off.
        logger.warning("%s It could not be cut off: %s", tail, error)
    else:
        logger.warning("%s", tail)
    return tail


QUARANTINE = "torn"  # A directory below the log's root; its files do not have the suffix of segments.
NOTES = "torn-unreported"  # A directory below the log's root: one note for each cut that is not reported yet.
COPIES_KEPT = 10  # Per receiver: a receiver that crashes every minute must not fill the disk with copies.


def quarantine_path(tail: TornTail) -> str:
    """The path of the copy of a torn tail."""
    return f"{QUARANTINE}/{tail.segment}-{tail.offset}.torn"


def note_path(tail: TornTail) -> str:
    """The path of the note that a torn tail was cut off and not reported yet."""
    return f"{NOTES}/{tail.segment}-{tail.offset}.json"


def unreported_cuts(storage: LogStorage, directory: str) -> tuple[TornTail, ...]:
    """The torn tails of a receiver (``directory``, below the log's root) that were cut off but not reported, for
    example because the process was killed in between."""
    cuts = []
    for path in storage.paths(f"{NOTES}/{directory}"):
        try:
            note = json.loads(storage.read(path))
            cuts.append(TornTail(note["segment"], note["offset"], note["length"], note["reason"], None, note["kept"]))
        except StoredFileMissingError:
            continue  # A writer that was replaced has reported it meanwhile.
        except (ValueError, LookupError, TypeError):
            # This must not stop the receiver: the copy exists, and this line is logged each time.
            logger.exception("The note %s of a torn tail that was cut off cannot be read.", path)
    return tuple(cuts)


def cut_is_reported(storage: LogStorage, tail: TornTail) -> None:
    """Delete the note of a cut; to be called when the cut has been reported."""
    storage.delete(note_path(tail))


def cut_off(storage: LogStorage, scan: SegmentScan, tail: TornTail) -> TornTail:
    """Cut off the torn tail that a finished scan found. Returns the tail with the path of its copy (``kept``).

    ``storage`` is rooted at the log, and the segment's writer must be fenced. A segment without a whole header is
    deleted. The last ``COPIES_KEPT`` copies of a receiver are kept. May be repeated after a crash.

    A note of the cut is written before the cut and stays until ``cut_is_reported``: if this process is killed in
    between, the next one finds the note (``unreported_cuts``).

    Raises RepairRefusedError when a writer still has the local file open, and StorageError. The segment is then
    unchanged.
    """
    with storage.open(tail.segment) as file:
        torn = file.read_at(tail.offset, file.size - tail.offset)
    path = quarantine_path(tail)
    storage.write_atomically(path, torn)
    cut = replace(tail, kept=path)
    reported = {
        "segment": cut.segment,
        "offset": cut.offset,
        "length": cut.length,
        "reason": cut.reason,
        "kept": cut.kept,
    }
    storage.write_atomically(note_path(tail), json.dumps(reported).encode())
    try:
        storage.truncate(tail.segment, tail.offset)
    except (RepairRefusedError, StorageError, OSError):
        with contextlib.suppress(StorageError, OSError):
            cut_is_reported(storage, tail)
        raise
    with contextlib.suppress(StorageError, OSError):
        # The segment is cut already: an empty file or a surplus copy that stays is no reason to fail.
        if scan.opening is None:
            storage.delete(tail.segment)
        for old in storage.paths(path.rpartition("/")[0])[:-COPIES_KEPT]:
            storage.delete(old)
    return cut


def is_orphaned(storage: LogStorage, name: SegmentName, later: Sequence[SegmentName]) -> bool:
    """Whether a recovery would find no accepted block in the segment; its writer must have ended.

    Frames carry their writer's last accepted sequence, so a later frame shows that a block was accepted: in the same
    segment, or in its writer's next one. No later frame covers a writer's last block; a recovery drops it and reads it
    from Kafka again. ``later`` are the receiver's segments after this one, in the order of writing. A damaged segment
    does not count as orphaned.
    """
    first: int | None = None
    try:
        for event in _reported_by(storage, name, later):
            header = event.header if isinstance(event, ScannedFrame) else event
            accepted = header.last_accepted_sequence
            if first is not None and accepted is not None and accepted >= first:
                return False
            if first is None and isinstance(header, FrameHeader):
                first = header.sequence
    except DamagedFrameError:
        return False
    return True


def _reported_by(storage: LogStorage, name: SegmentName, later: Sequence[SegmentName]) -> Iterator[ScanEvent]:
    """The segment's frames, then the first frame of the writer's next segment that has one."""
    yield from _events(storage, name)
    for following in later:
        if following.epoch != name.epoch:
            return
        for event in _events(storage, following):
            yield event
            return


def _events(storage: LogStorage, name: SegmentName) -> Iterator[ScanEvent]:
    try:
        # Any ending may be the result of a crash, so a torn tail is tolerated.
        yield from scan_segment(storage, name.path, newest=True).events()
    except (SegmentMissingError, StoredFileMissingError):
        return
