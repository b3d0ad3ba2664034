"""The web application of headrace, made at the first request.

Airflow loads the plugin in every process, also in each task, but only the API server gets requests. So FastAPI, the
ledger and what they import cost nothing elsewhere.
"""

from __future__ import annotations

import asyncio
import importlib
from typing import Any

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
