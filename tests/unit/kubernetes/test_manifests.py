"""examples/kubernetes, as far as that can be checked without a cluster; with Airflow's chart where it is named."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from headrace.checks.task_places import place_problems, task_place
from headrace.connections import from_text, variable_name
from headrace.stream import Stream

ROOT = Path(__file__).resolve().parents[3]
EXAMPLE = ROOT / "examples" / "kubernetes"
VALUES: dict[str, Any] = yaml.safe_load((EXAMPLE / "airflow-values.yaml").read_text())
MANIFESTS: list[dict[str, Any]] = [
    manifest
    for name in ("headrace", "spark-executors", "network-policy")
    for manifest in yaml.safe_load_all((EXAMPLE / f"{name}.yaml").read_text())
]
(WORKER,) = VALUES["workers"]["celery"]["sets"]
PAGE = (ROOT / "docs" / "guides" / "kubernetes.md").read_text()
CHART = os.environ.get("HEADRACE_AIRFLOW_CHART")
"""The folder of Airflow's chart, which no package registry has."""


def validate(manifest: dict[str, Any]) -> None:
    """Against Kubernetes' own schema, which refuses unknown fields."""
    validator = pytest.importorskip("kubernetes_validate")
    validator.validate(manifest, validator.latest_version(), strict=True)


def named(kind: str) -> dict[str, Any]:
    (manifest,) = [manifest for manifest in MANIFESTS if manifest["kind"] == kind]
    return manifest


@pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda manifest: manifest["kind"])
def test_the_manifests_are_kubernetes_own(manifest: dict[str, Any]) -> None:
    validate(manifest)


def test_the_workers_values_make_a_stateful_set() -> None:
    """As the chart makes it: each value is the field of this name."""
    container = {"name": "worker", "image": "airflow", "volumeMounts": WORKER["extraVolumeMounts"]}
    container["securityContext"] = WORKER["securityContexts"]["container"]
    pod = {
        "containers": [container | {"resources": WORKER["resources"]}],
        "volumes": WORKER["extraVolumes"],
        "terminationGracePeriodSeconds": WORKER["terminationGracePeriodSeconds"],
        "securityContext": WORKER["securityContexts"]["pod"],
    }
    labels = {"worker-set": WORKER["name"]}
    spec = {
        "replicas": WORKER["replicas"],
        "serviceName": "worker",
        "selector": {"matchLabels": labels},
        "template": {"metadata": {"labels": labels}, "spec": pod},
    }
    validate({"apiVersion": "apps/v1", "kind": "StatefulSet", "metadata": {"name": "worker"}, "spec": spec})


def test_the_workers_values_make_a_disruption_budget() -> None:
    labels = {"worker-set": WORKER["name"]}
    spec = {"selector": {"matchLabels": labels}, **WORKER["podDisruptionBudget"]["config"]}
    validate({"apiVersion": "policy/v1", "kind": "PodDisruptionBudget", "metadata": {"name": "worker"}, "spec": spec})


def test_the_network_policy_is_for_the_workers_of_the_set() -> None:
    policy = named("NetworkPolicy")["spec"]
    assert policy["podSelector"]["matchLabels"]["worker-set"] == WORKER["name"]
    egress = {port["port"] for rule in policy["egress"] for port in rule.get("ports", ())}
    secret = named("Secret")["stringData"]
    urls = [from_text(name, secret[name]) for name in ("ledger", "elasticsearch")]
    assert {connection.port for connection in urls} <= egress
    (servers,) = re.findall(r'"bootstrap.servers": "[^":]+:(\d+)"', secret["kafka"])
    assert int(servers) in egress


def test_the_service_monitor_scrapes_with_airflows_token() -> None:
    """The Prometheus operator's own schema is in no package registry."""
    monitor = yaml.safe_load((EXAMPLE / "service-monitor.yaml").read_text())
    (endpoint,) = monitor["spec"]["endpoints"]
    token = endpoint["authorization"]["credentials"]
    (given,) = [each for each in VALUES["secret"] if each["envName"] == "AIRFLOW__HEADRACE__METRICS_TOKEN"]
    assert (token["name"], token["key"]) == (given["secretName"], given["secretKey"])
    assert f"`GET {endpoint['path']}`" in (ROOT / "docs" / "metrics.md").read_text()


def test_the_volume_of_one_node_is_mounted_in_one_pod() -> None:
    claim = named("PersistentVolumeClaim")
    (volume,), (mount,) = WORKER["extraVolumes"], WORKER["extraVolumeMounts"]
    assert volume["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    assert volume["name"] == mount["name"]
    assert claim["spec"]["accessModes"] == ["ReadWriteOnce"]
    assert WORKER["replicas"] == 1


def test_the_drivers_service_account_is_the_sets() -> None:
    (subject,) = named("RoleBinding")["subjects"]
    # As the chart names it, in a release named airflow.
    assert subject["name"] == f"airflow-worker-{WORKER['name']}"


def test_every_variable_is_a_key_of_the_secret() -> None:
    secret = named("Secret")
    keys = secret["stringData"]
    assert {each["secretKey"] for each in VALUES["secret"]} == keys.keys()
    for each in VALUES["secret"]:
        assert each["secretName"] == secret["metadata"]["name"]
        if each["envName"].startswith("AIRFLOW_CONN_"):
            conn_id = each["envName"].removeprefix("AIRFLOW_CONN_").lower()
            connection = from_text(conn_id, keys[each["secretKey"]])
            assert variable_name(connection.id) == each["envName"]


def test_the_settings_are_options_of_airflow_and_of_headrace() -> None:
    configuration = pytest.importorskip("airflow.configuration")
    described = configuration.conf.configuration_description
    for section, options in VALUES["config"].items():
        assert options.keys() <= described[section]["options"].keys()
    for each in VALUES["secret"]:
        if each["envName"].startswith("AIRFLOW__"):
            _, section, option = each["envName"].lower().split("__")
            assert option in described[section]["options"]


def test_the_pages_stream_fits_the_worker(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("airflow")
    monkeypatch.setenv("AIRFLOW_HOME", str(tmp_path))
    code = re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)[0]
    namespace: dict[str, Any] = {"__file__": str(tmp_path / "orders.py"), "__name__": "orders"}
    exec(compile(code, "orders.py", "exec"), namespace)  # noqa: S102 - our own documentation
    stream = namespace["stream"]
    assert isinstance(stream, Stream)
    secret = {each["envName"]: named("Secret")["stringData"][each["secretKey"]] for each in VALUES["secret"]}
    assert list(place_problems(stream, task_place(VALUES["executor"], {}), secret)) == []
    assert Path(stream.storage.url).is_relative_to(WORKER["extraVolumeMounts"][0]["mountPath"])
    assert {variable_name(name) for name in stream.connection_ids} <= secret.keys()
    tasks = [task for dag in (namespace["receiver"], namespace["batches"]) for task in dag.tasks]
    assert {task.queue for task in tasks} == {WORKER["queue"]}


@pytest.mark.skipif(CHART is None, reason="HEADRACE_AIRFLOW_CHART names the folder of Airflow's chart")
def test_the_values_fit_the_charts_own_schema() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    schema = json.loads((Path(str(CHART)) / "values.schema.json").read_text())
    jsonschema.validate(VALUES, schema)
    # A set has the same fields, which the schema of a set does not check.
    celery = schema["properties"]["workers"]["properties"]["celery"]["properties"]
    for field, value in WORKER.items():
        if field != "name":
            jsonschema.validate(value, {**celery[field], "definitions": schema["definitions"]})
