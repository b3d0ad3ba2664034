"""What storing a block costs while 1, 8, 32 and 128 receivers of one host store blocks at the same time.

    python -m benchmarks.receivers_of_one_host [--receivers 1 8 32 128] [--streams 1] [--ledger sqlite postgres]
        [--records 1000] [--seconds 20] [--rounds 1] [--together 1 256] [--sync 0 0.5 8] [--beside FOLDER] [--json]

Each receiver is a process to which a block of so many records comes every 200 ms. It stores those that wait, at most
``--together`` at once, as its pushing thread does: write and sync the log's file, add the blocks to the ledger. With
``--sync`` each sync of the log takes so many seconds, as on a slow disk. All write to one disk and one ledger (SQLite,
or a real Postgres). The receivers are spread over so many streams. Prints, for each case, how many of the blocks that
were due were stored, the median and the 99th percentile of a write's time in the log and in the ledger, and the
processor time of a block in its receiver. With ``--beside``, each round of each case is also run with the headrace of
another checkout, in turns, one block at a time.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import multiprocessing
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import pyarrow as pa
from benchmarks.measures import bench_folder
from tests.support.records import TOPIC_ID, make_block

from headrace.blocks import BlockInfo, OffsetRange, ReceiverId, TopicPartition
from headrace.devstack.postgres import PostgresServer
from headrace.ledger import Ledger
from headrace.ledger.errors import LedgerUnavailableError
from headrace.ledger.receiving.tables import ReceiverLease
from headrace.ledger.tables import JobLease
from headrace.wal import writer as wal_writer
from headrace.wal.storage import LocalStorage, SystemCalls, open_storage
from headrace.wal.writer import WriteAheadLogWriter, WrittenFrame

INPUT = "records"
VALUE = b'{"user": "user-00001", "action": "click", "page": "/products/000001", "pad": "' + b"x" * 110 + b'"}'
BLOCK_SECONDS = 0.2


@dataclass(frozen=True)
class Case:
    """A number of receivers, spread over so many streams, on one kind of ledger. Each stores at most ``together``
    blocks at once, and each sync of its log takes ``sync`` seconds more."""

    ledger: str
    receivers: int
    streams: int
    together: int
    sync: float


@dataclass(frozen=True)
class Measured:
    """For one case; times in milliseconds. ``stored`` is a share of the blocks that were due."""

    ledger: str
    receivers: int
    streams: int
    together: int
    sync: float
    stored: float
    blocks_per_write: float
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
    jobs: Sequence[JobLease]
    seconds: float
    records: int
    together: int
    sync: float


class SlowDisk(SystemCalls):
    """A disk whose syncs of file contents take so many seconds longer."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def fdatasync(self, fd: int) -> None:
        time.sleep(self._seconds)
        super().fdatasync(fd)


def store_blocks(work: Work, index: int, begin: Barrier, pipe: Connection) -> None:
    """A receiver's process: sends the times of each block in the log and in the ledger, and its processor time."""
    with Ledger.open(work.ledger_url, create=False) as ledger:
        job = work.jobs[index % len(work.jobs)]
        receiver = ReceiverId(job.stream, INPUT, index)
        lease: ReceiverLease = until_available(partial(register, ledger, job, receiver))
        storage = (
            LocalStorage(work.storage_url, calls=SlowDisk(work.sync)) if work.sync else open_storage(work.storage_url)
        )
        writer = WriteAheadLogWriter(storage, "log", receiver, lease.epoch)
        partition = TopicPartition("flights", TOPIC_ID, index)
        records, _ = make_block([VALUE] * work.records, partition=index)
        begin.wait()
        used = resource.getrusage(resource.RUSAGE_SELF)
        # Receivers do not cut their blocks at the same moment.
        due = time.monotonic() + BLOCK_SECONDS * (index % 16) / 16
        until = due + work.seconds
        times: list[tuple[float, float]] = []
        blocks = 0
        accepted: int | None = None
        while due < until:
            time.sleep(max(0.0, due - time.monotonic()))
            if time.monotonic() > until:
                break
            waiting = 1 + int((time.monotonic() - due) / BLOCK_SECONDS)
            count = min(waiting, work.together)
            due += count * BLOCK_SECONDS
            starts = [(blocks + number) * work.records for number in range(count)]
            spans = [OffsetRange(partition, start, start + work.records, work.records) for start in starts]
            began = time.monotonic()
            frames = write(writer, records, spans, accepted)
            written = time.monotonic()
            infos = [
                BlockInfo(
                    receiver=receiver, epoch=lease.epoch, sequence=frame.sequence, cut_time_ms=now_ms(),
                    handle=frame.handle, ranges=(span,), records=work.records, payload_bytes=frame.payload_bytes,
                )
                for span, frame in zip(spans, frames, strict=True)
            ]  # fmt: skip
            until_available(partial(add, ledger, lease, infos))
            accepted = infos[-1].sequence
            blocks += count
            times.append((written - began, time.monotonic() - written))
        now = resource.getrusage(resource.RUSAGE_SELF)
        pipe.send((blocks, times, now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime))


def write(
    writer: WriteAheadLogWriter, records: pa.RecordBatch, spans: Sequence[OffsetRange], accepted: int | None
) -> Sequence[WrittenFrame]:
    if len(spans) == 1:
        # Another checkout may have only this.
        return [writer.write(records, spans, cut_time_ms=now_ms(), last_accepted_sequence=accepted)]
    blocks = [wal_writer.NewBlock(records, (span,), now_ms()) for span in spans]
    return writer.write_all(blocks, last_accepted_sequence=accepted)


