from __future__ import annotations

import subprocess
import sys
import textwrap

from headrace.spark.termination import EXIT_CODE


def run(body: str) -> subprocess.CompletedProcess[str]:
    code = "import threading, time\nfrom headrace.spark.termination import ProcessWatch\n" + textwrap.dedent(body)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=False)


def test_a_process_runs_its_last_action_and_ends_when_the_watched_process_is_gone() -> None:
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
