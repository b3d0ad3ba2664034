"""docker-compose.yaml and what belongs to it, as far as that can be checked without an engine."""

from __future__ import annotations

import importlib.util
import json
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from headrace.connections import from_text, variable_name
from headrace.devstack import jars
from headrace.stream.outputs import dead_letters_of

ROOT = Path(__file__).resolve().parents[3]
COMPOSE = yaml.safe_load((ROOT / "docker-compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
DOCKERFILE = (ROOT / "docker" / "Dockerfile").read_text()
BUILDS = {name: service for name, service in SERVICES.items() if "build" in service}
OURS = {
    name: service
    for name, service in SERVICES.items()
    if service["image"].startswith("headrace:") and name not in BUILDS
}
SPARK = {name: service for name, service in OURS.items() if name.startswith("spark-")}
SPARK_DEFAULTS = dict(line.split(" ", 1) for line in COMPOSE["configs"]["spark-defaults"]["content"].splitlines())
STREAMING = {name: service for name, service in OURS.items() if name not in SPARK}


def environments() -> Iterator[tuple[str, str, str]]:
    for name, service in SERVICES.items():
        for variable, value in (service.get("environment") or {}).items():
            yield name, variable, value


def test_there_is_everything() -> None:
    parts = {"kafka", "elasticsearch", "postgres", "spark-master", "spark-worker-1", "spark-worker-2"}
    airflow = {f"airflow-{part}" for part in ("init", "api-server", "scheduler", "dag-processor", "triggerer")}
    assert parts | airflow <= SERVICES.keys()


def test_services_wait_for_existing_services_with_a_health_check() -> None:
    for name, service in SERVICES.items():
        for other, how in service.get("depends_on", {}).items():
            assert other in SERVICES, f"{name} waits for {other}"
            if how["condition"] == "service_healthy":
                assert "healthcheck" in SERVICES[other], f"{name} waits for the health of {other}"
            else:
                assert how["condition"] == "service_completed_successfully"
                assert SERVICES[other]["restart"] == "no"


def test_every_service_that_stays_has_a_health_check() -> None:
    for name, service in SERVICES.items():
        assert service["restart"] == "no" or "healthcheck" in service, name


def test_ports_are_published_on_loopback_only_and_once() -> None:
    published = [port for service in SERVICES.values() for port in service.get("ports", [])]
    assert published
    assert all(re.fullmatch(r"127\.0\.0\.1:\d+:\d+", port) for port in published)
    assert len({port.split(":")[1] for port in published}) == len(published)


def test_images_are_pinned_to_the_versions_of_the_embedded_stack() -> None:
    images = {service["image"] for service in SERVICES.values()}
    assert all(re.search(r":\d+\.\d+", image) for image in images)
    assert f"apache/kafka:{jars.KAFKA_VERSION}" in images
    assert f"docker.elastic.co/elasticsearch/elasticsearch:{jars.ELASTICSEARCH_VERSION}" in images
    assert f"postgres:{jars.POSTGRES_VERSION.rpartition('.')[0]}" in images


def test_the_image_is_built_from_the_pinned_requirements() -> None:
    assert re.search(r"^FROM python:3\.11\.\d+-slim-\w+$", DOCKERFILE, re.MULTILINE)
    assert "--require-hashes -r requirements-bootstrap.txt" in DOCKERFILE
    assert "--require-hashes -r requirements.txt" in DOCKERFILE
    assert "--no-deps ." in DOCKERFILE
    # Java 17 in Debian 12, which 13 does not have.
    assert "default-jre-headless" in DOCKERFILE
    assert "openjdk-17" not in DOCKERFILE


def test_the_image_copies_what_exists() -> None:
    sources = [word for line in DOCKERFILE.splitlines() if line.startswith("COPY") for word in line.split()[1:-1]]
    assert sources
    assert all((ROOT / source).exists() for source in sources)


def test_the_build_context_has_what_the_image_copies_and_no_more() -> None:
    lines = (ROOT / ".dockerignore").read_text().split("\n")
    sources = {word for line in DOCKERFILE.splitlines() if line.startswith("COPY") for word in line.split()[1:-1]}
    assert "*" in lines
    assert {line[1:] for line in lines if line.startswith("!")} == sources


def test_the_cluster_gets_no_connection_and_no_key_of_airflow() -> None:
    """Executors have the connections of their stream from its application."""
    assert SPARK
    for service in SPARK.values():
        assert all(variable.startswith("SPARK_") for variable in service["environment"])


def test_the_cluster_and_its_applications_share_a_secret() -> None:
    assert SPARK_DEFAULTS["spark.authenticate"] == SPARK_DEFAULTS["spark.network.crypto.enabled"] == "true"
    assert REFERENCE.fullmatch(SPARK_DEFAULTS["spark.authenticate.secret"])
    for service in OURS.values():
        (given,) = service["configs"]
        assert given["source"] == "spark-defaults"
        assert given["target"] == f"{service['environment']['SPARK_CONF_DIR']}/spark-defaults.conf"


def test_the_workers_bound_their_executors_logs() -> None:
    assert SPARK_DEFAULTS["spark.executor.logs.rolling.strategy"] == "size"
    assert int(SPARK_DEFAULTS["spark.executor.logs.rolling.maxSize"]) <= 64 << 20
    assert int(SPARK_DEFAULTS["spark.executor.logs.rolling.maxRetainedFiles"]) <= 10


def test_all_that_runs_headrace_runs_one_image() -> None:
    assert {service["image"] for service in OURS.values()} == {SERVICES["headrace-image"]["image"]}
    version = re.search(r'__version__ = "([^"]+)"', (ROOT / "plugins/headrace/__init__.py").read_text())
    assert version is not None
    assert SERVICES["airflow-scheduler"]["image"] == f"headrace:{version[1]}"


def test_one_service_builds_the_image_and_ends() -> None:
    """Eight builds of one tag side by side failed with "already exists"."""
    assert BUILDS.keys() == {"headrace-image"}
    assert BUILDS["headrace-image"]["build"]["dockerfile"] == "docker/Dockerfile"
    assert BUILDS["headrace-image"]["restart"] == "no"
    assert BUILDS["headrace-image"]["command"] == ["true"]


@pytest.mark.parametrize("name", sorted(OURS))
def test_the_others_wait_for_that_image_and_ask_no_registry(name: str) -> None:
    """Also when it alone is started: `docker compose up -d --build spark-worker-1` builds what it depends on."""
    assert OURS[name]["pull_policy"] == "never"
    reached, ahead = set(), [name]
    while ahead:
        for other in SERVICES[ahead.pop()].get("depends_on", {}):
            if other not in reached:
                reached.add(other)
                ahead.append(other)
    assert "headrace-image" in reached


def test_the_dags_environment_is_what_they_read() -> None:
    read = set(re.findall(r'"(HEADRACE_\w+)"', (ROOT / "dags" / "deployment.py").read_text()))
    given = {variable for variable in SERVICES["airflow-scheduler"]["environment"] if variable.startswith("HEADRACE_")}
    assert read
    assert given == read


def test_the_dags_accept_that_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, value in SERVICES["airflow-scheduler"]["environment"].items():
        if variable.startswith("HEADRACE_"):
            monkeypatch.setenv(variable, value)
    monkeypatch.syspath_prepend(str(ROOT / "dags"))
    spec = importlib.util.spec_from_file_location("deployment_of_compose", ROOT / "dags" / "deployment.py")
    assert spec is not None
    assert spec.loader is not None
    deployment = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(deployment)
    assert deployment.STORAGE.shared
    assert deployment.SPARK.master == "spark://spark-master:7077"
    assert deployment.LEDGER == "connection:headrace_ledger"
    assert deployment.SPARK.task_slots() == 3


@pytest.mark.parametrize("file", ["flights.py", "word_count.py"])
def test_the_dags_connections_are_given_to_all_that_run_streams(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, value in SERVICES["airflow-scheduler"]["environment"].items():
        if variable.startswith("HEADRACE_"):
            monkeypatch.setenv(variable, value)
    monkeypatch.syspath_prepend(str(ROOT / "dags"))
    monkeypatch.delitem(sys.modules, "deployment", raising=False)
    try:
        stream = runpy.run_path(str(ROOT / "dags" / file))["stream"]
    finally:
        sys.modules.pop("deployment", None)
    assert stream.storage.shared
    assert stream.spark.master == "spark://spark-master:7077"
    assert stream.connection_ids
    for name, service in STREAMING.items():
        missing = {variable_name(conn_id) for conn_id in stream.connection_ids} - service["environment"].keys()
        assert not missing, name


def test_streams_use_elasticsearch_as_a_user_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the privileges that docs/security.md lists, on the indices of the streams, and not as its superuser."""
    for name, service in STREAMING.items():
        connection = from_text("es", service["environment"]["AIRFLOW_CONN_ELASTICSEARCH_DEFAULT"])
        assert connection.login == "headrace", name
        waits = service["depends_on"]
        assert "elasticsearch-user" in waits or "init" in name, name
    script = (ROOT / "docker" / "make_elasticsearch_user.sh").read_text()
    role = json.loads(script.partition("<<'JSON'\n")[2].partition("\nJSON\n")[0])
    assert role["cluster"] == ["monitor"]
    granted = {name: set(index["privileges"]) for index in role["indices"] for name in index["names"]}
    written = set(re.findall(r'ElasticsearchOutput\(.*index="([^"]+)"', (ROOT / "dags" / "flights.py").read_text()))
    assert granted.keys() == {*written, *map(dead_letters_of, written)}
    security = (
        (ROOT / "docs" / "security.md").read_text().partition("## Elasticsearch's privileges")[2].partition("## ")[0]
    )
    listed = {name for row in re.findall(r"^\| (`.+?) \|", security, re.M) for name in re.findall(r"`(\w+)`", row)}
    assert set().union(*granted.values()) == listed


def test_airflows_components_share_their_keys() -> None:
    """A receiver job's token is derived from one of them, in whichever component its tasks run."""
    components = [service["environment"] for name, service in SERVICES.items() if name.startswith("airflow-")]
    for variable in (
        "AIRFLOW__HEADRACE__SECRET_KEY",
        "AIRFLOW__CORE__FERNET_KEY",
        "AIRFLOW__API__SECRET_KEY",
        "AIRFLOW__API_AUTH__JWT_SECRET",
    ):
        assert len({environment[variable] for environment in components}) == 1, variable


def test_workers_have_a_folder_that_they_can_make() -> None:
    assert "USER headrace" in DOCKERFILE
    for name in ("spark-worker-1", "spark-worker-2"):
        assert SERVICES[name]["environment"]["SPARK_WORKER_DIR"].startswith("/tmp/")


def test_all_see_the_same_storage_and_ledger_environment() -> None:
    for variable in ("HEADRACE_STORAGE", "HEADRACE_LEDGER", "AIRFLOW_CONN_KAFKA_DEFAULT"):
        assert len({service["environment"][variable] for service in STREAMING.values()}) == 1
    storage = SERVICES["airflow-scheduler"]["environment"]["HEADRACE_STORAGE"]
    for name in ("spark-worker-1", "spark-worker-2", "airflow-scheduler", "airflow-triggerer"):
        assert f"storage:{storage}" in SERVICES[name]["volumes"], name


def test_volumes_are_declared() -> None:
    for service in SERVICES.values():
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            if source.startswith("./"):
                assert (ROOT / source).exists(), source
            else:
                assert source in COMPOSE["volumes"], source


@pytest.mark.parametrize("name", ["KAFKA_DEFAULT", "ELASTICSEARCH_DEFAULT", "HEADRACE_LEDGER"])
def test_the_connections_are_connections(name: str) -> None:
    text = SERVICES["airflow-scheduler"]["environment"][f"AIRFLOW_CONN_{name}"]
    connection = from_text(name.lower(), re.sub(r"\$\{(\w+)[^}]*\}", r"secret", text))
    assert connection.conn_type in ("kafka", "elasticsearch", "headrace_ledger")
    host = connection.host or connection.extra["bootstrap.servers"].split(":")[0]
    assert host in SERVICES


SECRET = re.compile(r"PASSWORD|SECRET|FERNET")
REFERENCE = re.compile(r"\$\{(\w+)(:\?[^}]+)?\}")


def test_secrets_come_from_the_environment_and_have_no_defaults() -> None:
    for name, variable, value in environments():
        if SECRET.search(variable) and not variable.endswith("PASSWORDS_FILE"):
            assert REFERENCE.fullmatch(value), f"{name}: {variable}"
    text = (ROOT / "docker-compose.yaml").read_text()
    assert ":-" not in text, "a default is no secret"


def make_env() -> Any:
    spec = importlib.util.spec_from_file_location("make_env", ROOT / "docker" / "make_env.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_make_env_makes_every_secret_that_is_asked_for() -> None:
    asked = {match[0] for match in REFERENCE.findall((ROOT / "docker-compose.yaml").read_text())}
    made = dict(line.split("=", 1) for line in make_env().env_text().splitlines())
    assert made.keys() == asked
    assert len(set(made.values())) == len(made)
    assert all(len(value) >= 43 for value in made.values())


def test_the_secrets_file_is_not_in_version_control() -> None:
    assert ".env" in (ROOT / ".gitignore").read_text().split()


@pytest.mark.parametrize("script", sorted((ROOT / "docker").glob("*.sh")), ids=lambda script: script.name)
def test_scripts_are_bash(script: Path) -> None:
    assert script.stat().st_mode & 0o111
    done = subprocess.run(["bash", "-n", shlex.quote(str(script))], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
