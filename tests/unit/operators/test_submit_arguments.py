"""SparkSubmitOperator's parameters, one by one: each is refused by its name, or reaches spark-submit as the provider's
operator would pass it on."""

from __future__ import annotations

import json

import pytest
from airflow.providers.apache.spark.operators.spark_submit import SparkSubmitOperator

from headrace.operators import spark_attempt
from headrace.operators.micro_batch import MicroBatchOperator
from headrace.operators.replay_batch import ReplayBatchOperator
from headrace.operators.spark_attempt import (
    BY_THE_PROVIDER,
    PASSED_ON,
    REFUSED,
    SubmitArgumentError,
    provider_arguments,
    submit_options,
)
from headrace.operators.wal_spark_submit import WalSparkSubmitOperator

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


def make(stream, **options) -> WalSparkSubmitOperator:
    return WalSparkSubmitOperator(task_id="generate", stream=stream, **options)


def test_every_parameter_of_the_installed_provider_is_known():
    """A newer provider may have one more: put it among those that are passed on, or refuse it with what to do."""
    assert provider_arguments() <= PASSED_ON | BY_THE_PROVIDER | REFUSED.keys()
    assert not PASSED_ON & REFUSED.keys()


@pytest.mark.parametrize("name", HERE)
def test_what_is_for_spark_submit_reaches_its_hook_as_the_providers_operator_passes_it(stream, monkeypatch, name):
    if name == "use_krb5ccache":
        monkeypatch.setenv("KRB5_CONFIG", "unused")
        given = {name: True, "principal": "me@REALM"}
    else:
        given = {name: value(name)}
    if name == "conn_id":
        monkeypatch.setenv("AIRFLOW_CONN_CLUSTER", CLUSTER)
    theirs = SparkSubmitOperator(task_id="theirs", **{"conn_id": "", **given})._get_hook()
    ours = make(stream, way="submit", **given)._get_hook()
    attribute = name if name == "spark_binary" else f"_{name}"
    assert getattr(theirs, attribute) == value(name)
    passed = getattr(ours, attribute)
    if name == "conf":
        # Beside what headrace sets itself.
        passed = {key: passed.get(key) for key in VALUES["conf"]}
    assert passed == value(name)


@pytest.mark.parametrize("name", sorted(PASSED_ON | BY_THE_PROVIDER))
def test_what_is_for_spark_submit_is_refused_where_a_batch_runs_in_the_receivers_application(stream, name):
    if name not in provider_arguments():
        pytest.skip("this provider has no such parameter")
    with pytest.raises(SubmitArgumentError, match=rf"'{name}' is for spark-submit.*way='submit'"):
        make(stream, **{name: value(name)})


@pytest.mark.parametrize("way", ["connect", "submit"])
@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_is_not_the_operators_is_refused_with_what_to_do(stream, way, name):
    with pytest.raises(SubmitArgumentError, match=rf"does not take '{name}'\. ."):
        make(stream, way=way, **{name: value(name)})


@pytest.mark.parametrize("way", ["connect", "submit"])
def test_none_and_false_ask_for_nothing(stream, way):
    nothing = {name: False if name in ("durable", "verbose") else None for name in provider_arguments()}
    operator = make(stream, way=way, **nothing)
    assert operator.name == "headrace batch flights"
    assert operator.durable is False
    assert operator._submit_options == {}


def test_a_parameter_that_a_newer_provider_has_is_refused(monkeypatch):
    monkeypatch.setattr(spark_attempt, "provider_arguments", lambda: frozenset({"gpus"}))
    with pytest.raises(SubmitArgumentError, match="'gpus'"):
        submit_options({"gpus": 2}, way="submit")


@pytest.mark.parametrize("name", sorted(BY_THE_PROVIDER))
def test_openlineages_settings_are_added_to_the_configuration_by_the_provider(stream, name):
    operator = make(stream, way="submit", **{name: True})
    assert getattr(operator, f"_{name}") is True
    # What the provider adds, it adds here, and the hook is made from it.
    operator.conf = {"spark.openlineage.parentRunId": "1"}
    assert operator._get_hook()._conf["spark.openlineage.parentRunId"] == "1"


def test_the_providers_template_fields_are_kept_and_their_rendered_values_submitted(stream):
    operator = make(stream, way="submit", files="{{ ds }}.json", executor_memory="2g")
    assert operator.template_fields == SparkSubmitOperator.template_fields
    operator.files = "2026-11-22.json"
    hook = operator._get_hook()
    assert (hook._files, hook._executor_memory) == ("2026-11-22.json", "2g")


def test_variables_for_spark_submit_do_not_bring_airflows_along(stream, monkeypatch):
    monkeypatch.setenv("AIRFLOW_CONN_SOMEBODY_ELSES", "{}")
    monkeypatch.setenv("AIRFLOW__HEADRACE__SECRET_KEY", "k" * 32)
    hook = make(stream, way="submit", env_vars={"GREETING": "hello", "TIMES": 3})._get_hook()
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
