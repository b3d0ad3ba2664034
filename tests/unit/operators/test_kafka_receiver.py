# ruff: noqa: PLR0917 - fixtures are asked for by argument
from __future__ import annotations

import contextlib
import dataclasses
import sqlite3
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import psutil
import pytest
from airflow.sdk.exceptions import TaskDeferred

from headrace.batch.recover import LostLedgerError
from headrace.batch.set_back import LedgerSetBackError
from headrace.checks.task_places import TaskPlaceError
from headrace.hooks.ledger import register
from headrace.ledger import Ledger
from headrace.ledger.tables import Declared
from headrace.operators import kafka_receiver
from headrace.operators.kafka_receiver import KafkaReceiverOperator, ReceiverJobError, log_file, newest_log
from headrace.operators.links import SparkUiLink, browser_link
from headrace.processes import PROCESS, own_identity
from headrace.spark.receiving.job_log import LOG_VARIABLE
from headrace.spark.versions import MixedSparkError, current_versions
from headrace.triggers.ledger import ReceiverJobTrigger, StreamWantedTrigger


@pytest.fixture
def operator(stream) -> KafkaReceiverOperator:
    return KafkaReceiverOperator(task_id="receive", stream=stream, poll_interval=0.05, start_timeout=120)


def deferred(operator, context) -> TaskDeferred:
    with pytest.raises(TaskDeferred) as found:
        operator.execute(context)
    return found.value


def ended(trigger, ledger, until):
    return until(lambda: trigger.poll(ledger))


def test_the_operator_starts_the_job_shows_it_and_waits_deferred(operator, toy, ledger, task, capsys):
    toy("run")
    waiting = deferred(operator, task.context)
    reported = capsys.readouterr().out
    job = ledger.jobs.current("flights")
    assert job.alive(ledger.now_ms())
    assert job.holder.startswith("airflow:flights_batches/run/task/1@")
    assert isinstance(waiting.trigger, ReceiverJobTrigger)
    assert waiting.trigger.parameters == {"epoch": job.epoch}
    assert waiting.trigger.poll(ledger) is None
    assert task.xcoms == {"_link_SparkUiLink": "http://127.0.0.1:4040"}
    assert newest_log("flights") in reported
    assert "is running" in reported


def test_no_link_leads_to_a_loopback_page_of_another_machine(operator, toy, ledger, task, capsys, monkeypatch):
    monkeypatch.setenv("AIRFLOW__API__BASE_URL", "https://airflow.example.org")
    toy("run")
    deferred(operator, task.context)
    assert operator.spark_ui_url == "http://127.0.0.1:4040"
    assert task.xcoms == {}
    assert SparkUiLink().get_link(operator, ti_key=None) == ""
    assert "docs/airflow.md says how to reach it" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("airflow", "ui", "link"),
    [
        ("http://127.0.0.1:8080", "http://127.0.0.1:4040", "http://127.0.0.1:4040"),
        ("http://localhost:8080", "http://localhost:4040", "http://localhost:4040"),
        ("https://airflow.example.org", "http://localhost:4040", ""),
        ("https://airflow.example.org", "http://[::1]:4040", ""),
        ("https://airflow.example.org", "http://driver.example.org:4040", "http://driver.example.org:4040"),
        ("", "http://127.0.0.1:4040", "http://127.0.0.1:4040"),
        ("http://127.0.0.1:8080", None, ""),
    ],
)
def test_the_link_to_sparks_user_interface_leads_somewhere(monkeypatch, airflow, ui, link):
    monkeypatch.setenv("AIRFLOW__API__BASE_URL", airflow)
    assert browser_link(ui) == link


def test_an_older_runs_retry_begins_by_the_newest_definition(operator, toy, ledger, task, stream, monkeypatch):
    """A run of the receiver DAG lasts as long as its job, and with versioned bundles so does its code."""
    toy("run")
    stale = register(ledger, stream)
    newest = register(ledger, stream.model_copy(update={"block_interval": timedelta(milliseconds=100)}))
    assert _revision_of_the_job(operator, task, ledger, newest, monkeypatch) == newest != stale


