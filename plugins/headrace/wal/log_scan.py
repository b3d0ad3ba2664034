"""Reads a whole log in order, receiver by receiver: for recovery without a ledger, and for checking.

Each segment's header holds the length and the state of the segments before it. So the scan detects a segment that is
missing, was cut short, or grew after its writer was replaced. Only the ledger knows whether the newest segments are all
there.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from headrace.blocks import BlockInfo, ReceiverId, TopicPartition
from headrace.wal import frame
from headrace.wal.errors import DamagedFrameError, SegmentMissingError, StoredFileMissingError
from headrace.wal.frame import FrameFault
from headrace.wal.headers import PreviousSegment, PreviousState, SegmentEnd, SegmentHeader
from headrace.wal.lost_ranges import KnownOfSegment, ReaderPositions
from headrace.wal.scan import RecoveryMode, ScanEvent, ScannedFrame, SegmentScan, TornTail, scan_segment
from headrace.wal.segments import SegmentName, receiver_directory, segments_in
from headrace.wal.storage import LogStorage
from headrace.wal.window import SECTOR_BYTES, Window

Accepted = Callable[[str], Sequence[BlockInfo]]
"""Returns the blocks that the ledger has accepted in the segment with this path."""


@dataclass(frozen=True, slots=True)
class SettledFrame:
    """A block, and whether the ledger had accepted it (None: undecided, it is its writer's last frame)."""

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
        """The blocks, each with whether the ledger accepted it. Later frames show this, since they carry their writer's
        last accepted sequence; at most the last frame of each epoch stays undecided."""
        held: ScannedFrame | None = None
        for event in self.events():
            header = event.header if isinstance(event, ScannedFrame) else event
            if held is not None:
                of = held.header
                is_same = (header.receiver, header.epoch) == (of.receiver, of.epoch)
                is_reported = is_same and not (isinstance(header, SegmentEnd) and header.last_accepted_sequence is None)
                if is_reported:
                    accepted = header.last_accepted_sequence
                    yield SettledFrame(held, accepted is not None and accepted >= of.sequence)
                    held = None
                elif not is_same:
                    yield SettledFrame(held, None)
                    held = None
            if isinstance(event, ScannedFrame):
                held = event
        if held is not None:
            yield SettledFrame(held, None)

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
        named = {name for path, each in said.items() if each.length and (name := SegmentName.parse(path)) is not None}
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
                older = (each.path for each in files if each < name)
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
