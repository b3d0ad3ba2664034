"""The Airflow plugin of headrace, found by the entry point group ``airflow.plugins``.

Airflow loads this in the scheduler, the API server, the DAG processor, the triggerer and every task, so it imports only
what serialised DAGs need.
"""

from __future__ import annotations

from typing import Any

from airflow.plugins_manager import AirflowPlugin

from headrace.timetables.micro_batch import MicroBatchTimetable


class HeadracePlugin(AirflowPlugin):
    """Registers the timetable of micro-batches."""

    name = "headrace"
    timetables: list[Any] = [MicroBatchTimetable]  # noqa: RUF012 - as Airflow declares it