def test_a_job_begins_by_its_tasks_definition_in_another_folder(operator, toy, ledger, task, stream, monkeypatch):
    """The files of another commit of a git bundle may not be on this host."""
    toy("run")
    spark = stream.spark.model_copy(update={"py_files": ("/bundles/versions/c3d4/code.py",)})
    here = stream.spark.model_copy(update={"py_files": ("/bundles/versions/a1b2/code.py",)})
    operator.stream = stream.model_copy(update={"spark": here})
    own = register(ledger, operator.stream)
    newest = register(ledger, stream.model_copy(update={"spark": spark}))
    assert _revision_of_the_job(operator, task, ledger, newest, monkeypatch) == own != newest


def _revision_of_the_job(operator, task, ledger: Ledger, newest: int, monkeypatch) -> int:
    """Start the job by a task of an older version of the DAG than the one that declared ``newest``, which stays."""
    _declare_later(ledger, newest)
    monkeypatch.setattr("headrace.hooks.ledger._dag_version_ms", lambda: 1_000)
    deferred(operator, task.context)
    assert ledger.streams.get("flights").revision == newest
    arguments = psutil.Process(operator._process.pid).cmdline()
    return int(arguments[arguments.index("--revision") + 1])


def _declare_later(ledger: Ledger, revision: int) -> None:
    """Have code of a later version of the DAG declare this revision."""
    declared = Declared.of(ledger.streams.at_revision("flights", revision))
    ledger.streams.register("flights", **dataclasses.asdict(declared), declared_at_ms=2_000_000_000_000)


def test_a_second_task_attaches_to_the_job_that_lives(operator, toy, ledger, task, stream):
    toy("run")
    deferred(operator, task.context)
    job = ledger.jobs.current("flights")
    again = KafkaReceiverOperator(task_id="receive", stream=stream)
    waiting = deferred(again, task.context)
    assert again._process is None
    assert waiting.trigger.parameters == {"epoch": job.epoch}


@pytest.mark.skipif(sys.platform != "linux", reason="processes have an identity on Linux only")
def test_a_job_whose_process_was_killed_is_replaced_early(operator, toy, ledger, task):
    """It is replaced before its lease is out."""
    toy("run")
    killed = {**own_identity(), "started": 1}
    ledger.jobs.acquire("flights", holder="killed", lease_ms=3_600_000, attributes={PROCESS: killed})
    assert deferred(operator, task.context).trigger.parameters == {"epoch": 2}
    assert operator._process.alive()


def test_an_attached_job_of_an_older_version_is_asked_to_stop(operator, ledger, task, monkeypatch, capsys):
    monkeypatch.setattr("headrace.runs.receiver_job.SETTLED_MS", 0)
    older = current_versions() | {"headrace": "0.0.1"}
    ledger.jobs.acquire("flights", holder="before the upgrade", lease_ms=60_000, versions=older)
    waiting = deferred(operator, task.context)
    assert "is being replaced by one of this version: headrace 0.0.1 there" in capsys.readouterr().out
    assert ledger.jobs.current("flights").stop_requested_at_ms is not None
    assert waiting.trigger.parameters == {"epoch": 1}


def test_of_two_tries_at_once_one_starts_and_the_other_attaches(toy, ledger, make_task, stream, until, monkeypatch):
    """Airflow runs a second try beside a first that it takes for dead, and neither sees a live job."""
    toy("run")
    both_saw_none = threading.Barrier(2, timeout=30)
    spawn = KafkaReceiverOperator._spawn

    def spawn_together(operator, *arguments):
        both_saw_none.wait()
        return spawn(operator, *arguments)

    monkeypatch.setattr(KafkaReceiverOperator, "_spawn", spawn_together)
    tries = [KafkaReceiverOperator(task_id="receive", stream=stream, start_timeout=30) for _ in range(2)]
    with ThreadPoolExecutor(2) as pool:
        waiting = list(pool.map(lambda one: deferred(one, make_task().context), tries))

    assert [one.trigger.parameters for one in waiting] == [{"epoch": 1}, {"epoch": 1}]
    loser = until(lambda: next((one._process for one in tries if not one._process.alive()), None))
    assert loser.exit_code() == 75
    assert "is held by" in loser.log.read_text()
    (winner,) = [one._process for one in tries if one._process is not loser]
    (job,) = ledger.jobs.page("flights")
    assert winner.alive()
    assert (job.attributes["pid"], job.alive(ledger.now_ms())) == (winner.pid, True)


