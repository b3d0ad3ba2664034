from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headrace.checks.task_places import GUIDE, Hosts, TaskPlaceError, check_place, place_problems, task_place
from headrace.connections import variable_name
from headrace.stream import ConsoleOutput, KafkaInput, Storage, Stream

ROOT = Path(__file__).resolve().parents[3]
POSTGRES = "postgresql+psycopg://headrace@db.example.com/headrace"


def stream_of(**fields: Any) -> Stream:
    given = {"storage": "s3://bucket/orders", "ledger": POSTGRES, "spark": {"run_batches": "submit"}} | fields
    inputs = KafkaInput(bootstrap_servers="kafka:9092", topics="orders")
    return Stream(name="orders", inputs=inputs, outputs=ConsoleOutput(), batch_interval="10 s", **given)


def found(stream: Stream, executor: str, environ: dict[str, str] | None = None) -> list[tuple[str, bool]]:
    """The fields with a problem, and whether it is certain."""
    problems = place_problems(stream, task_place(executor, environ or {}), environ or {})
    return [(problem.what.partition(":")[0], problem.certain) for problem in problems]


@pytest.mark.parametrize(
    ("setting", "name", "hosts"),
    [
        ("LocalExecutor", "LocalExecutor", Hosts.ONE),
        ("acme.executors.OwnExecutor", "OwnExecutor", Hosts.ONE),
        ("CeleryExecutor", "CeleryExecutor", Hosts.WORKERS),
        ("CeleryExecutor,KubernetesExecutor", "CeleryExecutor", Hosts.WORKERS),
        ("KubernetesExecutor, CeleryExecutor", "KubernetesExecutor", Hosts.CONTAINER_PER_TASK),
        ("pods:KubernetesExecutor", "KubernetesExecutor", Hosts.CONTAINER_PER_TASK),
        ("LocalExecutor;team1=KubernetesExecutor", "LocalExecutor", Hosts.ONE),
        ("=CeleryExecutor;team1=LocalExecutor", "CeleryExecutor", Hosts.WORKERS),
        (
            "fargate:airflow.providers.amazon.aws.executors.ecs.ecs_executor.AwsEcsExecutor",
            "AwsEcsExecutor",
            Hosts.CONTAINER_PER_TASK,
        ),
        ("AstroExecutor", "AstroExecutor", Hosts.CONTAINERS),
        ("", "", Hosts.ONE),
    ],
)
def test_the_first_executor_decides_where_tasks_run(setting: str, name: str, hosts: Hosts) -> None:
    place = task_place(setting, {})
    assert (place.name, place.hosts) == (name, hosts)


def test_the_container_of_a_task_is_known_by_its_environment() -> None:
    """The pod template of Airflow's chart sets LocalExecutor."""
    place = task_place("LocalExecutor", {"AIRFLOW_IS_K8S_EXECUTOR_POD": "True"})
    assert (place.name, place.hosts) == ("KubernetesExecutor", Hosts.CONTAINER_PER_TASK)
    amazon = task_place("LocalExecutor", {"AIRFLOW_IS_EXECUTOR_CONTAINER": "true"})
    assert amazon.hosts is Hosts.CONTAINER_PER_TASK


@pytest.mark.parametrize(
    ("variable", "name"), [("MWAA_AIRFLOW_COMPONENT", "Amazon MWAA"), ("COMPOSER_ENVIRONMENT", "Cloud Composer")]
)
def test_a_managed_airflow_is_known_by_its_environment(variable: str, name: str) -> None:
    place = task_place("CeleryExecutor", {variable: "worker"})
    assert (place.name, place.hosts) == (name, Hosts.CONTAINERS)
    in_pods = task_place("KubernetesExecutor", {variable: "worker"})
    assert in_pods.hosts is Hosts.CONTAINER_PER_TASK


@pytest.mark.parametrize("executor", ["LocalExecutor", "CeleryExecutor", "KubernetesExecutor", "AstroExecutor"])
def test_an_object_store_and_a_postgres_ledger_fit_everywhere(executor: str) -> None:
    """The log is in the object store."""
    assert found(stream_of(), executor) == []


