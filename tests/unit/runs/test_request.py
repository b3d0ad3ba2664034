from __future__ import annotations

from datetime import UTC, datetime
from types import SimpleNamespace
from uuid import uuid4

import pytest
from airflow.sdk.exceptions import AirflowFailException

from headrace.runs.identity import RunIdentity
from headrace.runs.request import RunRequest, run_request
from headrace.stream import ConsoleOutput, KafkaInput, State, Stream


@pytest.fixture
def stream(tmp_path) -> Stream:
    return Stream(
        name="flights",
        inputs=KafkaInput(bootstrap_servers="localhost:9", topics="flights"),
        outputs=(ConsoleOutput(id="one"), ConsoleOutput(id="two")),
        state=State(update="m:f", fields="k STRING", keys="k"),
        parameters={"limit": 3},
        batch_interval="10 s",
        storage=str(tmp_path),
        ledger=f"sqlite:///{tmp_path}/ledger.db",
    )


def ask(stream, conf=None, *, params=None, run_type="manual", clear_number=2) -> RunRequest:
    run = SimpleNamespace(
        run_id="run",
        clear_number=clear_number,
        run_type=run_type,
        conf=conf,
        start_date=datetime(2026, 1, 1, tzinfo=UTC),
    )
    return run_request({"dag_run": run, "params": params or {}, "ti": SimpleNamespace(id=uuid4())}, stream)


def test_a_run_that_asks_for_nothing(stream):
    found = ask(stream, run_type="scheduled", clear_number=None)
    assert found == RunRequest(RunIdentity("run", 0, "2026-01-01T00:00:00+00:00"))
    assert found.wants("one")
    assert found.attributes == {"run_id": "run", "clear_number": 0, "run_started": "2026-01-01T00:00:00+00:00"}


def test_a_backfills_run_is_known_by_its_type(stream):
    assert ask(stream, run_type="backfill").is_backfill


def test_conf_and_params_say_the_same(stream):
    asked = {"reprocess": True, "outputs": ["one"], "parameters": {"limit": 5}, "from_kafka": True}
    assert ask(stream, asked) == ask(stream, params=asked)
    found = ask(stream, asked)
    assert (found.reprocess, found.outputs, found.parameters, found.from_kafka) == (True, ("one",), {"limit": 5}, True)
    assert found.attributes["parameters"] == {"limit": 5}


def test_the_forms_empty_fields_ask_for_all(stream):
    found = ask(stream, {"outputs": [], "parameters": {}})
    assert (found.outputs, found.parameters) == (None, None)


def test_state_is_updated_whatever_outputs_are_asked_for_but_not_again(stream):
    found = ask(stream, {"outputs": ["two"]})
    assert [step for step in stream.steps if found.wants(step)] == ["state", "two"]
    assert [step for step in stream.steps if found.may_repeat(step)] == ["two"]


@pytest.mark.parametrize(
    ("conf", "why"),
    [
        ({"outputs": ["three"]}, "no output 'three', but state, one, two"),
        ({"outputs": "one"}, "no output 'one', but"),
        ({"outputs": [["one"]]}, "no output"),
        ({"parameters": {"other": 1}}, "no parameter other, but limit"),
        ({"parameters": [1]}, "must be an object"),
        ({"reprocess": "false"}, "reprocess must be true or false"),
        ({"from_kafka": 1}, "from_kafka must be true or false"),
    ],
)
def test_what_the_stream_has_not_is_refused_for_good(stream, conf, why):
    with pytest.raises(AirflowFailException, match=why):
        ask(stream, conf)


def test_a_name_that_means_nothing_is_refused_unless_the_dag_declares_it(stream):
    with pytest.raises(AirflowFailException, match="'reproces', which means nothing here; it may have from_kafka, out"):
        ask(stream, {"reproces": True})
    assert ask(stream, {"colour": "red"}, params={"colour": "blue"}).reprocess is False
