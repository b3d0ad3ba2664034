from __future__ import annotations

import importlib
import json
from importlib import metadata
from pathlib import Path

import airflow
import jsonschema
import pytest

from headrace.get_provider_info import get_provider_info
from headrace.ledger.database import engine_url


def test_the_provider_info_fits_airflows_schema():
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


def test_the_form_of_a_ledger_connection_needs_no_hook_import():
    from airflow.providers_manager import ProvidersManager

    manager = ProvidersManager()
    behaviour = manager.field_behaviours["headrace_ledger"]
    assert behaviour["hidden_fields"] == ["extra"]
    assert set(behaviour["placeholders"]) == {"host", "port", "schema"}
    form = {w.field_name for w in manager._connection_form_widgets.values() if w.package_name == "headrace"}
    fields = get_provider_info()["connection-types"][0]["conn-fields"]
    assert form == set(fields)


def test_every_field_of_the_form_reaches_the_ledgers_database(monkeypatch):
    fields = get_provider_info()["connection-types"][0]["conn-fields"]
    values = {name: field["schema"].get("enum", ["7"])[0] for name, field in fields.items()}
    server = {"conn_type": "headrace_ledger", "host": "db", "schema": "ledger"}
    monkeypatch.setenv("AIRFLOW_CONN_LEDGER", json.dumps(server | {"extra": values}))
    assert dict(engine_url("connection:ledger").query) == values


def test_a_field_of_the_form_that_was_left_empty_has_no_effect(monkeypatch):
    fields = get_provider_info()["connection-types"][0]["conn-fields"]
    empty = {name: [None, ""][number % 2] for number, name in enumerate(fields)}
    server = {"conn_type": "headrace_ledger", "host": "db", "schema": "ledger"}
    monkeypatch.setenv("AIRFLOW_CONN_LEDGER", json.dumps(server | {"extra": empty}))
    assert dict(engine_url("connection:ledger").query) == {}


@pytest.mark.parametrize("lazy", ["True", "False"])
def test_the_plugin_is_registered_once(monkeypatch, caplog, lazy):
    from airflow import plugins_manager, settings

    monkeypatch.setattr(settings, "LAZY_LOAD_PROVIDERS", lazy == "True")
    plugins, errors = plugins_manager._get_plugins.__wrapped__()
    assert [str(plugin.source) for plugin in plugins if plugin.name == "headrace"] == [
        f"headrace=={metadata.version('headrace')}: "
        "EntryPoint(name='headrace', value='headrace.ui.plugin:HeadracePlugin', group='airflow.plugins')"
    ]
    assert not [error for error in (*errors, *errors.values()) if "headrace" in error]
    assert not [record for record in caplog.records if "headrace" in record.getMessage()]
