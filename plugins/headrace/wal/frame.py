"""The log's format on disk.

A segment is a file of frames, end to end, nothing between them:

    segment := header frame, block frame*, [end frame]

A frame is a fixed prefix, a JSON header and (blocks only) an Arrow IPC payload. Numbers are little-endian:

    byte  size  field
       0     4  magic "HRWL"
       4     1  version, 1 (these first 24 bytes are the same in every version)
       5     1  kind: 1 segment header, 2 block, 3 segment end
       6     2  zero
       8     8  segment id: the first 8 bytes of BLAKE2b of the segment's path below the log's root
      16     8  offset of this frame in its segment
      24     4  header length H, 1 to 4 MiB
      28     4  payload length P, 0 to 1 GiB
      32     4  CRC32C of the payload
      36     4  CRC32C of bytes 0 to 35 and of the header
      40     H  header, JSON in UTF-8 (headers.py)
    40+H     P  payload, an Arrow IPC stream of one record batch (payload.py)

What each part is for:

- Two checksums: a damaged payload leaves the header readable, and the header says which offsets were lost.
- Lengths are checked against their bounds and against the bytes that the file really has before anything is
  allocated; the payload's is used only once its checksum (with the header's) has held.
- Segment id and offset make every frame belong to one place: bytes that were misdirected, recycled or are part of a
  record's value are not taken for a frame, so a reader can look for the next frame after damage.
- Frames of another version are distinguished from damage: their first 24 bytes are right, and no flipped bit explains
  the rest.
- Every write is one frame (the first of a segment: header and block together), synced before it is acknowledged. So
  after a crash at most the last frame of a segment is incomplete: that is a torn tail. Anything else is damage.
- A closed segment has an end frame; the header of the next one says how long the one before it is and how it was
  left. So a segment that was cut short, even between two frames, or lost, is noticed.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

import google_crc32c
import pyarrow as pa

from headrace.wal.errors import FrameTooLongError
from headrace.wal.headers import AnyHeader, FrameHeader, SegmentEnd, SegmentHeader

MAGIC = b"HRWL"
VERSION = 1
MAX_HEADER_BYTES = 4 << 20  # 40 bytes a partition: a hundred thousand partitions in one block.
MAX_PAYLOAD_BYTES = 1 << 30  # 64 times the default bound of a block; Arrow's 32-bit offsets end at 2 GiB.

_LAYOUT = struct.Struct("<4sBBHQQIII")
_CRC = struct.Struct("<I")
PREFIX_BYTES = _LAYOUT.size + _CRC.size
VERSION_OFFSET = 4
SEGMENT_ID_OFFSET = 8
MAX_FRAME_BYTES = PREFIX_BYTES + MAX_HEADER_BYTES + MAX_PAYLOAD_BYTES


class FrameKind(IntEnum):
    """What a frame is."""

    SEGMENT_HEADER = 1
    BLOCK = 2
    SEGMENT_END = 3


_HEADERS: dict[FrameKind, type[SegmentHeader] | type[FrameHeader] | type[SegmentEnd]] = {
    FrameKind.SEGMENT_HEADER: SegmentHeader,
    FrameKind.BLOCK: FrameHeader,
    FrameKind.SEGMENT_END: SegmentEnd,
}
_KINDS = {header: kind for kind, header in _HEADERS.items()}


class FrameFault(Exception):  # noqa: N818 - never leaves the package: readers turn it into errors that name the segment
    """These bytes are not a valid frame, for ``reason``.

    ``truncated``: the bytes end before the frame does. ``header``, and the frame's ``end`` in the segment, are given
    when only the payload is wrong. ``foreign``: another version of headrace wrote the frame, so it is not damaged.
    """

    def __init__(
        self,
        reason: str,
        *,
        truncated: bool = False,
        header: AnyHeader | None = None,
        end: int = 0,
        foreign: bool = False,
    ) -> None:
        super().__init__(reason)
        self.reason = reason
        self.foreign = foreign
        self.truncated = truncated
        self.header = header
        self.end = end


@dataclass(frozen=True, slots=True)
class Prefix:
    """A frame's first 40 bytes, in bounds but not yet checked against their checksum."""

    kind: FrameKind
    header_length: int
    payload_length: int
    payload_crc: int
    raw: bytes

    @property
    def frame_length(self) -> int:
        return PREFIX_BYTES + self.header_length + self.payload_length


def segment_id(segment: str) -> int:
    """The number that identifies a segment in its frames; ``segment`` is its path below the log's root."""
    return int.from_bytes(hashlib.blake2b(segment.encode(), digest_size=8).digest(), "little")


def segment_id_bytes(segment: int) -> bytes:
    """The segment's id as stored in each of its frames, at ``SEGMENT_ID_OFFSET``."""
    return segment.to_bytes(8, "little")


