"""The numbers of batches arrive at a StatsD server: Airflow's own client, over UDP.

SparkSubmitOperator's parameters, one by one: each is refused by its name, or reaches spark-submit as the provider's
operator would pass it on.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator

import pytest
from airflow.providers.apache.spark.operators.spark_submit import SparkSubmitOperator
from airflow.sdk.observability.metrics import stats_utils

from headrace.airflow_versions import stats
from headrace.hooks import spark_submit
from headrace.hooks.spark_submit import (
    BY_THE_PROVIDER,
    PASSED_ON,
    REFUSED,
    SubmitArgumentError,
    provider_arguments,
    submit_options,
)
from headrace.operators.micro_batch import MicroBatchOperator
from headrace.operators.replay_batch import ReplayBatchOperator
from headrace.operators.wal_spark_submit import BatchTaskError, WalSparkSubmitOperator, send_attempt


def initialize() -> None:
    """As Airflow's task runner does it: of 3.2, or of 3.3 and later."""
    if isinstance(stats, type):
        stats.initialize(factory=stats_utils.get_stats_factory(stats))
    else:
        stats.initialize(factory=stats_utils.get_stats_factory(), export_legacy_names=True)


@pytest.fixture
def received(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], dict[str, str]]]:
    """Airflow's metrics go to a UDP socket of this test. Returns what has arrived: values by name."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
        server.bind(("127.0.0.1", 0))
        server.settimeout(0.5)
        monkeypatch.setenv("AIRFLOW__METRICS__STATSD_ON", "True")
        monkeypatch.setenv("AIRFLOW__METRICS__STATSD_HOST", "127.0.0.1")
        monkeypatch.setenv("AIRFLOW__METRICS__STATSD_PORT", str(server.getsockname()[1]))
        initialize()

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
    initialize()


def make(stream):
    return WalSparkSubmitOperator(task_id="generate_batch", stream=stream, way="connect")


def test_a_completed_batch_sends_its_records_delays_and_outputs(stream, allocated, toy_batch, connectable, received):
    toy_batch("ok")
    _, task = allocated()
    make(stream).execute(task.context)
    arguments = received()
    assert arguments["airflow.headrace.batch.completed"] == "1|c"
    assert arguments["airflow.headrace.batch.records"] == "3|c"
    assert arguments["airflow.headrace.flights.batch.completed"] == "1|c"
    assert arguments["airflow.headrace.flights.completed.batch.attempts"] == "1|c"
    for delay in ("total_delay", "scheduling_delay", "processing_time"):
        assert float(arguments[f"airflow.headrace.flights.batch.{delay}"].removesuffix("|ms")) >= 0
    assert "airflow.headrace.batch.failed" not in arguments


def test_dead_letters_are_counted_by_output(stream, allocated, ledger, received):
    at_ms, _ = allocated()
    attempt = ledger.attempts.begin("flights", at_ms, holder="task", way="connect", lease_ms=5_000)
    ledger.attempts.record_output(attempt, "elasticsearch", {"created": 2, "dead_lettered": 1})
    ledger.attempts.complete(attempt)
    send_attempt(ledger, attempt)
    arguments = received()
    assert arguments["airflow.headrace.flights.elasticsearch.output.dead_letters"] == "1|c"
    assert arguments["airflow.headrace.output.created"] == "2|c"
    again = ledger.attempts.begin("flights", at_ms, holder="task", way="connect", lease_ms=5_000, force=True)
    ledger.attempts.fail(again, "too many", counts={"elasticsearch": {"created": 2, "dead_lettered": 7}})
    send_attempt(ledger, again)
    arguments = received()
    assert arguments["airflow.headrace.flights.elasticsearch.output.dead_letters"] == "7|c"
    assert "airflow.headrace.output.created" not in arguments


def test_a_failed_batch_run_again_is_counted_as_no_completion(stream, allocated, toy_batch, connectable, received):
    """It is not a second one; the failure is counted."""
    toy_batch("fail")
    _, task = allocated()
    with pytest.raises(BatchTaskError):
        make(stream).execute(task.context)
    arguments = received()
    assert arguments["airflow.headrace.flights.batch.failed"] == "1|c"
    assert arguments["airflow.headrace.flights.failed.batch.attempts"] == "1|c"
    assert "airflow.headrace.batch.completed" not in arguments
    toy_batch("ok")
    make(stream).execute(task.again(try_number=2).context)
    assert received()["airflow.headrace.batch.completed"] == "1|c"
    make(stream).execute(task.again(conf={"reprocess": True}, run_id="again").context)
    arguments = received()
    assert arguments["airflow.headrace.flights.completed.batch.attempts"] == "1|c"
    assert "airflow.headrace.batch.completed" not in arguments


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
    arguments = received()
    assert arguments["airflow.headrace.batch.completed"] == "1|c"
    assert not any("delay" in name or "processing_time" in name for name in arguments)


@pytest.mark.usefixtures("connectable")
def test_a_batch_does_not_fail_because_metrics_cannot_be_sent(stream, allocated, toy_batch, ledger, monkeypatch):
    def unavailable(*_: object, **__: object) -> None:
        raise OSError("no network")

    monkeypatch.setattr("headrace.operators.wal_spark_submit.stats.incr", unavailable)
    toy_batch("ok")
    at_ms, task = allocated()
    make(stream).execute(task.context)
    assert ledger.batches.get("flights", at_ms).state.value == "completed"


CLUSTER = json.dumps({"conn_type": "spark", "host": "spark://master", "port": 7077})
VALUES = {
    "conf": {"spark.x": "1"}, "conn_id": "cluster", "deploy_mode": "client", "env_vars": {"GREETING": "hello"},
    "executor_cores": 3, "num_executors": 4, "post_submit_commands": ["true"], "status_poll_interval": 9,
    "total_executor_cores": 5, "track_driver_via_k8s_api": True, "use_krb5ccache": True, "verbose": True,
    "yarn_rm_auth": object(), "yarn_track_via_rm_api": True,
}  # fmt: skip
HERE = sorted(PASSED_ON & provider_arguments())


def value(name: str) -> object:
    return VALUES.get(name, f"a {name}")


def batch_operator(stream, **options) -> WalSparkSubmitOperator:
    return WalSparkSubmitOperator(task_id="generate", stream=stream, **options)


def test_every_parameter_of_the_installed_provider_is_known():
    """A newer provider may have one more: put it among those that are passed on, or refuse it with what to do."""
    assert provider_arguments() <= PASSED_ON | BY_THE_PROVIDER | REFUSED.keys()
    assert not PASSED_ON & REFUSED.keys()


@pytest.mark.parametrize("name", HERE)
def test_spark_submits_options_reach_its_hook_as_the_providers(stream, monkeypatch, name):
    if name == "use_krb5ccache":
        monkeypatch.setenv("KRB5_CONFIG", "unused")
        given = {name: True, "principal": "me@REALM"}
    else:
        given = {name: value(name)}
    if name == "conn_id":
        monkeypatch.setenv("AIRFLOW_CONN_CLUSTER", CLUSTER)
    theirs = SparkSubmitOperator(task_id="theirs", **{"conn_id": "", **given})._get_hook()
    ours = batch_operator(stream, way="submit", **given)._get_hook()
    attribute = name if name == "spark_binary" else f"_{name}"
    assert getattr(theirs, attribute) == value(name)
    passed = getattr(ours, attribute)
    if name == "conf":
        # Beside what headrace sets itself.
        passed = {key: passed.get(key) for key in VALUES["conf"]}
    assert passed == value(name)


@pytest.mark.parametrize("name", sorted(PASSED_ON | BY_THE_PROVIDER))
def test_spark_submits_options_are_refused_in_a_receivers_batch(stream, name):
    """The batch runs in the receivers' application."""
    if name not in provider_arguments():
        pytest.skip("this provider has no such parameter")
    with pytest.raises(SubmitArgumentError, match=rf"'{name}' is for spark-submit.*way='submit'"):
        batch_operator(stream, **{name: value(name)})


