"""Runs pytest, and then each file with a failed test once more, by itself:
`python -m tests.support.second_try ARGUMENTS`.

For tests with servers in CI, where one flaky test would cost the whole run. The whole file, since the tests of a story
need those before them. If it passes, its failed tests are reported as flaky, with what both tries printed, and added to
`tests/flaky.txt`. A file that fails again fails the run, and so do more than `MOST` failed tests. Without `CI` in the
environment nothing is tried twice.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

import pytest

MOST = 5
LIST = Path(__file__).parents[1] / "flaky.txt"


class Failures:
    """A plugin of pytest: prints each failure when it happens, and keeps what the failed test printed, by its node id.

    With xdist it runs in the controller.
    """

    def __init__(self) -> None:
        self.outputs: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Called for each phase of a test: one test can fail in its call and again in its teardown."""
        if report.failed:
            parts = [f"-- {report.when} --\n{report.longreprtext}"]
            parts += [f"-- {title} --\n{text}" for title, text in report.sections]
            known = self.outputs.get(report.nodeid)
            self.outputs[report.nodeid] = "\n".join(parts if known is None else [known, *parts])
            # At once too: a run that is stopped at its time limit would hide what failed.
            print(f"\nFAILED {report.nodeid} ({report.when})\n{report.longreprtext}", flush=True)


def main(arguments: Sequence[str], *, flaky_list: Path = LIST) -> int:
    """Return pytest's exit code, or 0 if all tests that failed have passed at their second try."""
    failures = Failures()
    code = int(pytest.main(list(arguments), plugins=[failures]))
    # Any other code than this one is no failed test: an interrupt, an error of collection, no test at all.
    if code != pytest.ExitCode.TESTS_FAILED or not os.environ.get("CI"):
        return code
    if not 0 < len(failures.outputs) <= MOST:
        print(f"{len(failures.outputs)} tests failed: at most {MOST} get a second try, so none does.", flush=True)
        return code
    files = {node_id.partition("::")[0] for node_id in failures.outputs}
    passed = [node_id for file in sorted(files) for node_id in _second_try(file, failures.outputs)]
    _add(flaky_list, passed)
    print(f"Second try: {len(passed)} of {len(failures.outputs)} failed tests passed.", flush=True)
    return 0 if len(passed) == len(failures.outputs) else code


def _second_try(file: str, first_outputs: Mapping[str, str]) -> list[str]:
    """Run the file in a pytest of its own, and print what both tries printed. Its failed tests, if it passes now."""
    print(f"\nSecond try of {file}", flush=True)
    command = [sys.executable, "-m", "pytest", "-q", "-rA", "-p", "no:cacheprovider", "-p", "no:xdist", file]
    second = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    passes = second.returncode == pytest.ExitCode.OK
    failed = [node_id for node_id in first_outputs if node_id.partition("::")[0] == file]
    for node_id in failed:
        print(f"{'FLAKY' if passes else 'FAILED TWICE'}: {node_id}")
        if passes:
            print(f"== What its first try printed ==\n{first_outputs[node_id]}")
    print(f"== What the second try printed ==\n{second.stdout}", flush=True)
    return failed if passes else []


def _add(flaky_list: Path, node_ids: Sequence[str]) -> None:
    text = flaky_list.read_text() if flaky_list.exists() else ""
    known = {line.partition(" ")[2] for line in text.splitlines()}
    new = [node_id for node_id in node_ids if node_id not in known]
    if new:
        today = datetime.now(UTC).date().isoformat()
        flaky_list.write_text(text + "".join(f"{today} {node_id}\n" for node_id in new))
        print(f"Added to {flaky_list.name}; commit it: {', '.join(new)}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
