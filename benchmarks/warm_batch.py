"""Batches from the log to the search: Kafka, receiver job, Spark Connect, Elasticsearch, without Airflow.

    python -m benchmarks.warm_batch --records 500000 --batches 4 [--transform] [--peer] [--json]

Starts an embedded Kafka and Elasticsearch and a receiver job as Airflow would start it. For each batch it produces
JSON records of 190 bytes, waits until they are in the log, then does what the batch DAG's tasks do: allocate, run
``spark_jobs/micro_batch.py --way connect``, checkpoint. Airflow's own cost (about half a second a task) comes on top.
The first batch warms the application up and is measured apart.

After each batch the same documents go into another index as ready-made bulk bodies, four requests at a time: the limit
of what any program can do with this Elasticsearch on this machine. With ``--peer`` a warm Spark Structured Streaming
indexes them from Kafka into a third. Each of the three indices grows from round to round, and begins a round with as
many documents. All end when the documents can be searched. Their number is checked each time.
Of small batches the first is compared with the later ones, and these with one second.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import resource
import secrets
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.measures import Measure, bench_folder, print_measures
from benchmarks.receiver_throughput import PARTITIONS, define, fill, record
from benchmarks.structured_streaming import SCHEMA, Peer, cpu_seconds

from headrace.batch.allocation import allocate
from headrace.batch.checkpoint import write_checkpoint
from headrace.devstack.elasticsearch import ElasticsearchServer
from headrace.devstack.kafka import KafkaServer
from headrace.ledger import Ledger
from headrace.stream import ElasticsearchOutput, JsonDecoder, KafkaInput, Stream
from headrace.stream_context import StreamContext

PEER = "Structured Streaming"
# Of so few records the time of the servers is not worth a comparison.
SMALL = 10_000
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
        # For the transform.
        "PYTHONPATH": str(JOBS.parent),
        "SPARK_LOCAL_IP": "127.0.0.1",
    }


@contextlib.contextmanager
def receiver_job(stream: Stream, ledger: Ledger, env: dict[str, str], log: Path) -> Iterator[int]:
    """A receiver job that runs; its process id."""
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
        yield job.pid
    finally:
        ledger.jobs.request_stop(stream.name, "the benchmark is over")
        try:
            job.wait(90)
        except subprocess.TimeoutExpired:
            job.kill()


@contextlib.contextmanager
def receiving(folder: Path, records: int = 0) -> Iterator[tuple[str, Ledger, int]]:
    """A receiver job whose topic "bench" has ``records``: the bootstrap servers, the ledger, and the process id."""
    with KafkaServer(folder / "kafka") as kafka:
        fill(kafka.bootstrap_servers, "bench", records, spread_seconds=0)
        stream = define(kafka.bootstrap_servers, "bench", folder, 128, "arrival")
        with (
            Ledger.open(stream.ledger) as ledger,
            receiver_job(stream, ledger, environment(), folder / "receiver.log") as job,
        ):
            yield kafka.bootstrap_servers, ledger, job


def one_batch(stream: Stream, ledger: Ledger, env: dict[str, str], records: int) -> dict[str, float]:
    """Make batches of the ``records`` that wait in the log, as the batch DAG does; the seconds of each step."""
    earlier = [unclaimed.batch_time_ms for unclaimed in ledger.blocks.unclaimed(stream.name)]
    until("the batch time", lambda: ledger.now_ms() >= max(earlier), stream.batch_interval_ms / 1000 + 5)
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
    assert steps["records"] == records, steps
    steps["total"] = steps["allocate"] + steps["generate"] + steps["checkpoint"]
    return steps


def received(ledger: Ledger, stream: str = "bench") -> int:
    """The number of records that are in the log, of a topic without gaps."""
    return sum(position.next_offset for position in ledger.positions.all(stream))


def receive(stream: Stream, ledger: Ledger, bootstrap: str, records: int) -> None:
    """Produce the records, and wait until they are in the log."""

    before = received(ledger)
    fill(bootstrap, stream.kafka_inputs[0].topics[0], records, spread_seconds=0)
    until("the records to be in the log", lambda: received(ledger) >= before + records)


def ready_made(url: str, index: str, records: int, before: int = 0) -> float:
    """The seconds in which Elasticsearch takes the records as bulk bodies that are already made, into an index that has
    ``before`` documents."""
    lines = [
        b'{"create":{"_id":"bench+%d+%d"}}\n%b\n' % (n % PARTITIONS, (before + n) // PARTITIONS, record(n))
        for n in range(records)
    ]
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
    assert count(url, index) == before + records
    return time.monotonic() - started


def count(url: str, index: str) -> int:
    """The number of documents that can be searched, after a refresh."""
    connection = http.client.HTTPConnection(url.removeprefix("http://"))
    connection.request("POST", f"/{index}/_refresh")
    connection.getresponse().read()
    connection.request("GET", f"/{index}/_count")
    return int(json.load(connection.getresponse())["count"])


def ended_cpu_seconds() -> float:
    """The processor time of this process's children that have ended: of the batches' processes."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def measure(options: argparse.Namespace, folder: Path) -> list[dict[str, float]]:
    """The rounds, without the first: the seconds and CPU seconds of headrace, the limit and the peer."""
    env = environment()
    with KafkaServer(folder / "kafka") as kafka, ElasticsearchServer(folder / "elasticsearch") as elasticsearch:
        transform = {"transform": "benchmarks.transform:with_cents"} if options.transform else {}
        decoder = {"value_decoder": JsonDecoder(fields=SCHEMA)} if options.transform else {}
        stream = Stream(
            name="bench",
            inputs=KafkaInput(bootstrap_servers=kafka.bootstrap_servers, topics="bench", **decoder),
            outputs=ElasticsearchOutput(hosts=elasticsearch.url, index="bench", refresh=True),
            # Long enough that the records of one batch seldom fall on both sides of a batch time.
            batch_interval="20 s",
            storage=str(folder / "storage"),
            ledger=f"sqlite:///{folder}/ledger.db",
            **transform,
        )
        rounds: list[dict[str, float]] = []
        with contextlib.ExitStack() as stack:
            ledger = stack.enter_context(Ledger.open(stream.ledger))
            job = stack.enter_context(receiver_job(stream, ledger, env, folder / "receiver.log"))
            peer = None
            if options.peer:
                place = (kafka.bootstrap_servers, elasticsearch.url, "bench", folder / "peer", env)
                peer = stack.enter_context(Peer(*place))
            # The first documents make the server load its classes, which is not a cost of the first batch.
            ready_made(elasticsearch.url, "warm-up", options.records)
            for number in range(options.batches):
                receive(stream, ledger, kafka.bootstrap_servers, options.records)
                used = cpu_seconds(job) + ended_cpu_seconds()
                result = one_batch(stream, ledger, env, options.records)
                result["cpu_seconds"] = cpu_seconds(job) + ended_cpu_seconds() - used
                assert count(elasticsearch.url, "bench") == (number + 1) * options.records
                result["limit"] = ready_made(elasticsearch.url, "limit", options.records, number * options.records)
                if peer is not None:
                    answer = peer.index("peer", transform=options.transform)
                    assert count(elasticsearch.url, "peer") == (number + 1) * options.records
                    result |= {"peer": answer["seconds"], "peer_cpu_seconds": answer["cpu_seconds"]}
                rounds.append(result)
                print(f"{number}: { {name: round(value, 2) for name, value in result.items()} }", file=sys.stderr)
        return rounds