@pytest.mark.parametrize(
    ("executor", "environ", "certain"),
    [
        ("CeleryExecutor", {}, False),
        ("EdgeExecutor", {}, False),
        ("AstroExecutor", {}, True),
        ("CeleryExecutor", {"MWAA_AIRFLOW_COMPONENT": "worker"}, True),
        ("CeleryExecutor", {"COMPOSER_ENVIRONMENT": "orders"}, True),
        ("KubernetesExecutor", {}, True),
        ("LocalExecutor", {"AIRFLOW_IS_K8S_EXECUTOR_POD": "True"}, True),
    ],
)
def test_a_log_and_a_ledger_on_one_host_do_not_fit_other_hosts(
    executor: str, environ: dict[str, str], certain: bool, tmp_path: Path
) -> None:
    stream = stream_of(storage=str(tmp_path), ledger=f"sqlite:///{tmp_path}/ledger.db")
    assert found(stream, executor, environ) == [("storage", certain), ("ledger", certain)]
    assert found(stream, "LocalExecutor") == []
    # A volume that all tasks mount; but SQLite needs the memory of one host.
    mounted = stream.model_copy(update={"storage": Storage(url="/mnt/orders", shared=True)})
    assert found(mounted, executor, environ) == [("ledger", certain)]


@pytest.mark.parametrize(
    ("connection", "is_file"),
    [
        ('{"conn_type": "headrace_ledger", "schema": "/data/ledger.db"}', True),
        ('{"conn_type": "sqlite", "host": "/data/ledger.db"}', True),
        ('{"conn_type": "headrace_ledger", "host": "db.example.com", "schema": "headrace"}', False),
        ('{"conn_type": "postgres", "host": "db.example.com", "schema": "headrace"}', False),
        (None, False),
    ],
)
def test_a_ledger_of_a_connection_is_looked_up(connection: str | None, is_file: bool) -> None:
    environ = {} if connection is None else {variable_name("books"): connection}
    stream = stream_of(ledger="connection:books")
    assert found(stream, "KubernetesExecutor", environ) == ([("ledger", True)] if is_file else [])


def test_the_bucket_that_composer_copies_is_no_place_for_a_log() -> None:
    stream = stream_of(storage={"url": "/home/airflow/gcs/data/orders", "shared": True})
    assert found(stream, "CeleryExecutor", {"COMPOSER_ENVIRONMENT": "orders"}) == [("storage", True)]
    assert found(stream, "CeleryExecutor") == []


def test_what_works_worse_in_a_container_per_task_is_a_warning() -> None:
    assert found(stream_of(spark={}), "KubernetesExecutor") == [("spark.run_batches", False)]
    shared = stream_of(spark={"master": "local[4]", "job": "small", "run_batches": "submit"})
    assert found(shared, "KubernetesExecutor") == [("spark.job", False)]
    assert found(shared, "CeleryExecutor") == []


def test_a_lambda_function_cannot_hold_a_receiver_job() -> None:
    assert found(stream_of(), "AwsLambdaExecutor") == [("The receiver job", True)]


def test_the_error_names_each_field_the_place_and_the_page(tmp_path: Path) -> None:
    warnings: list[str] = []
    stream = stream_of(storage=str(tmp_path), ledger=f"sqlite:///{tmp_path}/ledger.db", spark={})
    with pytest.raises(TaskPlaceError) as refused:
        check_place(stream, task_place("KubernetesExecutor", {}), warnings.append, {})
    text = str(refused.value)
    assert text.startswith("Stream 'orders' cannot run on KubernetesExecutor. storage: ")
    assert "ledger: sqlite:///" in text
    assert GUIDE in text
    (warning,) = warnings
    assert warning.startswith("spark.run_batches: ")
    assert GUIDE in warning
    assert (ROOT / GUIDE).exists()
