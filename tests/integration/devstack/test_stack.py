"""`headrace stack up`, `status` and `down` as a person runs them, on real servers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import psycopg
import pytest
from tests.support.living_process import is_alive

from headrace.devstack.airflow_api import AirflowApi
from headrace.devstack.guarded_process import child_environment
from headrace.devstack.postgres import USER, PostgresServer
from headrace.devstack.state import Phase, StackState, processes_of_stack

_POSTGRES_ALONE = ["--without", "airflow", "--without", "kafka", "--without", "elasticsearch"]


class _Headrace:
    """The command, in a folder of its own, with a PATH on which neither it nor Airflow is."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.data = folder / ".headrace"
        self.env = {name: value for name, value in child_environment().items() if name != "VIRTUAL_ENV"}
        self.env["PATH"] = os.defpath + ":/usr/local/bin:/usr/bin"
        # Our own mark must not be the stack's.
        self.env.pop("HEADRACE_STACK", None)

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "headrace.cli.main", "stack", *arguments],
            cwd=self.folder,
            env=self.env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *arguments: str, code: int = 0) -> str:
        process = self.start(*arguments)
        out, err = process.communicate(timeout=280)
        assert process.returncode == code, out + err
        return out if "--json" in arguments else out + err

    def state(self, *arguments: str, code: int = 0) -> StackState:
        return StackState.model_validate_json(self.run(*arguments, "--json", code=code))


@pytest.fixture
def headrace(server_folder: Path) -> Iterator[_Headrace]:
    headrace = _Headrace(server_folder)
    yield headrace
    headrace.run("down")


def _eventually(what: Any, seconds: float = 120.0) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < deadline, "it did not come to be"
        time.sleep(0.05)
    return found


def _processes(state: StackState) -> set[psutil.Process]:
    """Every process of the stack: recorded ones, their descendants, and those that carry its mark."""
    recorded = {process for ref in [*state.recorded_processes(), state.supervisor] if ref and (process := ref.find())}
    below = {child for process in recorded for child in process.children(recursive=True)}
    return recorded | below | set(processes_of_stack(state.id))


def _all_gone(processes: set[psutil.Process]) -> bool:
    return not any(map(is_alive, processes))


_DETACHING_DAG = """
    import os, subprocess
    from airflow.sdk import dag, task, BaseHook

    @dag(schedule=None)
    def detaching():
        @task
        def detach():
            process = subprocess.Popen(["sleep", "1000"], start_new_session=True)
            return process.pid

        @task
        def look():
            kafka = BaseHook.get_connection("kafka_default").extra_dejson["bootstrap.servers"]
            elasticsearch = BaseHook.get_connection("elasticsearch_default")
            return [kafka, f"{elasticsearch.schema}://{elasticsearch.host}:{elasticsearch.port}", os.environ["PATH"]]

        detach() >> look()

    detaching()
"""


@pytest.mark.slow
def test_a_whole_stack_from_up_to_down(headrace: _Headrace) -> None:
    dags = headrace.folder / "dags"
    dags.mkdir()
    (dags / "detaching.py").write_text(textwrap.dedent(_DETACHING_DAG))

    state = headrace.state("up", "--detach")

    assert state.phase is Phase.RUNNING
    assert {service.phase for service in state.services.values()} == {Phase.RUNNING}
    assert headrace.state("status").services.keys() == state.services.keys()
    assert headrace.state("up", "--detach").supervisor == state.supervisor, "a second `up` starts nothing"

    # A task's connections, and a process that it leaves behind.
    assert state.login is not None
    password_file = Path(state.login.password_file)
    assert password_file.stat().st_mode & 0o077 == 0
    url = state.services["api-server"].address or ""
    password = json.loads(password_file.read_text())[state.login.user]
    # Its first answers need imports, and all the stack's processes start at once.
    api = AirflowApi(url, state.login.user, password, timeout=120)
    api.wait_for_dag("detaching")
    api.unpause("detaching")
    run = api.trigger("detaching")
    api.wait_for_run("detaching", run)
    kafka, elasticsearch, path = api.xcom("detaching", run, "look")
    assert kafka == state.services["kafka"].address
    assert elasticsearch == state.services["elasticsearch"].address
    assert path.split(":")[0] == str(Path(sys.executable).parent)
    detached = psutil.Process(api.xcom("detaching", run, "detach"))
    assert detached.is_running()

    # A crashed scheduler leaves the detached process alone; `up` brings the scheduler back.
    scheduler = state.services["scheduler"].process
    assert scheduler is not None
    os.kill(scheduler.pid, signal.SIGKILL)
    assert _eventually(lambda: scheduler.find() is None)
    assert headrace.state("status", code=3).services["scheduler"].phase is Phase.FAILED
    _eventually(lambda: "killed by signal 9" in (headrace_state(headrace.data).services["scheduler"].error or ""))
    assert detached.is_running()
    revived = headrace.state("up", "--detach")
    assert revived.services["scheduler"].phase is Phase.RUNNING
    assert revived.services["scheduler"].process != scheduler
    api.wait_for_run("detaching", api.trigger("detaching"))

    everything = _processes(revived)
    assert len(everything) > 15
    assert detached in everything

    headrace.run("down")

    assert _all_gone(everything)
    assert processes_of_stack(state.id) == []
    assert headrace.state("status", code=3).phase is Phase.STOPPED
    headrace.run("down")


