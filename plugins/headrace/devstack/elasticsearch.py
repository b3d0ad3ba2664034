"""Runs a real Elasticsearch: one node, from its published jars."""

from __future__ import annotations

import sys
import urllib.request
from pathlib import Path

from headrace.devstack.guarded_process import ProcessSpec, child_environment
from headrace.devstack.jars import ELASTICSEARCH_VERSION, bundle_jars, find_java
from headrace.devstack.server import LOOPBACK, Server, free_port


class ElasticsearchServer(Server):
    """One node on loopback, without security.

    Index, bulk, search, versions and cluster health work. The features of unpublished modules do not: `GET /`, ingest
    pipelines, reindex, painless scripts, data streams, security.
    """

    name = "elasticsearch"

    def __init__(
        self, folder: Path, *, port: int | None = None, transport_port: int | None = None, heap: str = "768m"
    ) -> None:
        super().__init__(folder)
        self.port = port or free_port()
        self.transport_port = transport_port or free_port({self.port})
        self.heap = heap

    @property
    def url(self) -> str:
        """The base URL of its HTTP interface."""
        return f"http://{LOOPBACK}:{self.port}"

    def specify(self) -> ProcessSpec:
        java = str(find_java().executable)
        home = self.folder / "home"
        _lay_out(home, bundle_jars("elasticsearch"))
        node = Path(__file__).with_name("elasticsearch_node.py")
        argv = [sys.executable, str(node), "--java", java, "--home", str(home), "--data", str(self.folder / "data")]
        argv += ["--http-port", str(self.port), "--transport-port", str(self.transport_port), "--heap", self.heap]
        return ProcessSpec(name=self.name, argv=argv, env=child_environment(), cwd=self.folder, log=self.log)

    def probe(self) -> None:
        with urllib.request.urlopen(f"{self.url}/_cluster/health?local=true", timeout=2):  # noqa: S310 - http, ours
            pass


def _lay_out(home: Path, jars: list[Path]) -> None:
    """Make an Elasticsearch home of links to ``jars``: netty's jars go to its plugin, the rest to the server."""
    netty = home / "modules" / "transport-netty4"
    for folder in (home / "lib", netty, home / "config", home / "plugins", home / "logs"):
        folder.mkdir(parents=True, exist_ok=True)
    for jar in jars:
        link = (netty if jar.name.startswith(("netty-", "transport-netty4-")) else home / "lib") / jar.name
        _link(link, jar)
    (netty / "plugin-descriptor.properties").write_text(_DESCRIPTOR)
    (home / "config" / "log4j2.properties").write_text(_LOGGING)


def _link(link: Path, jar: Path) -> None:
    if link.is_symlink() and link.readlink() == jar:
        return
    link.unlink(missing_ok=True)
    link.symlink_to(jar)


# Elasticsearch refuses unknown keys here.
_DESCRIPTOR = f"""\
description=Netty transport
version={ELASTICSEARCH_VERSION}
name=transport-netty4
java.version=17
elasticsearch.version={ELASTICSEARCH_VERSION}
classname=org.elasticsearch.transport.netty4.Netty4Plugin
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
