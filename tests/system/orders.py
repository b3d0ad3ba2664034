"""A stream outside the repository: its DAG file, its transform, its topic, and the proof of what became of it."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import psutil
from examples.demo.damage import Damage
from examples.demo.elasticsearch_side import ElasticsearchSide
from examples.demo.flights import FlightRecord
from examples.demo.kafka_side import offsets, read_topic
from examples.demo.observing import Observer, Snapshot
from examples.demo.producing import Producing, create_topic
from examples.demo.proof import Place, Proof, prove
from sqlalchemy import create_engine, text

from headrace.devstack.airflow_api import AirflowApi
from headrace.devstack.stack import Stack
from headrace.devstack.state import processes_of_stack
from headrace.errors import HeadraceError
from headrace.ledger import BatchState, Ledger
from headrace.ledger.tables import JobRow

STREAM = TOPIC = INDEX = "orders"
PARTITIONS = 3

DAG_FILE = '''
"""A stream for Airflow, made of the public parts of headrace alone."""

import os
from pathlib import Path

from headrace.dags import replay_dag, stream_dags
from headrace.stream import ElasticsearchOutput, JsonDecoder, KafkaInput, SparkSettings, Stream

stream = Stream(
    name="orders",
    inputs=KafkaInput(
        connection="kafka_default",
        topics="orders",
        value_decoder=JsonDecoder(fields="number LONG, item STRING, cents INT, pieces INT"),
    ),
    transform="orders_transform:with_total",
    outputs=ElasticsearchOutput(connection="elasticsearch_default", index="orders"),
    batch_interval="20 s",
    storage=os.environ["ORDERS_STORAGE"],
    ledger="connection:headrace_ledger",
    spark=SparkSettings(py_files=(str(Path(__file__).with_name("orders_transform.py")),)),
)

# One task does a batch: the demo and the tutorial have those of five, which take five times as much of a processor.
receiver, batches = stream_dags(stream, single_task=True)
replay = replay_dag(stream, "v2", outputs={"elasticsearch": {"index": "orders-v2"}})
'''

TRANSFORM_FILE = """
from pyspark.sql import functions as F


def with_total(records):
    order = F.col("value")
    return records.select("topic", "partition", "offset", "value.*", (order.cents * order.pieces).alias("total"))
"""

# Far above what it takes: on a machine that does ten other things at once, Airflow takes half a minute for a run.
_DEADLINE_SECONDS = 600.0
_POLL_SECONDS = 0.5
_TRANSACTIONS = """
    SELECT pid, state, wait_event_type, wait_event, pg_blocking_pids(pid), now() - xact_start, left(query, 200)
    FROM pg_stat_activity WHERE xact_start IS NOT NULL AND pid <> pg_backend_pid()
