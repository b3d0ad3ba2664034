"""A stream whose tasks Celery runs, beside the others that the LocalExecutor runs; and a Celery worker."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib.util import find_spec

from confluent_kafka import Producer
from examples.demo.elasticsearch_side import ElasticsearchSide
from examples.demo.producing import create_topic
from tests.system.orders import wait_until

from headrace.devstack.airflow import Airflow, AirflowComponent
from headrace.devstack.airflow_api import AirflowApi
from headrace.devstack.errors import LocalStackError
from headrace.devstack.guarded_process import ProcessSpec
from headrace.devstack.stack import Stack
from headrace.errors import HeadraceError
from headrace.ledger import Ledger
from headrace.ledger.states import JobState
from headrace.ledger.tables import JobRow

STREAM = TOPIC = INDEX = "parcels"
SECONDS = 600.0

DAG_FILE = '''
"""A stream for Airflow whose tasks are run by Celery."""

import os

from headrace.dags import batch_dag, receiver_dag
from headrace.stream import ElasticsearchOutput, KafkaInput, Stream

stream = Stream(
    name="parcels",
    inputs=KafkaInput(connection="kafka_default", topics="parcels"),
    outputs=ElasticsearchOutput(connection="elasticsearch_default", index="parcels"),
    batch_interval="5 s",
    storage=os.environ["ORDERS_STORAGE"],
    ledger="connection:headrace_ledger",
)

on_celery = {"executor": "CeleryExecutor"}
receiver = receiver_dag(stream, default_args=on_celery)
batches = batch_dag(stream, single_task=True, repair=False, default_args=on_celery)
'''


HAS_CELERY = find_spec("celery") is not None
"""Whether Airflow's Celery provider is here: the environments of `make airflow` have what users need alone."""


def celery_config(airflow: Airflow) -> dict[str, str]:
    """Airflow's configuration with Celery beside the LocalExecutor. Airflow's database carries the messages."""
    return {
        "core.executor": "LocalExecutor,CeleryExecutor",
        "celery.broker_url": f"sqla+{airflow.database_url}",
        # The transport has no broadcasts.
        "celery.worker_enable_remote_control": "False",
    }


class CeleryWorker(AirflowComponent):
    """A process `airflow celery worker`. If it is killed, what its tasks have started lives on, as on a real host."""

    def __init__(self, stack: Stack) -> None:
        assert stack.airflow is not None
        super().__init__(stack.airflow, "celery-worker")
        self._log_begins = 0

    def specify(self) -> ProcessSpec:
        spec = super().specify()
        self._log_begins = self.log.stat().st_size if self.log.exists() else 0
        command = ["celery", "worker", "--skip-serve-logs", "--concurrency", "2"]
        return replace(spec, argv=[*spec.argv[: spec.argv.index(self.name)], *command])

    def probe(self) -> None:
        with self.log.open("rb") as log:
            log.seek(self._log_begins)
            if b" ready." not in log.read():
                raise LocalStackError("the Celery worker is not ready yet")


class Parcels:
    """The stream as its test uses it."""

    def __init__(self, stack: Stack, ledger: Ledger) -> None:
        assert stack.kafka is not None
        assert stack.elasticsearch is not None
        assert stack.airflow is not None
        self.kafka = stack.kafka.bootstrap_servers
        self.elasticsearch = ElasticsearchSide(stack.elasticsearch.url)
        self.airflow = stack.airflow
        self.ledger = ledger
        self._sent = 0

    @property
    def api(self) -> AirflowApi:
        return self.airflow.api()

    def begin(self) -> None:
        """Make the topic, and let the stream be received."""
        create_topic(self.kafka, TOPIC, 1)
        self.api.wait_for_dag(f"{STREAM}_receiver")
        self.api.unpause(f"{STREAM}_receiver")

    def running_job(self, *, after: int = 0) -> JobRow:
        """The receiver job, once one of a later epoch runs and a task waits for it in the triggerer."""
        found: list[JobRow] = []

        def runs() -> bool:
            # Airflow's ledger begins with the first task.
            names = {row.name for row in self.ledger.streams.all()}
            job = self.ledger.jobs.current(STREAM) if STREAM in names else None
            found[:] = [job] if job is not None and job.epoch > after and job.state is JobState.RUNNING else []
            return bool(found) and self.receiver_task()["state"] == "deferred"

        wait_until(runs, seconds=SECONDS)
        return found[0]

    def receiver_task(self) -> dict[str, object]:
        """The task of the receiver DAG in its newest run."""
        (run,) = self.api.runs(f"{STREAM}_receiver", limit=1)
        (task,) = self.api.task_instances(f"{STREAM}_receiver", run["dag_run_id"])
        return task

    def send_and_find(self) -> None:
        """Send a record, and let batches run until it is a document; then let none run."""
        producer = Producer({"bootstrap.servers": self.kafka})
        producer.produce(TOPIC, json.dumps({"parcel": self._sent}).encode())
        assert producer.flush(60) == 0
        self._sent += 1
        self.api.wait_for_dag(f"{STREAM}_batches")
        self.api.unpause(f"{STREAM}_batches")
        wait_until(self._found, seconds=SECONDS)
        self.api.pause(f"{STREAM}_batches")
        wait_until(lambda: not self._running_batches(), seconds=SECONDS)

    def _running_batches(self) -> list[str | None]:
        """The states of the tasks that go on though the DAG is paused. Its runs do not end before it is unpaused."""
        dag_id = f"{STREAM}_batches"
        runs = [run["dag_run_id"] for run in self.api.runs(dag_id) if run["state"] == "running"]
        states = [state for run_id in runs for state in self.api.task_states(dag_id, run_id).values()]
        return [state for state in states if state in ("queued", "running", "deferred")]

    def _found(self) -> bool:
        try:
            if self.elasticsearch.count(INDEX) < self._sent:
                return False
            documents = {document.id for document in self.elasticsearch.documents(INDEX)}
        except HeadraceError:  # while the shards of the new index start
            return False
        return documents == {f"{TOPIC}+0+{offset}" for offset in range(self._sent)}
