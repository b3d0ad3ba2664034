"""What a job that several streams share costs: memory, processor time while no record comes, and the start.

    python -m benchmarks.shared_job --streams 1 20 [--seconds 60]

Starts an embedded Kafka, and for each number of streams the process of a shared job with so many streams, each with one
topic of one partition and one receiver. Airflow is not part of it. Memory is the proportional set size (Linux), so that
what processes share counts once. The processor time of the start does not depend on what else the machine does, the
seconds until every stream is received do.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
from benchmarks.idle import SETTLING_SECONDS
from benchmarks.measures import bench_folder
from benchmarks.structured_streaming import cpu_seconds
from benchmarks.warm_batch import until
from examples.demo.producing import create_topic

from headrace.devstack.kafka import KafkaServer
from headrace.ledger import Ledger
from headrace.runs.receiver_job import receiving, request_job, start_if_absent
from headrace.stream import ConsoleOutput, KafkaInput, SparkSettings, Stream

_JOB = Path(__file__).parents[1] / "spark_jobs" / "receiver.py"
_FOUND_SECONDS = 600.0


def streams_of(folder: Path, servers: str, count: int) -> list[Stream]:
    """The definitions, with their topics made."""
    spark = SparkSettings(master=f"local[{count + (os.cpu_count() or 1)}]", job="shared")
    made = []
    for number in range(count):
        topic = f"of-{count}-{number}"
        create_topic(servers, topic, 1)
        made.append(
            Stream(
                name=f"stream-{number}",
                inputs=KafkaInput(bootstrap_servers=servers, topics=topic),
                outputs=ConsoleOutput(),
                batch_interval="10 s",
                storage=str(folder / "storage"),
                ledger=f"sqlite:///{folder}/ledger.db",
                spark=spark,
            )
        )
    return made


def measure(folder: Path, servers: str, count: int, seconds: float) -> str:
    """The figures of a shared job with so many streams, in a line."""
    folder.mkdir()
    streams = streams_of(folder, servers, count)
    with Ledger.open(streams[0].ledger) as ledger:
        for stream in streams:
            ledger.streams.register(
                stream.name, stream.to_json(), batch_interval_ms=10_000, block_interval_ms=stream.block_interval_ms
            )
        job = start(folder, ledger, streams)
        began = time.monotonic()
        try:

            def check_alive() -> None:
                assert job.poll() is None, (folder / "job.log").read_text()[-4_000:]

            def all_received() -> bool:
                check_alive()
                return all(receiving(ledger, s.name, receivers=1, max_silence_ms=30_000).ok for s in streams)

            until("all streams", all_received, _FOUND_SECONDS)
            took, started = time.monotonic() - began, cpu_seconds(job.pid)
            time.sleep(SETTLING_SECONDS)
            check_alive()
            used, began = cpu_seconds(job.pid), time.monotonic()
            time.sleep(seconds)
            share = (cpu_seconds(job.pid) - used) / (time.monotonic() - began)
            check_alive()
            jvm, workers, rest = memory_mb(psutil.Process(job.pid))
            return (
                f"{count} stream(s): memory {jvm + workers + rest:,.0f} MB (JVM {jvm:,.0f}, receivers {workers:,.0f}, "
                f"driver and batch server {rest:,.0f}); idle {share:.1%} of a core; start {took:.0f} s, with "
                f"{started:.0f} s of processor time"
            )
        finally:
            job.terminate()
            job.wait(120)


def start(folder: Path, ledger: Ledger, streams: list[Stream]) -> subprocess.Popen[bytes]:
    """Request all streams, and start the process as the first one's task in Airflow does."""
    environment = os.environ | {"HEADRACE_SECRET_KEY": "benchmark", "SPARK_LOCAL_IP": "127.0.0.1"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    arguments = ["--ledger", streams[0].ledger, "--stream", streams[0].name, "--holder", "benchmark"]
    started: list[subprocess.Popen[bytes]] = []
    for stream in streams:
        request_job(ledger, stream, revision=1, holder=stream.name, lease_ms=int(_FOUND_SECONDS * 1000))

    def start_process() -> object:
        with (folder / "job.log").open("w") as log:
            command = [sys.executable, str(_JOB), *arguments]
            started.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
        return started[0]

    start_if_absent(ledger, "shared", holder="benchmark", start=start_process)  # type: ignore[arg-type]
    return started[0]


def memory_mb(driver: psutil.Process) -> tuple[float, float, float]:
    """The memory of the JVM, of the receivers' Python workers, and of the other processes, in megabytes."""
    jvm = workers = rest = 0.0
    for process in (driver, *driver.children(recursive=True)):
        size = process.memory_full_info().pss / 1e6
        if process.name() == "java":
            jvm += size
        elif any(parent.name() == "java" for parent in process.parents()):
            workers += size
        else:
            rest += size
    return jvm, workers, rest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 20])
    parser.add_argument("--seconds", type=float, default=60.0, help="of idleness that are measured")
    options = parser.parse_args()
    with bench_folder() as folder, KafkaServer(folder / "kafka") as kafka:
        for count in options.streams:
            print(measure(folder / str(count), kafka.bootstrap_servers, count, options.seconds), flush=True)


if __name__ == "__main__":
    main()
