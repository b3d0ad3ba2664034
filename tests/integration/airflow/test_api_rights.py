"""Every route of the API as every role, in Airflow's own API server application with its simple auth manager.

The application runs in a child process, without scheduler: rights, DAGs and runs are Airflow's.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.devstack.postgres import PostgresServer

DAGS = '''\
"""airflow dag"""
from pathlib import Path

from headrace.dags import replay_dag, stream_dags
from headrace.stream import ElasticsearchOutput, KafkaInput, Stream

home = Path(__file__).absolute().parents[1]
stream = Stream(
    name="orders",
    inputs=KafkaInput(connection="kafka_default", topics="orders"),
    outputs=ElasticsearchOutput(connection="elasticsearch_default", index="orders"),
    batch_interval="10 s",
    storage=home / "storage",
    ledger=f"sqlite:///{home}/ledger.db",
)
receiver, batches = stream_dags(stream)
replay = replay_dag(stream, "v2", outputs={"elasticsearch": {"index": "orders-v2"}})
'''


# Airflow's migrations take minutes on a busy machine.
pytestmark = pytest.mark.timeout(1600)


@pytest.fixture(scope="module")
def found(
    tmp_path_factory: pytest.TempPathFactory, postgres_server: PostgresServer, migrated_database: str
) -> Iterator[Any]:
    home = tmp_path_factory.mktemp("api-server")
    (home / "dags").mkdir()
    (home / "dags" / "orders.py").write_text(DAGS)
    database = f"airflow_{uuid.uuid4().hex[:8]}"
    url = postgres_server.create_database(database, template=migrated_database)
    settings = {
        "CORE__DAGS_FOLDER": str(home / "dags"),
        "CORE__PLUGINS_FOLDER": str(home / "plugins"),
        "CORE__LOAD_EXAMPLES": "False",
        "CORE__SIMPLE_AUTH_MANAGER_USERS": "admin:admin,op:op,user:user,viewer:viewer",
        "CORE__SIMPLE_AUTH_MANAGER_PASSWORDS_FILE": str(home / "passwords.json"),
        "DATABASE__SQL_ALCHEMY_CONN": url,
        "DATABASE__SQL_ALCHEMY_CONN_ASYNC": url,
        "API_AUTH__JWT_SECRET": "s" * 64,
        "API__SECRET_KEY": "k" * 64,
    }
    places = {"AIRFLOW_HOME": str(home), "PYTHONPATH": str(Path(__file__).parents[3])}
    environment = os.environ | places | {f"AIRFLOW__{k}": v for k, v in settings.items()}
    child = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("api_server_child.py"))],
        env=environment,
        capture_output=True,
        text=True,
        timeout=1500,
        check=False,
    )
    assert child.returncode == 0, child.stderr[-4000:]
    yield json.loads(child.stdout.splitlines()[-1])
    postgres_server.drop_database(database)


def _statuses(found: Any, user: str, method: str) -> set[int]:
    return {status for asked, _, status, _ in found["statuses"][user] if asked == method}


def test_anonymous_gets_401_everywhere(found: Any) -> None:
    assert _statuses(found, "anonymous", "GET") | _statuses(found, "anonymous", "POST") == {401}


@pytest.mark.parametrize("user", ["viewer", "user", "op", "admin"])
def test_every_role_reads(found: Any, user: str) -> None:
    assert _statuses(found, user, "GET") == {200}, found["statuses"][user]


def test_a_viewer_gets_403_from_every_action(found: Any) -> None:
    assert _statuses(found, "viewer", "POST") == {403}


@pytest.mark.parametrize("user", ["user", "op", "admin"])
def test_who_may_change_the_dag_may_act(found: Any, user: str) -> None:
    # A second run of a batch while its first one waits is refused (409), and a completed batch is not abandoned.
    assert _statuses(found, user, "POST") <= {200, 409}, found["statuses"][user]
    assert 200 in _statuses(found, user, "POST")


def test_the_dag_files_stream_is_found_without_configuration(found: Any) -> None:
    summary = found["summary"]
    assert summary["name"] == "orders"
    assert summary["replay_dag_ids"] == ["orders_replay_v2"]
    assert summary["may"] == {"read": True, "operate": True}


def test_a_dag_that_is_paused_in_airflow_is_the_reason(found: Any) -> None:
    # DAGs are paused at creation.
    assert found["summary"]["state"] == "stalled"
    assert "orders_batches is paused in Airflow" in found["summary"]["reason"]


def test_actions_made_airflow_runs_in_the_callers_name(found: Any) -> None:
    assert ["orders_batches", "manual", "admin"] in found["runs"]
    assert ["orders_replay_v2", "manual", "op"] in found["runs"]


def test_each_action_is_recorded_with_the_callers_name(found: Any) -> None:
    assert ["stream_state_changed", "user"] in found["by"]
    assert ["operator_action", "op"] in found["by"]
    assert "viewer" not in {by for _, by in found["by"]}


def test_a_forged_post_with_the_cookie_is_refused(found: Any) -> None:
    assert found["forged"] == [415, 403]
