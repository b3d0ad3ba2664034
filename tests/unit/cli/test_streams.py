"""The commands about streams, on a ledger with a batch and a receiver job in it."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from headrace.batch.allocation import allocate
from headrace.blocks import ReceiverId, TopicPartition
from headrace.cli.main import app
from headrace.clock import ManualClock, time_text
from headrace.hooks.ledger import register
from headrace.ledger import Ledger
from headrace.ledger.tables import JobLease
from headrace.receiver.tracker import find_stop_request
from headrace.stream import ConsoleOutput, KafkaInput, Stream
from headrace.stream_context import StreamContext
from headrace.views.streams import default_place, summarize
from headrace.wal.storage import open_storage


@pytest.fixture
def stream(tmp_path: Path) -> Stream:
    made = Stream(
        name="shop",
        inputs=KafkaInput(id="clicks", bootstrap_servers="127.0.0.1:1", topics="clicks"),
        outputs=ConsoleOutput(),
        batch_interval="10 s",
        storage=tmp_path / "storage",
        ledger=f"sqlite:///{tmp_path}/ledger.db",
    )
    with Ledger.open(made.ledger) as ledger:
        ledger.streams.register("shop", made.to_json(), batch_interval_ms=10_000, block_interval_ms=200)
        ledger.jobs.acquire("shop", holder="somebody", lease_ms=60_000)
        batch_time_ms = ledger.now_ms() // 10_000 * 10_000
        allocate(StreamContext(made, ledger), batch_time_ms)
    return made


def run(stream: Stream, *arguments: str) -> Result:
    return CliRunner().invoke(app, [*arguments, "--ledger", stream.ledger], catch_exceptions=False)


def answer(stream: Stream, *arguments: str) -> object:
    result = run(stream, *arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_streams_are_listed_and_shown(stream: Stream) -> None:
    (listed,) = answer(stream, "streams", "list")  # type: ignore[misc]
    assert (listed["name"], listed["desired_state"], listed["state"]) == ("shop", "running", "starting")
    shown = answer(stream, "streams", "show", "shop")
    assert shown["receiver_job"]["holder"] == "somebody"  # type: ignore[index]
    assert shown.items() >= {name: listed[name] for name in ("state", "reason", "since", "unclaimed")}.items()  # type: ignore[attr-defined]
    for arguments in (("streams", "list"), ("streams", "show", "shop")):
        assert "The receiver job starts: no receiver has started yet." in run(stream, *arguments).stdout


def test_the_commands_say_what_the_page_says(stream: Stream) -> None:
    with Ledger.open(stream.ledger) as ledger:
        (batch,) = ledger.batches.page("shop")
        attempt = ledger.attempts.begin("shop", batch.batch_time_ms, holder="h", way="connect", lease_ms=60_000)
        ledger.attempts.fail(attempt, "the index\n[red]is read-only")
        judged = summarize(ledger, ledger.streams.get("shop"), default_place("shop", stream.ledger), {})
    assert judged.state == "failing"
    reason = " ".join(judged.reason.split())
    listed, shown = (run(stream, *arguments).stdout for arguments in (("streams", "list"), ("streams", "show", "shop")))
    assert (
        f"Stream shop is failing since {time_text(judged.since_ms)}: {reason}\nWhat to do: {judged.remedy}\n" in shown
    )
    assert f"Also: {judged.also[0]}\n" in shown
    (as_json,) = answer(stream, "streams", "list")  # type: ignore[misc]
    told = (as_json["state"], as_json["reason"], as_json["since_ms"], tuple(as_json["also"]))
    assert told == (judged.state, judged.reason, judged.since_ms, judged.also)
    assert f"shop is failing: {reason} What to do: {as_json['remedy']}\n" in listed
    # The list asks nothing more for each stream, so it does not say when.
    assert "The repair tries the batch again by itself, or" in as_json["remedy"]
    assert f"tries batch {time_text(batch.batch_time_ms)} again once output console is written" in judged.remedy
    assert as_json["since"] == time_text(judged.since_ms)


def test_a_listener_that_loses_events_is_shown(stream: Stream) -> None:
    well = {"dropped": 0, "missed": 0, "failed": 0}
    with Ledger.open(stream.ledger) as ledger:
        ledger.jobs.note("shop", 1, {"listeners": {"quick": well, "slow": {**well, "dropped": 1234}}})
    shown = run(stream, "streams", "show", "shop").stdout
    assert "Listener slow: 1,234 events dropped\n" in shown
    assert "quick" not in shown
    detail = answer(stream, "streams", "show", "shop")
    assert [(listener["name"], listener["dropped"]) for listener in detail["listeners"]] == [
        ("quick", 0),
        ("slow", 1234),
    ]  # type: ignore[index]


def test_a_stream_by_timestamp_shows_its_watermarks(stream: Stream) -> None:
    at_ms = 1_700_000_000_000
    partition = TopicPartition("clicks", "topic-id", 0)
    with Ledger.open(stream.ledger) as ledger:
        register(ledger, stream.model_copy(update={"batch_by": "timestamp"}))
        lease = _job_lease(ledger)
        ledger.topics.observe(lease, "clicks", [("clicks", "topic-id", 1)])
        ledger.positions.ensure_all(lease, "clicks", {partition: 0})
        assert "latest timestamp" in run(stream, "streams", "show", "shop").stdout
        with ledger.positions._database.write() as connection:
            connection.exec_driver_sql(f"UPDATE positions SET watermark_ms = {at_ms}")
    assert time_text(at_ms) in run(stream, "streams", "show", "shop").stdout
    (shown,) = answer(stream, "streams", "show", "shop")["partitions"]  # type: ignore[index]
    assert (shown["watermark"], shown["drained_ms"]) == (time_text(at_ms), None)


def _job_lease(ledger: Ledger) -> JobLease:
    job = ledger.jobs.current("shop")
    assert job is not None
    return JobLease("shop", job.epoch, job.holder, 60_000, job.lease_until_ms)


def test_a_job_by_an_older_definition_is_shown_until_its_restart(stream: Stream) -> None:
    with Ledger.open(stream.ledger) as ledger:
        ledger.jobs.note("shop", 1, {"revision": 1})
        register(ledger, stream.model_copy(update={"transform": "operator:itemgetter"}))
        assert run(stream, "streams", "list").stdout.count("still receives") == 0
        register(ledger, stream.model_copy(update={"batch_by": "timestamp"}))
    for arguments in (("streams", "list"), ("streams", "show", "shop")):
        reported = run(stream, *arguments).stdout
        assert "still receives by revision 1 of the definition, and the stream has revision 3" in reported
        assert "batch_by was arrival and is timestamp" in reported
    (listed,) = answer(stream, "streams", "list")  # type: ignore[misc]
    assert (listed["revision"], listed["job_revision"]) == (3, 1)
    assert listed["unadopted"]["differences"] == ["batch_by was arrival and is timestamp"]


def test_a_receiver_is_shown_with_its_pause_and_its_numbers(stream: Stream) -> None:
    with Ledger.open(stream.ledger) as ledger:
        receiver = ReceiverId("shop", "clicks", 0)
        lease = ledger.receivers.register(
            ledger.receivers.schedule(_job_lease(ledger), receiver), host="here", lease_ms=60_000
        )
        for reason in ("the disk is full", None):
            ledger.receivers.heartbeat(
                lease, sealed_through_ms=1_700_000_000_000, paused_reason=reason, stats={"late_records": 4321}
            )
            shown = run(stream, "streams", "show", "shop").stdout
            assert (" paused " in shown) is (reason is not None)
            assert ("Receiver shop/clicks/0 is paused: the disk is full." in shown) is (reason is not None)
            assert "4,321" in shown
            assert time_text(1_700_000_000_000) in shown
            detail = answer(stream, "streams", "show", "shop")
            assert detail["receivers"][0]["paused_reason"] == reason  # type: ignore[index]


def test_a_receivers_last_error_has_its_time_and_its_executor(stream: Stream) -> None:
    with Ledger.open(stream.ledger) as ledger:
        scheduled = ledger.receivers.schedule(_job_lease(ledger), ReceiverId("shop", "clicks", 0))
        assert " scheduled " in run(stream, "streams", "show", "shop").stdout
        lease = ledger.receivers.register(scheduled, host="here", lease_ms=60_000)
        ledger.receivers.runs_on(scheduled, "exec-17")
        ledger.receivers.report_error(lease, "OSError: no route to host", "the stack")
        (row,) = ledger.receivers.all("shop")
    shown = run(stream, "streams", "show", "shop").stdout
    assert f"{time_text(row.last_error_at_ms)}: OSError: no route to host (--json has the stack)" in shown
    assert "exec-17" in shown
    (receiver,) = answer(stream, "streams", "show", "shop")["receivers"]  # type: ignore[call-overload, index]
    assert receiver["last_error"]["stack"] == "the stack"


def test_a_trouble_of_the_receiver_job_is_shown(stream: Stream) -> None:
    with Ledger.open(stream.ledger) as ledger:
        ledger.jobs.renew(_job_lease(ledger), attributes={"troubles": ["Topics of input clicks do not exist: cliks"]})
    assert "Topics of input clicks do not exist: cliks\n" in run(stream, "streams", "show", "shop").stdout


def test_what_cannot_be_asked_is_not_called_running(stream: Stream) -> None:
    with Ledger.open(stream.ledger) as ledger:
        lease = _job_lease(ledger)
        receiver = ledger.receivers.register(
            ledger.receivers.schedule(lease, ReceiverId("shop", "clicks", 0)), host="here", lease_ms=60_000
        )
        stats = {"total_lag": 5, "lag_unknown": 1, "lag_seconds": None, "rate": 2.5}
        ledger.receivers.heartbeat(receiver, sealed_through_ms=0, stats=stats)
        health = {"clicks": {"asked_ms": 0, "error": "Kafka at kafka:9092 cannot be asked", "topics": {}}}
        ledger.jobs.update(lease, state="running", attributes={"inputs": health})
        (listed,) = answer(stream, "streams", "list")  # type: ignore[misc]
        assert listed["state"] == "stalled"
        assert (listed["lag"], listed["lag_unknown"], listed["input_rate"]) == (5, 1, 2.5)
        for reported in (run(stream, "streams", "list").stdout, run(stream, "streams", "show", "shop").stdout):
            assert "Input clicks is not received: Kafka at kafka:9092" in reported
            assert "at least 5" in reported
        assert "waiting for its input" in run(stream, "streams", "show", "shop").stdout, "the receiver"
        health["clicks"]["error"] = None
        ledger.jobs.renew(lease, attributes={"inputs": health})
        (listed,) = answer(stream, "streams", "list")  # type: ignore[misc]
        assert listed["state"] == "well"
        assert "shop is" not in run(stream, "streams", "list").stdout


def test_stop_asks_the_job_and_start_wants_it_again(stream: Stream) -> None:
    stopped = answer(stream, "streams", "stop", "shop")
    assert stopped == {"stream": "shop", "desired_state": "stopped", "running": True}
    waited = run(stream, "streams", "stop", "shop", "--wait", "0.3")
    assert waited.exit_code == 4
    with Ledger.open(stream.ledger) as ledger:
        job = ledger.jobs.current("shop")
        assert job is not None
        assert job.stop_reason == "headrace streams stop"
    assert answer(stream, "streams", "start", "shop") == {"stream": "shop", "desired_state": "running"}


@pytest.mark.parametrize("as_json", [True, False])
def test_stop_waits_until_the_job_has_ended(stream: Stream, *, as_json: bool) -> None:
    ended = threading.Event()

    def end_when_asked() -> None:
        with Ledger.open(stream.ledger) as ledger:
            while (job := ledger.jobs.current("shop")) is not None and job.stop_requested_at_ms is None:
                if ended.wait(0.01):
                    return
            assert job is not None
            ledger.jobs.release(JobLease("shop", job.epoch, job.holder, 60_000, job.lease_until_ms))

    job = threading.Thread(target=end_when_asked)
    job.start()
    begun = time.monotonic()
    try:
        stopped = run(stream, "streams", "stop", "shop", "--wait", "30", *(["--json"] if as_json else []))
    finally:
        ended.set()
        job.join()
    assert time.monotonic() - begun < 25
    assert stopped.exit_code == 0, stopped.output
    if as_json:
        assert json.loads(stopped.stdout) == {"stream": "shop", "desired_state": "stopped", "running": False}
    else:
        assert "is stopped" in stopped.stdout


def test_batches_are_listed_and_shown_by_their_time(stream: Stream) -> None:
    listed = answer(stream, "batches", "list", "shop")
    (batch,) = listed["batches"]  # type: ignore[index]
    assert batch["state"] == "allocated"
    shown = answer(stream, "batches", "show", "shop", str(batch["batch_time_ms"]))
    assert shown["batch"]["manifest_uri"] == batch["manifest_uri"]  # type: ignore[index]
    assert run(stream, "batches", "show", "shop", "yesterday").exit_code == 2


def test_events_are_listed_newest_first(stream: Stream) -> None:
    listed: Any = answer(stream, "events", "list", "shop")
    assert [event["kind"] for event in listed] == ["batch_allocated", "job_started", "stream_registered"]
    lines = run(stream, "events", "list", "shop", "--limit", "1").stdout.splitlines()
    assert next(line.split()[0] for line in lines if line.strip()) == "at"
    assert "batch_allocated" in "".join(lines)
    assert "job_started" not in "".join(lines)
    assert run(stream, "events", "list", "shop", "--kind", "nonsense").exit_code == 2


def test_events_are_followed_oldest_first_a_json_object_a_line(stream: Stream, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(_: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("headrace.cli.events.time", SimpleNamespace(**{**vars(time), "sleep": interrupt}))
    lines = run(stream, "events", "list", "shop", "--follow", "--json").stdout.splitlines()
    assert [json.loads(line)["kind"] for line in lines] == ["stream_registered", "job_started", "batch_allocated"]


HEAVY = {
    *("airflow", "alembic", "confluent_kafka", "elasticsearch", "numpy", "pandas", "psycopg", "pyarrow", "pyspark"),
    *("headrace.receiver.tracker", "sqlalchemy.orm", "sqlalchemy.dialects.postgresql"),
}
# The definition of a stream is read for some details of one, and not for a list.
HEAVY_FOR_A_LIST = {*HEAVY, "headrace.stream"}


def test_reading_commands_import_only_what_reads_the_ledger(stream: Stream) -> None:
    """The imports are most of the time that they take."""
    with Ledger.open(stream.ledger) as ledger:
        (batch,) = ledger.batches.page("shop")
    commands = [
        ["streams", "show", "shop"],
        ["batches", "list", "shop"],
        ["batches", "show", "shop", time_text(batch.batch_time_ms)],
        ["batches", "unclaimed", "shop"],
        ["events", "list", "shop"],
    ]
    script = f"""
