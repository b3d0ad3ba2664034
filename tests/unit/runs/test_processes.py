"""The environment of a stream's processes, and processes that outlive their task."""

from __future__ import annotations

import json
import os
import signal
import sys
import time

import pytest
from airflow.sdk.exceptions import AirflowNotFoundException

from headrace.connections import ALLOWLIST_VARIABLE, resolve
from headrace.runs.processes import (
    DetachedProcess,
    SecretKeyUndefinedError,
    child_environment,
    connections_in_environment,
    spawn,
    tail,
)
from headrace.stream import ElasticsearchOutput, KafkaInput, Stream

KAFKA = {"conn_type": "kafka", "extra": {"bootstrap.servers": "localhost:9092", "sasl.password": "s3cret"}}


@pytest.fixture
def stream(tmp_path) -> Stream:
    return Stream(
        name="flights",
        inputs=KafkaInput(connection="kafka_flights", topics="flights"),
        outputs=ElasticsearchOutput(hosts="http://localhost:9200", index="flights"),
        batch_interval="10 s",
        storage=str(tmp_path),
        ledger=f"sqlite:///{tmp_path}/ledger.db",
    )


@pytest.fixture(autouse=True)
def airflow(monkeypatch):
    monkeypatch.setenv("AIRFLOW_CONN_KAFKA_FLIGHTS", json.dumps(KAFKA))
    monkeypatch.setenv("AIRFLOW_CONN_PAYROLL", "postgres://boss:pw@payroll/db")
    monkeypatch.setenv("AIRFLOW__HEADRACE__SECRET_KEY", "k" * 32)


def test_a_process_gets_its_streams_connections_and_no_others(stream):
    environment = child_environment(stream)
    assert "AIRFLOW_CONN_PAYROLL" not in environment
    connection = resolve("kafka_flights", environment)
    assert connection.conn_type == "kafka"
    assert connection.extra["sasl.password"] == "s3cret"


def test_a_tasks_own_question_to_kafka_finds_its_connection(stream, monkeypatch):
    """It finds it for as long as the task asks."""
    monkeypatch.delenv("AIRFLOW_CONN_KAFKA_FLIGHTS")
    monkeypatch.setattr("headrace.runs.processes.connection_json", lambda conn_id: json.dumps(KAFKA))
    with connections_in_environment(stream):
        assert resolve("kafka_flights").extra["sasl.password"] == "s3cret"
    assert "AIRFLOW_CONN_KAFKA_FLIGHTS" not in os.environ


def test_the_allowed_functions_go_with_the_kafka_connections(stream, monkeypatch):
    monkeypatch.setenv(ALLOWLIST_VARIABLE, "acme.kafka.make_token")
    assert child_environment(stream)[ALLOWLIST_VARIABLE] == "acme.kafka.make_token"
    monkeypatch.delenv(ALLOWLIST_VARIABLE)
    assert ALLOWLIST_VARIABLE not in child_environment(stream)


def test_the_key_for_googles_kafka_goes_with_its_connection_only(stream, monkeypatch):
    monkeypatch.setenv("AIRFLOW_CONN_GOOGLE_CLOUD_DEFAULT", json.dumps({"conn_type": "google_cloud_platform"}))
    assert "AIRFLOW_CONN_GOOGLE_CLOUD_DEFAULT" not in child_environment(stream)
    google = {"bootstrap.servers": "bootstrap.flights.europe-west1.managedkafka.acme.cloud.goog:9092"}
    monkeypatch.setenv("AIRFLOW_CONN_KAFKA_FLIGHTS", json.dumps({"conn_type": "kafka", "extra": google}))
    assert resolve("google_cloud_default", child_environment(stream)).conn_type == "google_cloud_platform"
    monkeypatch.delenv("AIRFLOW_CONN_GOOGLE_CLOUD_DEFAULT")
    assert "AIRFLOW_CONN_GOOGLE_CLOUD_DEFAULT" not in child_environment(stream)


def test_airflows_own_secrets_stay_with_airflow(stream):
    base = {
        "AIRFLOW__CORE__FERNET_KEY": "x",
        "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": "postgresql://airflow:pw@db/airflow",
        "AIRFLOW_VAR_TOKEN": "x",
        "JAVA_HOME": "/java",
        "PYTHONDONTWRITEBYTECODE": "1",
        "AIRFLOW_HOME": "/airflow",
    }
    environment = child_environment(stream, base)
    assert set(base) & set(environment) == {"JAVA_HOME", "AIRFLOW_HOME"}
    assert not any("airflow:pw" in value for value in environment.values())


