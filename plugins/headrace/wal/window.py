"""Reads a segment's bytes ahead: parses frames from them, and finds the next frame after damage."""

from __future__ import annotations

import logging

import pyarrow as pa

from headrace.wal import frame
from headrace.wal.errors import StorageError, is_unreadable
from headrace.wal.frame import FrameFault, Prefix
from headrace.wal.headers import AnyHeader
from headrace.wal.reader import Frame, read_frame
from headrace.wal.storage import RandomAccessFile

WINDOW_BYTES = 4 << 20  # Fetched at a time: a few blocks, so that small frames do not cost a request each.
SEARCH_BYTES = 64 << 10
SECTOR_BYTES = 4096
READ_TRIES = 3  # After so many failed reads the bytes count as unreadable.

logger = logging.getLogger(__name__)


class Window:
    """Reads a file ahead, one window at a time. No read allocates more than the file's size.

    With ``blank_unreadable``, sectors that the disk cannot read become zeros, which never pass for a frame.
    """

    def __init__(
        self, file: RandomAccessFile, *, read_ahead: int = WINDOW_BYTES, blank_unreadable: bool = False
    ) -> None:
        self._file = file
        self._read_ahead = read_ahead
        self._blank_unreadable = blank_unreadable
        self._start = 0
        self._data = pa.py_buffer(b"")
        self.size = file.size

    def another(self) -> Window:
        """A separate window on the same file."""
        return Window(self._file, read_ahead=self._read_ahead, blank_unreadable=self._blank_unreadable)

    def read(self, offset: int, length: int) -> pa.Buffer:
        """Up to ``length`` bytes, fewer where the file ends."""
        at = offset - self._start
        if at < 0 or at + length > self._data.size:
            self._data = self._fetch(offset, max(length, self._read_ahead))
            self._start, at = offset, 0
        return self._data[at : at + length]

    def _fetch(self, offset: int, length: int) -> pa.Buffer:
        try:
            return self._file.read_at(offset, length)
        except StorageError as error:
            if not self._blank_unreadable or not is_unreadable(error):
                raise
        end = min(offset + length, self.size)
        starts = [offset, *range((offset // SECTOR_BYTES + 1) * SECTOR_BYTES, end, SECTOR_BYTES)]
        sectors = zip(starts, [*starts[1:], end], strict=True)
        return pa.py_buffer(b"".join(self._sector(start, stop) for start, stop in sectors))

    def _sector(self, start: int, stop: int) -> bytes:
        for tried in range(1, READ_TRIES + 1):
            try:
                data: bytes = self._file.read_at(start, stop - start).to_pybytes()
            except StorageError as error:
                if not is_unreadable(error):
                    raise
                if tried == READ_TRIES:
                    logger.warning("%s These bytes are treated as damaged.", error.what)
            else:
                return data
        return bytes(stop - start)

    def frame(self, segment: int, offset: int, end: int) -> Frame:
        """The frame at ``offset``, checked, if it ends at or before ``end``; FrameFault if not."""
        prefix = self._prefix(segment, offset, end)
        # The header's checksum covers the payload's length, so the header is checked before the length is used.
        header_end = frame.PREFIX_BYTES + prefix.header_length
        head = self.read(offset, min(header_end, end - offset))
        frame.parse_header(prefix, head[frame.PREFIX_BYTES :].to_pybytes())
        return read_frame(self.read(offset, min(prefix.frame_length, end - offset)), segment=segment, offset=offset)

    def header(self, segment: int, offset: int = 0) -> AnyHeader:
        """The header of the frame at ``offset``, without reading its payload; FrameFault if there is none."""
        prefix = self._prefix(segment, offset, self.size)
        return frame.parse_header(prefix, self.read(offset + frame.PREFIX_BYTES, prefix.header_length).to_pybytes())

    def next_frame(self, segment: int, offset: int, end: int) -> int | None:
        """The offset of the next frame with a whole header in [offset, end); None if there is none.

        A frame holds its segment and offset, so bytes that only look like a frame are skipped. The search is for the
        segment's id, not for the magic before it: record values full of magics cost nothing.
        """
        needle = frame.segment_id_bytes(segment)
        at = offset + frame.SEGMENT_ID_OFFSET
        while (at := self._find(needle, at, end)) >= 0:
            if self._has_header(segment, at - frame.SEGMENT_ID_OFFSET):
                return at - frame.SEGMENT_ID_OFFSET
            at += 1
        return None

    def _has_header(self, segment: int, offset: int) -> bool:
        """Whether a frame with a whole header starts at ``offset``."""
        try:
            self.header(segment, offset)
        except FrameFault as fault:
            # A frame of another version is a frame too, so the bytes before it are not a tail.
            return fault.foreign
        return True

    def _prefix(self, segment: int, offset: int, end: int) -> Prefix:
        return frame.parse_prefix(
            self.read(offset, min(frame.PREFIX_BYTES, end - offset)).to_pybytes(),
            segment=segment,
            offset=offset,
            header=lambda length: self.read(offset + frame.PREFIX_BYTES, length).to_pybytes(),
        )

    def _find(self, what: bytes, offset: int, end: int) -> int:
        """The first offset of ``what`` in [offset, end), -1 if there is none."""
        while offset < end:
            chunk = self.read(offset, min(SEARCH_BYTES, end - offset)).to_pybytes()
            found: int = chunk.find(what)
            if found >= 0:
                return offset + found
            if offset + len(chunk) >= end or len(chunk) < len(what):
                return -1
            offset += len(chunk) - len(what) + 1
        return -1
