"""The spark-submit hook of a stream: the provider's hook with the stream's settings; no secrets on command lines.

Also which of SparkSubmitOperator's parameters a batch's operator passes on to it, and which it refuses
(`submit_options`).
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from airflow.providers.apache.spark.hooks.spark_submit import SparkSubmitHook
from airflow.providers.apache.spark.operators.spark_submit import SparkSubmitOperator
from airflow.sdk import BaseOperator

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


# With way="submit" a batch is its own application, and spark-submit's options configure it. With way="connect" it runs
# in the receiver job's application, which exists already: an option that would configure an application has no effect
# and is refused. What a stream declares for both of its applications is refused in either way.
PASSED_ON = frozenset(
    {
        "archives", "conf", "conn_id", "deploy_mode", "driver_class_path", "driver_memory", "env_vars",
        "exclude_packages", "executor_cores", "executor_memory", "files", "jars", "keytab", "name",
        "num_executors", "packages", "post_submit_commands", "principal", "properties_file", "proxy_user",
        "repositories", "spark_binary", "status_poll_interval", "total_executor_cores",
        "track_driver_via_k8s_api", "use_krb5ccache", "verbose", "yarn_queue", "yarn_rm_auth",
        "yarn_track_via_rm_api",
    }
)  # fmt: skip
"""Passed on to the hook with ``way="submit"``."""

BY_THE_PROVIDER = frozenset({"openlineage_inject_parent_job_info", "openlineage_inject_transport_info"})
"""SparkSubmitOperator handles these itself, with ``way="submit"``."""

REFUSED: Mapping[str, str] = {
    "application": "The application is headrace's own; give your code as the stream's transform.",
    "application_args": "The arguments are headrace's own; give values as the stream's parameters.",
    "durable": "There is no application to attach to: a retry is a new attempt, which fences the one before.",
    "java_class": "The application is written in Python.",
    "py_files": "Give them to the stream: SparkSettings(py_files=…).",
    "reconnect_on_retry": "There is no application to attach to: a retry is a new attempt, which fences the one "
    "before.",
}
"""Refused in both ways; each with the remedy that the error names."""


class SubmitArgumentError(HeadraceError):
    """An argument of SparkSubmitOperator that would have no effect on a batch."""


def provider_arguments() -> frozenset[str]:
    """The names that the installed SparkSubmitOperator takes, without those of BaseOperator."""
    # Also of its own base classes: some versions take ``durable`` there alone.
    own = [vars(each) for each in SparkSubmitOperator.__mro__ if not issubclass(BaseOperator, each)]
    made = [names["__init__"] for names in own if "__init__" in names]
    parameters = [parameter for init in made for parameter in inspect.signature(init).parameters.values()]
    return frozenset(parameter.name for parameter in parameters if parameter.kind is inspect.Parameter.KEYWORD_ONLY)


def submit_options(given: Mapping[str, Any], *, way: str) -> dict[str, Any]:
    """Return the arguments for spark-submit among ``given``. The values None and False are always accepted and ignored.

    Raises:
        SubmitArgumentError: an argument has no effect in this way, or this version of headrace does not know it.
    """
    # An older provider passes some of the refused ones on without naming them.
    names = sorted(provider_arguments() | REFUSED.keys())
    asked = {name: given[name] for name in names if given.get(name) not in (None, False)}
    for name in asked:
        if name in REFUSED:
            raise SubmitArgumentError(f"A batch's operator does not take {name!r}.", remedy=REFUSED[name])
        if name not in PASSED_ON | BY_THE_PROVIDER:
            raise SubmitArgumentError(
                f"This version of headrace does not know what {name!r} of SparkSubmitOperator means for a batch.",
                remedy="Leave it out; SparkSettings(conf=…) of the stream may do the same.",
            )
        if way != "submit":
            raise SubmitArgumentError(
                f"{name!r} is for spark-submit, and with way={way!r} a batch runs in the receiver job's application.",
                remedy="Give way='submit', or set it in the stream's SparkSettings, for the receiver job too.",
            )
    return {name: value for name, value in asked.items() if name in PASSED_ON}
