"""Segments of the log: they are written as the frozen ones were, and what these hold is read.

Payloads are compared by their records: another version of a codec may compress to other bytes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
from tests.support.records import make_block
from tests.support.segments import writer_options
from tests.unit.pins.freezing import stored

from headrace.blocks import OffsetRange, ReceiverId
from headrace.clock import ManualClock
from headrace.wal import frame
from headrace.wal.frame import decode
from headrace.wal.log_storage import LogStorage
from headrace.wal.reader import Frame, read_frame
from headrace.wal.storage import open_storage
from headrace.wal.writer import WriteAheadLogWriter

LOG = "shop/log"
RECEIVER = ReceiverId("shop", "clicks", 0)


def write(storage: LogStorage, epoch: int, **options: Any) -> str:
    """Write a segment of two blocks, of which the second has everything that a header can have; return its path."""
    clock = ManualClock(1_700_000_000_000 + epoch * 1_000)
    headers: list[Any] = [[{"key": "h", "value": b"1"}, {"key": "h", "value": None}], None, []]
    values, first = [b"{}", None, "é".encode()], 10 * epoch
    full, (range_,) = make_block(values, topic="clicks", from_offset=first, keys=[b"k", None, b""], headers=headers)
    short, (after,) = make_block([b"\x00\xff"], topic="clicks", from_offset=first + 3)
    # An offset without a record, as a transaction leaves it.
    after = OffsetRange(after.partition, after.from_offset, after.until_offset + 1, 1, leader_epoch=4)
    writer = WriteAheadLogWriter(
        storage,
        LOG,
        RECEIVER,
        epoch,
        clock=clock,
        positions=lambda: {range_.partition: first},
        **writer_options(**options),
    )
    writer.write(full, [range_], cut_time_ms=clock.now_ms(), last_accepted_sequence=None)
    clock.advance(200)
    cut_ms = clock.now_ms()
    written = writer.write(
        short, [after], cut_time_ms=cut_ms, last_accepted_sequence=0, event_time_ms=cut_ms - 5, source_position="[7]"
    )
    path = f"{LOG}/{written.handle.segment}"
    if epoch == 1:
        writer.close(last_accepted_sequence=1)
    return path


def frames(path: str, data: bytes) -> list[tuple[int, Frame]]:
    """The frames of a segment with their offsets."""
    found: list[tuple[int, Frame]] = []
    while (offset := sum(each.length for _, each in found)) < len(data):
        found.append((offset, read_frame(pa.py_buffer(data)[offset:], segment=segment_id(path), offset=offset)))
    return found


def segment_id(path: str) -> int:
    return frame.segment_id(path.removeprefix(f"{LOG}/"))


def test_segments(tmp_path: Path) -> None:
    storage = open_storage(str(tmp_path))
    for epoch, codec in ((1, "zstd"), (2, "lz4")):
        path = write(storage, epoch, codec=codec)
        kept = stored(path, storage.read(path))
        before, now = frames(path, kept), frames(path, storage.read(path))
        assert [(each.kind, each.header) for _, each in now] == [(each.kind, each.header) for _, each in before]
        for (_, written), (offset, each) in zip(now, before, strict=True):
            if each.payload.size:
                assert decode(written.payload).equals(decode(each.payload))
            payload = each.payload if each.payload.size else None
            head, body = frame.build(each.header, payload, segment=segment_id(path), offset=offset)
            assert head + (body.to_pybytes() if body else b"") == kept[offset : offset + each.length]
        # The header of the next segment says how long this one is.
        storage.write_atomically(path, kept)