def test_a_job_that_began_after_none_was_seen_is_attached_to(operator, toy, ledger, task):
    toy("run")
    job = ledger.jobs.acquire("flights", holder="the other", lease_ms=60_000)
    # As when it began between the look for a live job and the start of one.
    assert operator._start(ledger, task.context, ledger.streams.get("flights").revision).epoch == job.epoch
    assert operator._process.exit_code() == 75


def test_a_try_that_dies_between_spawn_and_lease_leaves_one_job(operator, toy, ledger, task, make_task, stream, until):
    toy("run")
    left = operator._spawn(task.context, operator.stream, 1)
    again = KafkaReceiverOperator(task_id="receive", stream=stream, start_timeout=30)
    waiting = deferred(again, make_task().context)
    assert waiting.trigger.parameters == {"epoch": 1}
    until(lambda: [left.alive(), again._process is not None and again._process.alive()].count(True) == 1)
    assert len(ledger.jobs.page("flights")) == 1


@pytest.fixture
def in_a_pod(monkeypatch, stream):
    """Where the KubernetesExecutor runs a task; the stream's folder is a volume, and its ledger not SQLite."""
    monkeypatch.setenv("AIRFLOW_IS_K8S_EXECUTOR_POD", "True")
    monkeypatch.setattr("headrace.checks.task_places._ledger_is_file", lambda *_: False)
    mounted = stream.model_copy(update={"storage": stream.storage.model_copy(update={"shared": True})})
    return KafkaReceiverOperator(task_id="receive", stream=mounted, poll_interval=0.05)


def test_a_task_in_its_own_pod_waits_beside_the_job_it_started(in_a_pod, toy, ledger, task, until):
    toy("run")
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(in_a_pod.execute, task.context)
        until(lambda: (job := ledger.jobs.current("flights")) is not None and job.state.value == "running")
        ledger.jobs.request_stop("flights", "test")
        # A deferral would be raised.
        assert waiting.result(30) is None


def test_a_task_in_its_own_pod_defers_when_the_job_is_elsewhere(in_a_pod, ledger, task):
    ledger.jobs.acquire("flights", holder="a task in another pod", lease_ms=60_000, versions=current_versions())
    assert deferred(in_a_pod, task.context).trigger.parameters == {"epoch": 1}


def test_a_driver_in_the_cluster_does_not_end_with_the_pod(in_a_pod, toy, ledger, task, monkeypatch):
    monkeypatch.setattr("headrace.hooks.spark_submit.StreamSparkSubmitHook.is_cluster_mode", True)
    toy("run")
    assert deferred(in_a_pod, task.context).trigger.parameters == {"epoch": 1}


def test_a_log_that_would_be_lost_with_the_pod_is_refused_first(stream, task, monkeypatch, tmp_path):
    """It is refused before anything is made."""
    monkeypatch.setenv("AIRFLOW_IS_K8S_EXECUTOR_POD", "True")
    elsewhere = stream.model_copy(update={"ledger": f"sqlite:///{tmp_path}/other.db"})
    with pytest.raises(TaskPlaceError, match=r"storage: .* ledger: ") as refused:
        KafkaReceiverOperator(task_id="receive", stream=elsewhere).execute(task.context)
    assert "cannot run on KubernetesExecutor" in str(refused.value)
    assert not (tmp_path / "other.db").exists()


