from __future__ import annotations

import subprocess
import sys

import pytest

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
