"""The settings of a receiver job's application, and its start, without Spark."""

from __future__ import annotations

import socket
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.spark.receiving import receiver_application
from headrace.spark.receiving.receiver_application import (
    TOKEN_VARIABLE,
    MasterUnreachableError,
    NoClusterError,
    TaskSlotsError,
    check_master,
    check_task_slots,
    receiver_conf,
    start_application,
)
from headrace.spark.sessions import default_conf
from headrace.stream import ConsoleOutput, ExecutorAllocation, KafkaInput, SparkSettings, Stream
from headrace.stream.model import StreamDefinitionError

LOOPBACK = {"SPARK_LOCAL_IP": "127.0.0.1"}


def stream(**spark: Any) -> Stream:
    return Stream(
        name="clicks",
        inputs=KafkaInput(bootstrap_servers="localhost:9092", topics="clicks"),
        outputs=ConsoleOutput(),
        batch_interval="10 s",
        storage={"url": "/tmp/clicks", "shared": True},
        ledger="sqlite:////tmp/ledger.db",
        spark=SparkSettings(**spark),
    )


@pytest.fixture(autouse=True)
def _no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, "before")
    monkeypatch.delenv("PYSPARK_GATEWAY_PORT", raising=False)


def test_a_receivers_application_neither_speculates_nor_shrinks() -> None:
    """It shares its processors fairly."""
    given = {"spark.speculation": "true", "spark.dynamicAllocation.enabled": "true"}
    conf = receiver_conf(stream(), "local[4]", None, given=given, environment=LOOPBACK)
    assert conf["spark.speculation"] == "false"
    assert conf["spark.dynamicAllocation.enabled"] == "false"
    assert conf["spark.scheduler.mode"] == "FAIR"
    assert conf["spark.driver.bindAddress"] == "127.0.0.1"
    assert "spark.plugins" not in conf


UNSAFE_PAGES = ("spark.ui.killEnabled", "spark.ui.heapHistogramEnabled", "spark.ui.threadDumpsEnabled")


@pytest.mark.parametrize("master", ["local[4]", "spark://host:7077", "yarn"])
def test_sparks_pages_neither_kill_jobs_nor_show_the_memory(master: str) -> None:
    """They do so only if the stream says so."""
    conf = receiver_conf(stream(), master, None, given={}, environment=LOOPBACK)
    assert [conf[name] for name in UNSAFE_PAGES] == ["false"] * 3
    # The application of a submitted batch has the same defaults.
    assert [default_conf(master)[name] for name in UNSAFE_PAGES] == ["false"] * 3
    asked = stream(conf={"spark.ui.threadDumpsEnabled": "true"})
    conf = receiver_conf(asked, master, None, given={"spark.ui.heapHistogramEnabled": "true"}, environment=LOOPBACK)
    assert [conf[name] for name in UNSAFE_PAGES] == ["false", "true", "true"]


def test_without_conf_the_application_has_the_streams_name() -> None:
    """It runs on this machine."""
    declared = stream()
    master = declared.spark.master_url(declared.receivers)
    conf = receiver_conf(declared, master, None, given={}, environment=LOOPBACK)
    assert (conf["spark.app.name"], conf["spark.master"]) == ("headrace receiver clicks", master)
    assert master.startswith("local[")


@pytest.mark.parametrize("master", ["local[4]", "spark://host:7077"])
def test_the_environment_given_to_executors_reaches_them(master: str) -> None:
    """It is the stream that gives it."""
    declared = stream(conf={"spark.executorEnv.REGION": "eu"})
    assert receiver_conf(declared, master, None, given={}, environment={})["spark.executorEnv.REGION"] == "eu"


def test_a_cluster_whose_masters_all_refuse_is_named_early() -> None:
    """It is named before Spark tries for a minute."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # Not listening, so connections are refused.
        refusing = f"127.0.0.1:{taken.getsockname()[1]}"
        check_master(f"spark://{refusing},127.0.0.1:{server.getsockname()[1]}")
        with pytest.raises(MasterUnreachableError, match=f"{refusing}: .*refused"):
            start_application(stream(master=f"spark://{refusing}"), token=None)
    with pytest.raises(MasterUnreachableError):
        check_master("spark://without-a-port")
    check_master("local[2]")
    check_master("yarn")


def test_executors_are_not_allocated_without_a_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """The master may come from spark-submit."""
    monkeypatch.setattr(receiver_application, "given_conf", lambda: {"spark.master": "local[4]"})
    with pytest.raises(NoClusterError, match=r"the master is local\[4\]"):
        start_application(stream(master="spark://host:7077", executors=ExecutorAllocation()), token=None)


def test_an_allocating_application_begins_with_the_minimum() -> None:
    """Where the cluster manager asks for a number; it is raised so that a batch has a slot."""

    def first(conf: dict[str, str] | None = None, **bounds: int) -> str | None:
        declared = stream(master="yarn", executors=ExecutorAllocation(**bounds), conf=conf or {})
        return receiver_conf(declared, "yarn", None, given={}, environment={}).get("spark.executor.instances")

    assert first(minimum=5) == "5"
    assert first() == "2", "one slot for the receiver and one for a batch"
    assert first({"spark.executor.cores": "4"}) == "1"
    assert first({"spark.executor.cores": "4", "spark.task.cpus": "3"}) == "2"
    assert first({"spark.executor.instances": "7"}) == "7"
    plain = receiver_conf(stream(master="yarn"), "yarn", None, given={}, environment={})
    assert "spark.executor.instances" not in plain


def test_a_start_that_fails_stops_what_was_started(monkeypatch: pytest.MonkeyPatch) -> None:
    stopped: list[bool] = []
    session = SimpleNamespace(stop=lambda: stopped.append(True), sparkContext=SimpleNamespace())
    builder = SimpleNamespace(config=lambda key, value: builder, getOrCreate=lambda: session)

    def too_few(*_: object, **__: object) -> None:
        raise TaskSlotsError("too few slots")

    monkeypatch.setattr("pyspark.sql.SparkSession", SimpleNamespace(builder=builder))
    monkeypatch.setattr(receiver_application, "prepare_environment", lambda master: None)
    monkeypatch.setattr(receiver_application, "send_code", too_few)
    with pytest.raises(TaskSlotsError):
        start_application(stream(), token=None)
    assert stopped == [True]


@pytest.mark.parametrize("setting", ["spark.dynamicAllocation.enabled", "spark.speculation"])
def test_what_would_move_or_take_executors_is_refused_in_conf(setting: str) -> None:
    with pytest.raises(StreamDefinitionError, match=f"{setting} is set by headrace"):
        SparkSettings(conf={setting: "true"})


def test_what_spark_submit_was_given_wins_over_the_streams_conf() -> None:
    conf = receiver_conf(
        stream(conf={"spark.a": "stream", "spark.b": "stream"}),
        "local[4]",
        None,
        given={"spark.a": "submit"},
        environment=LOOPBACK,
    )
    assert (conf["spark.a"], conf["spark.b"]) == ("submit", "stream")


def test_the_connect_server_listens_on_loopback_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its token is not for a command line."""
    import os

    conf = receiver_conf(stream(), "local[4]", "the token", given={}, environment=LOOPBACK)
    assert conf["spark.connect.grpc.binding.address"] == "127.0.0.1"
    assert "the token" not in conf.values()
    assert os.environ[TOKEN_VARIABLE] == "the token"