def test_workers_that_may_be_several_hosts_are_a_warning(operator, toy, ledger, task, monkeypatch, capsys):
    monkeypatch.setenv("AIRFLOW__CORE__EXECUTOR", "CeleryExecutor")
    toy("run")
    deferred(operator, task.context)
    assert "workers on other hosts do not see it" in capsys.readouterr().out


def test_a_job_that_was_asked_to_stop_ends_the_task_well(operator, toy, ledger, task, until):
    toy("run")
    waiting = deferred(operator, task.context)
    ledger.jobs.request_stop("flights", "test")
    event = ended(waiting.trigger, ledger, until)
    assert event == {"outcome": "stopped", "epoch": 1}
    assert operator.job_ended(task.context, event) is None


def test_a_job_that_fails_after_its_start_fails_the_task(stream, toy, ledger, task):
    """The task fails with the job's own error."""
    toy("fail")
    operator = KafkaReceiverOperator(task_id="receive", stream=stream, deferrable=False, poll_interval=0.05)
    with pytest.raises(ReceiverJobError, match="Kafka said no") as found:
        operator.execute(task.context)
    assert "receiver-" in str(found.value)


def test_a_task_waiting_in_a_celery_worker_warns_of_its_broker(stream, ledger, task, until, monkeypatch, capsys):
    monkeypatch.setenv("AIRFLOW__CORE__EXECUTOR", "CeleryExecutor")
    lease = ledger.jobs.acquire("flights", holder="before", lease_ms=60_000, versions=current_versions())
    operator = KafkaReceiverOperator(task_id="receive", stream=stream, deferrable=False, poll_interval=0.05)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(operator.execute, task.context)
        until(lambda: kafka_receiver.ATTACHED in ledger.jobs.current("flights").attributes)
        ledger.jobs.release(lease)
        assert waiting.result(30) is None
    assert "After the visibility timeout" in capsys.readouterr().out


def test_a_job_that_fails_while_waited_for_fails_the_task(operator, ledger, task):
    """The task fails with the job's own error."""
    lease = ledger.jobs.acquire("flights", holder="before", lease_ms=60_000, versions=current_versions())
    waiting = deferred(operator, task.context)
    ledger.jobs.release(lease, "failed", "Kafka said no")
    event = waiting.trigger.poll(ledger)
    assert event == {"outcome": "failed", "epoch": 1}
    with pytest.raises(ReceiverJobError, match="Kafka said no"):
        operator.job_ended(task.context, event)


def test_a_job_that_dies_before_its_lease_fails_with_its_log(operator, toy, ledger, task):
    """The task fails with the log's last lines."""
    toy("crash")
    with pytest.raises(ReceiverJobError, match="no such master"):
        operator.execute(task.context)
    assert ledger.jobs.current("flights") is None


def test_a_job_that_dies_without_a_word_is_noticed_by_its_lease(operator, toy, ledger, task, until):
    toy("vanish")
    waiting = deferred(operator, task.context)
    event = ended(waiting.trigger, ledger, until)
    assert event["outcome"] == "lost"
    with pytest.raises(ReceiverJobError, match="not renewed") as found:
        operator.job_ended(task.context, event)
    assert "toy receiver job runs" in str(found.value)


def test_airflows_retry_starts_it_again(operator, toy, ledger, task, stream, until):
    toy("vanish")
    ended(deferred(operator, task.context).trigger, ledger, until)
    toy("run")
    again = KafkaReceiverOperator(task_id="receive", stream=stream, start_timeout=120)
    assert deferred(again, task.context).trigger.parameters == {"epoch": 2}


def test_a_stream_to_be_stopped_is_waited_for_and_not_started(operator, toy, ledger, task):
    ledger.streams.set_desired_state("flights", "stopped")
    waiting = deferred(operator, task.context)
    assert isinstance(waiting.trigger, StreamWantedTrigger)
    assert waiting.trigger.poll(ledger) is None
    assert ledger.jobs.current("flights") is None
    ledger.streams.set_desired_state("flights", "running")
    assert waiting.trigger.poll(ledger) == {"desired_state": "running"}
    toy("run")
    with pytest.raises(TaskDeferred):
        operator.wanted(task.context, {})
    assert ledger.jobs.current("flights").epoch == 1