def test_each_stream_has_a_secret_of_its_own(stream):
    other = stream.model_copy(update={"name": "other"})
    secrets = {child_environment(each)["HEADRACE_SECRET_KEY"] for each in (stream, other, stream)}
    assert len(secrets) == 2


def test_the_secret_key_is_derived_from_ours_before_airflows(stream, monkeypatch):
    ours = child_environment(stream)["HEADRACE_SECRET_KEY"]
    monkeypatch.setenv("AIRFLOW__CORE__FERNET_KEY", "f" * 44)
    assert child_environment(stream)["HEADRACE_SECRET_KEY"] == ours
    monkeypatch.setenv("AIRFLOW__HEADRACE__SECRET_KEY", "")
    airflows = child_environment(stream)["HEADRACE_SECRET_KEY"]
    assert airflows == child_environment(stream)["HEADRACE_SECRET_KEY"] != ours
    assert len(ours) == len(airflows) == 64


@pytest.mark.parametrize("variable", ["AIRFLOW__HEADRACE__SECRET_KEY", "AIRFLOW__CORE__FERNET_KEY"])
def test_no_process_gets_the_key_itself(stream, monkeypatch, variable):
    """Airflow's decrypts every connection."""
    monkeypatch.setenv("AIRFLOW__HEADRACE__SECRET_KEY", "")
    key = "0123456789abcdef" * 3
    monkeypatch.setenv(variable, key)
    assert not any(key in value for value in child_environment(stream).values())


def test_without_any_key_nothing_is_started(stream, monkeypatch):
    monkeypatch.setenv("AIRFLOW__HEADRACE__SECRET_KEY", "")
    monkeypatch.setenv("AIRFLOW__CORE__FERNET_KEY", "")
    with pytest.raises(SecretKeyUndefinedError, match="AIRFLOW__HEADRACE__SECRET_KEY"):
        child_environment(stream)


def test_an_undefined_connection_is_an_error_that_names_it(stream, monkeypatch):
    monkeypatch.delenv("AIRFLOW_CONN_KAFKA_FLIGHTS")
    with pytest.raises(AirflowNotFoundException, match="kafka_flights"):
        child_environment(stream)


def test_children_run_this_python_and_find_its_scripts(stream):
    environment = child_environment(stream, {"PATH": "/bin"})
    assert environment["PYSPARK_PYTHON"] == sys.executable
    assert environment["PATH"].split(os.pathsep)[-1] == "/bin"
    assert environment["SPARK_LOCAL_IP"] == "127.0.0.1"


def test_streams_of_a_shared_job_have_one_secret_of_their_own(stream):
    """Their secret is no stream's own."""

    def secret(name: str, job: str | None) -> str:
        spark = stream.spark.model_copy(update={"job": job})
        return child_environment(stream.model_copy(update={"name": name, "spark": spark}))["HEADRACE_SECRET_KEY"]

    assert secret("flights", "all") == secret("orders", "all") != secret("orders", "some")
    assert secret("all", None) != secret("flights", "all")


def until(condition, seconds=10.0):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("did not happen in time")


@pytest.fixture
def sleeper(tmp_path):
    process = spawn(
        [sys.executable, "-c", "import os, time; print('up', os.getsid(0), flush=True); time.sleep(60)"],
        environment=dict(os.environ),
        log=tmp_path / "logs" / "job.log",
    )
    yield process
    if process.alive():
        os.killpg(process.pid, signal.SIGKILL)
    until(lambda: not process.alive())


def test_a_detached_process_has_its_own_session_and_log(sleeper):
    until(lambda: "up" in tail(sleeper.log))
    assert tail(sleeper.log).split()[1] == str(sleeper.pid)
    assert os.getsid(0) != sleeper.pid
    assert sleeper.alive()


def test_the_log_of_a_detached_process_is_private(sleeper):
    assert sleeper.log.stat().st_mode & 0o007 == 0


def test_a_later_process_of_the_same_id_is_not_the_detached_one(sleeper):
    assert not DetachedProcess(sleeper.pid, sleeper.created - 100, sleeper.log).alive()


def test_the_end_is_seen_with_its_code_and_last_lines(tmp_path):
    code = "import sys; [print('line', n) for n in range(100)]; sys.exit(3)"
    process = spawn([sys.executable, "-c", code], environment=dict(os.environ), log=tmp_path / "job.log")
    until(lambda: not process.alive())
    assert process.exit_code() == 3
    assert tail(process.log, lines=2).splitlines() == ["line 98", "line 99"]


def test_a_log_on_another_host_has_no_tail(tmp_path):
    assert tail(tmp_path / "nowhere.log") == ""
