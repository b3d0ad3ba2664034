"""The errors of the log and of the storage below it."""

from __future__ import annotations

import errno
from collections.abc import Iterable

from headrace.blocks import OffsetRange
from headrace.errors import HeadraceError

RANGES_SHOWN = 8  # In a message; the error object carries every range.
READ_VERSIONS = (1,)  # Of the log's format.
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT}


def ranges_text(ranges: Iterable[OffsetRange]) -> str:
    """The first ``RANGES_SHOWN`` offset ranges as text, with the number of the others."""
    ranges = tuple(ranges)
    reported = ", ".join(
        f"{r.partition.topic}-{r.partition.partition}[{r.from_offset}, {r.until_offset})" for r in ranges[:RANGES_SHOWN]
    )
    return reported if len(ranges) <= RANGES_SHOWN else f"{reported} and {len(ranges) - RANGES_SHOWN} more"


def is_out_of_space(error: BaseException | None) -> bool:
    """Whether a full disk or an exhausted quota caused the error. Only freeing space helps then."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _NO_ROOM:
            return True
        error = error.__cause__
    return False


def is_unreadable(error: BaseException) -> bool:
    """Whether an I/O error of the disk (EIO) caused the error, as with a bad sector."""
    cause = error.__cause__
    return isinstance(cause, OSError) and cause.errno == errno.EIO


class WalError(HeadraceError):
    """The root of the log's errors."""


class StorageError(WalError):
    """An operation of the storage below the log failed."""


class UnknownStorageError(StorageError):
    """No storage can be opened for this URL."""


class PathEscapesRootError(StorageError):
    """A path would leave the storage's root."""


class StoredFileMissingError(StorageError):
    """There is no such file in the storage."""


class StoredFileExistsError(StorageError):
    """A file that had to be new exists already."""


class WriteFailedError(WalError):
    """A block did not become durable.

    Its segment is poisoned: nothing is written to it again, and the next block opens a new segment. ``sequence`` is
    not used again. The records must be read again from Kafka, or written again while they are in memory. The frame may
    still be on disk; the next segment's header lets readers ignore it.
    """

    def __init__(self, segment: str, sequence: int, cause: BaseException) -> None:
        super().__init__(
            f"Block {sequence} was not written to segment {segment}: {type(cause).__name__}: {cause}.",
            remedy="The segment is given up and the next write opens a new one; check the disk if this repeats.",
        )
        self.segment = segment
        self.sequence = sequence


class StaleWriterError(WalError):
    """The log already has segments of this epoch or a later one: this writer has been replaced."""


class FrameTooLongError(WalError):
    """A frame to write, or a handle to read, is longer than the format allows."""


class PayloadError(WalError):
    """A payload is not a record batch of the log's schema."""


class SegmentMissingError(WalError):
    """A segment that a handle, the ledger or a later segment names does not exist.

    ``length`` is the size it had, in bytes (None: unknown). ``ranges`` are the offset ranges that were in it (None:
    unknown). They are ``exact`` when they come from the ledger. Otherwise they are inferred from the segments around
    it, and their ``records`` are upper bounds.
    """

    def __init__(
        self,
        segment: str,
        *,
        named_by: str,
        length: int | None = None,
        ranges: tuple[OffsetRange, ...] | None = None,
        exact: bool = True,
    ) -> None:
        super().__init__(
            f"Segment {segment} is missing from the log"
            + (f" ({length} bytes)" if length is not None else "")
            + f"; {named_by} names it."
            + ("" if ranges is None else f" {_report_lost(ranges, exact)}"),
            remedy="If cleanup removed it, re-read its offset ranges from Kafka; otherwise restore the file.",
        )
        self.segment = segment
        self.named_by = named_by
        self.length = length
        self.ranges = ranges
        self.exact = exact


class DamagedFrameError(WalError):
    """The log's bytes are not those that were written.

    ``offset`` is where the damage starts in ``segment``. ``ranges`` are the offset ranges that cannot be read (None:
    unknown). They are ``exact`` when they come from the ledger or from the frame's own header. Otherwise they are
    inferred from the frames around the damage, and their ``records`` are upper bounds.
    """

    def __init__(
        self,
        segment: str,
        offset: int,
        reason: str,
        ranges: tuple[OffsetRange, ...] | None = None,
        *,
        exact: bool = True,
    ) -> None:
        super().__init__(
            f"Segment {segment} is damaged at offset {offset}: {reason}. {_report_lost(ranges, exact)}",
            remedy="Restore the segment from a copy, or read those offsets again from Kafka.",
        )
        self.segment = segment
        self.offset = offset
        self.reason = reason
        self.ranges = ranges
        self.exact = exact


class LogVersionError(WalError):
    """A frame was written in a version of the log's format that is not in ``READ_VERSIONS``.

    This is not damage: nothing is cut off, and no recovery mode skips it.
    """

    def __init__(self, segment: str, offset: int, reason: str) -> None:
        reported = ", ".join(map(str, READ_VERSIONS))
        super().__init__(
            f"Segment {segment} was written at offset {offset} by another version of headrace: {reason}. This one "
            f"reads version {reported} of the log's format, and has changed nothing.",
            remedy="Use the version of headrace that wrote it, or a newer one, for receivers and batches. If there was "
            "never a newer one here the segment is damaged: restore it from a copy.",
        )
        self.segment = segment
        self.offset = offset
        self.reason = reason


def _report_lost(ranges: tuple[OffsetRange, ...] | None, exact: bool) -> str:
    if ranges is None:
        return "Which offsets were in it is not known from this segment."
    if not ranges:
        return "No offsets were lost."
    return f"Offsets lost{'' if exact else ' (inferred from the frames around it)'}: {ranges_text(ranges)}."


class TornTailError(DamagedFrameError):
    """A segment ends in the middle of a frame, and this is not tolerated: the segment is not its writer's newest, or
    the recovery mode is absolute consistency."""


class RepairRefusedError(WalError):
    """A torn tail cannot be cut off, because a writer has the segment open."""