def test_killing_the_task_asks_the_job_to_stop(operator, toy, ledger, task, until):
    toy("run")
    deferred(operator, task.context)
    operator._process = None  # as in a task that attached
    operator.on_kill()
    until(lambda: ledger.jobs.current("flights").state.value == "stopped")
    assert "killed" in ledger.jobs.current("flights").stop_reason


def test_a_stale_try_leaves_the_job_to_the_one_attached_to_it(operator, toy, ledger, task, stream):
    toy("run")
    deferred(operator, task.context)
    second = KafkaReceiverOperator(task_id="receive", stream=stream)
    deferred(second, task.again(try_number=2).context)
    operator.on_kill()
    assert ledger.jobs.current("flights").stop_requested_at_ms is None
    assert operator._process.alive()
    second.on_kill()
    assert ledger.jobs.current("flights").stop_requested_at_ms is not None


@pytest.mark.parametrize(
    ("state", "tries", "heard"),
    [
        ("success", {}, True),
        ("failed", {}, True),
        # Airflow would have tried once more.
        ("failed", {"try_number": 4}, True),
        # By itself: no try was left.
        ("failed", {"try_number": 5}, False),
        ("running", {}, False),
        # The run was deleted.
        (None, {}, False),
    ],
)
def test_a_mark_from_before_the_trigger_ran_reaches_the_next_run(
    operator, toy, ledger, make_task, stream, until, state, tries, heard
):
    toy("run")
    deferred(operator, make_task(**tries).context)
    following = make_task(run_id="next")
    following.states = {} if state is None else {"run": {"task": state}}
    waiting = deferred(KafkaReceiverOperator(task_id="receive", stream=stream), following.context)
    job = ledger.jobs.current("flights")
    assert (job.stop_requested_at_ms is not None) is heard
    if heard:
        assert "ended by a person" in job.stop_reason
        assert ended(waiting.trigger, ledger, until)["outcome"] == "stopped"


def test_clearing_the_task_asks_the_job_to_stop(operator, toy, ledger, make_task, stream):
    toy("run")
    deferred(operator, make_task().context)
    # A retry has one try more behind it, a cleared task has its retries anew.
    deferred(KafkaReceiverOperator(task_id="receive", stream=stream), make_task(try_number=2).context)
    assert ledger.jobs.current("flights").stop_requested_at_ms is None
    cleared = make_task(try_number=3)
    cleared.max_tries += 2
    deferred(KafkaReceiverOperator(task_id="receive", stream=stream), cleared.context)
    assert ledger.jobs.current("flights").stop_requested_at_ms is not None


def test_a_successor_is_followed(operator, toy, ledger, task, until):
    toy("vanish")
    waiting = deferred(operator, task.context)
    until(lambda: not ledger.jobs.current("flights").alive(ledger.now_ms()))
    ledger.jobs.acquire("flights", holder="somebody", lease_ms=60_000)
    event = waiting.trigger.poll(ledger)
    assert event["outcome"] == "superseded"
    with pytest.raises(TaskDeferred) as found:
        operator.job_ended(task.context, event)
    assert found.value.trigger.parameters == {"epoch": 2}


def test_without_deferring_it_waits_in_the_task(toy, ledger, task, stream):
    toy("run")
    operator = KafkaReceiverOperator(task_id="receive", stream=stream, deferrable=False, poll_interval=0.05)
    done = threading.Thread(target=operator.execute, args=(task.context,))
    done.start()
    try:
        while ledger.jobs.current("flights") is None or ledger.jobs.current("flights").state.value != "running":
            assert done.is_alive()
        # For several looks.
        done.join(0.3)
        assert done.is_alive()
    finally:
        ledger.jobs.request_stop("flights", "test")
        done.join(15)
    assert not done.is_alive()
    assert ledger.jobs.current("flights").state.value == "stopped"


