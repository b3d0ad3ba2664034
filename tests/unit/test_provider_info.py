from __future__ import annotations

import importlib
import json
from importlib import metadata
from pathlib import Path

import airflow
import jsonschema
import pytest

from headrace.get_provider_info import get_provider_info


def test_it_is_what_airflows_schema_says():
    schema = json.loads((Path(airflow.__file__).parent / "provider_info.schema.json").read_text())
    jsonschema.validate(get_provider_info(), schema)


def test_airflow_finds_it_by_its_entry_point():
    from airflow.providers_manager import ProvidersManager

    manager = ProvidersManager()
    assert "headrace" in manager.providers
    assert manager.hooks["headrace_ledger"].hook_name == "headrace ledger"
    assert "headrace.operators.links.SparkUiLink" in manager.extra_links_class_names


@pytest.mark.parametrize("kind", ["operators", "sensors", "hooks", "triggers"])
def test_every_module_is_there(kind):
    for group in get_provider_info()[kind]:
        for name in group["python-modules"]:
            importlib.import_module(name)


def test_every_class_is_there():
    info = get_provider_info()
    named = [entry["hook-class-name"] for entry in info["connection-types"]]
    named += [entry["plugin-class"] for entry in info["plugins"]]
    named += info["extra-links"]
    for path in named:
        module, _, attribute = path.rpartition(".")
        assert hasattr(importlib.import_module(module), attribute), path


def test_the_configuration_has_its_defaults():
    from airflow.configuration import conf
    from airflow.providers_manager import ProvidersManager

    ProvidersManager().initialize_providers_configuration()
    # Each wait has its own interval where this is not set.
    assert conf.get("headrace", "poll_interval", fallback=None) is None
    assert conf.get("headrace", "secret_key") == ""


def test_the_entry_points_are_those_of_the_project():
    ours = [e for e in metadata.entry_points(group="apache_airflow_provider") if e.name == "provider_info"]
    assert "headrace.get_provider_info:get_provider_info" in {e.value for e in ours}