import json, sys
from headrace.cli.main import app
app(["streams", "list", "--ledger", sys.argv[2]], standalone_mode=False)
heavy = {{"streams list": sorted({HEAVY_FOR_A_LIST} & sys.modules.keys())}}
for command in json.loads(sys.argv[1]):
    app([*command, "--ledger", sys.argv[2]], standalone_mode=False)
    heavy[" ".join(command[:2])] = sorted({HEAVY} & sys.modules.keys())
print(json.dumps(heavy))
"""
    done = subprocess.run(
        [sys.executable, "-c", script, json.dumps(commands), stream.ledger], capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout.splitlines()[-1]) == {
        "streams list": [],
        **{" ".join(command[:2]): [] for command in commands},
    }


COUNTED_CALLS = """
import json, sys

def counted(run):
    calls = [0]

    def count(frame, event, argument):
        calls[0] += event == "call"

    sys.setprofile(count)
    try:
        run()
    finally:
        sys.setprofile(None)
    return calls[0]

def libraries():
    import pydantic, rich.console, rich.table, sqlalchemy.dialects.sqlite, typer.main

def command():
    from headrace.cli.main import app
    app(sys.argv[1:], standalone_mode=False)

print(json.dumps([counted(libraries), counted(command)]))
"""


def test_a_list_of_streams_runs_little_code_of_its_own(stream: Stream) -> None:
    """Counts calls, not seconds, so that the machine's speed does not matter.

    The command makes as many calls as the imports of its libraries. It made 1.8 times as many when SQLAlchemy's ORM
    mapped the rows of the ledger.
    """
    command = ["streams", "list", "--ledger", stream.ledger]
    done = subprocess.run([sys.executable, "-c", COUNTED_CALLS, *command], capture_output=True, text=True, check=True)
    libraries, own = json.loads(done.stdout.splitlines()[-1])
    assert own < 1.3 * libraries


def test_an_unknown_stream_or_ledger_is_an_error_and_not_made(stream: Stream, tmp_path: Path) -> None:
    assert run(stream, "batches", "list", "nope").exit_code == 1
    missing = tmp_path / "missing.db"
    result = CliRunner().invoke(app, ["streams", "list", "--ledger", f"sqlite:///{missing}"])
    assert result.exit_code == 1
    assert not missing.exists()


TELEX = """
from typing import Literal
from headrace.stream import OutputDefinition

