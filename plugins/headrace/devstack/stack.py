"""The embedded stack in one data folder, started and stopped together: Kafka, Elasticsearch, Postgres, Airflow, and a
schema registry if it is asked for."""

from __future__ import annotations

import os
import threading
import time
import uuid
from collections.abc import Callable, Collection
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.devstack.airflow import DATABASE_SETTINGS, USER, Airflow
from headrace.devstack.elasticsearch import ElasticsearchServer
from headrace.devstack.errors import LocalStackError
from headrace.devstack.kafka import KafkaServer
from headrace.devstack.postgres import PostgresServer
from headrace.devstack.registry import RegistryServer
from headrace.devstack.server import LOOPBACK, Server, free_port, is_free
from headrace.devstack.state import (
    STACK_VARIABLE,
    Login,
    Phase,
    ProcessRef,
    ServiceState,
    StackState,
    read_state,
    remember_ports,
    remembered_ports,
    write_state,
)
from headrace.errors import HeadraceError

SERVICES = ("kafka", "elasticsearch", "postgres", "airflow")
LEDGER_DATABASE = "headrace"
LEDGER_CONNECTION = "headrace_ledger"
AIRFLOW_DATABASE = "airflow"
_PORTS = ("kafka", "kafka_controller", "elasticsearch", "elasticsearch_transport", "postgres", "registry", "airflow")


@dataclass(frozen=True, slots=True)
class StackOptions:
    """Options of a stack. ``without`` names services of `SERVICES` to leave out; Airflow needs postgres.

    ``registry``: also run a schema registry, whose download is larger than that of all the others.
    """

    data: Path
    dags: Path
    plugins: Path
    without: Collection[str] = ()
    registry: bool = False

    def __post_init__(self) -> None:
        unknown = set(self.without) - set(SERVICES)
        if unknown:
            raise LocalStackError(
                f"There is no service {', '.join(sorted(unknown))}. The services are {', '.join(SERVICES)}."
            )
        if "postgres" in self.without and "airflow" not in self.without:
            raise LocalStackError(
                "postgres cannot be left out: Airflow keeps its metadata in it.", remedy="Leave out airflow too."
            )


