"""The web application below ``/headrace``: the page's files, and the API that it and other programs use."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from fastapi import Depends, FastAPI, HTTPException, Request
from fastapi.responses import FileResponse, Response
from fastapi.staticfiles import StaticFiles

from headrace import __version__
from headrace.ui.api.access import SLOW_AT_ONCE, known_caller
from headrace.ui.api.action_routes import reads, writes
from headrace.ui.api.airflow_side import AirflowSide
from headrace.ui.api.batch_routes import batches
from headrace.ui.api.catalogue import Catalogue
from headrace.ui.api.errors import RESPONSES, add_error_handlers
from headrace.ui.api.key_searches import KeySearches
from headrace.ui.api.ledgers import SECONDS, OpenLedgers
from headrace.ui.api.metrics import metrics_router
from headrace.ui.api.stream_routes import streams
from headrace.ui.api.trace_routes import traces

logger = logging.getLogger(__name__)

PAGE = Path(__file__).parents[1] / "page"
API = "/api/v1"
_DESCRIPTION = """\
The streams of headrace: their state, batches and events, and what an operator does with them.

Every route needs Airflow's login: the cookie of its pages, or `Authorization: Bearer <token>` with a token of
`POST /auth/token`. A stream is visible to those who may read its batch DAG. An action needs the right to change that
DAG. A POST needs `Content-Type: application/json`.
"""
# The page loads nothing from elsewhere, and nobody else's page may frame it. Scripts set styles by properties (CSSOM),
# which the policy allows; <style> and the attribute "style" in HTML are refused.
_PAGE_POLICY = (
    "default-src 'self'; img-src 'self' data:; style-src 'self'; object-src 'none'; "
    "base-uri 'self'; form-action 'self'; frame-ancestors 'self'"
)


def create_app(airflow: AirflowSide | None = None, *, ledger_seconds: float = SECONDS) -> FastAPI:
    """Make the application; by default for the Airflow whose API server this process is.

    ``ledger_seconds``: how long a ledger has to answer.
    """
    if airflow is None:
        from headrace.ui.api.airflow_server import AirflowServer

        airflow = AirflowServer()
    app = FastAPI(
        title="headrace",
        version=__version__,
        description=_DESCRIPTION,
        openapi_url="/api/openapi.json",
        # FastAPI's pages of the document load scripts from elsewhere.
        docs_url=None,
        redoc_url=None,
    )
    app.state.airflow = airflow
    app.state.ledgers = OpenLedgers(airflow.environ, seconds=ledger_seconds)
    app.state.catalogue = Catalogue(airflow, app.state.ledgers)
    app.state.key_searches = KeySearches()
    app.state.slow_requests = threading.BoundedSemaphore(SLOW_AT_ONCE)
    for router in (streams, batches, traces, reads, writes):
        # Beside what each route asks for: no route is open by accident.
        app.include_router(router, prefix=API, dependencies=[Depends(known_caller)], responses=RESPONSES)
    add_error_handlers(app)
    app.include_router(metrics_router(airflow, app.state.ledgers))
    _add_examples(app)
    _add_page(app)
    _add_headers(app)
    return app


def _add_page(app: FastAPI) -> None:
    """The page's files are open, as Airflow's own are: they hold no data."""
    app.mount("/static", StaticFiles(directory=PAGE / "static"), name="static")

    @app.get("/", include_in_schema=False)
    def page() -> FileResponse:
        if not (PAGE / "index.html").exists():
            raise HTTPException(404, "This installation of headrace has no page, only the API.")
        return FileResponse(PAGE / "index.html", headers={"Content-Security-Policy": _PAGE_POLICY})


def _add_headers(app: FastAPI) -> None:
    @app.middleware("http")
    async def headers(request: Request, call_next: Any) -> Response:
        response: Response = await call_next(request)
        response.headers.setdefault("X-Content-Type-Options", "nosniff")
        response.headers.setdefault("Referrer-Policy", "same-origin")
        response.headers.setdefault("X-Frame-Options", "SAMEORIGIN")
        if "/api/v" in request.url.path:
            # The answers depend on who asks.
            response.headers.setdefault("Cache-Control", "no-store")
        elif "/static/" in request.url.path or request.url.path.endswith("/"):
            # With an ETag: a new version of headrace is seen at once.
            response.headers.setdefault("Cache-Control", "no-cache")
        return response


@cache
def examples() -> dict[str, Any]:
    """An example of each answer, by the name of its model in `headrace.ui.api.models`."""
    found: dict[str, Any] = json.loads(Path(__file__).with_name("examples.json").read_text(encoding="utf-8"))
    return found


def _add_examples(app: FastAPI) -> None:
    """Let the application's document have the examples.

    They are not written into the models: FastAPI leaves out all nulls of a document, also those of an example.
    """
    without: Callable[[], dict[str, Any]] = app.openapi

    def document() -> dict[str, Any]:
        found = without()
        for name, example in examples().items():
            found["components"]["schemas"][name]["examples"] = [example]
        return found

    app.openapi = document  # type: ignore[method-assign]
