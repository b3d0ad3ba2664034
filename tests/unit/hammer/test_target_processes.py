"""Finding whom to hit, among real processes that are named like those of a stream."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.hammer.kinds import Target
from tests.hammer.target_processes import TargetProcesses

from headrace.devstack.state import STACK_VARIABLE

Start = Callable[..., int]
SLEEP = "import time; print(flush=True); time.sleep(600)"


@pytest.fixture
def stack_id() -> str:
    """A stack's id."""
    return uuid.uuid4().hex


@pytest.fixture
def start(stack_id: str) -> Iterator[Start]:
    """Starts a Python with these arguments in the stack; its id."""
    with ExitStack() as running:

        def begin(*arguments: str, code: str = SLEEP, stack: str = stack_id) -> int:
            process = running.enter_context(
                subprocess.Popen(
                    [sys.executable, "-c", code, *arguments],
                    stdout=subprocess.PIPE,
                    env={**os.environ, STACK_VARIABLE: stack},
                )
            )
            running.callback(process.kill)
            assert process.stdout is not None
            process.stdout.readline()
            return process.pid

        yield begin


def pids(targets: TargetProcesses, target: Target) -> list[int]:
    return [group[0].pid for group in targets.find(target)]


def test_batches_of_the_stream_in_the_stack_are_found(start: Start, stack_id: str, tmp_path: Path) -> None:
    targets = TargetProcesses(stack_id, "hammer", tmp_path)
    mine = [start("/x/micro_batch.py", "--stream", "hammer") for _ in range(2)]
    start("/x/micro_batch.py", "--stream", "other")
    start("/x/receiver.py", "--stream", "hammer")
    start("/x/micro_batch.py", "--stream", "hammer", stack="another")
    assert pids(targets, Target.BATCH) == mine


def test_the_driver_is_the_receiver_job_that_is_no_java(start: Start, stack_id: str, tmp_path: Path) -> None:
    targets = TargetProcesses(stack_id, "hammer", tmp_path)
    driver = start("/x/receiver.py", "--stream", "hammer")
    assert pids(targets, Target.RECEIVER_DRIVER) == [driver]
    assert pids(targets, Target.RECEIVER_JVM) == []
    assert targets.jobs() == 0


def test_receivers_are_the_workers_with_the_log_open_for_writing(start: Start, stack_id: str, tmp_path: Path) -> None:
    targets = TargetProcesses(stack_id, "hammer", tmp_path)
    segment = tmp_path / "segment"
    opening = f"file = open({str(segment)!r}, {{mode!r}}); {SLEEP}"
    receiver = start("pyspark.daemon", code=opening.format(mode="ab"))
    start("pyspark.daemon", code=opening.format(mode="rb"))
    start("pyspark.daemon")
    start("something", code=opening.format(mode="ab"))
    assert pids(targets, Target.RECEIVER_TASK) == [receiver]
