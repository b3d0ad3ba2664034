"""The web application below ``/headrace``: the page's files, the API that it and other programs use, and the metrics.

``GET /headrace/metrics`` is for Prometheus. A scraper sends ``Authorization: Bearer <token>`` with the token of
``[headrace] metrics_token``, and gets all streams. Anyone else needs Airflow's login, and gets the streams whose batch
DAG they may read.
"""

from __future__ import annotations

import hmac
import json
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Depends, FastAPI, HTTPException, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import FileResponse
from fastapi.staticfiles import StaticFiles

from headrace import __version__
from headrace.ui.api.actions import reads, writes
from headrace.ui.api.airflow_side import AirflowSide, Caller
from headrace.ui.api.catalogue import SECONDS, Catalogue, OpenLedgers, may_read, undeclared
from headrace.ui.api.read_routes import batches, streams, traces
from headrace.ui.api.requests import RESPONSES, SLOW_AT_ONCE, KeySearches, add_error_handlers, known_caller
from headrace.views.metrics import render

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
    """An example of each answer, by the name of its class."""
    answers: dict[str, Any] = json.loads(Path(__file__).with_name("examples.json").read_text(encoding="utf-8"))
    return answers


def _add_examples(app: FastAPI) -> None:
    """Let the application's document have the examples.

    They are not written into the models: FastAPI leaves out all nulls of a document, also those of an example.
    """
    without: Callable[[], dict[str, Any]] = app.openapi

    def document() -> dict[str, Any]:
        described = without()
        for name, example in examples().items():
            described["components"]["schemas"][name]["examples"] = [example]
        return described

    app.openapi = document  # type: ignore[method-assign]


_BEARER = "bearer "
_EXAMPLE = """\
# HELP headrace_ledger_up 1 if the ledger answered this scrape, else 0.
# TYPE headrace_ledger_up gauge
headrace_ledger_up{ledger="connection:headrace_ledger"} 1.0
"""


def metrics_router(airflow: AirflowSide, ledgers: OpenLedgers) -> APIRouter:
    """Make the router, over the server's open ledgers."""
    router = APIRouter()

    @router.get(
        "/metrics",
        summary="The metrics of all streams, for Prometheus",
        response_class=Response,
        responses={200: {"content": {"text/plain": {"example": _EXAMPLE}}}},
    )
    async def metrics(request: Request) -> Response:
        scraper = is_scraper(request.headers.get("authorization"), airflow.metrics_token())
        caller = None if scraper else await airflow.caller(request)
        accept = request.headers.get("accept", "")
        body, content_type = await run_in_threadpool(render_metrics, airflow, ledgers, caller, accept)
        # What a caller gets depends on their rights.
        return Response(body, media_type=content_type, headers={"Cache-Control": "no-store"})

    return router


def is_scraper(authorization: str | None, metrics_token: str) -> bool:
    """Whether the header has the scrapers' token. The comparison takes the same time wherever they differ."""
    if not metrics_token or authorization is None or not authorization.lower().startswith(_BEARER):
        return False
    given = authorization[len(_BEARER) :].strip()
    return hmac.compare_digest(given.encode(), metrics_token.encode())


def render_metrics(airflow: AirflowSide, ledgers: OpenLedgers, caller: Caller | None, accept: str) -> tuple[bytes, str]:
    """Return the exposition of the streams that the caller may read (None: of all), and its content type."""
    deadline = ledgers.deadline()
    declared = airflow.declared()
    places = {(place.ledger, place.name): place for place in declared}

    def shown(ledger: str, stream_name: str) -> bool:
        if caller is None:
            return True
        place = places.get((ledger, stream_name)) or undeclared(stream_name, ledger, declared)
        return may_read(place, lambda dag_id: airflow.may(caller, "GET", dag_id))

    references = list(dict.fromkeys([*(place.ledger for place in declared), *airflow.ledgers()]))
    # All at the same time: one that is silent does not delay the others.
    begun = {
        reference: ledgers.submit(reference, lambda ledger: ledger.overviews.numbers()) for reference in references
    }
    return render(
        references,
        read=lambda reference: ledgers.answer(reference, begun[reference], deadline),
        accept=accept,
        may_read=shown,
        declared=places,
        shows_ledger=lambda ledger: caller is None or any(shown(*place) for place in places if place[0] == ledger),
    )
