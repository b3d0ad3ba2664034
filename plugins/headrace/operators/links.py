"""Links on a task's page in Airflow."""

from __future__ import annotations

import ipaddress
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from airflow.configuration import conf
from airflow.sdk import BaseOperatorLink

if TYPE_CHECKING:
    from airflow.sdk import BaseOperator
    from airflow.sdk.types import TaskInstanceKey


class SparkUiLink(BaseOperatorLink):
    """A link to the user interface of the Spark application that the task runs or uses."""

    name = "Spark UI"

    def get_link(self, operator: BaseOperator, *, ti_key: TaskInstanceKey) -> str:  # noqa: ARG002 - Airflow's signature
        """Called in the task when it ends; Airflow stores the result as an XCom."""
        return browser_link(getattr(operator, "spark_ui_url", None))


def browser_link(ui_url: str | None) -> str:
    """The address of Spark's user interface as a link; "" if a browser cannot reach it.

    With a local master the interface listens on loopback, since it has no password protection. If Airflow's pages
    (``[api] base_url``) are not on a loopback address, the browser may be on another machine, where the link would lead
    to that machine itself.
    """
    airflow_url = conf.get("api", "base_url", fallback=None)
    if not ui_url or (_is_loopback(ui_url) and airflow_url and not _is_loopback(airflow_url)):
        return ""
    return ui_url


def _is_loopback(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
