"""Links on a task's page in Airflow."""

from __future__ import annotations

from typing import TYPE_CHECKING

from airflow.sdk import BaseOperatorLink

if TYPE_CHECKING:
    from airflow.sdk import BaseOperator
    from airflow.sdk.types import TaskInstanceKey


class SparkUiLink(BaseOperatorLink):
    """To the user interface of the Spark application that the task runs or uses."""

    name = "Spark UI"

    def get_link(self, operator: BaseOperator, *, ti_key: TaskInstanceKey) -> str:  # noqa: ARG002 - Airflow's signature
        """Called in the task when it ends; Airflow keeps the answer as an XCom."""
        return getattr(operator, "spark_ui_url", None) or ""
