"""Which of SparkSubmitOperator's parameters a batch's operator accepts: each is passed on to spark-submit, or refused.

With ``way="submit"`` a batch is its own application, and spark-submit's options configure it. With ``way="connect"`` it
runs in the receiver job's application, which exists already: an option that would configure an application has no
effect and is refused. What a stream declares for both of its applications is refused in either way.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from airflow.providers.apache.spark.operators.spark_submit import SparkSubmitOperator

from headrace.errors import HeadraceError

PASSED_ON = frozenset(
    {
        "archives", "conf", "deploy_mode", "driver_class_path", "driver_memory", "env_vars", "exclude_packages",
        "executor_cores", "executor_memory", "files", "jars", "keytab", "name", "num_executors", "packages",
        "post_submit_commands", "principal", "properties_file", "proxy_user", "repositories", "spark_binary",
        "status_poll_interval", "total_executor_cores", "track_driver_via_k8s_api", "use_krb5ccache", "verbose",
        "yarn_queue", "yarn_rm_auth", "yarn_track_via_rm_api",
    }
)  # fmt: skip
"""Passed on to the hook with ``way="submit"``."""

BY_THE_PROVIDER = frozenset({"openlineage_inject_parent_job_info", "openlineage_inject_transport_info"})
"""SparkSubmitOperator handles these itself, with ``way="submit"``."""

REFUSED: Mapping[str, str] = {
    "application": "The application is headrace's own; give your code as the stream's transform.",
    "application_args": "The arguments are headrace's own; give values as the stream's parameters.",
    "conn_id": "Give it to the stream: SparkSettings(connection=…).",
    "durable": "There is no application to take up again: a retry is a new attempt, which fences the one before.",
    "java_class": "The application is written in Python.",
    "py_files": "Give them to the stream: SparkSettings(py_files=…).",
    "reconnect_on_retry": "There is no application to take up again: a retry is a new attempt, which fences the one "
    "before.",
}
"""Refused in both ways; each with the remedy that the error names."""


class SubmitArgumentError(HeadraceError):
    """An argument of SparkSubmitOperator that would have no effect on a batch."""


def provider_arguments() -> frozenset[str]:
    """The names that the installed SparkSubmitOperator takes, without those of BaseOperator."""
    parameters = inspect.signature(SparkSubmitOperator.__init__).parameters.values()
    return frozenset(each.name for each in parameters if each.kind is inspect.Parameter.KEYWORD_ONLY)


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
                remedy="Give way='submit', or have the stream's SparkSettings say it, which the receiver job has too.",
            )
    return {name: value for name, value in asked.items() if name in PASSED_ON}