def test_addresses_and_data_stay_over_a_killed_supervisor(headrace: _Headrace) -> None:
    before = headrace.state("up", "--detach", *_POSTGRES_ALONE)
    processes = _processes(before)
    assert before.supervisor is not None

    os.kill(before.supervisor.pid, signal.SIGKILL)

    assert _eventually(lambda: _all_gone(processes))
    found = headrace.state("status", code=3)
    assert found.phase is Phase.STOPPED
    assert "supervisor was killed" in (found.error or "")
    after = headrace.state("up", "--detach", *_POSTGRES_ALONE)
    assert after.services["postgres"].address == before.services["postgres"].address
    assert after.id == before.id


def test_a_registry_that_was_asked_for_is_a_server_like_others(headrace: _Headrace) -> None:
    alone = [*_POSTGRES_ALONE, "--without", "postgres", "--registry"]
    before = headrace.state("up", "--detach", *alone)
    address = before.services["registry"].address or ""
    assert before.connections["schema_registry_default"] == {"conn_type": "http", "host": address}
    answer = httpx.post(f"{address}/subjects/kept/versions", json={"schema": '"string"'}, timeout=60)
    schema_id = answer.raise_for_status().json()["id"]

    headrace.run("down")
    assert processes_of_stack(before.id) == []
    after = headrace.state("up", "--detach", *alone)

    assert after.services["registry"].address == address
    assert httpx.get(f"{address}/schemas/ids/{schema_id}", timeout=60).json()["schema"] == '"string"'
    assert address in headrace.run("status")


def test_ctrl_c_ends_a_stack_in_the_foreground(headrace: _Headrace) -> None:
    process = headrace.start("up", *_POSTGRES_ALONE)
    assert process.stdout is not None
    _eventually((headrace.data / "stack.json").exists)
    state = _eventually(
        lambda: (now := headrace_state(headrace.data)).phase is Phase.RUNNING and now,
    )
    processes = _processes(state)

    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)

    assert process.returncode == 0, err
    assert (state.services["postgres"].address or "") in out
    assert _all_gone(processes)
    assert headrace_state(headrace.data).phase is Phase.STOPPED


def test_ctrl_c_while_starting_leaves_nothing(headrace: _Headrace) -> None:
    process = headrace.start("up", "--without", "airflow")
    _eventually((headrace.data / "stack.json").exists)
    state = _eventually(
        lambda: (now := headrace_state(headrace.data)).services["kafka"].process is not None and now, 60
    )
    assert state.phase is Phase.STARTING

    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)

    assert process.returncode == 0, err
    assert processes_of_stack(state.id) == []
    assert headrace_state(headrace.data).phase is Phase.STOPPED


def test_ctrl_c_while_a_database_is_made_is_a_stop_and_no_error(headrace: _Headrace) -> None:
    """A server that is stopped under its client makes that client fail, in its own way."""
    postgres = PostgresServer(headrace.data / "postgres", settings={"max_prepared_transactions": "1"})
    with (
        postgres,
        psycopg.connect(
            host="127.0.0.1", port=postgres.port, user=USER, passfile=str(postgres.passfile), dbname="postgres"
        ) as connection,
    ):
        connection.autocommit = True
        connection.execute("ALTER SYSTEM SET max_prepared_transactions = 1")
        connection.autocommit = False
        # Outlives its connection and the server's restart, and keeps others from making databases.
        connection.execute("LOCK TABLE pg_database IN SHARE MODE")
        connection.execute("PREPARE TRANSACTION 'held'")
    process = headrace.start("up", *_POSTGRES_ALONE)
    state = _eventually(
        lambda: (
            (headrace.data / "stack.json").exists()
            and (now := headrace_state(headrace.data)).services["postgres"].phase is Phase.RUNNING
            and now
        )
    )
    assert state.phase is Phase.STARTING

    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)

    assert process.returncode == 0, err
    assert "Traceback" not in err
    assert processes_of_stack(state.id) == []
    assert headrace_state(headrace.data).phase is Phase.STOPPED


def headrace_state(data: Path) -> StackState:
    return StackState.model_validate_json((data / "stack.json").read_text())


@pytest.mark.parametrize("detach", ["--detach", "--foreground"])
def test_a_start_that_fails_says_why_and_leaves_nothing(headrace: _Headrace, detach: str) -> None:
    headrace.env["JAVA_HOME"] = str(headrace.folder)

    said = headrace.run("up", detach, "--without", "airflow", code=1)

    assert "JAVA_HOME" in said
    assert "Java 17 or newer is needed" in said
    assert "Traceback" not in said
    state = headrace.state("status", code=3)
    assert state.phase is Phase.FAILED
    assert "Java 17" in (state.error or "")
    assert processes_of_stack(state.id) == []


def test_wipe_deletes_everything(headrace: _Headrace) -> None:
    headrace.state("up", "--detach", *_POSTGRES_ALONE)
    headrace.run("down", "--wipe")
    assert not headrace.data.exists()
    assert "There is no stack" in headrace.run("status", code=3)


def test_a_folder_that_is_no_stacks_is_not_wiped(headrace: _Headrace) -> None:
    headrace.data.mkdir()
    (headrace.data / "precious").touch()
    headrace.run("down", "--wipe")
    assert (headrace.data / "precious").exists()
