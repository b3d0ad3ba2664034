"""What the resolver says of ``headrace[airflow]`` beside the Airflow of others: under the constraints that Airflow
publishes, and beside the newest version.

Airflow publishes one file of constraints for each Python; these copies are for 3.11 and later (3.2.1), and for 3.12 and
later (3.3.1). They pin pyspark-client and not pyspark. The bounds in pyproject.toml make a pair of them, except under
constraints with an older pyspark-client: there the command of docs/install.md names pyspark's version too.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.version import Version
from tests.integration.package.conftest import ROOT, UV, link_distribution, uv

# The lowest Python of each.
AIRFLOW = {"3.2.1": "3.11", "3.3.1": "3.12"}
# Their pyspark-client is older than the newest one that headrace allows, so the command names pyspark too.
NAME_SPARK = {"3.2.1"}
# One answer for the Python that is asked and all later ones.
FOR_NEWER_PYTHONS = ("--universal",)
OURS = ("--extra", "airflow", ROOT / "pyproject.toml")

IMPORT = """
import importlib, pkgutil
import headrace

failed = {}
for module in pkgutil.walk_packages(headrace.__path__, "headrace."):
    if ".migrations." not in module.name and not module.name.endswith("__main__"):
        try:
            importlib.import_module(module.name)
        except ImportError as error:
            failed[module.name] = error
raise SystemExit("\\n".join(f"{name}: {error}" for name, error in failed.items()) or None)
"""


def constraints(airflow: str) -> Path:
    return Path(__file__).with_name(f"constraints-{airflow}.txt")


def resolve(requirements: Path, python: str, *options: str | Path) -> dict[str, str]:
    """The versions that uv chooses for the requirements; with ``--extra airflow`` also for headrace itself."""
    compiled = ("pip", "compile", "-q", "--no-header", "--no-annotate", "--python-version", python)
    answer = subprocess.run(
        [UV, *compiled, requirements, *options], capture_output=True, text=True, check=False, timeout=280
    )
    assert answer.returncode == 0, answer.stderr
    found = re.findall(r"^([a-z0-9.-]+)==(\S+)", answer.stdout, re.M)
    # For all Pythons at once, a package can have a version for each; the two Sparks may not.
    assert len([name for name, _ in found if name.startswith("pyspark")]) in (0, 2)
    return dict(found)


@pytest.mark.parametrize(("airflow", "python"), AIRFLOW.items())
def test_it_installs_under_airflows_constraints(airflow: str, python: str, tmp_path: Path) -> None:
    pinned = dict(re.findall(r"^([\w.-]+)==(\S+)$", constraints(airflow).read_text(), re.M))
    spark = pinned["pyspark-client"]
    asked = tmp_path / "requirements.in"
    asked.write_text(f"apache-airflow=={airflow}\n" + (f"pyspark=={spark}\n" if airflow in NAME_SPARK else ""))
    found = resolve(asked, python, *OURS, "-c", constraints(airflow), *FOR_NEWER_PYTHONS)
    assert (found["apache-airflow"], found["pyspark"], found["pyspark-client"]) == (airflow, spark, spark)
    # Spark does not run batches without it. headrace does not name it: pyspark's extra `sql` requires it.
    assert found["pandas"] == pinned["pandas"]
    if airflow in NAME_SPARK:
        assert f"pyspark=={spark}" in (ROOT / "docs" / "install.md").read_text()


@pytest.mark.parametrize("options", [(), ("-c", ROOT / "requirements.txt"), ("--resolution", "lowest-direct")])
def test_both_sparks_have_one_version_without_constraints(options: tuple[str | Path, ...]) -> None:
    """pyspark and pyspark-client have releases that the other one lacks."""
    found = resolve(ROOT / "pyproject.toml", "3.11", "--extra", "airflow", *options, *FOR_NEWER_PYTHONS)
    assert found["pyspark"] == found["pyspark-client"]


@pytest.mark.slow
@pytest.mark.xfail(strict=False, reason="a beta of Airflow may be withdrawn, or break what it does not promise")
def test_modules_import_beside_the_newest_airflow_even_a_beta(tmp_path: Path) -> None:
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    asked = tmp_path / "requirements.in"
    asked.write_text("apache-airflow\n")
    newest = resolve(asked, python, "--no-deps", "--prerelease", "allow")["apache-airflow"]
    # Its parts are betas too; of everything else a release is chosen.
    asked.write_text(f"apache-airflow=={newest}\napache-airflow-core=={newest}\napache-airflow-task-sdk>=1.0.0b1\n")
    ours = ("--extra", "airflow", "--extra", "openlineage", ROOT / "pyproject.toml")
    found = resolve(asked, python, *ours, "--prerelease", "if-necessary-or-explicit")
    assert Version(found["apache-airflow"]) == Version(newest)
    environment = tmp_path / "venv"
    uv("venv", "-q", "--python", sys.executable, environment)
    for name in ("pyspark", "pyspark-client"):
        link_distribution(name, environment)
    install = [f"{name}=={version}" for name, version in found.items() if not name.startswith("pyspark")]
    uv("pip", "install", "-q", "--no-deps", *install, VIRTUAL_ENV=str(environment))
    uv("pip", "install", "-q", "--no-deps", "-e", ROOT, VIRTUAL_ENV=str(environment))
    ran = subprocess.run([environment / "bin" / "python", "-c", IMPORT], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, f"beside Airflow {newest}:\n{ran.stderr}"
