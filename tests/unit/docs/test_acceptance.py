"""The acceptance list is complete, and every test that it names exists."""

from __future__ import annotations

import ast
import re
from collections import Counter
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import pytest
from tests.unit.pins.freezing import frozen

ROOT = Path(__file__).resolve().parents[3]
LIST = ROOT / "tests" / "acceptance.md"
TEST = re.compile(r"tests/[\w/]+\.py::\w+(::\w+)?")


@dataclass
class Case:
    suite: str
    name: str
    notes: list[str] = field(default_factory=list)

    @property
    def status(self) -> str:
        """The first note: ``held``, or ``differs`` and ``absent`` with a text behind a colon."""
        return self.notes[0].partition(": ")[0]

    @property
    def reason(self) -> str:
        return self.notes[0].partition(": ")[2]

    @property
    def tests(self) -> list[str]:
        return self.notes[1:]


def read_cases() -> list[Case]:
    cases: list[Case] = []
    suite = ""
    for line in LIST.read_text().splitlines():
        if line.startswith("### "):
            suite = line[4:]
        elif suite and line.startswith("- "):
            cases.append(Case(suite, line[2:]))
        elif suite and line.startswith("  - "):
            cases[-1].notes.append(line[4:])
        else:
            assert not suite or not line.strip(), line
    return cases


@cache
def functions_of(path: Path) -> frozenset[str]:
    """The names that a test file's tests have: functions, and methods as ``Class::method``."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.ClassDef):
            found |= {f"{node.name}::{each.name}" for each in node.body if isinstance(each, ast.FunctionDef)}
            # A state machine of Hypothesis is a test case by assignment.
        elif isinstance(node, ast.Assign):
            found |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return frozenset(name for name in found if name.rpartition("::")[2].startswith(("test", "Test")))


def test_acceptance_cases() -> None:
    """The suites' and the cases' names are those that were given, and no case changes its status by accident."""
    frozen("acceptance_cases.txt", "".join(f"{case.status} {case.suite}: {case.name}\n" for case in read_cases()))


@pytest.mark.parametrize("case", read_cases(), ids=lambda case: f"{case.suite}: {case.name}")
def test_a_case_has_a_status_and_what_the_status_needs(case: Case) -> None:
    assert case.status in ("held", "differs", "absent"), case.notes
    assert bool(case.tests) == (case.status != "absent"), (
        "a case that is held or differs names tests, an absent one none"
    )
    assert case.status == "held" or len(case.reason.split()) >= 4, (
        "say in a sentence what is promised, or what is absent"
    )
    for note in case.tests:
        assert TEST.fullmatch(note), note
        path, _, name = note.partition("::")
        assert (ROOT / path).is_file(), f"{path} does not exist"
        assert name in functions_of(ROOT / path), f"{path} has no {name}"


def test_the_head_of_the_list_counts_the_cases_of_each_status() -> None:
    stated = {row[0]: int(row[1]) for row in re.findall(r"^\| (\w+) \| (\d+) \|", LIST.read_text(), re.MULTILINE)}
    assert stated == Counter(case.status for case in read_cases())
