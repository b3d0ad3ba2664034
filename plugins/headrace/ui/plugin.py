"""The Airflow plugin of headrace, found by the entry point group ``airflow.plugins``.

Airflow loads this in the scheduler, the API server, the DAG processor, the triggerer and every task, so it imports only
what serialised DAGs need: the web application is made at the first request (`LazyApp`). The exception are processes
that fork others, see `_IMPORTED_AHEAD`.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import sys
from typing import Any

from airflow.plugins_manager import AirflowPlugin

from headrace.timetables.micro_batch import MicroBatchTimetable

PREFIX = "/headrace"
"""The path of the page and the API on Airflow's server."""


# What the tasks of a batch and the DAG files import, by the component that forks a process for each of these. These
# then have it: measured, 0.65 s of processor time a task, and 0.35 s a DAG file. A LocalExecutor's workers are forks of
# the scheduler.
_DAGS = ("headrace.dags",)
_TASKS = (
    *_DAGS,
    "headrace.batch.allocation",
    "headrace.batch.checkpoint",
    "headrace.batch.cleanup",
    "headrace.hooks.spark_submit",
)
_IMPORTED_AHEAD = {"scheduler": _TASKS, "celery": _TASKS, "dag-processor": _DAGS}

logger = logging.getLogger(__name__)

_ICONS = {"icon": f"{PREFIX}/static/icon.svg", "icon_dark_mode": f"{PREFIX}/static/icon-dark.svg"}


ROOT_APP = "headrace.root_app"
"""The key of the surrounding application in a request's scope."""


class LazyApp:
    """An ASGI application that makes the real one when it is first called."""

    def __init__(self, factory: str) -> None:
        """``factory``: "module:function", called without arguments."""
        self._factory = factory
        self._app: Any = None
        self._making: asyncio.Task[Any] | None = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if self._app is None:
            if self._making is None:
                # Importing takes a second: in a thread, so that Airflow answers other requests meanwhile.
                self._making = asyncio.create_task(asyncio.to_thread(self._make))
            making = self._making
            try:
                self._app = await asyncio.shield(making)
            finally:
                if making.done():
                    self._making = None
        # The application that this one is mounted in: Airflow's own, whose API carries out some actions.
        scope[ROOT_APP] = scope.get("app")
        await self._app(scope, receive, send)

    def _make(self) -> Any:
        module, _, name = self._factory.partition(":")
        return getattr(importlib.import_module(module), name)()


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

    @classmethod
    def on_load(cls, *_args: Any, **_kwargs: Any) -> None:
        """Import ahead what the processes need that this component forks. Called by Airflow."""
        component = sys.argv[1] if len(sys.argv) > 1 else ""
        for name in _IMPORTED_AHEAD.get(component, ()):
            try:
                importlib.import_module(name)
            except Exception:
                # Airflow would drop the plugin, and with it the timetable. The process that needs it reports the error.
                logger.warning("%s cannot be imported ahead of the %s's processes", name, component, exc_info=True)
                return
