"""What local copies of a log in an object store save when a batch is read, and cost when a block is stored.

    python -m benchmarks.local_copies [--blocks 50] [--records 20000] [--rounds 3] [--json]

Starts an S3 server for tests (moto) on this machine, writes blocks of 190-byte records, and reads them back in one
process without Spark: from the store, and from the copies. The counts of both are compared. The server shares the
machine's cores. A store in a network has other times.
"""

from __future__ import annotations

import argparse
import logging
import os
import statistics
import sys
import tempfile
import time
import uuid
from pathlib import Path

import boto3
from benchmarks.measures import Measure, print_measures
from moto.server import ThreadedMotoServer
from tests.support.records import make_block

from headrace.blocks import BlockHandle, ReceiverId
from headrace.wal.local_copies import BlockCopies, CopySettings
from headrace.wal.log_storage import LogStorage
from headrace.wal.reader import read_blocks
from headrace.wal.storage import open_storage
from headrace.wal.writer import WriteAheadLogWriter

BUCKET = "headrace"


def start_server() -> ThreadedMotoServer:
    """Start a server with an empty bucket, and set the environment by which s3fs finds it."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    os.environ |= {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    boto3.client("s3").create_bucket(Bucket=BUCKET)
    return server


def store(log: LogStorage, copies: BlockCopies, blocks: int, records: int) -> tuple[list[BlockHandle], float, float]:
    """Write the blocks and their copies. Returns the handles, and the median seconds of a block and of a copy."""
    writer = WriteAheadLogWriter(log, "", ReceiverId("bench", "records", 0), 1)
    handles, stored, copied = [], [], []
    for number in range(blocks):
        values = [b'{"id":%d,"pad":"%b"}' % (number * records + each, b"x" * 160) for each in range(records)]
        batch, ranges = make_block(values, from_offset=number * records)
        frame = writer.write(batch, ranges, cut_time_ms=0, last_accepted_sequence=None)
        began = time.monotonic()
        copies.write(frame.handle, frame.parts)
        copied.append(time.monotonic() - began)
        stored.append(frame.seconds)
        handles.append(frame.handle)
    return handles, statistics.median(stored), statistics.median(copied)


def read(log: LogStorage, handles: list[BlockHandle], copies: BlockCopies | None) -> tuple[float, int]:
    """Read the blocks. Returns the seconds and the number of records."""
    began = time.monotonic()
    records = sum(block.batch.num_rows for block in read_blocks(log, handles, copies))
    return time.monotonic() - began, records


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=50)
    parser.add_argument("--records", type=int, default=20_000, help="in each block")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    from_copies, from_store, stored, copied = [], [], [], []
    server = start_server()
    try:
        for number in range(options.rounds):
            with tempfile.TemporaryDirectory(prefix="headrace-bench-") as folder:
                log = open_storage(f"s3://{BUCKET}/{uuid.uuid4().hex}")
                settings = CopySettings(4 << 30, str(Path(folder)))
                copies = BlockCopies(log.url, settings)
                handles, store_seconds, copy_seconds = store(log, copies, options.blocks, options.records)
                plain_seconds, plain = read(log, handles, None)
                copy_read_seconds, read_records = read(log, handles, copies)
                assert plain == read_records == options.blocks * options.records
                assert copies.counts.hits == options.blocks
            from_copies.append(copy_read_seconds)
            from_store.append(plain_seconds)
            stored.append(store_seconds)
            copied.append(copy_seconds)
            print(f"{number}: read {plain_seconds:.3f} s, from copies {copy_read_seconds:.3f} s", file=sys.stderr)
    finally:
        server.stop()
    size = f"{options.blocks} blocks of {options.records} records"
    print_measures(
        [
            Measure(f"read {size} from copies", "s", tuple(from_copies), "from the store", tuple(from_store)),
            Measure("copy a block", "s", tuple(copied), "store it", tuple(stored)),
        ],
        as_json=options.json,
    )


if __name__ == "__main__":
    main()