def add(ledger: Ledger, lease: ReceiverLease, infos: Sequence[BlockInfo]) -> None:
    if len(infos) == 1:
        ledger.blocks.add(lease, infos[0])
    else:
        ledger.blocks.add_all(lease, infos)


def register(ledger: Ledger, job: JobLease, receiver: ReceiverId) -> ReceiverLease:
    return ledger.receivers.register(ledger.receivers.schedule(job, receiver), host="here", lease_ms=600_000)


def until_available(step: Callable[[], Any]) -> Any:
    """Take a step of the ledger as often as a receiver would try: a wait for a lock is limited."""
    while True:
        with contextlib.suppress(LedgerUnavailableError):
            return step()


def now_ms() -> int:
    return int(time.time() * 1000)


def begin_stream(ledger: Ledger, name: str, receivers: Sequence[int]) -> JobLease:
    """Register a stream with these receivers, each of which has the partition of its index."""
    ledger.streams.register(name, "{}", batch_interval_ms=10_000, block_interval_ms=200)
    job = ledger.jobs.acquire(name, holder="benchmark", lease_ms=600_000)
    partitions = {TopicPartition("flights", TOPIC_ID, number): number for number in receivers}
    ledger.topics.observe(job, INPUT, [("flights", TOPIC_ID, max(receivers) + 1)])
    ledger.positions.ensure_all(job, INPUT, dict.fromkeys(partitions, 0))
    ledger.positions.assign(job, INPUT, partitions)
    return job


def measure(folder: Path, url: str, case: Case, seconds: float, records: int) -> Measured:
    """Run the receivers of a case."""
    receivers = case.receivers
    with Ledger.open(url) as ledger:
        jobs = [
            begin_stream(ledger, f"many-{number}", range(number, receivers, case.streams))
            for number in range(case.streams)
        ]
    work = Work(url, str(folder / "storage"), jobs, seconds, records, case.together, case.sync)
    context = multiprocessing.get_context("forkserver")
    # The imports of a hundred processes take longer than what is measured.
    context.set_forkserver_preload(["headrace.ledger", "headrace.devstack.postgres", "tests.support.records"])
    begin = context.Barrier(receivers)
    pipes, processes = [], []
    for index in range(receivers):
        here, there = multiprocessing.Pipe()
        processes.append(context.Process(target=store_blocks, args=(work, index, begin, there)))
        processes[-1].start()
        there.close()
        pipes.append(here)
    answers = [pipe.recv() for pipe in pipes]
    for process in processes:
        process.join()
    in_log = sorted(1000 * log for _, times, _ in answers for log, _ in times)
    in_ledger = sorted(1000 * ledger for _, times, _ in answers for _, ledger in times)
    blocks = sum(blocks for blocks, _, _ in answers)
    return Measured(
        **asdict(case),
        stored=round(blocks / (receivers * seconds / BLOCK_SECONDS), 3),
        blocks_per_write=round(blocks / len(in_log), 1),
        log_ms=round(statistics.median(in_log), 2),
        log_p99_ms=round(in_log[int(len(in_log) * 0.99)], 2),
        ledger_ms=round(statistics.median(in_ledger), 2),
        ledger_p99_ms=round(in_ledger[int(len(in_ledger) * 0.99)], 2),
        cpu_ms_per_block=round(1000 * sum(cpu for _, _, cpu in answers) / blocks, 2),
    )


@contextlib.contextmanager
def ledger_url(folder: Path, kind: str) -> Iterator[str]:
    if kind == "sqlite":
        yield f"sqlite:///{folder}/ledger.db"
        return
    with PostgresServer(folder / "postgres") as server:
        server.create_database("many")
        yield server.url("many")
        server.wipe()


def run(case: Case, seconds: float, records: int) -> Measured:
    """Run a case in a folder of its own."""
    with bench_folder() as folder, ledger_url(folder, case.ledger) as url:
        return measure(folder, url, case, seconds, records)


def run_with(checkout: Path, case: Case, seconds: float, records: int) -> Measured:
    """Run a case in a process that imports the headrace of another checkout."""
    here = Path(__file__).parents[1]
    of_case = ["--ledger", case.ledger, "--receivers", str(case.receivers), "--streams", str(case.streams)]
    command = [sys.executable, "-m", "benchmarks.receivers_of_one_host", *of_case]
    command += [f"--seconds={seconds}", f"--records={records}", "--together=1", f"--sync={case.sync}", "--json"]
    environment = {**os.environ, "PYTHONPATH": f"{checkout / 'plugins'}:{here}"}
    answer = subprocess.run(command, cwd=here, env=environment, check=True, stdout=subprocess.PIPE)
    return Measured(**json.loads(answer.stdout))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--receivers", type=int, nargs="+", default=[1, 8, 32, 128])
    parser.add_argument("--streams", type=int, nargs="+", default=[1])
    parser.add_argument("--ledger", nargs="+", choices=("sqlite", "postgres"), default=["sqlite", "postgres"])
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--records", type=int, default=1_000)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--together", type=int, nargs="+", default=[256])
    parser.add_argument("--sync", type=float, nargs="+", default=[0.0])
    parser.add_argument("--beside", type=Path)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    cases = itertools.product(options.ledger, options.receivers, options.streams, options.sync, options.together)
    for ledger, receivers, streams, sync, together in cases:
        if streams > receivers:
            continue
        case = Case(ledger, receivers, streams, together, sync)
        for _ in range(options.rounds):
            if options.beside:
                print("beside ", run_with(options.beside, case, options.seconds, options.records), flush=True)
            measured = run(case, options.seconds, options.records)
            print(json.dumps(asdict(measured)) if options.json else measured, flush=True)


if __name__ == "__main__":
    main()