@pytest.mark.parametrize("way", ["connect", "submit"])
@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_is_not_the_operators_is_refused_with_what_to_do(stream, way, name):
    with pytest.raises(SubmitArgumentError, match=rf"does not take '{name}'\. ."):
        batch_operator(stream, way=way, **{name: value(name)})


@pytest.mark.parametrize("way", ["connect", "submit"])
def test_none_and_false_ask_for_nothing(stream, way):
    nothing = {name: False if name in ("durable", "verbose") else None for name in provider_arguments()}
    operator = batch_operator(stream, way=way, **nothing)
    assert operator.name == "headrace batch flights"
    assert getattr(operator, "durable", False) is False
    assert operator._submit_options == {}


def test_a_parameter_that_a_newer_provider_has_is_refused(monkeypatch):
    monkeypatch.setattr(spark_submit, "provider_arguments", lambda: frozenset({"gpus"}))
    with pytest.raises(SubmitArgumentError, match="'gpus'"):
        submit_options({"gpus": 2}, way="submit")


@pytest.mark.parametrize("name", sorted(BY_THE_PROVIDER))
def test_openlineages_settings_are_added_by_the_provider(stream, name):
    """They are added to the configuration."""
    operator = batch_operator(stream, way="submit", **{name: True})
    assert getattr(operator, f"_{name}") is True
    # What the provider adds, it adds here, and the hook is made from it.
    operator.conf = {"spark.openlineage.parentRunId": "1"}
    assert operator._get_hook()._conf["spark.openlineage.parentRunId"] == "1"


def test_the_providers_template_fields_are_submitted_rendered(stream):
    operator = batch_operator(stream, way="submit", files="{{ ds }}.json", executor_memory="2g")
    assert operator.template_fields == SparkSubmitOperator.template_fields
    operator.files = "2026-11-22.json"
    hook = operator._get_hook()
    assert (hook._files, hook._executor_memory) == ("2026-11-22.json", "2g")


def test_variables_for_spark_submit_do_not_bring_airflows_along(stream, monkeypatch):
    monkeypatch.setenv("AIRFLOW_CONN_SOMEBODY_ELSES", "{}")
    monkeypatch.setenv("AIRFLOW__HEADRACE__SECRET_KEY", "k" * 32)
    hook = batch_operator(stream, way="submit", env_vars={"GREETING": "hello", "TIMES": 3})._get_hook()
    started = []

    class Process:
        stdout = ()

        def __init__(self, command, **options):
            started.append(options["env"])

        def wait(self):
            return 0

    monkeypatch.setattr("subprocess.Popen", Process)
    hook.submit("micro_batch.py")
    (environment,) = started
    assert (environment["GREETING"], environment["TIMES"]) == ("hello", "3")
    assert "HEADRACE_SECRET_KEY" in environment
    assert "AIRFLOW_CONN_SOMEBODY_ELSES" not in environment


@pytest.mark.parametrize("kind", [MicroBatchOperator, ReplayBatchOperator])
def test_the_other_operators_of_a_batch_take_and_refuse_the_same(stream, kind):
    more = {"replay": stream, "target": "v2", "step": "elasticsearch"} if kind is ReplayBatchOperator else {}
    with pytest.raises(SubmitArgumentError, match="'jars'"):
        kind(task_id="batch", stream=stream, jars="a.jar", **more)
    assert kind(task_id="batch", stream=stream, way="submit", jars="a.jar", **more)._get_hook()._jars == "a.jar"
