"""The source distribution without an extra, as executors have it: what they get imports, and little is installed."""

from __future__ import annotations

import json
import subprocess

import pytest
from tests.integration.package.conftest import Environment

pytestmark = pytest.mark.slow

SCRIPT = """
import importlib, json, pkgutil
from importlib import metadata

import headrace
from headrace.spark.packaging import _LAYERS

imported = []
for layer in _LAYERS:
    package = importlib.import_module(f"headrace.{layer}")
    for module in pkgutil.walk_packages(package.__path__, f"headrace.{layer}."):
        # Given to spark-submit, and Alembic's: neither is imported.
        if "applications" not in module.name and "migrations" not in module.name:
            importlib.import_module(module.name)
            imported.append(module.name)
print(json.dumps([imported, sorted(each.name.lower() for each in metadata.distributions())]))
"""
# Of people and of Airflow.
NOT_NEEDED = {"alembic", "apache-airflow", "elasticsearch", "psutil", "rich", "typer"}


def test_what_executors_get_imports_without_an_extra(executor: Environment) -> None:
    imported, installed = json.loads(executor.run("python", "-c", SCRIPT).splitlines()[-1])
    needed = {"headrace.spark.records.wal_source", "headrace.receiver.supervisor", "headrace.ledger.ledger"}
    assert needed <= set(imported)
    assert not NOT_NEEDED & set(installed)
    # With pandas and what it needs, without which Spark refuses functions of Arrow batches.
    assert len(installed) <= 26, installed


def test_a_command_names_the_extra_that_it_needs(executor: Environment) -> None:
    ran = subprocess.run(
        [executor.folder / "bin" / "headrace"], env=executor.variables, capture_output=True, text=True, check=False
    )
    assert (ran.returncode, ran.stdout) == (1, "")
    assert "Install headrace[cli] or headrace[airflow]" in ran.stderr
    assert "Traceback" not in ran.stderr


def test_a_ledger_that_cannot_be_made_here_says_where_it_can(executor: Environment) -> None:
    code = "import sys; from headrace.ledger import Ledger; Ledger.open(f'sqlite:///{sys.argv[1]}')"
    ran = subprocess.run(
        [executor.folder / "bin" / "python", "-c", code, executor.home / "ledger.db"],
        env=executor.variables,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "Run `headrace ledger migrate` where headrace[airflow] or headrace[cli] is installed." in ran.stderr
