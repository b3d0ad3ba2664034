"""Runs a real schema registry: Apicurio, which also serves the API of Confluent's."""

from __future__ import annotations

import tarfile
import urllib.request
from pathlib import Path

from headrace.devstack.guarded_process import ProcessSpec, child_environment
from headrace.devstack.jars import REGISTRY_VERSION, bundle_jars, cache_dir, find_java, unpack_once
from headrace.devstack.server import LOOPBACK, Server, free_port


class RegistryServer(Server):
    """One registry on loopback, with its schemas in a file of ``folder``.

    A schema that it has confirmed is still there after `kill`. Its ids count from 1, also those of another folder's
    registry: the same id may stand for another schema there.
    """

    name = "registry"

    def __init__(self, folder: Path, *, port: int | None = None, heap: str = "384m") -> None:
        super().__init__(folder)
        self.port = port or free_port()
        self.heap = heap

    @property
    def url(self) -> str:
        """The base URL of Confluent's API."""
        return f"http://{LOOPBACK}:{self.port}/apis/ccompat/v7"

    @property
    def own_url(self) -> str:
        """The base URL of Apicurio's own API."""
        return f"http://{LOOPBACK}:{self.port}/apis/registry/v2"

    def specify(self) -> ProcessSpec:
        # H2 by default writes what is committed half a second later.
        database = f"jdbc:h2:file:{self.folder / 'data' / 'registry'};WRITE_DELAY=0"
        program = _unpacked() / f"apicurio-registry-app-{REGISTRY_VERSION}-runner.jar"
        return ProcessSpec(
            name=self.name,
            argv=[str(find_java().executable), f"-Xmx{self.heap}", *_JVM_OPTIONS, "-jar", str(program)],
            env=child_environment()
            | {
                "QUARKUS_HTTP_HOST": LOOPBACK,
                "QUARKUS_HTTP_PORT": str(self.port),
                "REGISTRY_STORAGE_KIND": "sql",
                "REGISTRY_DATASOURCE_URL": database,
            },
            cwd=self.folder,
            log=self.log,
        )

    def probe(self) -> None:
        with urllib.request.urlopen(f"{self.url}/subjects", timeout=2):  # noqa: S310 - http, ours
            pass


def _unpacked() -> Path:
    (archive,) = bundle_jars("registry")
    folder = cache_dir() / archive.parent.name

    def unpack(into: Path) -> None:
        with tarfile.open(archive) as files:
            files.extractall(into, filter="data")

    unpack_once(folder, unpack)
    return folder


_JVM_OPTIONS = ["-XX:+UseSerialGC", "-XX:+ExitOnOutOfMemoryError", "-Djava.awt.headless=true"]