def test_under_spark_submit_the_token_is_set_in_the_running_jvm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYSPARK_GATEWAY_PORT", "1")
    conf = receiver_conf(stream(), "local[4]", "the token", given={}, environment=LOOPBACK)
    assert conf["spark.connect.authenticate.token"] == "the token"


def test_a_user_interface_that_would_listen_everywhere_is_off() -> None:
    assert receiver_conf(stream(), "local[4]", None, given={}, environment={})["spark.ui.enabled"] == "false"
    assert "spark.ui.enabled" not in receiver_conf(stream(), "local[4]", None, given={}, environment=LOOPBACK)


def test_no_setting_holds_a_connection() -> None:
    """Executors elsewhere are given their file."""
    environment = {"AIRFLOW_CONN_KAFKA": "hunter2", "HEADRACE_SECRET_KEY": "hunter2"}
    conf = receiver_conf(stream(), "spark://host:7077", None, given={}, environment=environment)
    assert conf["spark.executorEnv.HEADRACE_CONNECTIONS_FILE"] == "headrace-connections.json"
    assert "hunter2" not in str(conf)
    local = receiver_conf(stream(), "local[4]", None, given={}, environment=environment)
    assert "spark.executorEnv.HEADRACE_CONNECTIONS_FILE" not in local


@pytest.mark.parametrize(("slots", "receivers"), [(1, 1), (2, 2), (0, 1)])
def test_slots_that_receivers_would_fill_are_refused(slots: int, receivers: int) -> None:
    with pytest.raises(TaskSlotsError, match=rf"at least {receivers + 1}"):
        check_task_slots(slots, receivers)


def test_one_slot_more_than_receivers_will_do(tmp_path: Path) -> None:
    check_task_slots(3, 2)


def test_executors_elsewhere_find_the_streams_archives() -> None:
    """By the names that Spark gives the files in an executor's folder; a module's file is found without."""
    code = ("/code/mine.zip", "/code/module.py", "/code/folder", "hdfs://host/far.whl")
    declared = stream(py_files=code, conf={"spark.executorEnv.PYTHONPATH": "/given"})
    conf = receiver_conf(declared, "spark://host:7077", None, given={}, environment={})
    assert conf["spark.executorEnv.PYTHONPATH"].split(":") == ["/given", "mine.zip", "far.whl"]
    assert "spark.executorEnv.PYTHONPATH" not in receiver_conf(stream(), "spark://h:7077", None, given={})
    local = receiver_conf(stream(py_files=code), "local[4]", None, given={}, environment={})
    assert "spark.executorEnv.PYTHONPATH" not in local


@pytest.mark.parametrize(("master", "looks"), [("spark://h:7077", 3), ("local[4]", 1)])
def test_a_cluster_whose_executors_come_one_by_one_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, master: str, looks: int
) -> None:
    seen = [1, 1, 4]
    monkeypatch.setattr(receiver_application, "task_slots", lambda context: seen.pop(0))
    no_sleep = SimpleNamespace(**{**vars(time), "sleep": lambda seconds: None})
    monkeypatch.setattr(receiver_application, "time", no_sleep)
    spark: Any = SimpleNamespace(sparkContext=SimpleNamespace(master=master))
    slots = receiver_application._await_task_slots(spark, 2)
    assert (slots, 3 - len(seen)) == (4 if looks == 3 else 1, looks)


def test_a_shared_application_has_the_jobs_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It splits a batch for the cores."""
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    conf = receiver_conf(stream(master="local[24]", job="shared"), "local[24]", None, given={}, environment=LOOPBACK)
    assert conf["spark.app.name"] == "headrace receiver @shared"
    assert conf["spark.default.parallelism"] == "2"
    alone = receiver_conf(stream(master="local[24]"), "local[24]", None, given={}, environment=LOOPBACK)
    assert "spark.default.parallelism" not in alone
