"""How long a record takes from Kafka's acknowledgement until a search finds it, under a real Airflow.

    python -m benchmarks.latency --rate 100 --minutes 10 [--single-task] [--busy 2] [--again 1000]
                                 [--postgres] [--json]

Starts the embedded stack with README's first stream (a batch every ten seconds; its ledger is a SQLite file, or with
``--postgres`` in the server of Airflow's metadata) and produces JSON records of about 60 bytes at a steady rate. Every
0.2 s it asks Elasticsearch how many documents a search finds: record k became searchable when that count first reached
k, which holds because batches follow each other in time. The first two minutes (Spark's start, the first batches) do
not count. ``--busy`` has as many processes use up a core each meanwhile. At the end every record has to be there, once.

With ``--again`` the stream has as many batches of 2,000 records of the past. After the minutes without it, runs of a
replay DAG write all of these into another index, as many minutes long: the latencies of both times are compared.

The limit is half the interval and the run of a DAG with as many tasks that do nothing: what a batch would take that has
nothing to do, if its run began at the end of its interval. (Runs begin up to a second before.) It is measured after the
load, while the receiver job runs on and no batches are made.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from threading import Event, Thread
from typing import Any

from benchmarks.measures import Measure, bench_folder, print_measures
from benchmarks.receiver_throughput import fill
from benchmarks.warm_batch import received, until
from confluent_kafka import Producer
from examples.demo.elasticsearch_side import ElasticsearchSide
from examples.demo.errors import NotAnsweringError
from examples.demo.producing import create_topic

from headrace.batch.allocation import allocate
from headrace.devstack.airflow_api import AirflowApi
from headrace.devstack.elasticsearch import ElasticsearchServer
from headrace.devstack.kafka import KafkaServer
from headrace.devstack.postgres import PostgresServer
from headrace.devstack.stack import LEDGER_CONNECTION, LEDGER_DATABASE, Stack, StackOptions
from headrace.ledger import Ledger
from headrace.ledger.errors import LedgerMissingError, SchemaError
from headrace.stream import Stream
from headrace.stream_context import StreamContext

STREAM = "orders"
LIMIT = "half the interval and an empty DAG run"
INTERVAL_SECONDS = 10.0
WARM_UP_SECONDS = 120.0
AFTER_SECONDS = 30.0
POLL_SECONDS = 0.2
PAST_RECORDS = 2_000
"""Of each batch of the past."""

TASKS = 5
EMPTY_RUNS = 8
EMPTY_DAG_FILE = '''
"""As many tasks as a batch, which do nothing."""

from airflow.sdk import dag, task


@dag(schedule=None)
def empty():
    @task
    def nothing():
        pass

    first, *others = [nothing.override(task_id=f"nothing_{number}")() for number in range(COUNT)]
    for task_of_it in others:
        first >> task_of_it
        first = task_of_it


empty()
'''

DAG_FILE = '''
"""README's first stream: from Kafka to Elasticsearch, in Airflow."""

from pathlib import Path

from headrace.dags import replay_dag, stream_dags
from headrace.stream import ElasticsearchOutput, KafkaInput, Stream

home = Path(__file__).absolute().parents[1] / "orders"

stream = Stream(
    name="orders",
    inputs=KafkaInput(connection="kafka_default", topics="orders"),
    outputs=ElasticsearchOutput(connection="elasticsearch_default", index="orders"),
    batch_interval="10 s",
    storage=home,
    ledger=LEDGER,
    batch_by="BATCH_BY",
)

