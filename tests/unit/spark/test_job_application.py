"""Which streams the application of a shared job takes, and how they share its task slots, without Spark."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.spark.attempts.batch_server import socket_path
from headrace.spark.receiving import job_application
from headrace.spark.receiving.job_application import JobApplication, StreamDoesNotFitError, settings_differences
from headrace.spark.receiving.receiver_application import ReceiverApplication, TaskSlotsError
from headrace.spark.versions import current_versions
from headrace.stream import ConsoleOutput, KafkaInput, Stream

SPARK = {"master": "local[6]", "job": "shared"}


def stream(name: str, *, receivers: int = 1, connection: str | None = None, **spark: Any) -> Stream:
    where = {"bootstrap_servers": "h:1"} if connection is None else {"connection": connection}
    return Stream(
        name=name,
        inputs=KafkaInput(topics=name, receivers=receivers, **where),
        outputs=ConsoleOutput(),
        batch_interval="1 s",
        storage={"url": "/tmp/x", "shared": True},
        ledger="sqlite:////tmp/ledger.db",
        spark={**SPARK, **spark},
    )


@pytest.fixture
def slots(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> SimpleNamespace:
    """How many slots the application has; sockets are in a folder of the test."""
    free = SimpleNamespace(count=6, master="spark://host:7077")
    monkeypatch.setattr(job_application, "task_slots", lambda _: free.count)
    monkeypatch.setattr("headrace.spark.receiving.receiver_launcher.task_slots", lambda _: free.count)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return free


def application(slots: SimpleNamespace) -> JobApplication:
    spark: Any = SimpleNamespace(sparkContext=object())
    started = ReceiverApplication(spark, "app-1", slots.master, None, "sc://localhost:1", slots.count, 5)
    return JobApplication(started, stream("first"))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"conf": {"spark.executor.memory": "2g"}}, r"spark.conf is {'spark.executor.memory': '2g'}, and none there"),
        ({"master": "local[9]"}, r"spark.master is local\[9\], and local\[6\] there"),
        ({"py_files": ["/code"]}, r"spark.py_files is \['/code'\], and none there"),
        ({"run_batches": "submit"}, "spark.run_batches is submit, and connect there"),
    ],
)
def test_a_stream_with_other_spark_settings_is_refused_by_field(
    slots: SimpleNamespace, changes: dict[str, Any], text: str
) -> None:
    shared = application(slots)
    shared.join(stream("clicks"))
    with pytest.raises(StreamDoesNotFitError, match=rf"{text}\. Streams that run there: clicks\."):
        shared.check(stream("orders", **changes), current_versions())


def test_a_stream_with_the_same_settings_and_versions_fits(slots: SimpleNamespace) -> None:
    application(slots).check(stream("orders"), current_versions())


@pytest.mark.parametrize(("text", "fits"), [("ONE = 1\n", True), ("ONE = 2\n", False)], ids=["same", "changed"])
def test_the_same_file_in_another_folder_fits(slots: SimpleNamespace, tmp_path: Path, text: str, fits: bool) -> None:
    """A git bundle of Airflow has a folder for each commit."""
    files = [tmp_path / "versions" / commit / "code.py" for commit in ("a1b2", "c3d4")]
    for file, content in zip(files, ("ONE = 1\n", text), strict=True):
        file.parent.mkdir(parents=True)
        file.write_text(content)
    first, second = (stream(name, py_files=[str(file)]) for name, file in zip(("first", "second"), files, strict=True))
    assert (not list(settings_differences(first, second))) is fits
    files[1].unlink()
    assert len(list(settings_differences(first, second))) == 1


def test_a_stream_of_a_task_with_other_versions_is_refused(slots: SimpleNamespace) -> None:
    newer = current_versions() | {"headrace": "99"}
    with pytest.raises(StreamDoesNotFitError, match=r"headrace \S+ there, 99 here"):
        application(slots).check(stream("orders"), newer)


def test_a_stream_whose_connection_is_missing_is_refused(
    slots: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process does not have the connection."""
    with pytest.raises(StreamDoesNotFitError, match="the process does not have the connection kafka_orders"):
        application(slots).check(stream("orders", connection="kafka_orders"), current_versions())
    monkeypatch.setenv("AIRFLOW_CONN_KAFKA_ORDERS", json.dumps({"conn_type": "kafka", "host": "h", "port": 1}))
    application(slots).check(stream("orders", connection="kafka_orders"), current_versions())


def test_receivers_of_all_streams_leave_a_slot_for_batches(slots: SimpleNamespace) -> None:
    shared = application(slots)
    assert shared.join(stream("one", receivers=2))[0].batch_slots == 4
    assert shared.join(stream("two", receivers=3))[0].batch_slots == 1
    with pytest.raises(TaskSlotsError, match=r"6 task slot\(s\), and each of its 6 receiver"):
        shared.join(stream("three"))
    shared.leave(stream("one"))
    assert shared.join(stream("three"))[0].batch_slots == 2


def test_on_one_machine_batches_do_not_count_on_others_slots(
    slots: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The slots are those of further streams."""
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    slots.count, slots.master = 24, "local[24]"
    assert application(slots).join(stream("one"))[0].batch_slots == 2


def test_a_launcher_counts_other_streams_running_receivers(slots: SimpleNamespace) -> None:
    shared = application(slots)
    _, one = shared.join(stream("one", receivers=2))
    _, two = shared.join(stream("two", receivers=2))
    running: Any = SimpleNamespace(done=lambda: False)
    one._handles, two._handles = [running] * 2, [running] * 2
    slots.count = 4
    assert "4 receiver(s) hold them all" in str(one.crowding())
    assert one._all_running() == 4
    two._handles = []
    assert one.crowding() is None


def test_callers_of_each_stream_find_the_batch_server_of_the_job(slots: SimpleNamespace) -> None:
    shared, ledger = application(slots), "sqlite:////tmp/ledger.db"
    shared.join(stream("one"))
    link = socket_path(ledger, "one")
    assert link.is_symlink()
    assert link.resolve() == socket_path(ledger, "@shared").resolve()
    shared.leave(stream("one"))
    assert not link.is_symlink()
