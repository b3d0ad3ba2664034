"""Runs a real Elasticsearch or OpenSearch: one node, from its published jars."""

from __future__ import annotations

import sys
import urllib.request
from dataclasses import dataclass, replace
from pathlib import Path

from headrace.devstack.guarded_process import ProcessSpec, child_environment
from headrace.devstack.jars import (
    ELASTICSEARCH_9_VERSION,
    ELASTICSEARCH_VERSION,
    OLDEST_JAVA,
    OPENSEARCH_3_VERSION,
    OPENSEARCH_VERSION,
    bundle_jars,
    find_java,
    find_jdk,
)
from headrace.devstack.server import LOOPBACK, Server, free_port


@dataclass(frozen=True, slots=True)
class Release:
    """A version of a search server whose jars are known. ``product`` names its Java packages and its settings."""

    product: str
    version: str
    bundle: str
    """The name of its jars in the lock file."""
    netty_plugin: str
    """The class of the plugin that serves HTTP."""
    java: int = OLDEST_JAVA
    """The oldest Java that runs it. Newer than `OLDEST_JAVA`: a full JDK."""

    def __str__(self) -> str:
        return f"{self.product}-{self.version}"


ELASTICSEARCH_8 = Release(
    "elasticsearch", ELASTICSEARCH_VERSION, "elasticsearch", "org.elasticsearch.transport.netty4.Netty4Plugin"
)
ELASTICSEARCH_9 = replace(ELASTICSEARCH_8, version=ELASTICSEARCH_9_VERSION, bundle="elasticsearch-9", java=21)
OPENSEARCH_2 = Release("opensearch", OPENSEARCH_VERSION, "opensearch", "org.opensearch.transport.Netty4Plugin")
OPENSEARCH_3 = Release(
    "opensearch", OPENSEARCH_3_VERSION, "opensearch-3", "org.opensearch.transport.Netty4ModulePlugin", java=21
)


class ElasticsearchServer(Server):
    """One node on loopback, without security.

    Index, bulk, search, versions and cluster health work. The features of Elasticsearch's unpublished modules do not:
    `GET /`, ingest pipelines, reindex, painless scripts, data streams, security. OpenSearch has the first and the
    data streams.
    """

    name = "elasticsearch"

    def __init__(
        self,
        folder: Path,
        *,
        port: int | None = None,
        transport_port: int | None = None,
        heap: str = "768m",
        release: Release = ELASTICSEARCH_8,
    ) -> None:
        super().__init__(folder)
        self.release = release
        self.port = port or free_port()
        self.transport_port = transport_port or free_port({self.port})
        self.heap = heap

    @property
    def url(self) -> str:
        """The base URL of its HTTP interface."""
        return f"http://{LOOPBACK}:{self.port}"

    def specify(self) -> ProcessSpec:
        java = find_java() if self.release.java == OLDEST_JAVA else find_jdk(self.release.java)
        home = self.folder / "home"
        _lay_out(home, self.release, bundle_jars(self.release.bundle))
        node = Path(__file__).with_name("elasticsearch_node.py")
        argv = [sys.executable, str(node), "--product", self.release.product, "--java", str(java.executable)]
        argv += ["--home", str(home), "--data", str(self.folder / "data")]
        argv += ["--http-port", str(self.port), "--transport-port", str(self.transport_port), "--heap", self.heap]
        return ProcessSpec(name=self.name, argv=argv, env=child_environment(), cwd=self.folder, log=self.log)

    def probe(self) -> None:
        with urllib.request.urlopen(f"{self.url}/_cluster/health?local=true", timeout=2):  # noqa: S310 - http, ours
            pass


def _lay_out(home: Path, release: Release, jars: list[Path]) -> None:
    """Make a server's home of links to ``jars``: netty's jars go to its plugin, the rest to the server."""
    netty = home / "modules" / "transport-netty4"
    for folder in (home / "lib", netty, home / "config", home / "plugins", home / "logs"):
        folder.mkdir(parents=True, exist_ok=True)
    for jar in jars:
        link = (netty if jar.name.startswith(("netty-", "transport-netty4-")) else home / "lib") / jar.name
        _link(link, jar)
    (netty / "plugin-descriptor.properties").write_text(_descriptor(release))
    (home / "config" / "log4j2.properties").write_text(_LOGGING)


def _link(link: Path, jar: Path) -> None:
    if link.is_symlink() and link.readlink() == jar:
        return
    link.unlink(missing_ok=True)
    link.symlink_to(jar)


def _descriptor(release: Release) -> str:
    # Unknown keys are refused here.
    return f"""\
description=Netty transport
version={release.version}
name=transport-netty4
java.version={release.java}
{release.product}.version={release.version}
classname={release.netty_plugin}
extended.plugins=
has.native.controller=false
"""


_LOGGING = """\
status=error
appender.console.type=Console
appender.console.name=console
appender.console.target=SYSTEM_ERR
appender.console.layout.type=PatternLayout
appender.console.layout.pattern=[%d{ISO8601}][%-5p][%c{1}] %m%n
rootLogger.level=info
rootLogger.appenderRef.console.ref=console
"""
