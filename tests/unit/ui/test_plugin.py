"""Airflow executes whatever .py file it finds below its plugins folder, under its bare name. None of ours may be.

The plugin's web application is made at its first request, once.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from headrace.ui import plugin
from headrace.ui.plugin import LazyApp

REPOSITORY = Path(__file__).parents[3]

START = """
import json, sys
from airflow import plugins_manager
plugins_manager.ensure_plugins_loaded() if hasattr(plugins_manager, "ensure_plugins_loaded") else None
plugins, errors = plugins_manager._get_plugins()
print(json.dumps({
    "plugins": [plugin.name for plugin in plugins],
    "errors": errors,
    "timetables": sorted(plugins_manager.get_timetables_plugins()),
    "modules": sorted(sys.modules),
    "files": {name: getattr(module, "__file__", None) for name, module in list(sys.modules.items())},
}))
"""


def start(*arguments: str) -> dict:
    """What a process has loaded that was started as ``airflow`` with these arguments."""
    environment = {**os.environ, "AIRFLOW__CORE__PLUGINS_FOLDER": str(REPOSITORY / "plugins")}
    # A plugin of Airflow 3.2's examples imports pandas.
    environment["AIRFLOW__CORE__LOAD_EXAMPLES"] = "False"
    command = [sys.executable, "-c", START, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment, cwd="/")
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def started() -> dict:
    return start("api-server")


def test_no_plugin_fails_to_import(started):
    assert started["errors"] == {}


def test_ours_is_loaded_once_with_its_timetable(started):
    assert started["plugins"].count("headrace") == 1
    assert "headrace.timetables.micro_batch.MicroBatchTimetable" in started["timetables"]


def test_no_file_of_ours_is_a_module_of_its_own(started):
    package = str(REPOSITORY / "plugins" / "headrace")
    strays = [
        name
        for name, file in started["files"].items()
        if file and file.startswith(package) and not (name == "headrace" or name.startswith("headrace."))
    ]
    assert strays == []


def test_loading_the_plugin_is_cheap(started):
    heavy = {"pyspark", "confluent_kafka", "elasticsearch", "pyarrow"}
    assert heavy.isdisjoint(started["modules"])
    assert not any(name.startswith(("headrace.ledger", "headrace.wal")) for name in started["modules"])
    assert "headrace.dags" not in started["modules"]


def test_a_scheduler_has_imported_what_its_forked_tasks_need() -> None:
    started = start("scheduler")
    assert started["errors"] == {}
    needed = {"headrace.dags.factories", "headrace.batch.allocation", "headrace.batch.cleanup", "headrace.ledger"}
    assert needed <= set(started["modules"])
    assert {"pyspark", "confluent_kafka", "elasticsearch"}.isdisjoint(started["modules"])


def test_a_dag_processor_has_imported_what_dag_files_need() -> None:
    modules = set(start("dag-processor")["modules"])
    assert "headrace.dags.factories" in modules
    assert "pyarrow" not in modules


def test_a_module_that_cannot_be_preloaded_costs_no_plugin(monkeypatch, caplog) -> None:
    monkeypatch.setattr(sys, "argv", ["airflow", "scheduler"])
    # Python refuses its import.
    monkeypatch.setitem(sys.modules, "headrace.dags", None)
    plugin.HeadracePlugin.on_load()
    assert "headrace.dags cannot be imported ahead" in caplog.text


@pytest.fixture
def factory(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    module = types.ModuleType("an_application")
    module.made = 0  # type: ignore[attr-defined]

    def make() -> Any:
        module.made += 1
        if module.made == 1 and getattr(module, "fails", False):
            raise RuntimeError("its module cannot be imported")

        async def app(scope: Any, receive: Any, send: Any) -> None:
            scope["served"] = True

        return app

    module.make = make  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "an_application", module)
    return module


async def _requests(app: LazyApp, count: int) -> list[Any]:
    scopes: list[dict[str, Any]] = [{} for _ in range(count)]
    failures = await asyncio.gather(*(app(scope, None, None) for scope in scopes), return_exceptions=True)
    return [scope.get("served") or failure for scope, failure in zip(scopes, failures, strict=True)]


def test_the_application_is_made_once_for_concurrent_requests(factory: Any) -> None:
    app = LazyApp("an_application:make")
    assert factory.made == 0
    assert asyncio.run(_requests(app, 5)) == [True] * 5
    assert factory.made == 1


def test_after_a_failure_the_next_request_tries_again(factory: Any) -> None:
    factory.fails = True
    app = LazyApp("an_application:make")

    async def twice() -> tuple[list[Any], list[Any]]:
        return await _requests(app, 2), await _requests(app, 1)

    first, second = asyncio.run(twice())
    assert [type(error) for error in first] == [RuntimeError, RuntimeError]
    assert second == [True]
