"""What storing a block costs while 1, 8 and 32 receivers of one host store blocks at the same time.

    python -m benchmarks.receivers_of_one_host [--receivers 1 8 32] [--seconds 20] [--postgres] [--json]

Each receiver is a process that stores a block of 1,000 records every 200 ms, as a receiver's pushing thread does: write
and sync the log's file, add the block to the ledger. All write to one disk and one ledger (SQLite, or a real Postgres).
Prints, for each number of receivers, how many of the blocks that were due were stored, the median and the 99th
percentile of a block's time in the log and in the ledger, and the processor time of a block. If the times grow, a
shared sync or transaction of all receivers would pay.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import resource
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from pathlib import Path

from tests.support.records import TOPIC_ID, make_block

from headrace.blocks import BlockInfo, OffsetRange, ReceiverId, TopicPartition
from headrace.devstack.postgres import PostgresServer
from headrace.ledger import Ledger
from headrace.ledger.tables import JobLease
from headrace.wal.storage import open_storage
from headrace.wal.writer import WriteAheadLogWriter

STREAM, INPUT = "many", "records"
RECORDS = 1_000
VALUE = b'{"user": "user-00001", "action": "click", "page": "/products/000001", "pad": "' + b"x" * 110 + b'"}'
BLOCK_SECONDS = 0.2


@dataclass(frozen=True)
class Measured:
    """For one number of receivers; times in milliseconds. ``stored`` is a share of the blocks that were due."""

    receivers: int
    stored: float
    log_ms: float
    log_p99_ms: float
    ledger_ms: float
    ledger_p99_ms: float
    cpu_ms_per_block: float


@dataclass(frozen=True)
class Work:
    """What all receivers have in common."""

    ledger_url: str
    storage_url: str
    job: JobLease
    seconds: float


def store_blocks(work: Work, index: int, begin: Barrier, pipe: Connection) -> None:
    """A receiver's process: sends the times of each block in the log and in the ledger, and its processor time."""
    with Ledger.open(work.ledger_url, create=False) as ledger:
        receiver = ReceiverId(STREAM, INPUT, index)
        lease = ledger.receivers.register(ledger.receivers.schedule(work.job, receiver), host="here", lease_ms=600_000)
        writer = WriteAheadLogWriter(open_storage(work.storage_url), "log", receiver, lease.epoch)
        partition = TopicPartition("flights", TOPIC_ID, index)
        records, _ = make_block([VALUE] * RECORDS, partition=index)
        begin.wait()
        used = resource.getrusage(resource.RUSAGE_SELF)
        # Receivers do not cut their blocks at the same moment.
        due = time.monotonic() + BLOCK_SECONDS * (index % 16) / 16
        until = due + work.seconds
        times: list[tuple[float, float]] = []
        accepted: int | None = None
        while due < until:
            time.sleep(max(0.0, due - time.monotonic()))
            if time.monotonic() > until:
                break
            due += BLOCK_SECONDS
            span = OffsetRange(partition, len(times) * RECORDS, (len(times) + 1) * RECORDS, RECORDS)
            began = time.monotonic()
            frame = writer.write(records, (span,), cut_time_ms=now_ms(), last_accepted_sequence=accepted)
            written = time.monotonic()
            ledger.blocks.add(
                lease,
                BlockInfo(
                    receiver=receiver, epoch=lease.epoch, sequence=frame.sequence, cut_time_ms=now_ms(),
                    handle=frame.handle, ranges=(span,), records=RECORDS, payload_bytes=frame.payload_bytes,
                ),
            )  # fmt: skip
            accepted = frame.sequence
            times.append((written - began, time.monotonic() - written))
        now = resource.getrusage(resource.RUSAGE_SELF)
        pipe.send((times, now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime))


def now_ms() -> int:
    return int(time.time() * 1000)


def measure(folder: Path, url: str, receivers: int, seconds: float) -> Measured:
    """Run so many receivers."""
    with Ledger.open(url) as ledger:
        ledger.streams.register(STREAM, "{}", batch_interval_ms=10_000, block_interval_ms=200)
        job = ledger.jobs.acquire(STREAM, holder="benchmark", lease_ms=600_000)
        partitions = {TopicPartition("flights", TOPIC_ID, number): number for number in range(receivers)}
        ledger.topics.observe(job, INPUT, [("flights", TOPIC_ID, receivers)])
        ledger.positions.ensure_all(job, INPUT, dict.fromkeys(partitions, 0))
        ledger.positions.assign(job, INPUT, partitions)
    work = Work(url, str(folder / "storage"), job, seconds)
    context = multiprocessing.get_context("spawn")
    begin = context.Barrier(receivers)
    pipes, processes = [], []
    for index in range(receivers):
        here, there = multiprocessing.Pipe()
        processes.append(context.Process(target=store_blocks, args=(work, index, begin, there)))
        processes[-1].start()
        pipes.append(here)
    answers = [pipe.recv() for pipe in pipes]
    for process in processes:
        process.join()
    in_log = sorted(1000 * log for times, _ in answers for log, _ in times)
    in_ledger = sorted(1000 * ledger for times, _ in answers for _, ledger in times)
    return Measured(
        receivers=receivers,
        stored=round(len(in_log) / (receivers * seconds / BLOCK_SECONDS), 3),
        log_ms=round(statistics.median(in_log), 2),
        log_p99_ms=round(in_log[int(len(in_log) * 0.99)], 2),
        ledger_ms=round(statistics.median(in_ledger), 2),
        ledger_p99_ms=round(in_ledger[int(len(in_ledger) * 0.99)], 2),
        cpu_ms_per_block=round(1000 * sum(cpu for _, cpu in answers) / len(in_log), 2),
    )


@contextlib.contextmanager
def ledger_url(folder: Path, *, postgres: bool) -> Iterator[str]:
    if not postgres:
        yield f"sqlite:///{folder}/ledger.db"
        return
    with PostgresServer(folder / "postgres") as server:
        server.create_database("many")
        yield server.url("many")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--receivers", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--postgres", action="store_true")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    for receivers in options.receivers:
        folder = Path(tempfile.mkdtemp(prefix="headrace-bench-"))
        folder.chmod(0o755)
        try:
            with ledger_url(folder, postgres=options.postgres) as url:
                measured = measure(folder, url, receivers, options.seconds)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        print(json.dumps(asdict(measured)) if options.json else measured)


if __name__ == "__main__":
    main()