class TelexOutput(OutputDefinition):
    writer = "telex_writers:Writer"
    kind: Literal["telex"] = "telex"
    id: str = "telex"
"""


def test_check_reports_what_is_wrong(stream: Stream, tmp_path: Path) -> None:
    good = tmp_path / "good.json"
    good.write_text(stream.to_json())
    assert CliRunner().invoke(app, ["streams", "check", str(good)]).exit_code == 0
    # A check takes as long as its imports.
    script = (
        "import sys; from headrace.cli.main import app; app(['streams', 'check', sys.argv[1]], standalone_mode=False);"
        "print(sorted({'headrace.ledger', 'sqlalchemy', 'pyarrow', 'pyspark', 'airflow'} & sys.modules.keys()))"
    )
    checked = subprocess.run([sys.executable, "-c", script, good], capture_output=True, text=True, check=True)
    assert checked.stdout.splitlines()[-1] == "[]"
    bad = tmp_path / "bad.json"
    bad.write_text(json.dumps({**json.loads(stream.to_json()), "outputs": []}))
    result = CliRunner().invoke(app, ["streams", "check", str(bad)])
    assert result.exit_code == 1
    assert "outputs" in result.output


def test_check_finds_code_of_another_package_that_is_missing(
    stream: Stream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "telex_of_the_check.py").write_text(TELEX)
    (tmp_path / "telex-1.0.dist-info").mkdir()
    (tmp_path / "telex-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: telex\nVersion: 1.0\n")
    points = "[headrace.outputs]\ntelex = telex_of_the_check:TelexOutput\n"
    (tmp_path / "telex-1.0.dist-info" / "entry_points.txt").write_text(points)
    monkeypatch.syspath_prepend(tmp_path)
    definition = tmp_path / "telex.json"
    definition.write_text(json.dumps({**json.loads(stream.to_json()), "outputs": [{"kind": "telex"}]}))
    result = CliRunner().invoke(app, ["streams", "check", str(definition)])
    assert result.exit_code == 1
    assert "The writer of outputs.telex telex_writers:Writer cannot be imported" in result.output


def test_check_refuses_what_cannot_work_where_airflow_runs_tasks(stream: Stream, tmp_path: Path) -> None:
    """The stream's log is a folder, and its ledger on SQLite."""
    definition = tmp_path / "shop.json"
    definition.write_text(stream.to_json())
    check = ["streams", "check", str(definition)]
    refused = CliRunner().invoke(app, [*check, "--executor", "KubernetesExecutor"])
    assert refused.exit_code == 1
    for part in ("cannot run on KubernetesExecutor", "storage: ", "ledger: ", "docs/guides/managed-airflow.md"):
        assert part in refused.stderr
    managed = {"AIRFLOW__CORE__EXECUTOR": "CeleryExecutor", "MWAA_AIRFLOW_COMPONENT": "worker"}
    assert "cannot run on Amazon MWAA" in CliRunner().invoke(app, check, env=managed).stderr
    warned = CliRunner().invoke(app, [*check, "--json"], env={"AIRFLOW__CORE__EXECUTOR": "CeleryExecutor"})
    assert warned.exit_code == 0
    assert "Warning: storage: " in warned.stderr
    assert json.loads(warned.stdout)["name"] == "shop"


