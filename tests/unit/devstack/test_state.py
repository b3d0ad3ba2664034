from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from headrace.devstack.errors import LocalStackError
from headrace.devstack.server import free_port, is_free
from headrace.devstack.stack import StackOptions
from headrace.devstack.state import (
    STACK_VARIABLE,
    Phase,
    ProcessRef,
    ServiceState,
    StackState,
    end_stack_processes,
    exclusive,
    processes_of_stack,
    read_state,
    write_state,
)


def test_a_state_comes_back_as_it_was_written(tmp_path: Path) -> None:
    state = StackState(id="a", phase=Phase.RUNNING, services={"kafka": ServiceState(name="kafka", phase=Phase.FAILED)})
    write_state(tmp_path, state)
    assert read_state(tmp_path) == state
    assert stat.S_IMODE((tmp_path / "stack.json").stat().st_mode) == 0o600


def test_no_state_is_none_and_a_foreign_file_an_error(tmp_path: Path) -> None:
    assert read_state(tmp_path) is None
    (tmp_path / "stack.json").write_text("[]")
    with pytest.raises(LocalStackError, match="cannot be read"):
        read_state(tmp_path)


def test_a_running_stack_without_supervisor_is_shown_as_stopped() -> None:
    services = {"kafka": ServiceState(name="kafka", phase=Phase.RUNNING)}
    dead = ProcessRef(pid=os.getpid(), started=1.0)
    state = StackState(id="a", phase=Phase.RUNNING, supervisor=dead, services=services).as_found()
    assert state.phase is Phase.STOPPED
    assert state.services["kafka"].phase is Phase.STOPPED
    assert state.error is not None
    assert "headrace stack down" in state.error


def test_a_server_that_has_just_died_is_shown_as_failed() -> None:
    own = ProcessRef.of(os.getpid())
    services = {
        "kafka": ServiceState(name="kafka", phase=Phase.RUNNING, process=ProcessRef(pid=os.getpid(), started=1.0)),
        "postgres": ServiceState(name="postgres", phase=Phase.RUNNING, process=own),
    }
    state = StackState(id="a", phase=Phase.RUNNING, supervisor=own, services=services).as_found()
    assert {name: service.phase for name, service in state.services.items()} == {
        "kafka": Phase.FAILED,
        "postgres": Phase.RUNNING,
    }


def test_a_process_is_known_by_id_and_start() -> None:
    own = ProcessRef.of(os.getpid())
    assert own is not None
    assert own.find() == psutil.Process()
    assert ProcessRef(pid=own.pid, started=own.started - 60).find() is None, "its id was given to another"


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    started = subprocess.Popen(
        [sys.executable, "-c", "import time; print(flush=True); time.sleep(100)"],
        env=os.environ | {STACK_VARIABLE: "test-stack-1"},
        start_new_session=True,
        stdout=subprocess.PIPE,
    )
    # Popen returns in the middle of execve(), when /proc may not have the environment yet.
    with started:
        assert started.stdout is not None and started.stdout.readline()
        yield started
        started.kill()


def test_a_stacks_processes_are_ended_by_their_environment(sleeper: subprocess.Popen[bytes]) -> None:
    try:
        assert [process.pid for process in processes_of_stack("test-stack-1")] == [sleeper.pid]
        assert processes_of_stack("test-stack") == []
        command = f"{sleeper.pid} {sys.executable} -c import time; print(flush=True); time.sleep(100)"
        assert end_stack_processes("test-stack-1") == [command]
        assert sleeper.wait(10) is not None
        assert end_stack_processes("test-stack-1") == []
    finally:
        sleeper.kill()
        sleeper.wait()


def test_a_process_with_the_id_of_an_ended_one_is_ended_too(sleeper: subprocess.Popen[bytes]) -> None:
    """Whoever searches for a second time, such as the tests' session, may have the earlier process in memory."""
    try:
        earlier = next(process for process in psutil.process_iter() if process.pid == sleeper.pid)
        earlier._ident = (earlier.pid, psutil.Process().create_time() - 60)
        end_stack_processes("test-stack-1")
        assert sleeper.wait(10) is not None
    finally:
        sleeper.kill()
        sleeper.wait()


def test_recorded_processes_are_ended_but_no_others_of_their_id(sleeper: subprocess.Popen[bytes]) -> None:
    try:
        ref = ProcessRef.of(sleeper.pid)
        assert ref is not None
        assert end_stack_processes("none", [ProcessRef(pid=ref.pid, started=ref.started - 60)]) == []
        assert sleeper.poll() is None
        assert len(end_stack_processes("none", [ref])) == 1
    finally:
        sleeper.kill()
        sleeper.wait()


def test_a_port_in_use_is_not_free() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert not is_free(server.getsockname()[1])
    port = free_port()
    assert is_free(port)
    assert port < 32768, "below the ports of outgoing connections"


def test_a_port_that_another_process_has_chosen_is_not_reused(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = "from headrace.devstack.server import free_port; print(free_port(), flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", chosen], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        port = int(other.stdout.readline())
        assert is_free(port), "its server has not bound it yet"
        drawn = iter([port, port + 1, port + 2])
        monkeypatch.setattr("headrace.devstack.server.random.randint", lambda _first, _last: next(drawn))
        assert free_port() in (port + 1, port + 2)
        other.communicate(b"\n")


def test_a_lock_is_held_once(tmp_path: Path) -> None:
    with exclusive(tmp_path / "lock"), pytest.raises(BlockingIOError), exclusive(tmp_path / "lock", wait=False):
        pass
    with exclusive(tmp_path / "lock", wait=False):
        pass


@pytest.mark.parametrize(("without", "problem"), [(["kafak"], "no service kafak"), (["postgres"], "Airflow keeps")])
def test_impossible_stacks_are_refused(tmp_path: Path, without: list[str], problem: str) -> None:
    with pytest.raises(LocalStackError, match=problem):
        StackOptions(tmp_path, tmp_path, tmp_path, tuple(without))
