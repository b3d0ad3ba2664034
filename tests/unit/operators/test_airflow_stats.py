"""The numbers of batches arrive at a StatsD server: Airflow's own client, over UDP."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator

import pytest
from airflow.sdk.observability import stats
from airflow.sdk.observability.metrics import stats_utils

from headrace.operators.spark_attempt import BatchTaskError, send_attempt
from headrace.operators.wal_spark_submit import WalSparkSubmitOperator


@pytest.fixture
def received(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], dict[str, str]]]:
    """Airflow's metrics go to a UDP socket of this test. Returns what has arrived: values by name."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
        server.bind(("127.0.0.1", 0))
        server.settimeout(0.5)
        monkeypatch.setenv("AIRFLOW__METRICS__STATSD_ON", "True")
        monkeypatch.setenv("AIRFLOW__METRICS__STATSD_HOST", "127.0.0.1")
        monkeypatch.setenv("AIRFLOW__METRICS__STATSD_PORT", str(server.getsockname()[1]))
        # As Airflow's task runner does it.
        stats.initialize(factory=stats_utils.get_stats_factory(), export_legacy_names=True)

        def read() -> dict[str, str]:
            found = {}
            while True:
                try:
                    name, _, value = server.recv(4096).decode().partition(":")
                except TimeoutError:
                    return found
                found[name] = value

        yield read
    monkeypatch.undo()
    stats.initialize(factory=stats_utils.get_stats_factory(), export_legacy_names=True)


def make(stream):
    return WalSparkSubmitOperator(task_id="generate_batch", stream=stream, way="connect")


def test_a_completed_batch_sends_its_records_delays_and_outputs(stream, allocated, toy_batch, connectable, received):
    toy_batch("ok")
    _, task = allocated()
    make(stream).execute(task.context)
    found = received()
    assert found["airflow.headrace.batch.completed"] == "1|c"
    assert found["airflow.headrace.batch.records"] == "3|c"
    assert found["airflow.headrace.flights.batch.completed"] == "1|c"
    assert found["airflow.headrace.flights.completed.batch.attempts"] == "1|c"
    for delay in ("total_delay", "scheduling_delay", "processing_time"):
        assert float(found[f"airflow.headrace.flights.batch.{delay}"].removesuffix("|ms")) >= 0
    assert "airflow.headrace.batch.failed" not in found


def test_dead_letters_are_counted_by_output(stream, allocated, ledger, received):
    at_ms, _ = allocated()
    attempt = ledger.attempts.begin("flights", at_ms, holder="task", way="connect", lease_ms=5_000)
    ledger.attempts.record_output(attempt, "elasticsearch", {"created": 2, "dead_lettered": 1})
    ledger.attempts.complete(attempt)
    send_attempt(ledger, attempt)
    found = received()
    assert found["airflow.headrace.flights.elasticsearch.output.dead_letters"] == "1|c"
    assert found["airflow.headrace.output.created"] == "2|c"
    again = ledger.attempts.begin("flights", at_ms, holder="task", way="connect", lease_ms=5_000, force=True)
    ledger.attempts.fail(again, "too many", counts={"elasticsearch": {"created": 2, "dead_lettered": 7}})
    send_attempt(ledger, again)
    found = received()
    assert found["airflow.headrace.flights.elasticsearch.output.dead_letters"] == "7|c"
    assert "airflow.headrace.output.created" not in found


def test_a_failed_batch_is_counted_and_run_again_it_is_no_second_completion(
    stream, allocated, toy_batch, connectable, received
):
    toy_batch("fail")
    _, task = allocated()
    with pytest.raises(BatchTaskError):
        make(stream).execute(task.context)
    found = received()
    assert found["airflow.headrace.flights.batch.failed"] == "1|c"
    assert found["airflow.headrace.flights.failed.batch.attempts"] == "1|c"
    assert "airflow.headrace.batch.completed" not in found
    toy_batch("ok")
    make(stream).execute(task.again(try_number=2).context)
    assert received()["airflow.headrace.batch.completed"] == "1|c"
    make(stream).execute(task.again(conf={"reprocess": True}, run_id="again").context)
    found = received()
    assert found["airflow.headrace.flights.completed.batch.attempts"] == "1|c"
    assert "airflow.headrace.batch.completed" not in found


def test_the_task_that_ends_a_failed_run_counts_it_once(stream, allocated, ledger, received):
    at_ms, _ = allocated()
    outputs = ["elasticsearch", "console"]
    ledger.streams.register("flights", "{}", batch_interval_ms=200, block_interval_ms=200, outputs=outputs)
    run = {"holder": "task", "way": "connect", "lease_ms": 60_000}
    failing, other = (ledger.attempts.begin("flights", at_ms, outputs=[output], **run) for output in outputs)
    ledger.attempts.fail(failing, "no")
    send_attempt(ledger, failing)
    # The batch may still be running; the other task ends it.
    assert "airflow.headrace.batch.failed" not in received()
    ledger.attempts.record_output(other, "console", {})
    ledger.attempts.complete(other)
    send_attempt(ledger, other)
    assert received()["airflow.headrace.batch.failed"] == "1|c"


def test_a_batch_from_before_the_stream_began_sends_no_delays(stream, ledger, received):
    at_ms = ledger.streams.get("flights").zero_time_ms
    ledger.allocations.seal("flights", at_ms)
    empty = {"manifest_uri": "m", "manifest_sha256": "0" * 64, "blocks_expected": 0}
    ledger.allocations.allocate("flights", at_ms, inputs=[], **empty)
    attempt = ledger.attempts.begin("flights", at_ms, holder="task", way="connect", lease_ms=60_000)
    ledger.attempts.record_output(attempt, "elasticsearch", {})
    ledger.attempts.complete(attempt)
    send_attempt(ledger, attempt)
    found = received()
    assert found["airflow.headrace.batch.completed"] == "1|c"
    assert not any("delay" in name or "processing_time" in name for name in found)


@pytest.mark.usefixtures("connectable")
def test_a_batch_does_not_fail_because_its_numbers_cannot_be_sent(stream, allocated, toy_batch, ledger, monkeypatch):
    def unavailable(*_: object, **__: object) -> None:
        raise OSError("no network")

    monkeypatch.setattr("headrace.operators.spark_attempt.stats.incr", unavailable)
    toy_batch("ok")
    at_ms, task = allocated()
    make(stream).execute(task.context)
    assert ledger.batches.get("flights", at_ms).state.value == "completed"
