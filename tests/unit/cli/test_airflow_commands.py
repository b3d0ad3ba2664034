"""`airflow headrace …`, by the real `airflow` command, with a connection that only Airflow's secrets backend has."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from headrace import connections
from headrace.cli.preview import stream_context
from headrace.ledger import Ledger
from headrace.stream import ConsoleOutput, ElasticsearchOutput, KafkaInput, Stream

pytest.importorskip("airflow")


def airflow(home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    secrets = {"connections_file_path": str(home / "connections.json")}
    settings = {
        "AIRFLOW_HOME": str(home),
        "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
        "AIRFLOW__SECRETS__BACKEND": "airflow.secrets.local_filesystem.LocalFilesystemBackend",
        "AIRFLOW__SECRETS__BACKEND_KWARGS": json.dumps(secrets),
    }
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("AIRFLOW", "HEADRACE"))}
    return subprocess.run(
        [Path(sys.executable).with_name("airflow"), "headrace", *arguments],
        env=kept | settings,
        cwd=home,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_commands_run_under_airflow_with_its_connections(tmp_path: Path) -> None:
    database = tmp_path / "ledger.db"
    with Ledger.open(f"sqlite:///{database}") as ledger:
        ledger.streams.register("orders", "{}", batch_interval_ms=10_000, block_interval_ms=200)
    connection = {"conn_type": "headrace_ledger", "schema": str(database)}
    (tmp_path / "connections.json").write_text(json.dumps({"headrace_ledger_default": connection}))
    listed = airflow(tmp_path, "events", "list", "orders", "--json")
    assert listed.returncode == 0, listed.stderr
    assert json.loads(listed.stdout)[0]["kind"] == "stream_registered"


def test_a_check_knows_airflows_configuration(tmp_path: Path) -> None:
    stream = Stream(
        name="orders",
        inputs=KafkaInput(connection="brokers", topics="orders"),
        outputs=ConsoleOutput(),
        batch_interval="10 s",
        storage=tmp_path,
        ledger=f"sqlite:///{tmp_path}/ledger.db",
    )
    (tmp_path / "orders.json").write_text(stream.to_json())
    (tmp_path / "airflow.cfg").write_text("[apache_kafka]\ncallback_allowlist = acme.kafka.make_token\n")
    extra = {"bootstrap.servers": "b:1", "security.protocol": "SASL_SSL", "sasl.mechanism": "OAUTHBEARER"}
    connection = {"conn_type": "kafka", "extra": {**extra, "oauth_cb": "acme.kafka.other"}}
    (tmp_path / "connections.json").write_text(json.dumps({"brokers": connection}))
    checked = airflow(tmp_path, "streams", "check", "orders.json")
    assert checked.returncode == 1
    assert "not among the allowed ones (acme.kafka.make_token)" in " ".join(checked.stderr.split())
    # The executor too.
    (tmp_path / "airflow.cfg").write_text("[core]\nexecutor = KubernetesExecutor\n")
    checked = airflow(tmp_path, "streams", "check", "orders.json")
    assert checked.returncode == 1
    assert "cannot run on KubernetesExecutor" in " ".join(checked.stderr.split())


def test_the_lines_of_airflows_log_are_not_in_the_output(tmp_path: Path) -> None:
    (tmp_path / "orders.py").write_text(
        "import logging\n"
        "from headrace.stream import ConsoleOutput, KafkaInput, Stream\n"
        "logging.getLogger('orders').warning('The module is read.')\n"
        "stream = Stream(name='orders', inputs=KafkaInput(bootstrap_servers='b:1', topics='orders'), "
        "outputs=ConsoleOutput(), batch_interval='10 s', storage='/srv', ledger='sqlite:////srv/ledger.db')\n"
    )
    checked = airflow(tmp_path, "streams", "check", "orders:stream", "--json")
    assert checked.returncode == 0, checked.stderr
    assert json.loads(checked.stdout)["name"] == "orders"
    assert "The module is read." in checked.stderr


def test_all_that_follows_a_noun_is_left_to_the_command() -> None:
    from airflow.cli.cli_parser import _add_command

    from headrace.cli.airflow_commands import airflow_commands

    parser = argparse.ArgumentParser()
    groups = parser.add_subparsers()
    for command in airflow_commands():
        _add_command(groups, command)
    for line in ("streams -h", "trace --key cup orders", "batches list orders --limit 3", "streams"):
        assert parser.parse_args(["headrace", *line.split()]).arguments == line.split()
    with pytest.raises(SystemExit):
        parser.parse_args(["headrace", "stack", "up"])


@pytest.fixture
def look_up_by() -> Iterator[Callable[..., None]]:
    """`connections.look_up_by` for this test."""
    yield connections.look_up_by
    connections.look_up_by(lambda _: None)


def test_sparks_processes_of_a_command_get_the_connections(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, look_up_by: Callable[..., None]
) -> None:
    """Records that the log no longer has are read from Kafka by Spark's Python workers, which know the environment."""
    kafka, search = '{"conn_type": "kafka"}', '{"conn_type": "elasticsearch", "host": "es1"}'
    look_up_by({"brokers": kafka, "search": search, "other": "{}"}.get)
    for name in ("BROKERS", "SEARCH", "OTHER"):
        monkeypatch.setenv(f"AIRFLOW_CONN_{name}", "")
    monkeypatch.setenv("AIRFLOW_CONN_SEARCH", "http://given")
    monkeypatch.setattr(sys, "path", [*sys.path])
    stream = Stream(
        name="orders",
        inputs=KafkaInput(connection="brokers", topics="orders"),
        outputs=ElasticsearchOutput(connection="search", index="orders"),
        batch_interval="10 s",
        storage=tmp_path,
        ledger=f"sqlite:///{tmp_path}/ledger.db",
    )
    with Ledger.open(stream.ledger) as ledger:
        ledger.streams.register("orders", stream.to_json(), batch_interval_ms=10_000, block_interval_ms=200)
    with stream_context(stream.ledger, "orders"):
        environment = dict(os.environ)
    got = [environment[f"AIRFLOW_CONN_{name}"] for name in ("BROKERS", "SEARCH", "OTHER")]
    assert got == [kafka, "http://given", ""]
