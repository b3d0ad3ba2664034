"""Runs one node of Elasticsearch or OpenSearch until SIGTERM; started by file name, see elasticsearch.py.

Elasticsearch's launcher is not published as a jar, so the node is built over py4j, which comes with pyspark. The JVM
ends when this process does (it watches its standard input), and this process ends when the JVM does.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from py4j.java_gateway import GatewayParameters, JavaGateway, find_jar_path

# The options that bin/elasticsearch passes (server/cli: SystemJvmOptions), limited to those that this node needs.
_JVM_OPTIONS = [
    "-Xss1m",
    "-XX:+UseSerialGC",
    "-XX:+ExitOnOutOfMemoryError",
    "-Djava.awt.headless=true",
    "-Dfile.encoding=UTF-8",
    "-Djna.nosys=true",
    "-Dio.netty.noUnsafe=true",
    "-Dio.netty.noKeySetOptimization=true",
    "-Dio.netty.recycler.maxCapacityPerThread=0",
    "-Dlog4j.shutdownHookEnabled=false",
    "-Dlog4j2.disable.jmx=true",
]


def main() -> None:
    arguments = _arguments()
    jvm = _start_jvm(arguments)
    if jvm.stdout is None:
        raise RuntimeError("the JVM has no standard output")
    # py4j prints the first two lines: its port, and the token that clients need.
    port, token = jvm.stdout.readline().strip(), jvm.stdout.readline().strip()
    if not port.isdigit():
        sys.exit(f"the JVM did not start: {port} {token}")
    # All further output goes to the log. It must be read, or the JVM blocks.
    threading.Thread(target=shutil.copyfileobj, args=(jvm.stdout, sys.stderr), daemon=True).start()
    gateway = JavaGateway(gateway_parameters=GatewayParameters(port=int(port), auth_token=token, auto_convert=True))
    node = _build_node(gateway.jvm, arguments)
    signal.signal(signal.SIGTERM, lambda *_: threading.Thread(target=_close, args=(node, gateway)).start())
    node.start()
    sys.exit(jvm.wait())


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--product", choices=["elasticsearch", "opensearch"], required=True)
    parser.add_argument("--java", required=True)
    parser.add_argument("--home", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--http-port", required=True)
    parser.add_argument("--transport-port", required=True)
    parser.add_argument("--heap", required=True)
    return parser.parse_args()


def _start_jvm(arguments: argparse.Namespace) -> subprocess.Popen[str]:
    home: Path = arguments.home
    if arguments.product == "elasticsearch":
        # The plugin loader needs modules; with the class path it fails.
        loaded = ["--add-opens=java.base/java.io=org.elasticsearch.preallocate", "-p", str(home / "lib")]
        loaded += ["--add-modules", "org.elasticsearch.server,jdk.net", "-cp", find_jar_path()]
    else:
        loaded = ["-cp", os.pathsep.join([find_jar_path(), *map(str, sorted((home / "lib").glob("*.jar")))])]
    command = [
        arguments.java,
        f"-Xmx{arguments.heap}",
        *_JVM_OPTIONS,
        f"-D{arguments.product.replace('elasticsearch', 'es')}.path.home={home}",
        f"-D{arguments.product.replace('elasticsearch', 'es')}.path.conf={home / 'config'}",
        f"-Dlog4j2.configurationFile={(home / 'config' / 'log4j2.properties').as_uri()}",
        *loaded,
        *("py4j.GatewayServer", "--enable-auth", "--die-on-broken-pipe", "0"),
    ]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def _build_node(jvm: Any, arguments: argparse.Namespace) -> Any:
    server = getattr(jvm.org, arguments.product)
    settings = server.common.settings.Settings.builder()
    for name, value in {
        "path.home": str(arguments.home),
        "path.data": str(arguments.data),
        "path.logs": str(arguments.home / "logs"),
        "cluster.name": "headrace-local",
        "node.name": "local",
        "network.host": "127.0.0.1",
        "http.port": arguments.http_port,
        "transport.port": arguments.transport_port,
        "discovery.type": "single-node",
        # A laptop's disk may be 90 % full; then no shard would be allocated, or every index would become read-only.
        "cluster.routing.allocation.disk.threshold_enabled": "false",
    }.items():
        settings.put(name, value)
    path = jvm.java.io.File(str(arguments.home / "config")).toPath()
    environment = server.env.Environment(settings.build(), path)
    if arguments.product == "opensearch":
        return server.node.Node(environment)
    server.common.logging.LogConfigurator.configureESLogging()
    bundles = server.plugins.PluginsUtils.getModuleBundles(environment.modulesDir())
    loader = server.plugins.PluginsLoader.createPluginsLoader(bundles, jvm.java.util.HashSet(), jvm.java.util.HashMap())
    return server.node.Node(environment, loader)


def _close(node: Any, gateway: JavaGateway) -> None:
    with contextlib.suppress(Exception):
        node.close()
    with contextlib.suppress(Exception):
        gateway.shutdown()
    # This process's exit closes the JVM's standard input, which ends the JVM.
    os._exit(0)


if __name__ == "__main__":
    main()
