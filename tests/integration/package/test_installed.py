"""The wheel in an environment of its own, beside Airflow in the pinned versions, without the repository."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from tests.integration.package.conftest import ADDRESS, ROOT, UV, Environment

pytestmark = pytest.mark.slow

# Airflow takes seconds to import: everything that needs no command of its own is in one process.
SCRIPT = """
import json, sys, zipfile
from pathlib import Path

import headrace
from airflow.dag_processing.dagbag import DagBag
from airflow.plugins_manager import _get_plugins
from airflow.providers_manager import ProvidersManager
from headrace.spark.packaging import package_zip

bag = DagBag(sys.argv[1])
plugins, errors = _get_plugins()
provider = ProvidersManager().providers["headrace"]
print("RESULT", json.dumps({
    "package": headrace.__file__,
    "path": sys.path,
    "dags": {dag_id: dag.task_ids for dag_id, dag in bag.dags.items()},
    "labels": [task.label for dag in bag.dags.values() for task in dag.tasks],
    "import_errors": bag.import_errors,
    "plugins": [str(plugin.source) for plugin in plugins if plugin.name == "headrace"],
    "plugin_errors": {str(name): str(error) for name, error in errors.items() if "headrace" in f"{name}{error}"},
    "documentation": provider.data["documentation-url"],
    "executors": zipfile.ZipFile(package_zip()).namelist(),
}))
"""


@pytest.fixture(scope="module")
def found(environment: Environment) -> dict:
    """What one process finds that parses the README's first stream."""
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE)
    dags = environment.home / "dags"
    dags.mkdir(exist_ok=True)
    (dags / "orders.py").write_text(blocks[0])
    output = environment.run("python", "-c", SCRIPT, dags)
    (line,) = [line for line in output.splitlines() if line.startswith("RESULT ")]
    return json.loads(line.removeprefix("RESULT "))


def test_the_installed_versions_fit_together(environment: Environment) -> None:
    environment.run(str(UV), "pip", "check", "--python", environment.folder / "bin" / "python")


def test_nothing_comes_from_the_repository(environment: Environment, found: dict) -> None:
    assert Path(found["package"]).is_relative_to(environment.folder)
    assert not [path for path in found["path"] if path and Path(path).is_relative_to(ROOT)]


def test_the_command_starts(environment: Environment) -> None:
    assert "batches" in environment.run("headrace", "--help")


def test_airflow_lists_the_provider(environment: Environment, found: dict) -> None:
    listed = json.loads(environment.run("airflow", "providers", "list", "-o", "json"))
    assert [each["version"] for each in listed if each["package_name"] == "headrace"] == ["0.1.0"]
    assert found["documentation"].startswith(ADDRESS)


def test_airflow_loads_the_plugin_once(found: dict) -> None:
    assert len(found["plugins"]) == 1
    assert found["plugin_errors"] == {}


def test_the_readmes_first_stream_parses(found: dict) -> None:
    assert found["import_errors"] == {}
    assert set(found["dags"]) == {"orders_receiver", "orders_batches", "orders_repair"}
    assert "generate_batch.elasticsearch" in found["dags"]["orders_batches"]


def test_the_task_of_an_output_has_the_outputs_id_as_its_label(found: dict) -> None:
    assert "elasticsearch" in found["labels"]


def test_executors_get_the_package_from_the_installed_files(found: dict) -> None:
    assert {"__init__.py", "wal/reader.py", "spark/records/wal_source.py"} <= set(found["executors"])


def test_a_ledger_is_created_by_the_installed_migrations(environment: Environment) -> None:
    url = f"sqlite:///{environment.home}/ledger.db"
    environment.run("headrace", "ledger", "migrate", "--ledger", url)
    assert (environment.home / "ledger.db").stat().st_size > 0


def test_a_type_checker_reads_the_packages_types(environment: Environment) -> None:
    (typed,) = environment.folder.glob("lib/python3*/site-packages/headrace/py.typed")
    assert typed.is_file()
