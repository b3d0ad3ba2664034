"""A stream by Kafka's timestamps whose batches are single tasks, and how it is seen from outside."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
from confluent_kafka import Consumer, Producer, TopicPartition
from examples.demo.elasticsearch_side import ElasticsearchSide
from examples.demo.kafka_side import offsets
from examples.demo.producing import create_topic
from tests.system.orders import wait_until

from headrace.devstack.airflow_api import AirflowApi
from headrace.devstack.stack import Stack
from headrace.ledger import Ledger
from headrace.ledger.batches.tables import BatchRow
from headrace.ledger.states import BatchState

STREAM = TOPIC = INDEX = "clicks"
PARTITIONS = 2
INTERVAL_MS = 10_000

DAG_FILE = '''
"""A stream for Airflow whose batches hold what arrived in Kafka in their interval."""

import os
from datetime import datetime
from pathlib import Path

from headrace.dags import batch_dag, receiver_dag
from headrace.stream import ElasticsearchOutput, KafkaInput, Limits, ParquetOutput, Stream

stream = Stream(
    name="clicks",
    inputs=KafkaInput(connection="kafka_default", topics="clicks"),
    outputs=[
        ElasticsearchOutput(connection="elasticsearch_default", index="clicks"),
        ParquetOutput(path=os.environ["CLICKS_FILES"]),
    ],
    batch_interval="10 s",
    batch_by="timestamp",
    allowed_lateness="2 s",
    storage=os.environ["CLICKS_STORAGE"],
    ledger="connection:headrace_ledger",
    limits=Limits(segment_interval="5 s"),
)

# When nobody sends any more, the schedule ends: each run takes seconds of a processor.
ends = Path(os.environ["CLICKS_SCHEDULE_ENDS"])
end_date = datetime.fromisoformat(ends.read_text()) if ends.exists() else None

receiver = receiver_dag(stream)
batches = batch_dag(stream, single_task=True, end_date=end_date)
'''


@dataclass(frozen=True, slots=True)
class Click:
    """A record as a plain consumer gave it."""

    partition: int
    offset: int
    timestamp_ms: int
    value: bytes

    @property
    def document_id(self) -> str:
        return f"{TOPIC}+{self.partition}+{self.offset}"


class ClickProducer:
    """Sends clicks at a slow pace from a thread, for as long as it is wanted."""

    def __init__(self, bootstrap_servers: str, *, rate: float) -> None:
        self._bootstrap_servers = bootstrap_servers
        self._pause = 1 / rate
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.sent = 0

    def __enter__(self) -> ClickProducer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        producer = Producer({"bootstrap.servers": self._bootstrap_servers, "linger.ms": 5})
        while not self._stop.wait(self._pause):
            producer.produce(TOPIC, json.dumps({"click": self.sent}).encode(), partition=self.sent % PARTITIONS)
            producer.poll(0)
            self.sent += 1
        assert producer.flush(30) == 0


class Clicks:
    """The stream as its tests use it."""

    def __init__(self, stack: Stack, ledger: Ledger) -> None:
        assert stack.kafka is not None
        assert stack.elasticsearch is not None
        assert stack.airflow is not None
        self.ledger = ledger
        self.kafka = stack.kafka.bootstrap_servers
        self.elasticsearch_url = stack.elasticsearch.url
        self.elasticsearch = ElasticsearchSide(self.elasticsearch_url)
        self.airflow = stack.airflow

    @property
    def api(self) -> AirflowApi:
        return self.airflow.api()

    def begin(self) -> None:
        """Make the topic, and let the DAGs run."""
        create_topic(self.kafka, TOPIC, PARTITIONS)
        for dag_id in (f"{STREAM}_receiver", f"{STREAM}_batches"):
            self.api.wait_for_dag(dag_id)
            self.api.unpause(dag_id)

    def end_schedule(self) -> None:
        """Let there be no run for intervals that begin later than the next one."""
        # The next one too: the ledger's clock, which gives batch times, is another.
        end = datetime.fromtimestamp((self.ledger.now_ms() + INTERVAL_MS) / 1000, UTC)
        Path(os.environ["CLICKS_SCHEDULE_ENDS"]).write_text(end.isoformat())

    def records(self) -> Iterator[Click]:
        """What Kafka holds, read by a plain consumer."""
        consumer = Consumer({"bootstrap.servers": self.kafka, "group.id": "proof", "enable.auto.commit": False})
        try:
            for partition, (first, end) in offsets(self.kafka, TOPIC).items():
                consumer.assign([TopicPartition(TOPIC, partition, first)])
                position = first
                while position < end:
                    for message in consumer.consume(1_000, 1.0):
                        assert message.error() is None, message.error()
                        offset = message.offset() or 0
                        position = offset + 1
                        yield Click(partition, offset, message.timestamp()[1], message.value() or b"")
        finally:
            consumer.close()

    def batch_times(self) -> dict[Click, int]:
        """Each record's batch time by the definition: the interval end after its partition's running maximum."""
        latest: dict[int, int] = {}
        found = {}
        for click in self.records():
            at_ms = latest[click.partition] = max(latest.get(click.partition, 0), click.timestamp_ms)
            found[click] = (at_ms // INTERVAL_MS + 1) * INTERVAL_MS
        return found

    def taken(self) -> dict[tuple[int, int], int]:
        """Batch time by (partition, offset), as the ledger has it: a record that is in two batches fails here."""
        found: dict[tuple[int, int], int] = {}
        for batch in self.batches():
            for taken in self.ledger.batches.inputs(STREAM, batch.batch_time_ms):
                for offset in range(taken.from_offset, taken.until_offset):
                    place = (taken.partition.partition, offset)
                    assert place not in found, f"{place} is in {found[place]} and in {batch.batch_time_ms}"
                    found[place] = batch.batch_time_ms
        return found

    def batches(self) -> list[BatchRow]:
        """All batches, oldest first."""
        return self.ledger.batches.page(STREAM, 10_000, oldest_first=True)

    def settle(self, *, seconds: float = 600.0) -> None:
        """Wait until every record in Kafka is in a batch that has completed and whose log has gone: ``seconds`` at most
        between two changes."""

        def progress() -> list[tuple[Any, ...]]:
            return [(b.batch_time_ms, b.state, b.attempt, b.cleaned_at_ms) for b in self.batches()]

        def settled() -> bool:
            held = sum(end - first for first, end in offsets(self.kafka, TOPIC).values())
            batches = [batch for batch in self.batches() if batch.records]
            return sum(batch.records for batch in batches) == held and all(
                batch.state is BatchState.COMPLETED and batch.cleaned_at_ms for batch in batches
            )

        try:
            while not settled():
                before = progress()
                wait_until(lambda: settled() or progress() != before, seconds=seconds, poll=0.5)  # noqa: B023
        except AssertionError as late:
            rows = [(b.batch_time_ms, b.state.value, b.records, b.cleaned_at_ms, b.error) for b in self.batches()]
            raise AssertionError(f"{late}; unclaimed {self.ledger.blocks.unclaimed(STREAM)}; batches {rows}") from None

    def documents(self) -> dict[str, tuple[bytes, int, int]]:
        """Source, version and sequence number of every document, by id."""
        self.elasticsearch.get(f"/{INDEX}/_refresh")
        # On a slow machine there are more than the 10,000 that one search returns.
        hits: list[dict[str, Any]] = []
        with httpx.Client(base_url=self.elasticsearch_url, timeout=120) as client:
            search = {"version": True, "seq_no_primary_term": True, "size": 5_000, "sort": ["_doc"]}
            page = client.post(f"/{INDEX}/_search?scroll=2m", json=search).json()
            while page["hits"]["hits"]:
                hits += page["hits"]["hits"]
                page = client.post("/_search/scroll", json={"scroll": "2m", "scroll_id": page["_scroll_id"]}).json()
        assert len(hits) == self.elasticsearch.count(INDEX)
        return {hit["_id"]: (json.dumps(hit["_source"]).encode(), hit["_version"], hit["_seq_no"]) for hit in hits}

    def wait_for_backfill(self, backfill: int, *, seconds: float = 600.0) -> None:
        """Wait until all runs of the backfill have ended, well or not: ``seconds`` at most between two changes."""
        dag_id = f"{STREAM}_batches"

        def over() -> bool:
            found: dict[str, Any] = self.api.request("GET", f"/backfills/{backfill}")
            return found["completed_at"] is not None

        def states() -> dict[str, list[tuple[str, str]]]:
            runs = [run["dag_run_id"] for run in self.api.runs(dag_id) if run["run_type"] == "backfill"]
            return {
                run: [(task["task_id"], task["state"]) for task in self.api.task_instances(dag_id, run)] for run in runs
            }

        while not over():
            before = states()
            try:
                wait_until(lambda: over() or states() != before, seconds=seconds, poll=0.5)  # noqa: B023
            except AssertionError as stuck:
                raise AssertionError(f"backfill {backfill} does not go on, {stuck}: {states()}") from None


def sleep_through(intervals: int) -> None:
    """Let so many batch times pass: there is no other way for a producer to have run that long."""
    end_ms = (int(time.time() * 1000) // INTERVAL_MS + intervals + 1) * INTERVAL_MS
    wait_until(lambda: time.time() * 1000 >= end_ms, seconds=intervals * INTERVAL_MS / 1000 + 30, poll=0.5)
