"""How fast the log takes blocks: encode, write and fdatasync, as one receiver does them one after the other.

    python -m benchmarks.wal_write [--directory DIR] [--records 20000 40000 80000] [--codec zstd lz4] [--seconds 3]

Records are JSON of about 190 bytes. Prints, per block size and codec, records/s, MB/s (of Arrow memory and of disk),
the milliseconds of a block's encoding and of its writing (with the sync), and the rate of reading by handle.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
from tests.support.records import TOPIC_ID, make_block

from headrace.blocks import BlockHandle, OffsetRange, ReceiverId, TopicPartition
from headrace.wal.frame import Codec, encode
from headrace.wal.reader import read_blocks
from headrace.wal.storage import open_storage
from headrace.wal.writer import SegmentSettings, WriteAheadLogWriter

PARTITIONS = 4


@dataclass(frozen=True)
class Measured:
    """One block size and codec; times are medians in milliseconds."""

    codec: str
    records: int
    records_per_second: float
    arrow_mb_per_second: float
    disk_mb_per_second: float
    write_ms: float
    worst_write_ms: float
    encode_ms: float
    cpu_seconds_per_million: float
    read_records_per_second: float


def sample(records: int) -> tuple[pa.RecordBatch, tuple[OffsetRange, ...]]:
    """A block of flight-like JSON values, a quarter of it from each partition."""
    draw = random.Random(190)
    values = [
        json.dumps(
            {
                "flight": f"HR{draw.randrange(10_000)}",
                "origin": draw.choice(["EWR", "JFK", "LGA"]),
                "destination": draw.choice(["ATL", "BOS", "IAH", "LAX", "MIA", "ORD", "SFO"]),
                "departure": 1_700_000_000_000 + 37 * i,
                "delay": round(draw.gauss(10, 30), 2),
                "tail": f"N{draw.randrange(99_999):05d}",
                "distance": draw.randrange(100, 5000),
                "note": f"{draw.getrandbits(128):032x}",
            }
        ).encode()
        for i in range(records)
    ]
    keys: list[bytes | None] = [b"HR%d" % draw.randrange(10_000) for _ in range(records)]
    quarter = records // PARTITIONS
    blocks = [
        make_block(values[p * quarter : (p + 1) * quarter], keys=keys[p * quarter : (p + 1) * quarter], partition=p)[0]
        for p in range(PARTITIONS)
    ]
    ranges = tuple(OffsetRange(TopicPartition("flights", TOPIC_ID, p), 0, quarter, quarter) for p in range(PARTITIONS))
    (batch,) = pa.Table.from_batches(blocks).combine_chunks().to_batches()
    return batch, ranges


def measure(directory: Path, records: int, codec: Codec, seconds: float) -> Measured:
    """Write blocks for ``seconds``, then read the last few back."""
    batch, ranges = sample(records)
    storage = open_storage(str(directory))
    segments = SegmentSettings(codec=codec)
    writer = WriteAheadLogWriter(storage, "log", ReceiverId("benchmark", "kafka", 0), 1, segments=segments)
    encode_ms = []
    for _ in range(5):
        started = time.perf_counter()
        encode(batch, codec)
        encode_ms.append((time.perf_counter() - started) * 1000)
    times: list[float] = []
    handles: list[BlockHandle] = []
    on_disk = 0
    cpu = time.process_time()
    begin = time.perf_counter()
    while time.perf_counter() - begin < seconds:
        started = time.perf_counter()
        written = writer.write(batch, ranges, cut_time_ms=0, last_accepted_sequence=len(handles) - 1)
        times.append(time.perf_counter() - started)
        handles.append(written.handle)
        on_disk += written.handle.length
    elapsed = time.perf_counter() - begin
    cpu = time.process_time() - cpu
    writer.close()
    log = storage.below("log")
    started = time.perf_counter()
    got = sum(block.batch.num_rows for block in read_blocks(log, handles[-20:]))
    reading = time.perf_counter() - started
    total = batch.num_rows * len(handles)
    return Measured(
        codec=codec,
        records=records,
        records_per_second=total / elapsed,
        arrow_mb_per_second=batch.nbytes * len(handles) / elapsed / 1e6,
        disk_mb_per_second=on_disk / elapsed / 1e6,
        write_ms=statistics.median(times) * 1000,
        worst_write_ms=max(times) * 1000,
        encode_ms=statistics.median(encode_ms),
        cpu_seconds_per_million=cpu / total * 1e6,
        read_records_per_second=got / reading,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, help="where to write; a temporary directory by default")
    parser.add_argument("--records", type=int, nargs="+", default=[20_000, 40_000, 80_000])
    parser.add_argument("--codec", nargs="+", default=["zstd", "lz4"])
    parser.add_argument("--seconds", type=float, default=3.0)
    arguments = parser.parse_args()
    print(f"{os.cpu_count()} cores, pyarrow {pa.__version__}; load {os.getloadavg()[0]:.1f}")
    print(
        "codec  records  records/s  Arrow MB/s  disk MB/s  block ms  worst  of it encode  CPU s/million  read records/s"
    )
    for codec in arguments.codec:
        for records in arguments.records:
            directory = Path(tempfile.mkdtemp(prefix="headrace-wal-", dir=arguments.directory))
            try:
                m = measure(directory, records, codec, arguments.seconds)
            finally:
                shutil.rmtree(directory)
            print(
                f"{m.codec:5} {m.records:8,} {m.records_per_second:10,.0f} {m.arrow_mb_per_second:11.0f} "
                f"{m.disk_mb_per_second:10.0f} {m.write_ms:9.1f} {m.worst_write_ms:6.1f} {m.encode_ms:10.1f} "
                f"{m.cpu_seconds_per_million:14.2f} {m.read_records_per_second:15,.0f}"
            )


if __name__ == "__main__":
    main()
