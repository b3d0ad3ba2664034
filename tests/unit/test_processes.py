from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from headrace.processes import has_ended, own_identity

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")

REPORT = "import json; from headrace.processes import own_identity; print(json.dumps(own_identity()), flush=True)"


@pytest.fixture
def process():
    """A Python process that has printed its identity and waits."""
    command = [sys.executable, "-c", f"{REPORT}; input()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as running:
        yield running
        running.kill()


def identity_of(process) -> dict:
    return json.loads(process.stdout.readline())


def test_a_killed_process_has_ended_before_its_parent_waited(process) -> None:
    identity = identity_of(process)
    assert identity["pid"] == process.pid
    assert not has_ended(identity)
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert has_ended(identity), "it is a zombie"
    process.wait()
    assert has_ended(identity)


def test_another_process_with_the_same_number_is_not_the_same() -> None:
    identity = own_identity()
    assert identity is not None
    assert not has_ended(identity)
    assert has_ended({**identity, "started": identity["started"] - 1})


@pytest.mark.parametrize("name", ["boot", "pid_namespace"])
def test_nothing_is_said_of_a_process_of_another_machine(name: str) -> None:
    """Nothing is said of one in another container either."""
    assert not has_ended({**(own_identity() or {}), "pid": 2**22 + 1, name: "another"})


def test_nothing_is_said_about_a_process_without_an_identity() -> None:
    assert not has_ended(None)
    assert not has_ended({})