class Stack:
    """A stack that this process supervises. Each change of its state is written to the data folder.

    ``on_change`` is called with the state after each change: from several threads, but never concurrently.
    """

    def __init__(self, options: StackOptions, on_change: Callable[[StackState], None] = lambda _state: None) -> None:
        self.data = options.data.absolute()
        self.data.mkdir(parents=True, exist_ok=True)
        before = read_state(self.data)
        self._on_change = on_change
        self._changing = threading.Lock()
        self._stop_requested = threading.Event()
        self._starting = False
        self.state = StackState(
            id=before.id if before else uuid.uuid4().hex, phase=Phase.STARTING, supervisor=ProcessRef.of(os.getpid())
        )
        # Every process started from here on inherits it, including those that a task starts in a new session.
        os.environ[STACK_VARIABLE] = self.state.id
        os.environ["HEADRACE_DATA"] = str(self.data)
        self._ports = self._choose_ports()
        self._make_servers(options)

    def start(self) -> None:
        """Start all servers in parallel. If one fails, record that in its state, stop all and raise the error."""
        self._starting = True
        self._change(phase=Phase.STARTING)
        with ThreadPoolExecutor(8) as pool:
            jobs = [
                pool.submit(self._start, server) for server in (self.kafka, self.elasticsearch, self.registry) if server
            ]
            if self.postgres is not None:
                jobs.append(pool.submit(self._start_postgres_and_airflow, pool))
            done, _ = wait(jobs, return_when=FIRST_EXCEPTION)
            failure = next((error for job in done if (error := job.exception())), None)
            if failure is not None:
                if self._stop_requested.is_set():
                    # Clients of the stopped servers fail with errors of many kinds: report the interruption instead.
                    failure = _interrupted(failure)
                self.request_stop()
                self._stop_servers()
        self._starting = False
        if failure is not None:
            self._change(phase=Phase.FAILED, error=str(failure))
            raise failure
        self._change(phase=Phase.RUNNING)

    def request_stop(self) -> None:
        """Make `watch` return, and `start` start no further server."""
        self._stop_requested.set()

    def interrupt(self) -> None:
        """Make `watch` return, and `start` too, by stopping the servers being started. Call it from another thread."""
        self.request_stop()
        if self._starting:
            self._stop_servers()

    def stop(self) -> None:
        """Stop all servers and every process that they have started."""
        self.request_stop()
        self._change(phase=Phase.STOPPING)
        self._stop_servers()
        for service in self.state.services.values():
            service.phase = Phase.STOPPED
        self._change(phase=Phase.STOPPED)

    def watch(self, restart: threading.Event) -> None:
        """Until a stop is requested, record servers that have died, and restart them when ``restart`` is set."""
        while not self._stop_requested.wait(0.5):
            for name, server in self.servers.items():
                service = self.state.services[name]
                if service.phase is Phase.RUNNING and not server.alive:
                    self._note_death(service, server)
            if restart.is_set():
                restart.clear()
                self._restart_dead()

    @property
    def servers(self) -> dict[str, Server]:
        """The servers of this stack by name, with each of Airflow's components."""
        backends: list[Server | None] = [self.kafka, self.elasticsearch, self.registry, self.postgres]
        components = list(self.airflow.components.values()) if self.airflow else []
        return {server.name: server for server in [*backends, *components] if server is not None}

    def _make_servers(self, options: StackOptions) -> None:
        ports, without = self._ports, options.without
        self.kafka = (
            None
            if "kafka" in without
            else KafkaServer(self.data / "kafka", port=ports["kafka"], controller_port=ports["kafka_controller"])
        )
        self.elasticsearch = (
            None
            if "elasticsearch" in without
            else ElasticsearchServer(
                self.data / "elasticsearch",
                port=ports["elasticsearch"],
                transport_port=ports["elasticsearch_transport"],
            )
        )
        self.postgres = (
            None if "postgres" in without else PostgresServer(self.data / "postgres", port=ports["postgres"])
        )
        self.registry = RegistryServer(self.data / "registry", port=ports["registry"]) if options.registry else None
        self.airflow = None
        self.state.connections = self.connections()
        if "airflow" not in without and self.postgres is not None:
            self.airflow = Airflow(
                self.data / "airflow",
                database_url=self.postgres.url(AIRFLOW_DATABASE),
                dags_folder=options.dags,
                plugins_folder=options.plugins,
                port=ports["airflow"],
                connections=self.connections(),
            )
            self.state.login = Login(user=USER, password_file=str(self.airflow.password_file))
        self.state.services = {
            name: ServiceState(name=name, log=str(server.log), address=self._address(name), phase=Phase.STARTING)
            for name, server in self.servers.items()
        }

    def connections(self) -> dict[str, dict[str, Any]]:
        """The Airflow connections to this stack's servers, by id."""
        connections: dict[str, dict[str, Any]] = {"spark_default": {"conn_type": "spark", "host": "local[*]"}}
        if self.kafka is not None:
            extra = {"bootstrap.servers": self.kafka.bootstrap_servers}
            connections["kafka_default"] = {"conn_type": "kafka", "extra": extra}
        if self.elasticsearch is not None:
            connections["elasticsearch_default"] = {
                "conn_type": "elasticsearch",
                "host": LOOPBACK,
                "port": self.elasticsearch.port,
                "schema": "http",
            }
        if self.registry is not None:
            # As Airflow's HTTP connections have a path: only behind a whole URL.
            connections["schema_registry_default"] = {"conn_type": "http", "host": self.registry.url}
        if self.postgres is not None:
            connections[LEDGER_CONNECTION] = {
                "conn_type": "headrace_ledger",
                "host": LOOPBACK,
                "port": self.postgres.port,
                "login": "headrace",
                "password": self.postgres.password,
                "schema": LEDGER_DATABASE,
            }
        return connections

    def _address(self, name: str) -> str | None:
        if name == "kafka" and self.kafka:
            return self.kafka.bootstrap_servers
        if name == "elasticsearch" and self.elasticsearch:
            return self.elasticsearch.url
        if name == "registry" and self.registry:
            return self.registry.url
        if name == "postgres" and self.postgres:
            return self.postgres.url(LEDGER_DATABASE)
        return self.airflow.url if name == "api-server" and self.airflow else None

    def _choose_ports(self) -> dict[str, int]:
        """The ports of the last start if they are still free, else new ones."""
        before = remembered_ports(self.data)
        ports: dict[str, int] = {}
        for name in _PORTS:
            port = before.get(name)
            ports[name] = port if port and is_free(port) else free_port({*ports.values(), *before.values()})
        remember_ports(self.data, ports)
        return ports

    def _start_postgres_and_airflow(self, pool: ThreadPoolExecutor) -> None:
        if self.postgres is None:
            return
        self._start(self.postgres)
        self.postgres.create_database(LEDGER_DATABASE)
        from headrace.ledger import Ledger

        # A data folder of an older version holds an older ledger. Nothing uses it yet, so it can be migrated.
        Ledger.migrate(self.postgres.url(LEDGER_DATABASE))
        if self.airflow is None:
            return
        self.postgres.create_database(AIRFLOW_DATABASE, settings=DATABASE_SETTINGS)
        self.airflow.prepare()
        self._check_not_interrupted()
        jobs: list[Future[None]] = [
            pool.submit(self._start, component) for component in self.airflow.components.values()
        ]
        for job in jobs:
            job.result()

    def _start(self, server: Server) -> None:
        service = self.state.services[server.name]
        since = time.monotonic()
        service.phase, service.error = Phase.STARTING, None
        try:
            self._check_not_interrupted()
            server.launch()
            # Recorded before it answers, so that the process can be found if this supervisor dies.
            service.process = ProcessRef.of(server.process.pid)
            service.guard = ProcessRef.of(server.process.guard_pid)
            self._change()
            if self._stop_requested.is_set():
                server.stop()  # the stop request may have come before there was a process to stop
            server.await_ready()
        except BaseException as error:
            service.phase = Phase.FAILED
            service.error = str(error) if isinstance(error, HeadraceError) else f"{type(error).__name__}: {error}"
            self._change()
            raise
        service.phase, service.seconds_to_start = Phase.RUNNING, round(time.monotonic() - since, 1)
        self._change()

    def _check_not_interrupted(self) -> None:
        if self._stop_requested.is_set():
            raise _interrupted()

    def _note_death(self, service: ServiceState, server: Server) -> None:
        service.phase = Phase.FAILED
        try:
            server.process.check()
        except HeadraceError as error:
            service.error = str(error)
        self._change()

    def _restart_dead(self) -> None:
        dead = [server for name, server in self.servers.items() if self.state.services[name].phase is Phase.FAILED]
        if not dead:
            return
        self._starting = True
        for server in dead:
            self.state.services[server.name].phase = Phase.STARTING
        self._change()
        with ThreadPoolExecutor(len(dead)) as pool:
            # Each server's state records whether its restart worked; a failure does not affect the others.
            wait([pool.submit(self._start, server) for server in dead])
        self._starting = False

    def _stop_servers(self) -> None:
        # Airflow first: its tasks use the others.
        if self.airflow is not None:
            self.airflow.stop()
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda server: server.stop(), self.servers.values()))

    def _change(self, phase: Phase | None = None, error: str | None = None) -> None:
        with self._changing:
            if phase is not None:
                self.state.phase, self.state.error = phase, error
            write_state(self.data, self.state)
            self._on_change(self.state)


def _interrupted(cause: BaseException | None = None) -> LocalStackError:
    error = LocalStackError("The start was interrupted.")
    error.__cause__ = cause
    return error