"""
_DAMAGES = {
    Damage.TRUNCATED: b'{"number": 1, "item": "cu',
    Damage.ARRAY: b"[1, 2]",
    Damage.NOT_UTF8: b'{"item": "\xff"}',
}


class Orders:
    """The stream as its tests use it."""

    def __init__(self, stack: Stack, ledger: Ledger) -> None:
        assert stack.kafka is not None
        assert stack.elasticsearch is not None
        assert stack.airflow is not None
        self.stack = stack
        self.ledger = ledger
        self.kafka = stack.kafka.bootstrap_servers
        self.elasticsearch = ElasticsearchSide(stack.elasticsearch.url)
        self.airflow = stack.airflow
        self._produced = 0
        self._malformed: dict[Place, Damage] = {}
        self._number = 0

    @property
    def api(self) -> AirflowApi:
        """Airflow's REST API."""
        return self.airflow.api()

    def begin(self) -> None:
        """Make the topic, and let the DAGs run."""
        create_topic(self.kafka, TOPIC, PARTITIONS)
        self._unpause(f"{STREAM}_receiver")
        # Batches before the first record would only be in the way of a slow machine.
        self.until(lambda snapshot: snapshot.receiving == "running")
        self._unpause(f"{STREAM}_batches")

    def _unpause(self, dag_id: str) -> None:
        self.api.wait_for_dag(dag_id)
        self.api.unpause(dag_id)

    def produce(self, records: int, *, rate: float | None = None) -> Producing:
        """Begin to produce; one order in a hundred is malformed."""
        producing = Producing(self.kafka, TOPIC, self._orders(records), rate=rate)
        producing.start()
        return producing

    def produce_under_way(self) -> Producing:
        """Begin to produce for ten seconds, and wait until some of it has been received."""
        received = self.look().received
        producing = self.produce(20_000, rate=2_000)
        self.until(lambda snapshot: snapshot.received > received + 2_000)
        return producing

    def finish(self, producing: Producing) -> None:
        """Wait until all is produced, and remember what has to be found."""
        producing.wait()
        self._produced += producing.delivered
        self._malformed |= producing.malformed

    def settle(self) -> Snapshot:
        """Wait until everything produced so far is in a completed and checkpointed batch."""
        return self.until(lambda snapshot: snapshot.processed)

    def prove(self) -> Proof:
        """Compare everything that was ever produced with everything that is in the index and the dead letters."""
        again = read_topic(self.kafka, TOPIC)
        records = {
            place: value if place in self._malformed else with_total(value) for place, value in again.values.items()
        }
        return prove(
            produced=self._produced,
            held=again.held,
            records=records,
            malformed=self._malformed.keys(),
            documents=self.elasticsearch.documents(INDEX),
            dead_letters=self.elasticsearch.dead_letters(f"{INDEX}-dead-letters"),
        )

    def assert_proved(self) -> None:
        """Settle, and require the proof to hold."""
        self.settle()
        proof = self.prove()
        assert proof.holds, list(proof.problems())
        assert proof.dead_lettered == len(self._malformed) > 0
        assert self.ledger.gaps.page(STREAM) == []

    def assert_nobody_was_needed(self) -> None:
        """A task waits for the receiver job's end, in a run that did not fail, and no batch waits for a person: where
        a batch's run failed, a later one has completed the batch."""

        def attached() -> bool:
            running = [run for run in self.api.runs(f"{STREAM}_receiver") if run["state"] == "running"]
            states = [self.api.task_states(f"{STREAM}_receiver", run["dag_run_id"]) for run in running]
            return states == [{"receive": "deferred"}]

        wait_until(attached, seconds=300)
        failed = [run["dag_run_id"] for run in self.api.runs(f"{STREAM}_receiver") if run["state"] == "failed"]
        assert not failed, f"{failed}\n{self._explain()}"
        wait_until(lambda: self._failed_batches() == [], seconds=_DEADLINE_SECONDS)

    def _failed_batches(self) -> list[int]:
        unfinished = self.ledger.batches.earlier_unfinished(STREAM, self.ledger.now_ms())
        return [batch.batch_time_ms for batch in unfinished if batch.state is BatchState.FAILED]

    def look(self) -> Snapshot:
        """How far the stream is."""
        ends = sum(end for _, end in offsets(self.kafka, TOPIC).values())
        observer = Observer(
            STREAM,
            ledger=self.ledger,
            to_produce=self._produced,
            produced=lambda: ends,
            elasticsearch=self.elasticsearch,
            index=INDEX,
        )
        return observer.look()

    def until(self, condition: Callable[[Snapshot], bool], *, seconds: float = _DEADLINE_SECONDS) -> Snapshot:
        """Look until ``condition`` holds; fails with the last look, and with what Airflow's tasks say."""
        looks: list[Snapshot] = []

        def holds() -> bool:
            try:
                looks[:] = [self.look()]
            except HeadraceError:  # while a server is being killed or started
                return False
            return condition(looks[0])

        try:
            wait_until(holds, seconds=seconds)
        except AssertionError:
            raise AssertionError(f"after {seconds:g} s: {looks}\n{self._explain()}") from None
        return looks[0]

    def job(self) -> JobRow:
        """The newest receiver job."""
        job = self.ledger.jobs.current(STREAM)
        assert job is not None
        return job

    def batch_process(self) -> psutil.Process | None:
        """The process that runs a batch just now, forked from the receiver job's batch server or not."""
        for process in processes_of_stack(self.stack.state.id):
            try:
                command = process.cmdline()
            except psutil.Error:
                continue
            forked = " ".join(command).startswith(f"headrace batch {STREAM} ")
            if forked or (any(word.endswith("micro_batch.py") for word in command) and STREAM in command):
                return process
        return None

    def indexings(self) -> int:
        """Documents that the index has taken so far, whether a search sees them yet or not."""
        found = self.elasticsearch.get(f"/{INDEX}/_stats/indexing")
        return int(found["_all"]["primaries"]["indexing"]["index_total"])

    def _orders(self, records: int) -> Iterator[FlightRecord]:
        for _ in range(records):
            number, self._number = self._number, self._number + 1
            key = str(number % 997).encode()
            if number % 100 == 50:
                kind = list(_DAMAGES)[number // 100 % len(_DAMAGES)]
                yield FlightRecord(key, _DAMAGES[kind], kind)
                continue
            order = {
                "number": number,
                "item": f"cup {number % 7} é",
                "cents": random.randint(1, 9_999),
                "pieces": number % 5,
            }
            yield FlightRecord(key, json.dumps(order).encode())

    def _explain(self) -> str:
        lines = [f"health: {self.api.health()}", f"import errors: {self.api.import_errors()}"]
        for dag_id in (f"{STREAM}_receiver", f"{STREAM}_batches"):
            dag = self.api.request("GET", f"/dags/{dag_id}")
            lines.append(str({name: dag[name] for name in ("dag_id", "is_stale", "is_paused", "last_parsed_time")}))
            for run in self.api.runs(dag_id, limit=3):
                lines.append(f"{run['dag_run_id']} {run['state']} since {run['start_date']}")
                for task in self.api.task_instances(dag_id, run["dag_run_id"]):
                    if task["state"] in ("failed", "up_for_retry", "running", "deferred"):
                        log = self.api.task_log(
                            dag_id, run["dag_run_id"], task["task_id"], try_number=task["try_number"]
                        )
                        lines += [f"{run['dag_run_id']} {task['task_id']} {task['state']}:", log[-3000:]]
        for name in ("scheduler", "dag-processor"):
            log = self.airflow.components[name].log.read_text(errors="replace")
            lines += [f"{name}:", "\n".join(log.splitlines()[-30:])]
        lines += ["transactions:", *self._transactions()]
        return "\n".join(lines)

    def _transactions(self) -> list[str]:
        """What Airflow's database has under way: the scheduler passes over a run whose row is locked."""
        engine = create_engine(self.airflow.database_url)
        with engine.connect() as connection:
            rows = connection.execute(text(_TRANSACTIONS)).all()
        engine.dispose()
        return [str(tuple(row)) for row in rows]


def with_total(value: bytes | None) -> bytes:
    """What the transform makes of an order, computed without Spark."""
    order: dict[str, Any] = json.loads(value or b"")
    return json.dumps({**order, "total": order["cents"] * order["pieces"]}).encode()


def wait_until(condition: Callable[[], bool], *, seconds: float, poll: float = _POLL_SECONDS) -> None:
    """Poll with a deadline."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds:g} s"
        time.sleep(poll)


__all__ = ["DAG_FILE", "INDEX", "STREAM", "TRANSFORM_FILE", "Orders", "wait_until"]
