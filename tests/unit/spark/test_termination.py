"""How a process ends by itself, by SIGTERM, and with the process that it depends on."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

from headrace.spark.termination import EXIT_CODE

COMMAND = """
import time
from concurrent.futures import ThreadPoolExecutor
from headrace.spark.termination import run_and_leave

def main():
    # As the release calls of a Spark Connect client whose server has gone.
    ThreadPoolExecutor(1).submit(time.sleep, 600)
    print("told", flush=False)
    {ending}

run_and_leave(main)
"""


@pytest.mark.parametrize(
    ("ending", "code", "reported"),
    [
        ("return 143", 143, ""),
        ("raise ValueError('no')", 1, "ValueError: no"),
        ("raise SystemExit(2)", 2, ""),
        ("raise SystemExit('no')", 1, "no"),
        ("raise SystemExit", 0, ""),
    ],
)
def test_a_command_ends_at_once_and_loses_none_of_its_output(ending: str, code: int, reported: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", COMMAND.format(ending=ending)], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (code, "told\n")
    assert reported in done.stderr


def run(body: str) -> subprocess.CompletedProcess[str]:
    code = "import threading, time\nfrom headrace.spark.termination import ProcessWatch\n" + textwrap.dedent(body)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=False)


def test_a_process_acts_and_ends_when_the_watched_one_is_gone() -> None:
    """It runs its last action first."""
    ended = run(
        """
        gone = threading.Event()
        ProcessWatch(gone.is_set, before_end=lambda: print("wish", flush=True)).start()
        gone.set()
        time.sleep(20)
        """
    )
    assert (ended.returncode, ended.stdout) == (EXIT_CODE, "wish\n")


def test_a_dismissed_watch_lets_the_process_end_by_itself() -> None:
    ended = run("watch = ProcessWatch(lambda: True)\nwatch.dismiss()\nwatch.start()\ntime.sleep(0.5)\n")
    assert ended.returncode == 0
