"""Who may do what: the dependencies of all routes of the API.

A stream is visible to those who may read its batch DAG. If several DAGs declare themselves its batch DAG, they must be
allowed to read all of them. To everyone else the stream does not exist: 404, not 403, so that names do not leak.
An action needs the right to change the batch DAG's runs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, TypeVar

from fastapi import Depends, HTTPException, Path, Request

from headrace.ledger import Ledger
from headrace.monitoring.summary import Placed
from headrace.ui.api.airflow_side import AirflowSide, Caller
from headrace.ui.api.catalogue import Catalogue
from headrace.ui.api.ledgers import OpenLedgers

T = TypeVar("T")
_OWN = ("same-origin", "none")
SLOW_AT_ONCE = 8
"""How many requests that ask Kafka or Elasticsearch run at once. Each holds a thread for as long as that takes, of the
40 that the API server has for all of Airflow, its execution API too."""
_AGAIN_SECONDS = 5


async def known_caller(request: Request) -> Caller:
    """Return who calls; 401 if the caller is not logged in."""
    airflow: AirflowSide = request.app.state.airflow
    return await airflow.caller(request)


CallerDep = Annotated[Caller, Depends(known_caller)]


@dataclass(frozen=True, slots=True)
class KnownStream:
    """A stream that the caller may read."""

    place: Placed
    caller: Caller
    airflow: AirflowSide
    ledgers: OpenLedgers

    @property
    def name(self) -> str:
        """The stream's name."""
        return self.place.name

    def ask(self, question: Callable[[Ledger], T]) -> T:
        """Ask its ledger."""
        return self.ledgers.ask(self.place.ledger, question)

    @property
    def may_operate(self) -> bool:
        """Whether the caller may act on the stream."""
        return may_operate(self.airflow, self.caller, *self.place.batch_dag_ids)

    @property
    def not_operable(self) -> str:
        """Why the caller may not act on the stream, if they may not."""
        return f"{self.caller.name} may not change the DAG {' and '.join(self.place.batch_dag_ids)} and start its runs."


def may_operate(airflow: AirflowSide, caller: Caller, *dag_ids: str) -> bool:
    """Whether the caller may change each of the DAGs, and start its runs."""
    return all(
        airflow.may(caller, "PUT", dag_id) and airflow.may(caller, "POST", dag_id, runs=True) for dag_id in dag_ids
    )


def readable_stream(
    request: Request,
    caller: CallerDep,
    name: Annotated[str, Path(description="The stream's name.", examples=["orders"])],
) -> KnownStream:
    """Return the stream of the path; 404 if there is none, or the caller may not see it."""
    state = request.app.state
    airflow: AirflowSide = state.airflow
    catalogue: Catalogue = state.catalogue
    place = catalogue.find(name, lambda dag_id: airflow.may(caller, "GET", dag_id))
    if place is None:
        raise HTTPException(404, f"There is no stream {name!r}, or you may not read its batch DAG.")
    return KnownStream(place, caller, airflow, state.ledgers)


def operable_stream(stream: Annotated[KnownStream, Depends(readable_stream)]) -> KnownStream:
    """Return the stream of the path; 403 if the caller may read it and not act on it."""
    if not stream.may_operate:
        raise HTTPException(403, stream.not_operable)
    return stream


def refuse_forgery(request: Request) -> None:
    """Refuse a request that another site makes a browser send with the user's cookie.

    Airflow's cookie is SameSite=Lax, so a browser does not send it with a POST from another site. But a site is a
    domain with all of its hosts and ports. So a POST that is identified by the cookie is accepted under two conditions.
    Its content type is JSON: a form cannot send that, and a script of another origin can only if Airflow allows it
    (CORS; by default it does not). And if the browser says where the request comes from, that is this server's own
    page. A bearer token proves the intent by itself.

    Raises:
        HTTPException: 415 if its content is not JSON, 403 if it is from another site's page.
    """
    content = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content != "application/json":
        raise HTTPException(415, "Send the body as JSON, with Content-Type: application/json ({} if it is empty).")
    if request.headers.get("authorization", "").lower().startswith("bearer "):
        return
    if request.headers.get("sec-fetch-site", "same-origin").lower() not in _OWN:
        raise HTTPException(403, "The request comes from a page of another origin.")


def slow_request(request: Request) -> Iterator[None]:
    """Hold one of the places for requests that ask other servers than the ledger; 503 if all are taken."""
    places: threading.BoundedSemaphore = request.app.state.slow_requests
    if not places.acquire(blocking=False):
        raise HTTPException(
            503,
            f"As many requests that ask Kafka or Elasticsearch as may run at once are running: {SLOW_AT_ONCE}. Try "
            "again.",
            headers={"Retry-After": str(_AGAIN_SECONDS)},
        )
    try:
        yield
    finally:
        places.release()


StreamDep = Annotated[KnownStream, Depends(readable_stream)]
OperableDep = Annotated[KnownStream, Depends(operable_stream)]
SLOW = [Depends(slow_request)]
"""The dependencies of a route that asks Kafka or Elasticsearch."""
