"""A failed test's second try in CI: it decides the exit code, and what is reported and listed as flaky."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FLAKY = """
from pathlib import Path

def test_passes():
    pass

def test_flaky():
    mark = Path(__file__).with_name("tried")
    first = not mark.exists()
    mark.touch()
    print("first try" if first else "second try")
    assert not first, "the server was late"
"""
BROKEN = "import pytest\n@pytest.mark.parametrize('n', range({}))\ndef test_broken(n):\n    assert n < 0\n"
RUN = """
import sys
from pathlib import Path
from tests.support.second_try import main
sys.exit(main(sys.argv[1:], flaky_list=Path("flaky.txt")))
"""


def run(folder: Path, *options: str, ci: bool = True) -> tuple[int, str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST") and name != "CI"}
    environment |= {"PYTHONPATH": str(ROOT), **({"CI": "true"} if ci else {})}
    command = [sys.executable, "-c", RUN, "-q", "-p", "no:cacheprovider", *options]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("options", [(), ("-n", "2")])
def test_a_test_that_passes_at_its_second_try_is_listed_as_flaky(tmp_path: Path, options: tuple[str, ...]) -> None:
    (tmp_path / "test_it.py").write_text(FLAKY)
    code, printed = run(tmp_path, *options)
    assert code == 0, printed
    _, flaky, both = printed.partition("FLAKY: test_it.py::test_flaky")
    assert flaky
    first, second = both.split("== What the second try printed ==")
    assert "\nfirst try" in first
    assert "the server was late" in first
    assert "\nsecond try" in second
    (line,) = (tmp_path / "flaky.txt").read_text().splitlines()
    assert line.endswith(" test_it.py::test_flaky")
    (tmp_path / "tried").unlink()
    assert run(tmp_path, *options)[0] == 0
    assert (tmp_path / "flaky.txt").read_text().splitlines() == [line], "listed once"


def test_a_test_that_fails_twice_fails_the_run(tmp_path: Path) -> None:
    (tmp_path / "test_flaky.py").write_text(FLAKY)
    (tmp_path / "test_broken.py").write_text(BROKEN.format(1))
    code, printed = run(tmp_path)
    assert code == 1
    assert "FAILED TWICE: test_broken.py::test_broken[0]" in printed
    assert "FLAKY: test_flaky.py::test_flaky" in printed


def test_the_tests_of_a_story_are_tried_again_in_order(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(
        f"known = []\n{FLAKY}\n    assert known\n".replace("pass\n", "known.append(1)\n", 1)
    )
    code, printed = run(tmp_path)
    assert code == 0, printed


def test_more_failures_than_five_get_no_second_try(tmp_path: Path) -> None:
    (tmp_path / "test_broken.py").write_text(BROKEN.format(6))
    code, printed = run(tmp_path)
    assert code == 1
    assert "Second try of" not in printed


def test_no_second_try_outside_ci(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(FLAKY)
    code, printed = run(tmp_path, ci=False)
    assert code == 1
    assert "Second try" not in printed


def test_an_error_of_collection_is_no_failed_test(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text("import nothing_of_this_name\n")
    assert run(tmp_path)[0] == pytest.ExitCode.INTERRUPTED
