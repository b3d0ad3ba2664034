"""The spark-submit hook of a stream: the provider's hook with the stream's settings; no secrets on command lines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from airflow.providers.apache.spark.hooks.spark_submit import SparkSubmitHook

import headrace
from headrace.errors import HeadraceError
from headrace.runs.processes import child_environment

if TYPE_CHECKING:
    from headrace.stream import Stream

# A Spark Connect server that is stopped while sessions run queries may restart the (non-daemon) thread of its session
# manager, and the JVM does not end by itself while that thread is alive.
_CONF = {"spark.submit.callSystemExitOnMainExit": "true"}
# Options of spark-submit, and the settings that they set: an option wins over a setting.
_SET_BY_OPTION: Mapping[str, str] = {
    "driver_memory": "spark.driver.memory",
    "executor_cores": "spark.executor.cores",
    "executor_memory": "spark.executor.memory",
    "num_executors": "spark.executor.instances",
    "total_executor_cores": "spark.cores.max",
    "yarn_queue": "spark.yarn.queue",
}


class ApplicationMissingError(HeadraceError):
    """The installation lacks the file that spark-submit is to run."""


class SparkConnectionConflictError(HeadraceError):
    """An operator and its stream name different Spark connections."""


def application(name: str) -> str:
    """The path of ``receiver.py`` or ``micro_batch.py``: inside an installed package, or in the checkout."""
    package = Path(headrace.__file__).parent
    candidates = [package / "spark" / "applications" / name, package.parents[1] / "spark_jobs" / name]
    for candidate in candidates:
        if candidate.is_file():
            return str(candidate)
    raise ApplicationMissingError(
        f"The Spark application {name} is not there: {', '.join(map(str, candidates))}.",
        remedy="Install headrace again; its wheel carries both applications.",
    )


class StreamSparkSubmitHook(SparkSubmitHook):
    """spark-submit with the master (or the Airflow connection), configuration and Python files of a stream.

    The application gets its connections in the environment of the spark-submit process. In cluster mode the driver is
    not a child of that process, and the provider would write them on the command line (``spark.yarn.appMasterEnv…``).
    So in cluster mode they have to be in the driver's environment already; the log says so.

    :param receivers: how many receivers the application hosts; determines its number of task slots with a local master.
    :param conn_id: the Airflow connection of Spark's master; by default the stream's, without one its master.
    :param conf: settings besides the stream's. These win, and so do the provider's own parameters; the log says so.

    Raises:
        SparkConnectionConflictError: the stream names another connection.
    """

    def __init__(
        self,
        stream: Stream,
        *,
        application_args: Sequence[str],
        name: str,
        receivers: int = 0,
        conn_id: str | None = None,
        conf: Mapping[str, str] | None = None,
        **kwargs: Any,
    ) -> None:
        settings = stream.spark
        if conn_id and settings.connection not in (None, conn_id):
            raise SparkConnectionConflictError(
                f"The operator has the Spark connection {conn_id!r}, and stream {stream.name!r} has "
                f"{settings.connection!r}.",
                remedy="Leave out conn_id, or the connection of the stream's SparkSettings.",
            )
        # Set first: the base class resolves the connection in its constructor.
        self._stream = stream
        self._receivers = receivers
        self._spark_connection = conn_id or settings.connection
        super().__init__(
            conf={**_CONF, **settings.conf, **(conf or {})},
            conn_id=self._spark_connection or "",
            py_files=",".join(settings.py_files) or None,
            application_args=list(application_args),
            name=name,
            **kwargs,
        )
        set_here = {
            **(conf or {}),
            **{key: kwargs[option] for option, key in _SET_BY_OPTION.items() if kwargs.get(option) is not None},
        }
        for key, value in set_here.items():
            if str(settings.conf.get(key, value)) != str(value):
                # Without the values: they may be secrets.
                self.log.info("%s is this operator's, not the one of the stream.", key)

    def _resolve_connection(self) -> dict[str, Any]:
        if self._spark_connection is not None:
            # Raises for an unknown id: the provider would fall back to a YARN cluster.
            self.get_connection(self._spark_connection)
            return super()._resolve_connection()
        binary = self.spark_binary or "spark-submit"
        return {
            "master": self._stream.spark.master_url(self._receivers),
            "queue": self._yarn_queue,
            "deploy_mode": self._deploy_mode,
            "spark_binary": binary,
            "namespace": self._conf.get("spark.kubernetes.namespace"),
            "principal": self._principal,
            "keytab": self._keytab,
            "rest_scheme": "http",
            "rest_port": 6066,
            "rest_endpoint": None,
        }

    @property
    def is_cluster_mode(self) -> bool:
        """Whether the driver runs in the cluster, not as a child of spark-submit."""
        return bool(self._connection["deploy_mode"] == "cluster")

    def command(self, application_path: str) -> list[str]:
        """The whole spark-submit command, without secrets."""
        return self._build_spark_submit_command(application_path)

    def environment(self) -> dict[str, str]:
        """The environment that the command needs."""
        if self.is_cluster_mode:
            self.log.warning(
                "The driver runs in the cluster: give it the stream's connections (AIRFLOW_CONN_…) and "
                "HEADRACE_SECRET_KEY (what headrace.runs.processes.secret_key returns here for its name) there, for "
                "instance from a Kubernetes secret."
            )
        return child_environment(self._stream) | {name: str(value) for name, value in (self._env_vars or {}).items()}

    def _build_spark_submit_command(self, application: str) -> list[str]:
        command = super()._build_spark_submit_command(application)
        # If these were kept, the provider would also pass on all of Airflow's environment; see `environment`.
        self._env = None
        return command

    def submit(self, application: str = "", **kwargs: Any) -> str | None:
        return super().submit(application, **{"env": self.environment(), **kwargs})
