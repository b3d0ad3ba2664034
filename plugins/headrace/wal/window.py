"""A segment's bytes, read ahead: frames out of them, and the search for the next one behind damage."""

from __future__ import annotations

import pyarrow as pa

from headrace.wal import frame
from headrace.wal.frame import FrameFault, Prefix
from headrace.wal.reader import Frame, read_frame
from headrace.wal.storage import RandomAccessFile

WINDOW_BYTES = 4 << 20  # Fetched at a time: a few blocks, so that small frames do not cost a request each.
SEARCH_BYTES = 64 << 10


class Window:
    """A file read ahead, a window at a time. No read allocates more than the file has."""

    def __init__(self, file: RandomAccessFile) -> None:
        self._file = file
        self._start = 0
        self._data = pa.py_buffer(b"")
        self.size = file.size

    def another(self) -> Window:
        """A window of its own on the same file."""
        return Window(self._file)

    def read(self, offset: int, length: int) -> pa.Buffer:
        """Up to ``length`` bytes, fewer where the file ends."""
        at = offset - self._start
        if at < 0 or at + length > self._data.size:
            self._data = self._file.read_at(offset, max(length, WINDOW_BYTES))
            self._start, at = offset, 0
        return self._data[at : at + length]

    def frame(self, segment: int, offset: int, end: int) -> Frame:
        """The frame at ``offset``, checked, if it ends at ``end`` or before; FrameFault if not."""
        prefix = self._prefix(segment, offset, end)
        # The header's checksum covers the payload's length, so it is read first: only then is the length trusted.
        header_end = frame.PREFIX_BYTES + prefix.header_length
        head = self.read(offset, min(header_end, end - offset))
        frame.parse_header(prefix, head[frame.PREFIX_BYTES :].to_pybytes())
        return read_frame(self.read(offset, min(prefix.frame_length, end - offset)), segment=segment, offset=offset)

    def next_frame(self, segment: int, offset: int, end: int) -> int | None:
        """Where the next frame with a whole header starts in [offset, end).

        A frame knows its segment and offset, so what merely looks like one is passed by. The segment's id is looked
        for with the magic before it: values full of magics, which a topic may carry, cost nothing.
        """
        needle = frame.segment_id_bytes(segment)
        at = offset + frame.SEGMENT_ID_OFFSET
        while (at := self._find(needle, at, end)) >= 0:
            if self._has_header(segment, at - frame.SEGMENT_ID_OFFSET):
                return at - frame.SEGMENT_ID_OFFSET
            at += 1
        return None

    def _has_header(self, segment: int, offset: int) -> bool:
        """Whether a frame with a whole header starts at ``offset``, whatever its payload."""
        try:
            prefix = self._prefix(segment, offset, self.size)
            frame.parse_header(prefix, self.read(offset + frame.PREFIX_BYTES, prefix.header_length).to_pybytes())
        except FrameFault as fault:
            # One of another version is a frame all the same: what stands before it is no tail.
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
        """The first place of ``what`` in [offset, end), -1 if there is none."""
        while offset < end:
            chunk = self.read(offset, min(SEARCH_BYTES, end - offset)).to_pybytes()
            found: int = chunk.find(what)
            if found >= 0:
                return offset + found
            if offset + len(chunk) >= end or len(chunk) < len(what):
                return -1
            offset += len(chunk) - len(what) + 1
        return -1