def measures(rounds: list[dict[str, float]], options: argparse.Namespace) -> list[Measure]:
    cold, *warm = rounds
    kind = f"{', with a transform' if options.transform else ''}, {options.records:,} records"
    work = f"log to search{kind}"

    def each(name: str) -> list[float]:
        return [result[name] for result in warm]

    def rate(name: str) -> tuple[float, ...]:
        return tuple(options.records / seconds for seconds in each(name))

    def million(name: str) -> tuple[float, ...]:
        return tuple(used / options.records * 1e6 for used in each(name))

    found = [Measure(work, "records/s", rate("total"), "ready-made bulk bodies", rate("limit"))]
    if options.peer:
        found.append(Measure(work, "records/s", rate("total"), PEER, rate("peer")))
        found.append(
            Measure(
                f"CPU, {work}", "CPU s per million records", million("cpu_seconds"), PEER, million("peer_cpu_seconds")
            )
        )
    first = Measure(
        f"first batch{kind}",
        "s",
        (cold["total"],),
        "the warm batches",
        (statistics.median(each("total")),),
    )
    alone = Measure(
        f"batch of {options.records:,} records, alone",
        "s",
        tuple(each("total")),
        "one second",
        tuple(1.0 for _ in warm),
    )
    return [first, alone] if options.records <= SMALL else [*found, first]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=int, default=500_000)
    parser.add_argument("--batches", type=int, default=4, help="with the first, which does not count")
    parser.add_argument("--transform", action="store_true", help="decode the records, and compute a column")
    parser.add_argument("--peer", action="store_true", help="also with Structured Streaming, see structured_streaming")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with bench_folder() as folder:
        rounds = measure(options, folder)
    print_measures(measures(rounds, options), as_json=options.json)


if __name__ == "__main__":
    main()