def build(header: AnyHeader, payload: pa.Buffer | None, *, segment: int, offset: int) -> tuple[bytes, pa.Buffer | None]:
    """Build a frame's two parts, to be written one after the other; ``segment`` is the segment's id.

    Raises FrameTooLongError when header or payload exceed the format's bounds.
    """
    header_bytes = header.to_json()
    payload_length = 0 if payload is None else payload.size
    if len(header_bytes) > MAX_HEADER_BYTES or payload_length > MAX_PAYLOAD_BYTES:
        raise FrameTooLongError(
            f"A frame of {len(header_bytes)} header and {payload_length} payload bytes passes the log's bounds of "
            f"{MAX_HEADER_BYTES} and {MAX_PAYLOAD_BYTES}.",
            remedy="Lower the stream's max_block_bytes.",
        )
    payload_crc = 0 if payload is None else google_crc32c.value(payload)
    kind = _KINDS[type(header)]
    layout = _LAYOUT.pack(MAGIC, VERSION, kind, 0, segment, offset, len(header_bytes), payload_length, payload_crc)
    return b"".join((layout, _CRC.pack(_header_crc(layout, header_bytes)), header_bytes)), payload


def parse_prefix(
    raw: bytes, *, segment: int, offset: int, header: Callable[[int], bytes] = lambda _length: b""
) -> Prefix:
    """The prefix in ``raw`` (40 bytes), if it belongs to the frame at ``offset`` of ``segment``; FrameFault if not.

    ``header(n)`` returns the n bytes after the prefix: they distinguish another version's frame from damage.
    """
    if len(raw) < PREFIX_BYTES:
        raise FrameFault(f"{len(raw)} bytes are no frame", truncated=True)
    magic, version, kind, zero, of_segment, at, header_length, payload_length, payload_crc = _LAYOUT.unpack_from(raw)
    if magic != MAGIC:
        raise FrameFault("no frame starts here" if any(raw) else "zeros where a frame should start")
    if of_segment != segment or at != offset:
        raise FrameFault("the frame here belongs to another place")
    if version != VERSION:
        raise FrameFault(
            f"format version {version} is not known",
            # Another version may have another layout after the first 24 bytes, so its checksum may be elsewhere.
            foreign=version > VERSION and not _holds(_with_version(raw), header_length, header),
        )
    if zero or kind not in _HEADERS:
        raise FrameFault(f"there is no frame of kind {kind}", foreign=_holds(raw, header_length, header))
    if not 0 < header_length <= MAX_HEADER_BYTES or payload_length > MAX_PAYLOAD_BYTES:
        raise FrameFault(f"lengths of {header_length} and {payload_length} bytes are out of bounds")
    return Prefix(FrameKind(kind), header_length, payload_length, payload_crc, raw[:PREFIX_BYTES])


def parse_header(prefix: Prefix, header_bytes: bytes) -> AnyHeader:
    """The header, if its checksum (which covers the prefix too) matches; FrameFault if not."""
    if len(header_bytes) < prefix.header_length:
        raise FrameFault("the file ends inside a frame's header", truncated=True)
    (crc,) = _CRC.unpack_from(prefix.raw, _LAYOUT.size)
    if crc != _header_crc(prefix.raw[: _LAYOUT.size], header_bytes):
        raise FrameFault("the header's checksum does not match")
    try:
        return _HEADERS[prefix.kind].from_json(header_bytes)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise FrameFault(f"the header cannot be read ({type(error).__name__}: {error})", foreign=True) from error


def check_payload(prefix: Prefix, payload: pa.Buffer) -> None:
    """Raises FrameFault unless ``payload`` has the frame's payload length and checksum."""
    if payload.size != prefix.payload_length:
        raise FrameFault("the file ends inside a block's payload", truncated=True)
    if prefix.payload_length and prefix.payload_crc != google_crc32c.value(payload):
        raise FrameFault("the payload's checksum does not match")


def _holds(raw: bytes, header_length: int, header: Callable[[int], bytes]) -> bool:
    """Whether the checksum of prefix and header is right."""
    if not 0 < header_length <= MAX_HEADER_BYTES:
        return False
    (crc,) = _CRC.unpack_from(raw, _LAYOUT.size)
    return bool(crc == _header_crc(raw[: _LAYOUT.size], header(header_length)))


def _with_version(raw: bytes) -> bytes:
    return raw[:VERSION_OFFSET] + bytes([VERSION]) + raw[VERSION_OFFSET + 1 :]


def _header_crc(layout: bytes, header_bytes: bytes) -> int:
    return int(google_crc32c.extend(google_crc32c.value(layout), header_bytes))
