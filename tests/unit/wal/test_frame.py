"""The format on disk: what is written is what is read, and everything else is told apart."""

from __future__ import annotations

import json
import struct
from dataclasses import replace

import pyarrow as pa
import pytest

from headrace.blocks import OffsetRange, ReceiverId, TopicPartition
from headrace.wal import frame
from headrace.wal.errors import FrameTooLongError
from headrace.wal.frame import (
    AnyHeader,
    FrameFault,
    FrameHeader,
    FrameKind,
    PreviousSegment,
    PreviousState,
    SegmentEnd,
    SegmentHeader,
)
from headrace.wal.reader import read_frame

RECEIVER = ReceiverId("flüge", "kafka", 3)
BLOCK = FrameHeader(
    receiver=RECEIVER,
    epoch=7,
    sequence=41,
    last_accepted_sequence=39,
    cut_time_ms=1_700_000_000_200,
    ranges=(
        OffsetRange(TopicPartition("a", "id-a", 0), 0, 10, 10),
        OffsetRange(TopicPartition("a", "id-a", 1), 5, 22, 4, leader_epoch=6),
        OffsetRange(TopicPartition("b", "id-b", 0, 2), 1 << 62, (1 << 62) + 1, 1),
    ),
    records=15,
    raw_bytes=1234,
)
HEADER = SegmentHeader(
    receiver=RECEIVER,
    epoch=7,
    number=2,
    opened_ms=1_700_000_000_000,
    next_sequence=41,
    last_accepted_sequence=None,
    positions={TopicPartition("a", "id-a", 0): 10, TopicPartition("b", "id-b", 0, 2): 0},
    previous=(PreviousSegment("x/1.wal", 100, PreviousState.POISONED),),
)
END = SegmentEnd(
    receiver=RECEIVER, epoch=7, blocks=3, next_sequence=44, last_accepted_sequence=43, closed_ms=1_700_000_060_000
)
PAYLOAD = pa.py_buffer(b"payload" * 30)


def whole(header: AnyHeader = BLOCK, payload: pa.Buffer | None = PAYLOAD, offset: int = 100) -> bytes:
    head, body = frame.build(header, payload, segment=9, offset=offset)
    return head + (b"" if body is None else body.to_pybytes())


@pytest.mark.parametrize(
    ("header", "payload", "kind"),
    [
        (BLOCK, PAYLOAD, FrameKind.BLOCK),
        (replace(BLOCK, event_time_ms=1_699_999_990_000), PAYLOAD, FrameKind.BLOCK),
        (HEADER, None, FrameKind.SEGMENT_HEADER),
        (END, None, FrameKind.SEGMENT_END),
    ],
)
def test_round_trip(header: AnyHeader, payload: pa.Buffer | None, kind: FrameKind) -> None:
    data = whole(header, payload)
    read = read_frame(pa.py_buffer(data + b"what follows"), segment=9, offset=100)
    assert (read.kind, read.header, read.length) == (kind, header, len(data))
    assert read.payload.to_pybytes() == (b"" if payload is None else payload.to_pybytes())


def test_the_format_is_the_one_that_is_documented() -> None:
    """Logs outlive releases: a change here needs a new version."""
    data = whole()
    magic, version, kind, zero, segment, offset, header_length, payload_length = struct.unpack_from("<4sBBHQQII", data)
    assert (magic, version, kind, zero, segment, offset) == (b"HRWL", 1, 2, 0, 9, 100)
    assert len(data) == 40 + header_length + payload_length
    assert data[40:].startswith(b'{"stream":"fl\xc3\xbcge","input":"kafka","receiver":3,"epoch":7,"sequence":41,')
    assert frame.segment_id("kafka-0/0000000001-000000-1700000000000.wal") == 0xF356351F1B2E5B49


def test_headers_of_other_releases_are_read() -> None:
    """Before there were batches by timestamp, and after whatever comes next."""
    fields = json.loads(BLOCK.to_json())
    assert "event_ms" not in fields
    assert FrameHeader.from_json(json.dumps({**fields, "invented": "later"}).encode()) == BLOCK


def test_every_flipped_bit_is_noticed() -> None:
    data = whole(payload=pa.py_buffer(b"p" * 8))
    for bit in range(len(data) * 8):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(FrameFault):
            read_frame(pa.py_buffer(bytes(damaged)), segment=9, offset=100)


def test_every_cut_is_noticed_as_one() -> None:
    data = whole(payload=pa.py_buffer(b"p" * 8))
    for length in range(len(data)):
        with pytest.raises(FrameFault) as fault:
            read_frame(pa.py_buffer(data[:length]), segment=9, offset=100)
        assert fault.value.truncated


def test_the_header_of_a_damaged_payload_names_what_is_lost() -> None:
    data = bytearray(whole())
    data[-1] ^= 1
    with pytest.raises(FrameFault) as fault:
        read_frame(pa.py_buffer(bytes(data)), segment=9, offset=100)
    assert fault.value.header == BLOCK
    assert fault.value.end == 100 + len(data)


@pytest.mark.parametrize(("segment", "offset"), [(8, 100), (9, 0), (9, 101)])
def test_a_frame_belongs_to_one_place(segment: int, offset: int) -> None:
    with pytest.raises(FrameFault, match="another place"):
        read_frame(pa.py_buffer(whole()), segment=segment, offset=offset)


@pytest.mark.parametrize(
    ("header_length", "payload_length"), [(0, 0), (0xFFFFFFFF, 0), (100, 0xFFFFFFFF), (frame.MAX_HEADER_BYTES + 1, 1)]
)
def test_lengths_are_bounded_before_they_are_used(header_length: int, payload_length: int) -> None:
    raw = bytearray(whole()[: frame.PREFIX_BYTES])
    struct.pack_into("<II", raw, 24, header_length, payload_length)
    with pytest.raises(FrameFault, match="out of bounds"):
        frame.parse_prefix(bytes(raw), segment=9, offset=100)


def test_a_later_format_is_not_guessed_at() -> None:
    raw = bytearray(whole())
    raw[4] = 2
    with pytest.raises(FrameFault, match="version 2 is not known"):
        frame.parse_prefix(bytes(raw), segment=9, offset=100)


def test_too_long_a_frame_is_not_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frame, "MAX_PAYLOAD_BYTES", 100)
    with pytest.raises(FrameTooLongError, match="max_block_bytes"):
        whole()


def test_a_header_of_many_partitions_fits() -> None:
    ranges = tuple(
        OffsetRange(TopicPartition("topic", "id", p), 1_000_000_000, 1_000_000_010, 10) for p in range(20_000)
    )
    header = FrameHeader(RECEIVER, 1, 0, None, 0, ranges, 200_000, 0)
    read = read_frame(pa.py_buffer(whole(header, PAYLOAD)), segment=9, offset=100)
    assert read.header == header
