"""How long a warm batch takes from its allocation to its checkpoint: Kafka, receiver job, Connect, Elasticsearch.

    python -m benchmarks.warm_batch --records 500000 --batches 4 [--json] [--minimum 0.5]

Starts an embedded Kafka and Elasticsearch and a receiver job as Airflow would start it. For each batch it produces
JSON records of 190 bytes, waits until they are in the log, then does what the batch DAG's tasks do: allocate, run
``spark_jobs/micro_batch.py --way connect``, checkpoint. Airflow's own cost (about half a second a task) comes on top.
The first batch warms the application up and does not count.

After each batch the same documents go into another index as ready-made bulk bodies, four requests at a time: the limit
of what any program can do with this Elasticsearch on this machine. ``ratio`` is the batch's speed relative to it; both
end when the documents can be searched. The number of documents is checked each time.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import secrets
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.receiver_throughput import PARTITIONS, fill, record

from headrace.batch.allocation import allocate
from headrace.batch.checkpoint_writer import write_checkpoint
from headrace.devstack.elasticsearch import ElasticsearchServer
from headrace.devstack.kafka import KafkaServer
from headrace.ledger import Ledger
from headrace.stream import ElasticsearchOutput, KafkaInput, Stream
from headrace.stream_context import StreamContext

JOBS = Path(__file__).parents[1] / "spark_jobs"


def until(what: str, done: Callable[[], Any], seconds: float = 180.0) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := done()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {seconds:g} s for {what}")
        time.sleep(0.1)
    return found


def environment() -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return {
        **inherited,
        "HEADRACE_SECRET_KEY": secrets.token_hex(32),
        "PYSPARK_PYTHON": sys.executable,
        "SPARK_LOCAL_IP": "127.0.0.1",
    }


@contextlib.contextmanager
def receiver_job(stream: Stream, ledger: Ledger, env: dict[str, str], log: Path) -> Iterator[None]:
    ledger.streams.register(
        stream.name,
        stream.to_json(),
        batch_interval_ms=stream.batch_interval_ms,
        block_interval_ms=stream.block_interval_ms,
    )
    command = [sys.executable, str(JOBS / "receiver.py"), "--ledger", stream.ledger, "--stream", stream.name]
    with log.open("wb") as file:
        job = subprocess.Popen(command, env=env, stdout=file, stderr=subprocess.STDOUT)

    def running() -> bool:
        found = ledger.jobs.current(stream.name)
        if job.poll() is not None:
            raise RuntimeError(log.read_text()[-4000:])
        return found is not None and found.state.value == "running"

    try:
        until("the receiver job", running)
        yield
    finally:
        ledger.jobs.request_stop(stream.name, "the benchmark is over")
        try:
            job.wait(90)
        except subprocess.TimeoutExpired:
            job.kill()


def one_batch(stream: Stream, ledger: Ledger, bootstrap: str, records: int, env: dict[str, str]) -> dict[str, float]:
    def received() -> int:
        return sum(position.next_offset for position in ledger.positions.all(stream.name))

    before = received()
    fill(bootstrap, stream.inputs[0].topics[0], records, spread_seconds=0)
    until("the records to be in the log", lambda: received() >= before + records)
    time_ms = max(unclaimed.batch_time_ms for unclaimed in ledger.blocks.unclaimed(stream.name))
    earlier = [unclaimed.batch_time_ms for unclaimed in ledger.blocks.unclaimed(stream.name)]
    until("the batch time", lambda: ledger.now_ms() >= time_ms, stream.batch_interval_ms / 1000 + 5)
    context = StreamContext(stream, ledger)
    steps = {"records": 0.0, "allocate": 0.0, "generate": 0.0, "checkpoint": 0.0}
    for at_ms in earlier:
        started = time.monotonic()
        batch = allocate(context, at_ms).batch
        allocated = time.monotonic()
        command = [sys.executable, str(JOBS / "micro_batch.py"), "--ledger", stream.ledger, "--stream", stream.name]
        subprocess.run([*command, "--batch-time", str(at_ms), "--way", "connect"], env=env, check=True)
        generated = time.monotonic()
        write_checkpoint(context, at_ms)
        steps["records"] += batch.records
        steps["allocate"] += allocated - started
        steps["generate"] += generated - allocated
        steps["checkpoint"] += time.monotonic() - generated
    steps["total"] = steps["allocate"] + steps["generate"] + steps["checkpoint"]
    return {name: round(value, 3) for name, value in steps.items()}


def ready_made(url: str, index: str, records: int) -> float:
    """The seconds in which Elasticsearch takes the records as bulk bodies that are already made."""
    lines = [b'{"create":{"_id":"bench+%d+%d"}}\n%b\n' % (n % PARTITIONS, n, record(n)) for n in range(records)]
    bodies = [b"".join(lines[first : first + 5_000]) for first in range(0, records, 5_000)]
    host = url.removeprefix("http://")
    local = threading.local()

    def send(body: bytes) -> None:
        if not hasattr(local, "connection"):
            local.connection = http.client.HTTPConnection(host)
        local.connection.request("POST", f"/{index}/_bulk", body, {"content-type": "application/x-ndjson"})
        answer = local.connection.getresponse().read()
        assert b'"errors":false' in answer[:100], answer[:500]

    started = time.monotonic()
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(send, bodies))
    assert count(url, index) == records
    return time.monotonic() - started


def count(url: str, index: str) -> int:
    """The number of documents that can be searched, after a refresh."""
    connection = http.client.HTTPConnection(url.removeprefix("http://"))
    connection.request("POST", f"/{index}/_refresh")
    connection.getresponse().read()
    connection.request("GET", f"/{index}/_count")
    return int(json.load(connection.getresponse())["count"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=int, default=500_000)
    parser.add_argument("--batches", type=int, default=4, help="with the first, which does not count")
    parser.add_argument("--minimum", type=float, default=0.0, help="exit with 1 if the median ratio is lower")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="headrace-bench-"))
    env = environment()
    try:
        with KafkaServer(folder / "kafka") as kafka, ElasticsearchServer(folder / "elasticsearch") as elasticsearch:
            stream = Stream(
                name="bench",
                inputs=KafkaInput(bootstrap_servers=kafka.bootstrap_servers, topics="bench"),
                outputs=ElasticsearchOutput(hosts=elasticsearch.url, index="bench", refresh=True),
                # Long enough that the records of one batch seldom fall on both sides of a batch time.
                batch_interval="20 s",
                storage=str(folder / "storage"),
                ledger=f"sqlite:///{folder}/ledger.db",
            )
            with Ledger.open(stream.ledger) as ledger, receiver_job(stream, ledger, env, folder / "receiver.log"):
                results = []
                for number in range(options.batches):
                    result = one_batch(stream, ledger, kafka.bootstrap_servers, options.records, env)
                    assert count(elasticsearch.url, "bench") == (number + 1) * options.records
                    result["limit"] = round(ready_made(elasticsearch.url, f"limit-{number}", options.records), 3)
                    result["ratio"] = round(result["limit"] / result["total"], 3)
                    results.append(result)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    median = statistics.median(result["total"] for result in results[1:])
    ratio = round(statistics.median(result["ratio"] for result in results[1:]), 3)
    if options.json:
        print(json.dumps({"batches": results, "median_seconds": median, "median_ratio": ratio}))
    else:
        for number, result in enumerate(results):
            print(f"batch {number}{' (cold)' if number == 0 else ''}: {result}")
        print(f"medians of the warm ones: {median} s for {options.records:,} records, {ratio} of the limit")
    if ratio < options.minimum:
        sys.exit(1)


if __name__ == "__main__":
    main()
