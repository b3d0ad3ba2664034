"""A real process, really killed: what it was told is durable is there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from headrace.blocks import BlockHandle, ReceiverId
from headrace.wal.reader import read_blocks
from headrace.wal.recovery import scan_log
from headrace.wal.storage import open_storage
from headrace.wal.writer import WriteAheadLogWriter

ROOT = Path(__file__).parents[3]
WRITER = """
import sys
from headrace.blocks import ReceiverId
from tests.support.records import make_block
from headrace.wal.storage import open_storage
from headrace.wal.writer import SegmentSettings, WriteAheadLogWriter

writer = WriteAheadLogWriter(
    open_storage(sys.argv[1]), "log", ReceiverId("flights", "kafka", 0), 1, segments=SegmentSettings(200_000)
)
at = 0
while True:
    batch, ranges = make_block([b"%d" % i for i in range(at, at + 5000)], from_offset=at)
    handle = writer.write(batch, ranges, cut_time_ms=0, last_accepted_sequence=None).handle
    print(handle.segment, handle.offset, handle.length, flush=True)
    at += 5000
"""
ENOUGH = 15


def test_what_a_killed_writer_had_acknowledged_is_there(tmp_path: Path) -> None:
    acknowledged = []
    command = [sys.executable, "-c", WRITER, str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            segment, offset, length = line.split()
            acknowledged.append(BlockHandle(segment, int(offset), int(length)))
            if len(acknowledged) == ENOUGH:
                # Kill -9 in the middle of the next write, as likely as not.
                process.kill()
    log = open_storage(str(tmp_path / "log"))
    blocks = list(read_blocks(log, acknowledged))
    assert [block.header.sequence for block in blocks] == list(range(len(acknowledged)))
    values = [value.as_py() for block in blocks for value in block.batch["value"]]
    assert values == [b"%d" % i for i in range(5000 * len(acknowledged))]
    # The next epoch takes over, whatever the kill left at the end.
    WriteAheadLogWriter(log, "", ReceiverId("flights", "kafka", 0), 2)
    scan = scan_log(log)
    assert len(list(scan)) >= len(acknowledged)
    assert scan.torn_tails == []