def test_log_files_do_not_pile_up(monkeypatch, tmp_path):
    monkeypatch.setenv("AIRFLOW__HEADRACE__LOG_FOLDER", str(tmp_path))
    (tmp_path / "flights").mkdir()
    for _ in range(40):
        started = log_file("flights")
        started.touch()
        started.with_name(f"{started.name}.1.gz").touch()
    logs = sorted((tmp_path / "flights").glob("*.log"))
    assert len(logs) == 30
    assert newest_log("flights") == str(logs[-1])
    # Of the job that starts now, and of the one before.
    assert {part.name for part in (tmp_path / "flights").glob("*.gz")} == {f"{log.name}.1.gz" for log in logs[-2:]}


def test_the_job_is_given_its_log_to_keep_it_bounded(stream, toy, task, ledger, monkeypatch):
    toy("run")
    given = {}

    def spawn(command, *, environment, log):
        given.update(log=log, variable=environment[LOG_VARIABLE])
        raise OSError("no more processes")

    monkeypatch.setattr(kafka_receiver, "spawn", spawn)
    with pytest.raises(OSError, match="no more processes"):
        KafkaReceiverOperator(task_id="receive", stream=stream).execute(task.context)
    assert given["variable"] == str(given["log"])


def test_a_job_does_not_start_on_an_older_copy_of_its_ledger(stream, toy, source, task, tmp_path):
    source.store(1)
    with contextlib.closing(sqlite3.connect(stream.ledger.removeprefix("sqlite:///"))) as database:
        (tmp_path / "older.db").write_bytes(database.serialize())
    for _ in range(3):
        source.store(1)
    changed = stream.model_copy(update={"ledger": f"sqlite:///{tmp_path}/older.db"})
    with Ledger.open(changed.ledger) as older:
        older.jobs.release(source.job)
    toy("run")
    with pytest.raises(LedgerSetBackError, match="an older copy"):
        KafkaReceiverOperator(task_id="receive", stream=changed).execute(task.context)


@pytest.mark.parametrize("recover", ["manual", "automatic"])
def test_a_lost_ledger_is_rebuilt_before_the_start_if_allowed(
    recover, stream, toy, source, task, tmp_path, monkeypatch, capsys
):
    """The stream's definition says whether it may be."""
    monkeypatch.setattr("headrace.batch.recover.LEASE_MS", 500)
    source.store(3)
    # Nothing shows that the last block was accepted; nothing else has its offsets, so it counts.
    source.store(2)
    changed = stream.model_copy(update={"recover": recover, "ledger": f"sqlite:///{tmp_path}/new.db"})
    operator = KafkaReceiverOperator(task_id="receive", stream=changed, poll_interval=0.05, start_timeout=120)
    toy("run")
    if recover == "manual":
        with pytest.raises(LostLedgerError, match="headrace streams recover flights"):
            operator.execute(task.context)
        return
    deferred(operator, task.context)
    with Ledger.open(changed.ledger) as ledger:
        assert [row.next_offset for row in ledger.positions.all("flights")] == [5]
        assert ledger.jobs.current("flights").alive(ledger.now_ms())
        ledger.jobs.request_stop("flights", "the test is over")
    reported = capsys.readouterr().out
    assert "The ledger does not know stream 'flights'" in reported and "waiting" in reported
    assert "was lost, and has been rebuilt: 1 segments, 2 blocks" in reported


def test_with_two_versions_of_spark_in_one_folder_no_job_starts(operator, ledger, task, monkeypatch):
    monkeypatch.setattr("importlib.metadata.version", {"pyspark": "4.3.0", "pyspark-client": "4.2.0"}.get)
    with pytest.raises(MixedSparkError):
        operator.execute(task.context)
    assert ledger.jobs.current("flights") is None
