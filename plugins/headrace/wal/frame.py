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
      40     H  header, JSON in UTF-8
    40+H     P  payload, an Arrow IPC stream of one record batch

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

Headers are JSON, so that ``strings`` can read a log when everything else is lost. Offset ranges are grouped by topic,
since a block may span thousands of partitions:
``[["flights", "<topic id>", 1, [[partition, from, until, records, leader epoch if known], …]], …]``.
A field that was added later is omitted when it has no value, and read as None when it is missing. Readers ignore
unknown fields. So a new field needs a new format version only if older readers must not ignore it.

Payloads are compressed by zstd. Measured on one core with 60,000 JSON records of 185 bytes: zstd's level 1 takes 18 ms
and leaves 3.4 of 14.7 MB; lz4 takes 15 ms and leaves 6.7 MB; level 3 takes 40 ms and leaves no less. Decompression is 9
and 4 ms.

Segments are named by receiver, epoch and number, so that a sorted listing is the order of writing.
"""

from __future__ import annotations

import hashlib
import json
import re
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import Any, Literal
from urllib.parse import quote, unquote

import google_crc32c
import pyarrow as pa

from headrace.blocks import OffsetRange, ReceiverId, TopicPartition
from headrace.wal.errors import FrameTooLongError, PayloadError


class PreviousState(StrEnum):
    """How a writer left the previous segment."""

    CLOSED = "closed"
    """Ended by an end frame; ``length`` is the whole file."""
    POISONED = "poisoned"
    """A write or sync failed after ``length`` good bytes; what follows them was never acknowledged."""
    INHERITED = "inherited"
    """An earlier epoch's last segment; the new epoch's writer found ``length`` bytes that belong to the log."""


@dataclass(frozen=True, slots=True)
class PreviousSegment:
    """A segment before this one. ``length`` is the number of its bytes that belong to the log (0: it may not exist)."""

    segment: str
    length: int
    state: PreviousState


@dataclass(frozen=True, slots=True)
class FrameHeader:
    """The header of a block's frame.

    ``last_accepted_sequence`` is the sequence of the newest frame of this epoch that the ledger had accepted when
    this one was written, None if there was none. ``raw_bytes`` is the block's size in memory, before compression.
    ``event_time_ms`` is that of `BlockInfo`: a rebuild of a lost ledger needs it to find the batch of a block of a
    stream by timestamp. ``source_position`` is that of `BlockInfo`.
    """

    receiver: ReceiverId
    epoch: int
    sequence: int
    last_accepted_sequence: int | None
    cut_time_ms: int
    ranges: tuple[OffsetRange, ...]
    records: int
    raw_bytes: int
    event_time_ms: int | None = None
    source_position: str | None = None
    written_with: int | None = None
    """The sequence of the first frame of the write that wrote this one; None: this is the first."""

    @property
    def first_sequence(self) -> int:
        """The sequence of the first frame of the same write. The ledger accepts all frames of a write or none."""
        return self.sequence if self.written_with is None else self.written_with

    def to_json(self) -> bytes:
        return _dump(
            {
                **_dump_writer(self.receiver, self.epoch),
                "sequence": self.sequence,
                "accepted": self.last_accepted_sequence,
                "cut_ms": self.cut_time_ms,
                **({} if self.event_time_ms is None else {"event_ms": self.event_time_ms}),
                **({} if self.source_position is None else {"source_position": self.source_position}),
                **({} if self.written_with is None else {"written_with": self.written_with}),
                "records": self.records,
                "raw_bytes": self.raw_bytes,
                "ranges": _dump_ranges(self.ranges),
            }
        )

    @classmethod
    def from_json(cls, data: bytes) -> FrameHeader:
        fields = json.loads(data)
        return cls(
            receiver=_load_receiver(fields),
            epoch=fields["epoch"],
            sequence=fields["sequence"],
            last_accepted_sequence=fields["accepted"],
            cut_time_ms=fields["cut_ms"],
            ranges=_load_ranges(fields["ranges"]),
            records=fields["records"],
            raw_bytes=fields["raw_bytes"],
            event_time_ms=fields.get("event_ms"),
            source_position=fields.get("source_position"),
            written_with=fields.get("written_with"),
        )


@dataclass(frozen=True, slots=True)
class SegmentHeader:
    """The header of a segment's first frame: its writer, the writer's positions and the segments before it.

    ``positions`` are the next offsets of the writer's partitions when it opened the segment. ``previous`` are all
    segments since the last one that has a readable header, oldest first.
    """

    receiver: ReceiverId
    epoch: int
    number: int
    opened_ms: int
    next_sequence: int
    last_accepted_sequence: int | None
    positions: Mapping[TopicPartition, int]
    previous: tuple[PreviousSegment, ...]

    def to_json(self) -> bytes:
        return _dump(
            {
                **_dump_writer(self.receiver, self.epoch),
                "number": self.number,
                "opened_ms": self.opened_ms,
                "next_sequence": self.next_sequence,
                "accepted": self.last_accepted_sequence,
                "positions": [[*_dump_partition(tp), offset] for tp, offset in sorted(self.positions.items())],
                "previous": [[p.segment, p.length, p.state.value] for p in self.previous],
            }
        )

    @classmethod
    def from_json(cls, data: bytes) -> SegmentHeader:
        fields = json.loads(data)
        return cls(
            receiver=_load_receiver(fields),
            epoch=fields["epoch"],
            number=fields["number"],
            opened_ms=fields["opened_ms"],
            next_sequence=fields["next_sequence"],
            last_accepted_sequence=fields["accepted"],
            positions={_load_partition(tp): offset for *tp, offset in fields["positions"]},
            previous=tuple(PreviousSegment(s, length, PreviousState(state)) for s, length, state in fields["previous"]),
        )


@dataclass(frozen=True, slots=True)
class SegmentEnd:
    """The header of a segment's last frame: the writer closed the segment after ``blocks`` blocks; no byte follows.

    ``last_accepted_sequence`` is None also when the writer could not know it: the end frame was written together with
    the last block.
    """

    receiver: ReceiverId
    epoch: int
    blocks: int
    next_sequence: int
    last_accepted_sequence: int | None
    closed_ms: int

    def to_json(self) -> bytes:
        return _dump(
            {
                **_dump_writer(self.receiver, self.epoch),
                "blocks": self.blocks,
                "next_sequence": self.next_sequence,
                "accepted": self.last_accepted_sequence,
                "closed_ms": self.closed_ms,
            }
        )

    @classmethod
    def from_json(cls, data: bytes) -> SegmentEnd:
        fields = json.loads(data)
        return cls(
            receiver=_load_receiver(fields),
            epoch=fields["epoch"],
            blocks=fields["blocks"],
            next_sequence=fields["next_sequence"],
            last_accepted_sequence=fields["accepted"],
            closed_ms=fields["closed_ms"],
        )


AnyHeader = FrameHeader | SegmentHeader | SegmentEnd


def _dump(fields: dict[str, Any]) -> bytes:
    return json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode()


def _dump_writer(receiver: ReceiverId, epoch: int) -> dict[str, Any]:
    return {"stream": receiver.stream, "input": receiver.input_id, "receiver": receiver.index, "epoch": epoch}


def _load_receiver(fields: dict[str, Any]) -> ReceiverId:
    return ReceiverId(fields["stream"], fields["input"], fields["receiver"])


def _dump_partition(partition: TopicPartition) -> list[Any]:
    return [partition.topic, partition.topic_id, partition.incarnation, partition.partition]


def _load_partition(fields: list[Any]) -> TopicPartition:
    topic, topic_id, incarnation, partition = fields
    return TopicPartition(topic, topic_id, partition, incarnation)


def _dump_ranges(ranges: tuple[OffsetRange, ...]) -> list[Any]:
    topics: dict[tuple[str, str, int], list[list[int]]] = {}
    for r in ranges:
        tp = r.partition
        topics.setdefault((tp.topic, tp.topic_id, tp.incarnation), []).append(
            [
                tp.partition,
                *r.numbers,
            ]
        )
    return [[*topic, partitions] for topic, partitions in topics.items()]


def _load_ranges(topics: list[Any]) -> tuple[OffsetRange, ...]:
    return tuple(
        OffsetRange(TopicPartition(topic, topic_id, partition, incarnation), *numbers)
        for topic, topic_id, incarnation, partitions in topics
        for partition, *numbers in partitions
    )


Codec = Literal["zstd", "lz4"]

# The names are those of Spark's Kafka source, so that a transform works on both.
RECORD_SCHEMA: pa.Schema = pa.schema(
    [
        pa.field("key", pa.binary()),
        pa.field("value", pa.binary()),
        pa.field("topic", pa.string()),
        pa.field("partition", pa.int32()),
        pa.field("offset", pa.int64()),
        pa.field("timestamp", pa.timestamp("ms", tz="UTC")),
        pa.field("timestampType", pa.int8()),
        pa.field("headers", pa.list_(pa.struct([pa.field("key", pa.string()), pa.field("value", pa.binary())]))),
        pa.field("incarnation", pa.int32()),
    ]
)

# What Arrow adds to the bytes of a block's records: padding, and the dictionary of its topics.
_SLACK_BYTES = 1 << 20
# Kafka's topics have up to 249 characters. Each record's row repeats what the dictionary has once.
_LONGEST_TOPIC = 1_000
_DICTIONARY_BATCH, _RECORD_BATCH = 2, 3

# One thread: the cores are shared with the consumer and the broker, and more threads save only 15 % of the time.
_READ_OPTIONS = pa.ipc.IpcReadOptions(use_threads=False)


def encode(records: pa.RecordBatch, codec: Codec = "zstd") -> pa.Buffer:
    """Encode the records (``RECORD_SCHEMA``; ``topic`` may be dictionary-encoded) as compressed bytes.

    Raises PayloadError when a column is missing, surplus or of another type.
    """
    _check(records.schema)
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression=codec, use_threads=False)
    with pa.ipc.new_stream(sink, records.schema, options=options) as stream:
        stream.write_batch(records)
    return sink.getvalue()


def decode(data: bytes | pa.Buffer, raw_bytes: int | None = None) -> pa.RecordBatch:
    """Decode the record batch in ``data``, exactly as ``RECORD_SCHEMA`` (``topic`` plain: Spark reads no dictionaries).

    ``raw_bytes``: the size of the records in memory; what would decompress to more is refused before it does.

    Raises PayloadError when the bytes hold something else.
    """
    try:
        if raw_bytes is not None and (size := decompressed_bytes(data)) > raw_bytes + _SLACK_BYTES:
            raise PayloadError(f"A block's payload would take {size:,} bytes, and its records have {raw_bytes:,}.")
        with pa.ipc.open_stream(data, options=_READ_OPTIONS) as stream:
            batch = stream.read_next_batch()
        # A checksum detects damage, not malice: Arrow would follow offsets that lead out of their buffers.
        batch.validate(full=True)
        _check(batch.schema)
    except (pa.ArrowException, OSError, StopIteration, EOFError, UnicodeDecodeError, struct.error) as error:
        raise PayloadError(f"A block's payload is no Arrow stream of one record batch: {error}.") from error
    if pa.types.is_dictionary(batch.schema.field("topic").type):
        position = batch.schema.get_field_index("topic")
        if any(len(topic.as_py() or "") > _LONGEST_TOPIC for topic in batch.column(position).dictionary):
            raise PayloadError(f"A block has a topic of more than {_LONGEST_TOPIC:,} characters.")
        batch = batch.set_column(position, RECORD_SCHEMA.field("topic"), batch.column(position).cast(pa.string()))
    if batch.schema.names == RECORD_SCHEMA.names:
        return batch
    return batch.select(RECORD_SCHEMA.names)


def _check(schema: pa.Schema) -> None:
    if schema.equals(RECORD_SCHEMA):
        return
    if sorted(schema.names) != sorted(RECORD_SCHEMA.names):
        raise PayloadError(f"A block's columns are {RECORD_SCHEMA.names}, got {schema.names}.")
    for expected in RECORD_SCHEMA:
        got = schema.field(expected.name).type
        is_topic_dictionary = expected.name == "topic" and pa.types.is_dictionary(got) and got.value_type == pa.string()
        if got != expected.type and not is_topic_dictionary:
            raise PayloadError(f"A block's column {expected.name!r} is {expected.type}, got {got}.")


def decompressed_bytes(data: bytes | pa.Buffer) -> int:
    """The memory that the buffers of the Arrow stream in ``data`` will take, by what is written before each of them.

    Arrow allocates that much before it decompresses. pyarrow does not show it, so the messages' tables (FlatBuffers)
    are read here. Raises struct.error if they lead out of the message.
    """
    return sum(
        size
        for message in pa.ipc.MessageReader.open_stream(data)
        for size in _buffer_sizes(message.metadata, message.body)
    )


def _buffer_sizes(metadata: pa.Buffer, body: pa.Buffer | None) -> Iterator[int]:
    # Of Message: 1 is the header's type, 2 the header. Of DictionaryBatch: 1 is its RecordBatch. Of RecordBatch: 2 are
    # the buffers, 3 is the compression.
    message = _follow(metadata, 0)
    kind_at = _field(metadata, message, 1)
    kind = struct.unpack_from("<B", metadata, kind_at)[0] if kind_at else 0
    if kind not in (_DICTIONARY_BATCH, _RECORD_BATCH) or body is None:
        return
    batch = _follow(metadata, _field(metadata, message, 2))
    if kind == _DICTIONARY_BATCH:
        batch = _follow(metadata, _field(metadata, batch, 1))
    is_compressed = bool(_field(metadata, batch, 3))
    buffers = _follow(metadata, _field(metadata, batch, 2))
    (count,) = struct.unpack_from("<I", metadata, buffers)
    for number in range(count):
        start, length = struct.unpack_from("<qq", metadata, buffers + 4 + 16 * number)
        if is_compressed and length >= 8:
            (size,) = struct.unpack_from("<q", body, start)
            # -1: this buffer is not compressed.
            yield max(size, length)
        else:
            yield length


def _field(table: pa.Buffer, at: int, index: int) -> int:
    """Where a field of the table at ``at`` is; 0 if the table does not have it."""
    vtable = at - struct.unpack_from("<i", table, at)[0]
    (size,) = struct.unpack_from("<H", table, vtable)
    place = 4 + 2 * index
    offset = struct.unpack_from("<H", table, vtable + place)[0] if place < size else 0
    return at + offset if offset else 0


def _follow(table: pa.Buffer, at: int) -> int:
    return at + int(struct.unpack_from("<I", table, at)[0])


SUFFIX = ".wal"
_NAME = re.compile(
    r"(?P<input>[^/]+)-(?P<index>\d+)/"
    r"(?P<epoch>\d{10,})-(?P<number>\d{6,})-(?P<opened>\d{13,})(-(?P<token>[0-9a-f]{16}))?\.wal"
)


@dataclass(frozen=True, slots=True, order=True)
class SegmentName:
    """The parts of a segment's name. Sorts by receiver, then in the order of writing.

    ``token`` is 16 random hexadecimal digits in an object store, and empty in a folder. With it, no two logs have a
    segment of the same name, not even a stream's log and that of the same stream after it was removed and created
    again. Local copies of blocks rely on this (`local_copies`).
    """

    input_id: str
    index: int
    epoch: int
    number: int
    opened_ms: int
    token: str = ""

    @property
    def directory(self) -> str:
        """The directory of its receiver, below the log's root."""
        return _directory(self.input_id, self.index)

    @property
    def path(self) -> str:
        """The segment's path below the log's root, as in handles."""
        token = f"-{self.token}" if self.token else ""
        return f"{self.directory}/{self.epoch:010d}-{self.number:06d}-{self.opened_ms:013d}{token}{SUFFIX}"

    @classmethod
    def parse(cls, path: str) -> SegmentName | None:
        """Parse ``path``; None when it is not a segment's."""
        match = _NAME.fullmatch(path)
        if match is None:
            return None
        return cls(
            unquote(match["input"]),
            int(match["index"]),
            int(match["epoch"]),
            int(match["number"]),
            int(match["opened"]),
            match["token"] or "",
        )


def receiver_directory(receiver: ReceiverId) -> str:
    """The directory below the log's root that holds a receiver's segments."""
    return _directory(receiver.input_id, receiver.index)


def _directory(input_id: str, index: int) -> str:
    return f"{quote(input_id, safe='')}-{index}"


def segments_in(paths: list[str]) -> list[SegmentName]:
    """The segments among ``paths``, in the order of writing."""
    return sorted(name for path in paths if (name := SegmentName.parse(path)) is not None)


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
