"""pyproject.toml says for everything what the lowest version is, and allows the versions that are pinned."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
NAMED = ("cli", "airflow", "registry")
DECLARED = [
    requirement
    for requirement in map(Requirement, sum((EXTRAS[name] for name in NAMED), PROJECT["dependencies"]))
    if requirement.name != PROJECT["name"]
]
PINNED = {
    canonicalize_name(name): version
    for name, version in re.findall(
        r"^([A-Za-z0-9._-]+)(?:\[[^\]]*\])?==([^ ;\\]+)", (ROOT / "requirements.txt").read_text(), re.M
    )
}


@pytest.mark.parametrize("requirement", DECLARED, ids=lambda requirement: requirement.name)
def test_every_dependency_has_a_floor_and_its_pin_is_allowed(requirement: Requirement) -> None:
    assert [specifier for specifier in requirement.specifier if specifier.operator == ">="], (
        "make floors tests with this version"
    )
    assert requirement.specifier.contains(PINNED[canonicalize_name(requirement.name)])


def test_make_floors_installs_what_pyproject_says() -> None:
    """It has no list of its own: the floors that it tests are those that are declared."""
    (target,) = re.findall(r"^floors:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.M)
    (compiled,) = [line for line in target.splitlines() if "pip compile" in line]
    assert "--resolution lowest-direct" in compiled
    extras = "--extra airflow --extra openlineage --extra registry --extra s3"
    assert f"{extras} pyproject.toml -o $(FLOORS)/floors.txt" in compiled
    assert "pip install -q --compile-bytecode -r $(FLOORS)/floors.txt" in target
    assert "pytest tests/unit" in target
