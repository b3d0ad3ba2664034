"""What the API's routes share: who may do what, how parameters are read, and which answer an error becomes.

A stream is visible to those who may read its batch DAG. If several DAGs declare themselves its batch DAG, they must be
allowed to read all of them. To everyone else the stream does not exist: 404, not 403, so that names do not leak.
An action needs the right to change the batch DAG's runs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from fastapi import Depends, FastAPI, HTTPException, Path, Query, Request
from fastapi.responses import JSONResponse

from headrace.clock import parse_time
from headrace.connections import ConnectionNotFoundError
from headrace.errors import HeadraceError
from headrace.ledger import Ledger
from headrace.ledger.errors import (
    BatchNotFoundError,
    BatchStateError,
    LedgerConflictError,
    LedgerUnavailableError,
    LedgerUrlError,
    SchemaError,
    StreamNotFoundError,
)
from headrace.ledger.timelines import Place
from headrace.stream_context import StreamContext
from headrace.ui.api.airflow_side import AirflowSide, Caller
from headrace.ui.api.catalogue import Catalogue, LedgerSilentError, OpenLedgers
from headrace.views.base import View
from headrace.views.streams import Placed
from headrace.views.trace_records import search_key
from headrace.views.traced import KeySearch

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


MAX_ID = 2**63 - 1
"""The largest number of the ledger's columns."""
# The years 1653 to 9998: what is reckoned from a time, such as the start of its interval, is in the calendar too.
_FIRST_MS, _LAST_MS = -10_000_000_000_000, 253_370_764_800_000

FromTime = Annotated[
    str | None, Query(alias="from", description="The first batch time.", examples=["2026-11-23T06:00:00Z"])
]
UntilTime = Annotated[str | None, Query(description="The first batch time that is left out.")]
BeforeId = Annotated[int | None, Query(ge=1, le=MAX_ID, description="The ``next_before_id`` of the page before.")]
BatchTime = Annotated[str, Path(description="ISO 8601, or epoch milliseconds.", examples=["2026-11-23T06:30:00.000Z"])]


def time_ms(text: str, name: str) -> int:
    """Epoch milliseconds of an ISO 8601 time (UTC if it names no zone) or of a number; 422 if it is neither, or far
    outside of the times of batches."""
    try:
        parsed_ms = int(text) if text.isascii() and text.isdigit() and len(text) <= 15 else _of_iso(text)
    except (ValueError, OverflowError):
        raise HTTPException(422, f"{name} is neither ISO 8601 nor epoch milliseconds: {text[:100]!r}.") from None
    if not _FIRST_MS <= parsed_ms <= _LAST_MS:
        raise HTTPException(422, f"{name} is outside the years 1653 to 9998: {text!r}.")
    return parsed_ms


def _of_iso(text: str) -> int:
    # A "+" that was not encoded arrives as a space.
    return parse_time(text.replace(" 0", "+0") if text.count(":") > 2 else text)


def optional_ms(text: str | None, name: str) -> int | None:
    """`time_ms`, or None."""
    return None if text is None else time_ms(text, name)


def cursor_of(place: Place | None) -> str | None:
    """The place where a page ended, as text."""
    if place is None:
        return None
    return str(place.batch_time_ms) if place.value is None else f"{place.value}.{place.batch_time_ms}"


def place_of(cursor: str | None) -> Place | None:
    """The reverse of `cursor_of`; 422 if it is no cursor."""
    if cursor is None:
        return None
    value, _, time = cursor.rpartition(".")
    try:
        place = Place(int(time), int(value) if value else None)
    except ValueError:
        place = None
    if place is None or abs(place.batch_time_ms) > MAX_ID or abs(place.value or 0) > MAX_ID:
        raise HTTPException(422, f"{cursor[:100]!r} is no cursor: pass the next_cursor of a page.")
    return place


MAX_SEARCHED = 200_000
"""The most records that a search reads: a person waits for the answer. The command searches more."""
SECONDS = 15.0
"""How long a search takes. It ends at the end of a block, and the answer has what was found until then."""
AT_ONCE = 2
"""How many searches run at once: each decompresses and scans blocks as fast as it can."""


class SearchesBusyError(HeadraceError):
    """Too many searches for keys are running."""


class KeySearches:
    """Runs searches in the threads of those who call. Safe across threads."""

    def __init__(self, *, seconds: float = SECONDS, at_once: int = AT_ONCE) -> None:
        self._seconds = seconds
        self._at_once = at_once
        self._slots = threading.BoundedSemaphore(at_once)

    def search(self, context: StreamContext, key: bytes, *, limit: int) -> KeySearch:
        """Search the log for records with the key, newest first.

        Raises:
            SearchesBusyError: as many searches as may run at once are running.
        """
        if not self._slots.acquire(blocking=False):
            raise SearchesBusyError(
                f"As many searches for keys as may run at once in this API server are running: {self._at_once}.",
                remedy=f"Try again: each ends within {self._seconds:g} s. Or run `headrace trace NAME --key KEY`.",
            )
        try:
            return search_key(context, key, limit=limit, max_records=MAX_SEARCHED, max_seconds=self._seconds)
        finally:
            self._slots.release()


class Error(View):
    """An error: what happened, and what to do."""

    detail: str
    remedy: str | None = None


_STATUSES: tuple[tuple[type[HeadraceError], int], ...] = (
    (StreamNotFoundError, 404),
    (BatchNotFoundError, 404),
    (BatchStateError, 409),
    (LedgerConflictError, 409),
    (LedgerSilentError, 503),
    (SearchesBusyError, 503),
    (LedgerUnavailableError, 503),
    (SchemaError, 503),
    (LedgerUrlError, 503),
    (ConnectionNotFoundError, 503),
)

RESPONSES: dict[int | str, dict[str, Any]] = {
    401: {"model": Error, "description": "Not logged in."},
    404: {"model": Error, "description": "There is no such stream or batch, or you may not read it."},
    503: {"model": Error, "description": "The stream's ledger does not answer."},
}
ACTION_RESPONSES: dict[int | str, dict[str, Any]] = {
    **RESPONSES,
    403: {"model": Error, "description": "You may read the stream, and not act on it."},
    409: {"model": Error, "description": "The action is refused; the preview says why."},
    415: {"model": Error, "description": "The body is not JSON."},
}


def add_error_handlers(app: FastAPI) -> None:
    """Let errors of headrace become answers. Any other error is a 500, and in the server's log."""

    @app.exception_handler(HeadraceError)
    async def answer(_request: Request, error: HeadraceError) -> JSONResponse:
        status = next((code for kind, code in _STATUSES if isinstance(error, kind)), 502)
        again = {"Retry-After": "15"} if isinstance(error, SearchesBusyError) else None
        return JSONResponse({"detail": error.what, "remedy": error.remedy}, status_code=status, headers=again)