receiver, batches = stream_dags(stream, single_task=SINGLE_TASK)
again = replay_dag(stream, "again", outputs={"elasticsearch": {"index": "orders-again"}})
'''


def dag_file(*, single_task: bool = False, batch_by: str = "arrival", postgres: bool = False) -> str:
    """The text of `DAG_FILE` for these."""
    ledger = f'"connection:{LEDGER_CONNECTION}"' if postgres else 'f"sqlite:///{home}/ledger.db"'
    return DAG_FILE.replace("SINGLE_TASK", str(single_task)).replace("BATCH_BY", batch_by).replace("LEDGER", ledger)


class Load:
    """Produces at ``rate`` records a second from a thread; ``sent`` has the time of each acknowledgement, in order."""

    def __init__(self, bootstrap_servers: str, rate: float) -> None:
        self.sent: list[float] = []
        self._rate = rate
        self._producer = Producer({"bootstrap.servers": bootstrap_servers, "linger.ms": 5, "enable.idempotence": True})
        self._stop = Event()
        self._error: Any = None
        self._thread = Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()
        if self._error is not None:
            raise RuntimeError(f"Kafka did not take a record: {self._error}")

    def _run(self) -> None:
        began, number = time.monotonic(), 0
        while not self._stop.wait(max(0.0, began + number / self._rate - time.monotonic())):
            value = json.dumps({"number": number, "item": f"cup {number % 7}", "cents": 350, "pieces": number % 5})
            self._producer.produce(STREAM, key=str(number % 997), value=value, on_delivery=self._delivered)
            self._producer.poll(0)
            number += 1
        self._producer.flush(60)

    def _delivered(self, error: Any, _message: Any) -> None:
        if error is None:
            self.sent.append(time.monotonic())
        else:
            self._error = error


class Replaying:
    """Replays the batches from ``first`` to ``last``, by one run after the other, after ``wait`` seconds; ``batches``
    counts those that the runs have written."""

    def __init__(self, api: AirflowApi, first: datetime, last: datetime, wait: float) -> None:
        self.batches = 0
        self._api, self._span = api, {"from": first.isoformat(), "until": last.isoformat()}
        self._dag = f"{STREAM}_replay_again"
        api.wait_for_dag(self._dag)
        api.unpause(self._dag)
        self._stop = Event()
        self._thread = Thread(target=self._run, args=(wait,), daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Wait for the run that runs."""
        self._stop.set()
        self._thread.join()

    def _run(self, wait: float) -> None:
        self._stop.wait(wait)
        while not self._stop.is_set():
            run_id = self._api.trigger(self._dag, conf=self._span)
            run = self._api.wait_for_run(self._dag, run_id, timeout=1_800)
            assert run["state"] == "success", run
            self.batches += int(self._api.xcom(self._dag, run_id, "replay_batch.elasticsearch", "range")["batches"])


def complete(ledger: Ledger, stream: str, time_ms: int) -> None:
    """Complete an allocated batch, of which nothing is written."""
    attempt = ledger.attempts.begin(stream, time_ms, holder="benchmark", way="connect", lease_ms=60_000)
    for output in attempt.outputs:
        ledger.attempts.record_output(attempt, output, {})
    ledger.attempts.complete(attempt)


def past_batches(bootstrap_servers: str, ledger: Ledger, number: int) -> tuple[datetime, datetime]:
    """Make so many completed batches of records with timestamps of the past. Returns the bounds of their times."""
    records = number * PAST_RECORDS
    fill(bootstrap_servers, STREAM, records, spread_seconds=int((number + 60) * INTERVAL_SECONDS), partitions=2)
    until("the records of the past", lambda: received(ledger, STREAM) >= records, 600)
    context = StreamContext(Stream.from_json(ledger.streams.get(STREAM).definition), ledger)
    times = [unclaimed.batch_time_ms for unclaimed in ledger.blocks.unclaimed(STREAM)]
    for time_ms in times:
        allocate(context, time_ms)
        complete(ledger, STREAM, time_ms)
    interval = context.stream.batch_interval
    first, last = (datetime.fromtimestamp(time_ms / 1000, UTC) for time_ms in (min(times), max(times)))
    return first - interval, last


def count(index: ElasticsearchSide, known: int) -> int:
    """Documents that a search finds; ``known`` while the index cannot answer, as when it has just been made."""
    try:
        return index.count(STREAM)
    except NotAnsweringError:
        return known


def searchable_times(index: ElasticsearchSide, load: Load, counted_until: float) -> list[float]:
    """When each record, in order, was first found; goes on after ``counted_until`` until all that was sent is there.

    The load goes on for a while: where batches are by timestamp, the last ones wait for records that do not come.
    """
    found: list[float] = []
    load_until = counted_until + AFTER_SECONDS
    while time.monotonic() < load_until or len(found) < len(load.sent):
        if time.monotonic() > load_until:
            load.stop()
        there = count(index, len(found))
        found += [time.monotonic()] * (there - len(found))
        if time.monotonic() > load_until + 600:
            raise TimeoutError(f"{len(load.sent)} records were sent and {there} are found")
        time.sleep(POLL_SECONDS)
    return found


def quantiles(latencies: Sequence[float]) -> dict[str, float]:
    cuts = statistics.quantiles(latencies, n=100, method="inclusive")
    return {name: round(cuts[cut - 1], 2) for name, cut in (("p50", 50), ("p95", 95), ("p99", 99))} | {
        "max": round(max(latencies), 2)
    }


def run_seconds(api: AirflowApi, dag_id: str) -> float:
    """The median time of the last runs that succeeded, from the end of their interval, or their trigger, on."""
    runs = [run for run in api.runs(dag_id, limit=30) if run["state"] == "success"]
    took = []
    for run in runs:
        due = run["run_after"] if run["run_type"] == "manual" else run["data_interval_end"]
        took.append((datetime.fromisoformat(run["end_date"]) - datetime.fromisoformat(due)).total_seconds())
    return statistics.median(took)


def task_seconds(api: AirflowApi, dag_id: str) -> dict[str, tuple[float, float]]:
    """Of the last runs that succeeded, for each task the median seconds from when it could start until its process has
    started, and from then to its end. What comes before the batch time does not count."""
    took: dict[str, list[tuple[float, float]]] = {}
    for run in [run for run in api.runs(dag_id, limit=12) if run["state"] == "success"]:
        tasks = [task for task in api.task_instances(dag_id, run["dag_run_id"]) if task["start_date"]]
        for task in tasks:
            scheduled, start, end = (
                max(datetime.fromisoformat(task[name]), datetime.fromisoformat(run["data_interval_end"]))
                for name in ("scheduled_when", "start_date", "end_date")
            )
            took.setdefault(task["task_id"], []).append(
                ((start - scheduled).total_seconds(), (end - start).total_seconds())
            )
    return {
        name: (round(statistics.median(w for w, _ in each), 2), round(statistics.median(r for _, r in each), 2))
        for name, each in took.items()
    }


def empty_run_seconds(api: AirflowApi) -> float:
    """Such a run of a DAG with tasks that do nothing. The stream makes no batches meanwhile."""
    api.pause(f"{STREAM}_batches")
    api.wait_for_dag("empty")
    api.unpause("empty")
    for _ in range(EMPTY_RUNS):
        api.wait_for_run("empty", api.trigger("empty"), timeout=120)
    return run_seconds(api, "empty")


def stack_options(folder: Path, text: str) -> StackOptions:
    """Of a stack in the folder, whose only stream is in a DAG file with this text."""
    dags = folder / "dags"
    dags.mkdir()
    (dags / "orders.py").write_text(text)
    return StackOptions(data=folder / "stack", dags=dags, plugins=folder / "plugins")


def open_ledger(folder: Path, postgres: PostgresServer | None = None) -> Ledger:
    """The stream's ledger, a SQLite file in the folder or in this server, once its first task has made it, within five
    minutes. The caller closes it."""
    url = f"sqlite:///{folder}/{STREAM}/ledger.db" if postgres is None else postgres.url(LEDGER_DATABASE)
    opened: list[Ledger] = []

    def is_made() -> bool:
        try:
            opened.append(Ledger.open(url, create=False))
        except (LedgerMissingError, SchemaError):
            return False
        return True

    until("the ledger", is_made, 300)
    return opened[0]


def begin(stack: Stack, *, batches: bool = True) -> tuple[KafkaServer, ElasticsearchServer, AirflowApi]:
    """Start the stack and the receiver of its stream, and its batches if ``batches``."""
    stack.start()
    assert stack.kafka and stack.elasticsearch and stack.airflow
    create_topic(stack.kafka.bootstrap_servers, STREAM, 2)
    api = stack.airflow.api()
    for dag_id in (f"{STREAM}_receiver", f"{STREAM}_batches"):
        api.wait_for_dag(dag_id)
    api.unpause(f"{STREAM}_receiver")
    if batches:
        api.unpause(f"{STREAM}_batches")
    return stack.kafka, stack.elasticsearch, api


def measure(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    batch_by = "timestamp" if options.again else "arrival"
    text = dag_file(single_task=options.single_task, batch_by=batch_by, postgres=options.postgres)
    stack = Stack(stack_options(folder, text))
    empty = EMPTY_DAG_FILE.replace("COUNT", "1" if options.single_task else str(TASKS))
    (folder / "dags" / "empty.py").write_text(empty)
    busy: list[subprocess.Popen[bytes]] = []
    try:
        kafka, elasticsearch, api = begin(stack, batches=False)
        postgres = stack.postgres if options.postgres else None
        with open_ledger(folder, postgres) as ledger:
            past = past_batches(kafka.bootstrap_servers, ledger, options.again) if options.again else None
        api.unpause(f"{STREAM}_batches")
        index = ElasticsearchSide(elasticsearch.url)
        load = Load(kafka.bootstrap_servers, options.rate)
        until("the first documents", lambda: count(index, 0), 300)
        busy += [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(options.busy)]
        seconds = options.minutes * 60
        replaying = None if past is None else Replaying(api, *past, WARM_UP_SECONDS + seconds)
        counted_from = time.monotonic() + WARM_UP_SECONDS
        replayed_from = counted_from + seconds
        counted_until = replayed_from + (seconds if replaying else 0)
        found = searchable_times(index, load, counted_until)
        written = 0 if replaying is None else index.count("orders-again")
        if replaying is not None:
            replaying.stop()
        latencies = [
            (sent, seen - sent)
            for sent, seen in zip(load.sent, found, strict=True)
            if counted_from <= sent < counted_until
        ]
        alone = [latency for sent, latency in latencies if sent < replayed_from]
        beside = [latency for sent, latency in latencies if sent >= replayed_from]
        minutes: dict[int, list[float]] = {}
        for sent, latency in latencies:
            minutes.setdefault(int((sent - counted_from) // 60), []).append(latency)
        with open_ledger(folder, postgres) as ledger:
            batches = ledger.batches.page(STREAM, 10_000)
        for process in busy:
            process.kill()
        return {
            "tasks": 1 if options.single_task else TASKS,
            "ledger": "postgres" if options.postgres else "sqlite",
            "rate": options.rate,
            "busy": options.busy,
            "replayed_batches": 0 if replaying is None else replaying.batches,
            "replayed_records_meanwhile": written,
            "records": len(latencies),
            "seconds": quantiles(alone),
            "seconds_while_replaying": quantiles(beside) if replaying else {},
            "medians_by_minute": [round(statistics.median(minutes[at]), 1) for at in sorted(minutes)],
            "task_seconds_waiting_and_running": task_seconds(api, f"{STREAM}_batches"),
            "dag_run_seconds": round(run_seconds(api, f"{STREAM}_batches"), 2),
            "limit": round(INTERVAL_SECONDS / 2 + empty_run_seconds(api), 2),
            "batches": len([batch for batch in batches if batch.absorbed_by_ms is None]),
            "batch_times_taken_over": len([batch for batch in batches if batch.absorbed_by_ms is not None]),
        }
    finally:
        for process in busy:
            process.kill()
            process.wait()
        stack.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, default=100.0)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--single-task", action="store_true")
    parser.add_argument("--busy", type=int, default=0, help="processes that use up a core each")
    parser.add_argument("--again", type=int, default=0, help="batches of the past that are replayed after a while")
    parser.add_argument("--postgres", action="store_true", help="keep the ledger in a server")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with bench_folder() as folder:
        result = measure(folder, options)
    for name, value in result.items():
        print(f"{name}: {value}", file=sys.stderr)
    alone = result["seconds"]
    work = f"produced until searchable, {'one task' if options.single_task else f'{TASKS} tasks'}"
    print_measures(
        [
            Measure(f"{work}, {quantile}", "s", (result["seconds"][quantile],), LIMIT, (result["limit"],))
            for quantile in ("p50", "p95", "p99")
        ]
        + [
            Measure(f"{work}, {quantile}, while a range is replayed", "s", (seconds,), "without it", (alone[quantile],))
            for quantile, seconds in result["seconds_while_replaying"].items()
        ],
        as_json=options.json,
    )


if __name__ == "__main__":
    main()
