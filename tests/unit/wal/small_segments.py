"""Segments of a few small blocks: written by the writer, or laid out frame by frame."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import pytest
from tests.support.faulty_storage import FaultyStorage
from tests.support.memory_storage import MemoryStorage
from tests.support.records import make_block

from headrace.blocks import BlockInfo, ReceiverId
from headrace.clock import ManualClock
from headrace.wal import frame, scan
from headrace.wal.frame import AnyHeader, Codec, FrameHeader, SegmentEnd, SegmentHeader, SegmentName, encode
from headrace.wal.scan import RecoveryMode
from headrace.wal.storage import LocalStorage
from headrace.wal.writer import SegmentSettings, WriteAheadLogWriter

RECEIVER = ReceiverId("flights", "kafka", 0)
PATH = SegmentName("kafka", 0, 1, 0, 1_700_000_000_000).path
OTHER = SegmentName("kafka", 0, 1, 1, 1_700_000_000_000).path
SKIP = RecoveryMode.SKIP_ANY_CORRUPTED_RECORDS
ABSOLUTE = RecoveryMode.ABSOLUTE_CONSISTENCY
PASSING = [mode for mode in RecoveryMode if mode.passes_over]
# What a compressed buffer begins with.
CODEC_MAGIC: dict[Codec, bytes] = {"zstd": bytes.fromhex("28b52ffd"), "lz4": bytes.fromhex("04224d18")}


def open_writer(storage: MemoryStorage | FaultyStorage | LocalStorage, codec: Codec = "zstd") -> WriteAheadLogWriter:
    return WriteAheadLogWriter(
        storage, "", RECEIVER, 1, clock=ManualClock(1_700_000_000_000), segments=SegmentSettings(codec=codec)
    )


def value_of(at: int, size: int) -> bytes:
    """The value of a block that `write` writes."""
    return Random(at).randbytes(size)


def write(writer: WriteAheadLogWriter, sizes: Sequence[int]) -> list[BlockInfo]:
    blocks = []
    for at, size in enumerate(sizes):
        batch, ranges = make_block([value_of(at, size)], from_offset=at)
        frame = writer.write(batch, ranges, cut_time_ms=0, last_accepted_sequence=None)
        blocks.append(BlockInfo(RECEIVER, 1, frame.sequence, 0, frame.handle, ranges, 1, frame.payload_bytes))
    return blocks


def opening() -> SegmentHeader:
    return SegmentHeader(RECEIVER, 1, 0, 1_700_000_000_000, 0, None, {}, ())


def block(sequence: int) -> FrameHeader:
    return FrameHeader(RECEIVER, 1, sequence, None, 0, make_block([b"x"], from_offset=sequence)[1], 1, 0)


def ending() -> SegmentEnd:
    return SegmentEnd(RECEIVER, 1, 1, 1, None, 1_700_000_000_001)


def lay_out(headers: Sequence[AnyHeader], path: str = PATH) -> tuple[MemoryStorage, list[int]]:
    """A segment of these frames, each at its own place, and where they start."""
    data, starts = b"", []
    payload = encode(make_block([b"x"])[0])
    for header in headers:
        starts.append(len(data))
        given = payload if isinstance(header, FrameHeader) else None
        head, body = frame.build(header, given, segment=frame.segment_id(path), offset=len(data))
        data += head + (b"" if body is None else body.to_pybytes())
    storage = MemoryStorage()
    storage.write_atomically(path, data)
    return storage, starts


def fetch_at_a_time(monkeypatch: pytest.MonkeyPatch, window_bytes: int) -> None:
    """Have scans read so many bytes ahead: the default is bound to its parameter, not looked up by its name."""
    assert scan.Window.__init__.__kwdefaults__ is not None
    monkeypatch.setitem(scan.Window.__init__.__kwdefaults__, "read_ahead", window_bytes)
