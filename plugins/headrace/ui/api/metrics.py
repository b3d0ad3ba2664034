"""``GET /headrace/metrics``: the metrics of all streams, for Prometheus.

A scraper sends ``Authorization: Bearer <token>`` with the token of ``[headrace] metrics_token``, and gets all streams.
Anyone else needs Airflow's login, and gets the streams whose batch DAG they may read.
"""

from __future__ import annotations

import hmac

from fastapi import APIRouter, Request, Response
from fastapi.concurrency import run_in_threadpool

from headrace.metrics.exposition import render
from headrace.ui.api.airflow_side import AirflowSide, Caller
from headrace.ui.api.catalogue import may_read, undeclared
from headrace.ui.api.ledgers import OpenLedgers

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
    places = {(each.ledger, each.name): each for each in declared}

    def shown(ledger: str, stream_name: str) -> bool:
        if caller is None:
            return True
        place = places.get((ledger, stream_name)) or undeclared(stream_name, ledger, declared)
        return may_read(place, lambda dag_id: airflow.may(caller, "GET", dag_id))

    references = list(dict.fromkeys([*(each.ledger for each in declared), *airflow.ledgers()]))
    # All at the same time: one that is silent does not delay the others.
    begun = {each: ledgers.submit(each, lambda ledger: ledger.overviews.numbers()) for each in references}
    return render(
        references,
        read=lambda each: ledgers.answer(each, begun[each], deadline),
        accept=accept,
        may_read=shown,
        declared=places,
        shows_ledger=lambda ledger: caller is None or any(shown(*place) for place in places if place[0] == ledger),
    )
