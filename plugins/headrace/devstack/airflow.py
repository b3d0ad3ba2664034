"""Runs Airflow's four components, each as a separate process, on a metadata database given by URL."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import os
import secrets
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Self

from headrace.devstack.airflow_api import AirflowApi
from headrace.devstack.errors import LocalStackError
from headrace.devstack.guarded_process import GuardedProcess, ProcessSpec, child_environment
from headrace.devstack.server import LOOPBACK, Server, Startable, free_port

COMPONENTS = ("api-server", "scheduler", "dag-processor", "triggerer")
USER = "admin"


DATABASE_SETTINGS = {"idle_in_transaction_session_timeout": "20s", "transaction_timeout": "2min"}
"""Settings that Airflow's Postgres database needs with the LocalExecutor.

When a scheduler is killed with kill -9, its workers keep its connection open, and so the locks of its transaction: the
next scheduler would skip the locked runs forever. Airflow's own transactions are short. The first setting does not
catch a transaction whose client was killed between the statements of a pipeline (psycopg's ``executemany``): Postgres
regards that transaction as active, and waits.
"""


class AirflowComponent(Server):
    """One of Airflow's processes.

    `kill` leaves its child processes running, as a crash would (the scheduler's: LocalExecutor's workers and their
    tasks); `stop` ends them too.
    """

    ready_seconds = 180.0

    def __init__(self, airflow: Airflow, name: str) -> None:
        super().__init__(airflow.folder)
        self.name = name
        self._airflow = airflow
        self._launched_at = datetime.now(UTC)

    @property
    def log(self) -> Path:
        return self.folder / "components" / f"{self.name}.log"

    def specify(self) -> ProcessSpec:
        self._launched_at = datetime.now(UTC)
        # Task logs are read from the local disk, so the two log servers, which bind to every interface, are not needed.
        options = ["--skip-serve-logs"] if self.name in ("scheduler", "triggerer") else []
        return ProcessSpec(
            name=f"airflow {self.name}",
            argv=[*airflow_command(), self.name, *options],
            env=self._airflow.environment(),
            cwd=self.folder,
            log=self.log,
            # A scheduler that is asked to stop waits for its tasks, which may run for hours. The triggerer waits for
            # sockets of its ended runner, often for a minute. Killing triggers loses nothing.
            grace_seconds={"scheduler": 5.0, "triggerer": 2.0}.get(self.name, 10.0),
            keep_descendants=True,
        )

    def probe(self) -> None:
        health = self._airflow.api().health()
        if self.name == "api-server":
            return
        key = self.name.replace("-", "_")
        heartbeat = health[key][f"latest_{key}_heartbeat"]
        if heartbeat is None or datetime.fromisoformat(heartbeat) < self._launched_at:
            raise LocalStackError(f"no heartbeat of this {self.name} yet")


class Airflow(Startable):
    """An Airflow on this machine: `LocalExecutor`, simple auth manager with the user `admin`.

    ``folder`` is AIRFLOW_HOME; it keeps logs, secrets and the generated password over restarts. ``connections`` are
    Airflow connections by id, passed to the processes as AIRFLOW_CONN_<ID>. ``environment`` is added for every
    component and task. ``config`` is Airflow's own configuration as {"section.key": value}. ``migrated``: the database
    already has this Airflow's schema, for example because it is a copy.
    """

    def __init__(
        self,
        folder: Path,
        *,
        database_url: str,
        dags_folder: Path,
        plugins_folder: Path | None = None,
        port: int | None = None,
        connections: Mapping[str, Mapping[str, Any]] | None = None,
        environment: Mapping[str, str] | None = None,
        config: Mapping[str, str] | None = None,
        users: Mapping[str, str] | None = None,
        migrated: bool = False,
    ) -> None:
        self.folder = folder.absolute()
        self.database_url = database_url
        self.dags_folder = dags_folder.absolute()
        self.plugins_folder = (plugins_folder or folder / "plugins").absolute()
        self.port = port or free_port()
        self.connections = dict(connections or {})
        self.users = {USER: "admin"} | dict(users or {})
        self._environment = dict(environment or {})
        self.config = dict(config or {})
        self._migrated = migrated
        self._migration: GuardedProcess | None = None
        self.components = {name: AirflowComponent(self, name) for name in COMPONENTS}

    @property
    def url(self) -> str:
        """The base URL of the web pages and the REST API."""
        return f"http://{LOOPBACK}:{self.port}"

    @property
    def password_file(self) -> Path:
        """A JSON file of user to generated password; readable by its owner alone."""
        return self.folder / "simple_auth_manager_passwords.json"

    def password(self, user: str = USER) -> str:
        """The generated password of ``user``."""
        password: str = json.loads(self._secret_file(self.password_file, self._new_passwords))[user]
        return password

    def api(self, user: str = USER) -> AirflowApi:
        """A client of the REST API as ``user``."""
        # All the stack's processes share a machine, and an API server that starts answers late.
        return AirflowApi(self.url, user, self.password(user), timeout=120.0)

    def start(self) -> Self:
        """Prepare the database and start all four; returns when each has answered or sent a heartbeat."""
        try:
            self.prepare()
            with ThreadPoolExecutor(len(COMPONENTS)) as pool:
                for started in [pool.submit(component.start) for component in self.components.values()]:
                    started.result()
        except BaseException:
            self.stop()
            raise
        return self

    def prepare(self) -> None:
        """Create the folders and secrets, and migrate the metadata database to this Airflow's schema."""
        for folder in (self.folder, self.dags_folder, self.plugins_folder):
            folder.mkdir(parents=True, exist_ok=True)
        self.password()
        # A migration takes seconds, so it is skipped if this version has already migrated this database.
        done = self.folder / "migrated"
        state = hashlib.sha256(f"{self._version()} {self.database_url}".encode()).hexdigest()
        if self._migrated or (done.exists() and done.read_text() == state):
            return
        self._migration = GuardedProcess(
            ProcessSpec(
                name="airflow db migrate",
                argv=[*airflow_command(), "db", "migrate"],
                env=self.environment(),
                cwd=self.folder,
                log=self.folder / "components" / "db-migrate.log",
            )
        )
        try:
            self._migration.wait()
            if self._migration.exit_code != 0:
                self._migration.check()
        finally:
            self._migration.stop()
        done.write_text(state)

    def stop(self) -> None:
        """Stop all components and everything they and their tasks have started."""
        if self._migration is not None:
            self._migration.stop()
        with ThreadPoolExecutor(len(COMPONENTS)) as pool:
            list(pool.map(lambda component: component.stop(), self.components.values()))

    def environment(self) -> dict[str, str]:
        """The environment of the components, and of an `airflow` command that should use the same installation."""
        programs = str(Path(sys.executable).parent)
        keys = json.loads(self._secret_file(self.folder / "secrets.json", self._new_secrets))
        settings = _CONFIG | {
            "core.dags_folder": str(self.dags_folder),
            "core.plugins_folder": str(self.plugins_folder),
            "core.execution_api_server_url": f"{self.url}/execution/",
            "core.simple_auth_manager_users": ",".join(f"{user}:{role}" for user, role in self.users.items()),
            "core.simple_auth_manager_passwords_file": str(self.password_file),
            "core.fernet_key": keys["fernet"],
            "database.sql_alchemy_conn": self.database_url,
            # Otherwise Airflow would require asyncpg or aiosqlite; psycopg supports both sync and async.
            **({"database.sql_alchemy_conn_async": self.database_url} if "+psycopg:" in self.database_url else {}),
            "logging.base_log_folder": str(self.folder / "logs"),
            "dag_processor.dag_file_processor_timeout": "120",
            "api.host": LOOPBACK,
            "api.port": str(self.port),
            "api.base_url": self.url,
            "api.secret_key": keys["api"],
            "api_auth.jwt_secret": keys["jwt"],
        }
        variables = {f"AIRFLOW__{name.replace('.', '__', 1).upper()}": value for name, value in settings.items()}
        variables |= {f"AIRFLOW__{name.replace('.', '__', 1).upper()}": value for name, value in self.config.items()}
        variables |= {f"AIRFLOW_CONN_{name.upper()}": json.dumps(value) for name, value in self.connections.items()}
        inherited = {name: value for name, value in child_environment().items() if not name.startswith("AIRFLOW__")}
        return (
            inherited
            | {
                "AIRFLOW_HOME": str(self.folder),
                # So that tasks use this environment's `spark-submit` and `airflow`, and executors its Python.
                "PATH": os.pathsep.join([programs, os.environ.get("PATH", os.defpath)]),
                "PYSPARK_PYTHON": sys.executable,
                # Spark's driver and executors bind to every interface unless told otherwise.
                "SPARK_LOCAL_IP": LOOPBACK,
            }
            | variables
            | self._environment
        )

    @staticmethod
    def _version() -> str:
        try:
            return version("apache-airflow-core")
        except PackageNotFoundError as error:
            raise LocalStackError(
                "Airflow is not installed here.",
                remedy="Install headrace[airflow], or run `headrace stack up --without airflow`.",
            ) from error

    def _new_passwords(self) -> dict[str, str]:
        return {user: secrets.token_urlsafe(12) for user in self.users}

    @staticmethod
    def _new_secrets() -> dict[str, str]:
        return {
            "fernet": base64.urlsafe_b64encode(secrets.token_bytes(32)).decode(),
            "api": secrets.token_hex(32),
            "jwt": secrets.token_hex(64),
        }

    @staticmethod
    def _secret_file(path: Path, make: Any) -> str:
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            # The components start in threads. A link appears with the whole content, and only the first one is made:
            # no thread reads a part of the file, or keeps secrets of its own.
            temporary = path.with_name(f".{path.name}-{secrets.token_hex(8)}")
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "w") as file:
                json.dump(make(), file)
            try:
                with contextlib.suppress(FileExistsError):
                    path.hardlink_to(temporary)
            finally:
                temporary.unlink()
        return path.read_text()


def airflow_command() -> list[str]:
    """The command that runs this environment's `airflow`, whatever the PATH."""
    return [sys.executable, "-m", "airflow"]


_CONFIG = {
    "core.executor": "LocalExecutor",
    "core.auth_manager": "airflow.api_fastapi.auth.managers.simple.simple_auth_manager.SimpleAuthManager",
    "core.load_examples": "False",
    # A stream's receiver task waits as long as the stream runs, and should not occupy a worker's slot.
    "operators.default_deferrable": "True",
    # The default forks 32 workers of 160 MB each.
    "core.parallelism": "6",
    # With the default of 1 s, the sleep between two scheduler loops is most of the time of a chain of short tasks. With
    # 0.1 s an idle scheduler takes a seventh of a core.
    "scheduler.scheduler_idle_sleep_time": "0.25",
    # The tasks of a killed scheduler are adopted after 30 s without its heartbeat, instead of up to five minutes later.
    "scheduler.orphaned_tasks_check_interval": "15",
    # New DAG files appear in seconds instead of five minutes; known ones are parsed again when they change.
    "dag_processor.refresh_interval": "2",
    "dag_processor.bundle_refresh_check_interval": "1",
    "usage_data_collection.enabled": "False",
}
