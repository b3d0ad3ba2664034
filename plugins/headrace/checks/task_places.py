"""Finds the parts of a stream that cannot work where Airflow runs its tasks (docs/guides/managed-airflow.md).

The tasks of a stream share its folder and its ledger. The receiver job, a process that the task of the receiver DAG
starts, outlives this task, but not the container that it runs in. So what matters is which tasks share a host and a
disk, and how long these live. Airflow's executor decides this; some places are known by their environment variables.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import PurePosixPath
from urllib.parse import unquote, urlsplit

from headrace.connections import CONNECTION_PREFIX, ConnectionNotFoundError, resolve
from headrace.errors import HeadraceError
from headrace.stream import Stream

GUIDE = "docs/guides/managed-airflow.md"


class TaskPlaceError(HeadraceError):
    """The stream cannot work where Airflow runs its tasks: its log or its ledger would be lost, or is out of reach."""


class Hosts(Enum):
    """Which hosts the tasks of one stream run on."""

    ONE = "one"
    """Processes of one host, as far as is known."""
    WORKERS = "workers"
    """Workers that may be several hosts."""
    CONTAINERS = "containers"
    """Workers that are containers with disks of their own, and are replaced."""
    CONTAINER_PER_TASK = "container per task"
    """A container for each task, which ends with it."""


@dataclass(frozen=True, slots=True)
class TaskPlace:
    """Where Airflow runs a stream's tasks. ``name`` is the executor's, or that of a managed Airflow."""

    name: str
    hosts: Hosts

    @property
    def redelivers(self) -> bool:
        """Whether a broker gives a task to another worker when it has run for long: by default for 24 hours."""
        return self.name in ("CeleryExecutor", *_MANAGED.values())


@dataclass(frozen=True, slots=True)
class PlaceProblem:
    """A part of a stream that does not fit a place. ``certain``: it cannot work; otherwise that depends on what is not
    known here."""

    what: str
    remedy: str
    certain: bool


_EXECUTORS: Mapping[str, Hosts] = {
    "AstroExecutor": Hosts.CONTAINERS,
    "AwsBatchExecutor": Hosts.CONTAINER_PER_TASK,
    "AwsEcsExecutor": Hosts.CONTAINER_PER_TASK,
    "AwsEksExecutor": Hosts.CONTAINER_PER_TASK,
    "AwsLambdaExecutor": Hosts.CONTAINER_PER_TASK,
    "CeleryExecutor": Hosts.WORKERS,
    "EdgeExecutor": Hosts.WORKERS,
    "KubernetesExecutor": Hosts.CONTAINER_PER_TASK,
}
# AWS ends a function after 15 minutes. No container of it can hold a receiver job, nor most batches.
_LAMBDA = "AwsLambdaExecutor"
# Set by Airflow's Kubernetes and Amazon providers in the container of each task. There ``[core] executor`` need not be
# the one that started the task: the pod template of Airflow's chart has LocalExecutor.
_OF_A_TASK = {
    "AIRFLOW_IS_K8S_EXECUTOR_POD": "KubernetesExecutor",
    "AIRFLOW_IS_EXECUTOR_CONTAINER": "an executor of Airflow's Amazon provider",
}
_COMPOSER = "Cloud Composer"
# Documented variables of managed Airflows.
_MANAGED = {"MWAA_AIRFLOW_COMPONENT": "Amazon MWAA", "COMPOSER_ENVIRONMENT": _COMPOSER}
# Composer copies these folders from and to a bucket, at times: what one worker syncs, others see later or never.
_COMPOSERS_BUCKET = PurePosixPath("/home/airflow/gcs")


def task_place(executor: str, environ: Mapping[str, str] | None = None) -> TaskPlace:
    """Return where tasks run by this setting ``[core] executor``, or by the environment (by default this process's).

    Of several executors the first counts, which is Airflow's default one.
    """
    environ = os.environ if environ is None else environ
    for variable, name in _OF_A_TASK.items():
        if environ.get(variable):
            return TaskPlace(name, Hosts.CONTAINER_PER_TASK)
    name = _first(executor)
    hosts = _EXECUTORS.get(name, Hosts.ONE)
    if hosts is not Hosts.CONTAINER_PER_TASK:
        for variable, service in _MANAGED.items():
            if environ.get(variable):
                return TaskPlace(service, Hosts.CONTAINERS)
    return TaskPlace(name, hosts)


def _first(setting: str) -> str:
    """The class name of the first executor: ``A;team=B``, ``A,B``, ``alias:module.A``."""
    first = setting.partition(";")[0].strip("= ").partition(",")[0]
    return first.strip().rpartition(":")[2].rpartition(".")[2]


def check_place(
    stream: Stream, place: TaskPlace, warn: Callable[[str], object], environ: Mapping[str, str] | None = None
) -> None:
    """Refuse a stream that cannot work at the place; ``warn`` of what may not. ``environ`` has the ledger's connection.

    Raises:
        TaskPlaceError: with all that cannot work.
    """
    problems = list(place_problems(stream, place, environ))
    for problem in problems:
        if not problem.certain:
            warn(f"{problem.what} {problem.remedy} See {GUIDE}.")
    certain = [problem for problem in problems if problem.certain]
    if certain:
        texts = [f"{problem.what} {problem.remedy}" for problem in certain]
        raise TaskPlaceError(
            f"Stream {stream.name!r} cannot run on {place.name}. {' '.join(texts)}",
            remedy=f"{GUIDE} shows what works there.",
        )


def place_problems(
    stream: Stream, place: TaskPlace, environ: Mapping[str, str] | None = None
) -> Iterator[PlaceProblem]:
    """Yield the parts of the stream that do not fit the place, each with the field and the remedy."""
    if place.hosts is Hosts.ONE:
        return
    yield from _log_problems(stream, place)
    if _ledger_is_file(stream.ledger, environ):
        yield PlaceProblem(
            f"ledger: {stream.ledger} is a SQLite file, and {_BECAUSE[place.hosts]}.",
            "Use Postgres (docs/guides/postgres.md); not the database of a managed Airflow, which is closed to others.",
            place.hosts is not Hosts.WORKERS,
        )
    if place.name == _LAMBDA:
        yield PlaceProblem(
            "The receiver job: AWS ends a Lambda function after 15 minutes, and the receiver job with it.",
            'Give the DAGs of the stream another executor, such as default_args={"executor": "AwsEcsExecutor"}.',
            certain=True,
        )
    elif place.hosts is Hosts.CONTAINER_PER_TASK:
        yield from _container_problems(stream, place)


_BECAUSE = {
    Hosts.WORKERS: "workers on other hosts do not see it",
    Hosts.CONTAINERS: "each worker has a disk of its own, which is lost when the worker is replaced",
    Hosts.CONTAINER_PER_TASK: "each task has a container with a disk of its own, which is lost when the task ends",
}


def _log_problems(stream: Stream, place: TaskPlace) -> Iterator[PlaceProblem]:
    storage = stream.storage
    if not storage.is_local:
        return
    if not storage.shared:
        volume = "" if place.name in _MANAGED.values() else ", or a volume that all tasks mount, with shared=True"
        yield PlaceProblem(
            f"storage: {storage.url} is a folder of one host, and {_BECAUSE[place.hosts]}.",
            f"Use an object store, such as s3://bucket/folder{volume}.",
            place.hosts is not Hosts.WORKERS,
        )
        return
    folder = PurePosixPath(unquote(urlsplit(storage.url).path))
    if place.name == _COMPOSER and folder.is_relative_to(_COMPOSERS_BUCKET):
        yield PlaceProblem(
            f"storage: {storage.url} is a folder of the environment's bucket, which Cloud Composer copies to the "
            "workers and back at times: a batch would not find what a receiver has synced.",
            "Name the bucket itself: gs://bucket/folder.",
            certain=True,
        )


def _container_problems(stream: Stream, place: TaskPlace) -> Iterator[PlaceProblem]:
    # A connection may have the deploy mode "cluster", and then the driver is not in the container.
    if stream.spark.job is not None and stream.spark.connection is None:
        yield PlaceProblem(
            f"spark.job: all streams of the job {stream.spark.job} are received in one process, which ends with the "
            "container of the task that started it: when that stream stops, the others start again.",
            "Leave job out, or run the receiver DAGs by an executor with workers that stay.",
            certain=False,
        )
    if stream.spark.run_batches == "connect":
        yield PlaceProblem(
            f"spark.run_batches: {place.name} runs a batch in another container than the receiver job, whose Spark "
            "application it cannot reach. So each batch starts a Spark application of its own, in 15 s or more.",
            'Set run_batches="submit", and intervals of a minute or more; or use an executor with workers that stay.',
            certain=False,
        )


def _ledger_is_file(ledger: str, environ: Mapping[str, str] | None) -> bool:
    """Whether the ledger is on SQLite; False if it is a connection that this process does not know."""
    if not ledger.startswith(CONNECTION_PREFIX):
        return ledger.startswith("sqlite")
    with suppress(ConnectionNotFoundError):
        connection = resolve(ledger.removeprefix(CONNECTION_PREFIX), environ)
        return connection.conn_type == "sqlite" or (connection.conn_type == "headrace_ledger" and not connection.host)
    return False