def test_check_finds_a_value_that_the_kafka_client_refuses(stream: Stream, tmp_path: Path) -> None:
    fields = json.loads(stream.to_json())
    fields["inputs"][0]["client"] = {"fetch.min.bytes": "many"}
    definition = tmp_path / "client.json"
    definition.write_text(json.dumps(fields))
    result = CliRunner().invoke(app, ["streams", "check", str(definition)])
    assert result.exit_code == 1
    assert "client of input 'clicks' is refused by librdkafka" in result.output
    assert "fetch.min.bytes" in result.output


def test_check_finds_a_transform_where_a_batch_would(stream: Stream, tmp_path: Path) -> None:
    (tmp_path / "checked_by_the_command.py").write_text("def rows(clicks): ...\ndef misfit(orders, carts): ...\n")
    fields = {**json.loads(stream.to_json()), "spark": {"py_files": [str(tmp_path / "checked_by_the_command.py")]}}
    definition = tmp_path / "with_transform.json"
    definition.write_text(json.dumps({**fields, "transform": "checked_by_the_command:rows"}))
    answered = CliRunner().invoke(app, ["streams", "check", str(definition)])
    assert answered.exit_code == 0, answered.output
    definition.write_text(json.dumps({**fields, "transform": "checked_by_the_command:misfit"}))
    refused = CliRunner().invoke(app, ["streams", "check", str(definition)])
    assert refused.exit_code == 1
    assert "Name its parameters like the inputs' ids" in refused.output


