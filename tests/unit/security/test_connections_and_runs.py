"""What connections and runs may say, and what becomes of secrets."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from airflow.providers.apache.spark.operators.spark_submit import SparkSubmitOperator
from airflow.sdk.exceptions import AirflowFailException

from headrace.connections import Connection, from_text
from headrace.elasticsearch.errors import IndexingOptionsError
from headrace.elasticsearch.transport import Cluster
from headrace.errors import HeadraceError
from headrace.hooks.spark_submit import StreamSparkSubmitHook
from headrace.kafka.client import connection_config
from headrace.kafka.errors import ClientSettingError
from headrace.ledger import Ledger
from headrace.ledger.database import engine_url
from headrace.operators.batch_steps import AllocateBlocksOperator, CheckpointOperator, CleanupOperator
from headrace.operators.kafka_receiver import KafkaReceiverOperator
from headrace.operators.micro_batch import MicroBatchOperator
from headrace.operators.replay_batch import ReplayBatchOperator
from headrace.operators.wal_spark_submit import WalSparkSubmitOperator
from headrace.runs.batch_run import run_request
from headrace.stream import ConsoleOutput, KafkaInput, Stream

SECRET = "hunter2-hunter2"
OPERATORS = [
    AllocateBlocksOperator,
    CheckpointOperator,
    CleanupOperator,
    KafkaReceiverOperator,
    MicroBatchOperator,
    ReplayBatchOperator,
    WalSparkSubmitOperator,
]


@pytest.fixture
def stream(tmp_path: Path) -> Stream:
    return Stream(
        name="shop",
        inputs=KafkaInput(connection="brokers", topics="clicks"),
        outputs=ConsoleOutput(),
        batch_interval="10 s",
        parameters={"limit": 1},
        storage=tmp_path,
        ledger="connection:shop_ledger",
    )


@pytest.mark.parametrize(
    "name",
    [
        "plugin.library.paths",
        "ssl.engine.location",
        "ssl.providers",
        "sasl.kerberos.kinit.cmd",
        "group.instance.idx",
        "default_topic_config",
    ],
)
def test_a_kafka_connection_loads_no_code_and_starts_no_program(name: str) -> None:
    connection = Connection("brokers", "kafka", extra={"bootstrap.servers": "b:1", name: SECRET})
    with pytest.raises(ClientSettingError, match=name) as refused:
        connection_config(connection)
    assert SECRET not in str(refused.value)


@pytest.mark.parametrize("name", ["node_class", "transport_class", "serializer", "headers", "hosts", "http_auth"])
def test_an_elasticsearch_connection_says_only_what_is_known(name: str) -> None:
    """Anything else is refused by its name and without its value."""
    connection = Connection("es", "elasticsearch", host="h", extra={name: SECRET})
    with pytest.raises(IndexingOptionsError, match=name) as refused:
        Cluster.from_connection(connection)
    assert SECRET not in str(refused.value)


def test_a_ledgers_connection_passes_only_tls_and_timeouts() -> None:
    """Nothing else goes to the driver."""
    extra = {
        "passfile": "/x", "creator": "evil", "hostaddr": "10.0.0.1", "host": "evil", "password": "p",
        "sslmode": "require", "keepalives_idle": 5, "options": "-c statement_timeout=1000",
    }  # fmt: skip
    connection = {"conn_type": "postgres", "host": "h", "schema": "d", "password": SECRET, "extra": extra}
    url = engine_url("connection:shop", {"AIRFLOW_CONN_SHOP": json.dumps(connection)})
    assert url.drivername == "postgresql+psycopg"
    wanted = {"sslmode": "require", "keepalives_idle": "5", "options": "-c statement_timeout=1000"}
    assert dict(url.query) == wanted
    assert SECRET not in str(url)


@pytest.mark.parametrize(
    "url", ["mysql://h/d", "postgresql+evil://h/d", "evil:///x", "sqlite:///:memory:", "sqlite:///x", "file:///etc/x"]
)
def test_a_ledgers_url_loads_no_other_driver(url: str) -> None:
    try:
        assert engine_url(url).drivername == "postgresql+psycopg"
    except HeadraceError:
        return


@pytest.mark.parametrize("name", ["'; DROP TABLE batches; --", 'shop" OR "1"="1', "shop\x00", "%s", ":stream"])
def test_names_are_values_to_the_ledger(tmp_path: Path, name: str) -> None:
    with Ledger.open(f"sqlite:///{tmp_path}/ledger.db") as ledger:
        ledger.streams.register("shop", "{}", batch_interval_ms=1000, block_interval_ms=200)
        with pytest.raises(HeadraceError):
            ledger.streams.get(name)
        assert ledger.batches.page(name) == []
        assert ledger.runs.find(name, name) is None
        assert [row.name for row in ledger.streams.all()] == ["shop"]


@pytest.mark.parametrize(
    "conf",
    [
        {"spark": {"conf": {"spark.plugins": "Evil"}}},
        {"transform": "os:system"},
        {"application_args": ["--class", "Evil"]},
        {"storage": "/elsewhere"},
        {"ledger": "sqlite:////elsewhere.db"},
        {"outputs": ["../../etc"]},
        {"outputs": ["console; rm -rf /"]},
        {"outputs": {"console": 1}},
        {"parameters": {"limit": 1, "__class__": "x"}},
        {"parameters": "limit=1"},
        {"reprocess": "yes"},
    ],
    ids=str,
)
def test_a_run_chooses_among_what_there_is(stream: Stream, conf: dict[str, Any]) -> None:
    run = SimpleNamespace(conf=conf, run_type="manual", run_id="r", clear_number=0, start_date=None)
    ti = SimpleNamespace(id=SimpleNamespace(version=4, int=0))
    with pytest.raises(AirflowFailException):
        run_request({"dag_run": run, "ti": ti, "params": {}}, stream)  # type: ignore[typeddict-item]


def test_what_a_run_gives_is_a_value_and_no_template(stream: Stream) -> None:
    run = SimpleNamespace(
        conf={"parameters": {"limit": "{{ var.value.secret }}"}}, run_type="manual", run_id="{{ 7 * 7 }}",
        clear_number=0, start_date=None,
    )  # fmt: skip
    ti = SimpleNamespace(id=SimpleNamespace(version=4, int=0))
    asked = run_request({"dag_run": run, "ti": ti, "params": {}}, stream)  # type: ignore[typeddict-item]
    assert asked.parameters == {"limit": "{{ var.value.secret }}"}
    assert asked.run.run_id == "{{ 7 * 7 }}"


@pytest.mark.parametrize("operator", OPERATORS, ids=lambda operator: operator.__name__)
def test_no_field_of_ours_is_rendered(operator: type) -> None:
    """Those of SparkSubmitOperator are, as the author of a DAG expects of them."""
    theirs = SparkSubmitOperator.template_fields if issubclass(operator, SparkSubmitOperator) else ()
    assert tuple(operator.template_fields) == tuple(theirs)  # type: ignore[attr-defined]


def test_no_secret_is_in_a_command_a_log_or_an_error(
    stream: Stream, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    brokers = {"conn_type": "kafka", "extra": {"bootstrap.servers": "b:1", "sasl.password": SECRET}}
    ledger = {"conn_type": "postgres", "host": "nosuch.invalid", "login": "u", "password": SECRET, "schema": "d"}
    monkeypatch.setenv("AIRFLOW_CONN_BROKERS", json.dumps(brokers))
    monkeypatch.setenv("AIRFLOW_CONN_SHOP_LEDGER", json.dumps(ledger))
    monkeypatch.setenv("AIRFLOW__HEADRACE__SECRET_KEY", SECRET)
    with caplog.at_level(logging.DEBUG):
        hook = StreamSparkSubmitHook(stream, application_args=["--stream", "shop"], name="headrace shop")
        command = hook.command("/app.py")
        environment = hook.environment()
        with pytest.raises(HeadraceError) as failed:
            Ledger.open(stream.ledger, create=False)
    assert SECRET in environment["AIRFLOW_CONN_BROKERS"]
    assert environment["HEADRACE_SECRET_KEY"] not in (SECRET, "")
    for reported in (*command, caplog.text, str(failed.value), repr(failed.value), stream.to_json(), repr(hook)):
        assert SECRET not in reported


@pytest.mark.parametrize("text", [f"postgres://u:{SECRET}@h:port/d", f'{{"password": "{SECRET}"', f"::{SECRET}"])
def test_what_cannot_be_read_of_a_connection_is_not_repeated(text: str) -> None:
    try:
        shown = repr(from_text("shop", text))
    except HeadraceError as error:
        shown = f"{error} {error!r} {error.__cause__} {error.__context__ if not error.__suppress_context__ else ''}"
    assert SECRET not in shown
