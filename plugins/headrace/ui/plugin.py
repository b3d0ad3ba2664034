"""The Airflow plugin of headrace, found by the entry point group ``airflow.plugins``.

Airflow loads this in the scheduler, the API server, the DAG processor, the triggerer and every task, so it imports only
what serialised DAGs need.
"""

from __future__ import annotations

from typing import Any

from airflow.plugins_manager import AirflowPlugin

from headrace.timetables.micro_batch import MicroBatchTimetable
from headrace.ui.lazy_app import LazyApp

PREFIX = "/headrace"
"""The path of the page and the API on Airflow's server."""


_ICONS = {"icon": f"{PREFIX}/static/icon.svg", "icon_dark_mode": f"{PREFIX}/static/icon-dark.svg"}


class HeadracePlugin(AirflowPlugin):
    """Registers the timetable of micro-batches, and the page with its API."""

    name = "headrace"
    timetables: list[Any] = [MicroBatchTimetable]  # noqa: RUF012 - as Airflow declares it
    fastapi_apps: list[Any] = [  # noqa: RUF012
        {"app": LazyApp("headrace.ui.api.app:create_app"), "url_prefix": PREFIX, "name": "headrace"}
    ]
    external_views: list[Any] = [  # noqa: RUF012
        {
            "name": "Streams",
            "href": f"{PREFIX}/",
            "destination": "nav",
            "url_route": "headrace_streams",
            **_ICONS,
        },
        {
            "name": "Stream",
            "href": f"{PREFIX}/?dag_id={{DAG_ID}}",
            "destination": "dag",
            "url_route": "headrace_stream",
            **_ICONS,
        },
        {
            "name": "Batch",
            "href": f"{PREFIX}/?dag_id={{DAG_ID}}&run_id={{RUN_ID}}",
            "destination": "dag_run",
            "url_route": "headrace_batch",
            **_ICONS,
        },
    ]