def test_a_row_is_one_line_without_a_terminal(stream: Stream) -> None:
    with Ledger.open(stream.ledger) as ledger:
        (batch,) = ledger.batches.page("shop")
    assert time_text(batch.batch_time_ms) in run(stream, "batches", "list", "shop").stdout


def test_stop_without_a_ledger_leaves_a_request_in_the_folder(tmp_path: Path) -> None:
    storage = open_storage(str(tmp_path))
    storage.write_atomically("shop/manifests/0.json", b"{}")
    runner = CliRunner()
    stopped = runner.invoke(
        app, ["streams", "stop", "shop", "--storage", str(tmp_path), "--reason", "the ledger is lost"]
    )
    assert stopped.exit_code == 0, stopped.output
    assert "ends within a minute" in stopped.stdout
    assert find_stop_request(storage.below("shop"), since_ms=0) == "the ledger is lost"


@pytest.mark.parametrize("arguments", [["--storage", "{folder}"], []], ids=["another folder", "neither"])
def test_stop_asks_for_the_ledger_or_the_storage(tmp_path: Path, arguments: list[str]) -> None:
    given = [argument.format(folder=tmp_path) for argument in arguments]
    refused = CliRunner().invoke(app, ["streams", "stop", "shop", *given], env={"HEADRACE_LEDGER": None})
    assert refused.exit_code == 2
    assert "storage" in refused.output
    assert not (tmp_path / "shop").exists()


def test_a_stream_allocated_ahead_of_the_clock_is_opened_again(stream: Stream) -> None:
    assert "nothing to open" in run(stream, "streams", "reopen", "shop").stdout
    with Ledger.open(stream.ledger) as ledger:
        ahead_ms = ledger.now_ms() // 10_000 * 10_000 + 31_536_000_000
    clock = ManualClock(ahead_ms)
    with Ledger.open(stream.ledger, clock=clock) as ledger:
        allocate(StreamContext(stream, ledger, clock=clock), ahead_ms)
    planned = run(stream, "streams", "reopen", "shop").stdout
    assert time_text(ahead_ms) in planned and "--yes does it" in planned
    assert answer(stream, "streams", "reopen", "shop")["done"] is False  # type: ignore[index]
    done = answer(stream, "streams", "reopen", "shop", "--yes")
    assert done["reopened"]["batches"] == [ahead_ms]  # type: ignore[index]
    with Ledger.open(stream.ledger) as ledger:
        assert ledger.streams.get("shop").sealed_until_ms <= ledger.now_ms()
        assert ledger.batches.get("shop", ahead_ms).state.value == "allocated"
    assert "nothing to open" in run(stream, "streams", "reopen", "shop", "--yes").stdout
