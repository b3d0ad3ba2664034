"""The routes that read: streams and their history, batches, and the trace of a record."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any
from urllib.parse import quote

from fastapi import APIRouter, HTTPException, Query, Request

from headrace.ledger import Ledger
from headrace.ledger.states import BatchState, EventKind
from headrace.ledger.timelines import BatchOrder, BatchSelection
from headrace.stream import Stream
from headrace.stream_context import StreamContext
from headrace.ui.api.airflow_side import AirflowSide, Run
from headrace.ui.api.catalogue import Catalogue, may_read
from headrace.ui.api.requests import (
    SLOW,
    BatchTime,
    BeforeId,
    CallerDep,
    Error,
    FromTime,
    KeySearches,
    KnownStream,
    StreamDep,
    UntilTime,
    cursor_of,
    may_operate,
    optional_ms,
    place_of,
    time_ms,
)
from headrace.views import history
from headrace.views.batch_detail import Attempt, BatchDetail, Links, batch_detail
from headrace.views.batches import BatchPage, batch_lines
from headrace.views.history import EventPage, GapPage, Timeline
from headrace.views.streams import May, OfDag, StreamDetail, StreamList, stream_detail
from headrace.views.trace import trace_document, trace_record
from headrace.views.trace_location import Coordinates
from headrace.views.traced import Trace, UnknownRecordError

streams = APIRouter(tags=["streams"])
batches = APIRouter(tags=["batches"])


@streams.get("/streams", summary="List the streams that you may read")
def list_streams(request: Request, caller: CallerDep) -> StreamList:
    """Each stream with its state and numbers, sorted by name. A ledger that does not answer is in ``problems``."""
    airflow: AirflowSide = request.app.state.airflow
    catalogue: Catalogue = request.app.state.catalogue
    known: dict[str, bool] = {}

    def readable(dag_id: str) -> bool:
        if dag_id not in known:
            known[dag_id] = airflow.may(caller, "GET", dag_id)
        return known[dag_id]

    summaries, problems = catalogue.summaries(readable)
    return StreamList(
        streams=tuple(
            stream.model_copy(update=_may(may_operate(airflow, caller, *stream.place.batch_dag_ids)))
            for stream in summaries
        ),
        problems=tuple(problems),
    )


@streams.get("/streams/{name}", summary="Show one stream")
def show_stream(stream: StreamDep) -> StreamDetail:
    """Its state and numbers, receiver job, receivers, partitions, and what holds its log."""
    place = stream.place
    facts = stream.airflow.facts((place.batch_dag_id, place.receiver_dag_id))
    detail = stream.ask(lambda ledger: stream_detail(ledger, stream.name, place, facts))
    return detail.model_copy(update=_may(stream.may_operate))


@streams.get("/streams/{name}/timeline", summary="Show a stream's batches and samples over time")
def show_timeline(
    stream: StreamDep,
    from_time: FromTime = None,
    until: UntilTime = None,
    points: Annotated[int, Query(ge=10, le=1000, description="The largest number of batches, and of samples.")] = 200,
) -> Timeline:
    """By default the last ``points`` batch times. A longer range is thinned."""
    from_ms, until_ms = optional_ms(from_time, "from"), optional_ms(until, "until")
    if from_ms is not None and until_ms is not None and from_ms >= until_ms:
        raise HTTPException(422, "from has to be before until.")
    return stream.ask(
        lambda ledger: history.timeline(ledger, stream.name, from_ms=from_ms, until_ms=until_ms, points=points)
    )


@streams.get("/streams/{name}/events", summary="List a stream's events")
def list_events(
    stream: StreamDep,
    kind: Annotated[list[str] | None, Query(description="Only these kinds; may be repeated.")] = None,
    before_id: BeforeId = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
) -> EventPage:
    """Newest first. Events of blocks are left out unless their kind is asked for."""
    known = {member.value for member in EventKind}
    unknown = sorted(set(kind or ()) - known)
    if unknown:
        raise HTTPException(422, f"There is no kind {', '.join(unknown)}; there are {', '.join(sorted(known))}.")
    kinds = [EventKind(name) for name in kind or ()]
    return stream.ask(lambda ledger: history.events(ledger, stream.name, kinds, before_id=before_id, limit=limit))


@streams.get("/streams/{name}/gaps", summary="List a stream's gaps")
def list_gaps(
    stream: StreamDep,
    before_id: BeforeId = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
) -> GapPage:
    """Offsets that were given up, newest first."""
    return stream.ask(lambda ledger: history.gaps(ledger, stream.name, before_id=before_id, limit=limit))


@streams.get("/dags/{dag_id}", summary="Find the stream of a DAG, and the batch of a run")
def stream_of_dag(
    request: Request,
    caller: CallerDep,
    dag_id: str,
    run_id: Annotated[str | None, Query(description="A run of the DAG.")] = None,
) -> OfDag:
    """For the page inside Airflow's page of a DAG or of a run. 404 if the DAG is not of a stream."""
    airflow: AirflowSide = request.app.state.airflow
    catalogue: Catalogue = request.app.state.catalogue
    declared = catalogue.of_dag(dag_id)
    if (
        declared is None
        or not may_read(declared, lambda batch_dag_id: airflow.may(caller, "GET", batch_dag_id))
        or not airflow.may(caller, "GET", dag_id)
    ):
        raise HTTPException(404, f"The DAG {dag_id!r} is not of a stream, or you may not read it.")
    batch_time_ms = None
    if run_id is not None and dag_id != declared.receiver_dag_id:
        ended_ms = airflow.batch_time_of(dag_id, run_id)
        batch_time_ms = request.app.state.ledgers.ask(
            declared.ledger,
            lambda ledger: history.batch_of_run(ledger, declared.name, run_id, ended_ms),
        )
    return OfDag(stream=declared.name, batch_time_ms=batch_time_ms)


def _may(operate: bool) -> dict[str, May]:
    return {"may": May(read=True, operate=operate)}


@batches.get("/streams/{name}/batches", summary="List a stream's batches")
def list_batches(
    stream: StreamDep,
    *,
    state: Annotated[list[BatchState] | None, Query(description="Only these states; may be repeated.")] = None,
    from_time: FromTime = None,
    until: UntilTime = None,
    folded: Annotated[
        bool, Query(description="Without batch times that a later batch took over: its line names them.")
    ] = False,
    order: BatchOrder = BatchOrder.NEWEST,
    limit: Annotated[int, Query(ge=1, le=500)] = 50,
    cursor: Annotated[str | None, Query(description="The ``next_cursor`` of the page before.")] = None,
) -> BatchPage:
    """In one of several orders. Orders other than by time sort the newest 10,000 batches of the range."""
    after = place_of(cursor)
    if after is not None and (after.value is None) is not order.by_time:
        raise HTTPException(422, "The cursor is of another order: begin again without it.")
    wanted = BatchSelection(tuple(state or ()), optional_ms(from_time, "from"), optional_ms(until, "until"), folded)

    def read(ledger: Ledger) -> BatchPage:
        page = ledger.batch_pages.page(stream.name, wanted, order, limit, after)
        return BatchPage(
            batches=batch_lines(ledger, page.rows),
            next_cursor=cursor_of(page.after),
            total_by_state=ledger.batch_pages.counts(stream.name),
            window=page.window,
        )

    return stream.ask(read)


@batches.get("/streams/{name}/batches/{batch_time}", summary="Show one batch")
def show_batch(request: Request, stream: StreamDep, batch_time: BatchTime) -> BatchDetail:
    """What it holds, its attempts, the result of each output, and links to its run, logs and Spark's pages."""
    batch_time_ms = time_ms(batch_time, "batch_time")
    batch = stream.ask(lambda ledger: batch_detail(ledger, stream.name, batch_time_ms))
    attempts = tuple(
        attempt.model_copy(update={"links": _attempt_links(request, attempt)}) for attempt in batch.all_attempts
    )
    return batch.model_copy(update={"links": _links(request, stream, batch), "all_attempts": attempts})


def own_run(stream: KnownStream, batch_time_ms: int, run_ids: Sequence[str]) -> Run | None:
    """The existing run of a batch; None if there is none, or it was deleted.

    A run whose interval ends at the batch time is that of the batch only if the ledger did not assign it another one:
    a late run takes over other batch times.
    """
    dag_id = stream.place.batch_dag_id
    for run_id in run_ids:
        run = stream.airflow.run(dag_id, run_id)
        if run is not None:
            return run
    run = stream.airflow.run_ending(dag_id, batch_time_ms)
    if run is None:
        return None
    run_id = run.run_id
    assigned_ms = stream.ask(lambda ledger: ledger.runs.find(stream.name, run_id))
    return run if assigned_ms in (None, batch_time_ms) else None


def _links(request: Request, stream: KnownStream, batch: BatchDetail) -> Links:
    """To the batch's own run, and to the log and Spark's page of its newest attempt."""
    run = own_run(stream, batch.batch_time_ms, batch.run_ids)
    own = [attempt for attempt in batch.all_attempts if attempt.target is None]
    newest = _attempt_links(request, own[-1]) if own else Links()
    grid = f"{_root(request)}/dags/{quote(stream.place.batch_dag_id)}"
    if run is None:
        return Links(grid=grid, logs=newest.logs, spark_ui=newest.spark_ui)
    address = f"{grid}/runs/{quote(run.run_id, safe='')}"
    return Links(run=address, logs=newest.logs or _logs(address, own), spark_ui=newest.spark_ui, grid=grid)


# See `headrace.runs.batch_run.holder`.
_TASK = re.compile(r"airflow:(?P<dag>[^/]+)/(?P<run>.+)/(?P<task>[^/]+)/\d+")


def _attempt_links(request: Request, attempt: Attempt) -> Links:
    """Of the task that made it, which may be one of the repair, of a range or of a replay."""
    task = _TASK.fullmatch(attempt.holder)
    if task is None:
        return Links(spark_ui=attempt.spark_ui)
    dag, run, name = (quote(task[part], safe="") for part in ("dag", "run", "task"))
    address = f"{_root(request)}/dags/{dag}/runs/{run}"
    return Links(run=address, logs=f"{address}/tasks/{name}", spark_ui=attempt.spark_ui)


def _logs(run: str, attempts: list[Attempt]) -> str | None:
    """The page of the task that ran the newest attempt; the run's own page does not name it."""
    outputs = attempts[-1].outputs if attempts else ()
    return f"{run}/tasks/generate_batch.{quote(outputs[0])}" if len(outputs) == 1 else run


def _root(request: Request) -> str:
    """The path of Airflow's own pages: what is before ``/headrace`` in this application's."""
    return str(request.scope.get("root_path", "")).rpartition("/headrace")[0]


_ONE_OF = "Give topic, partition and offset; or document_id; or key."

traces = APIRouter(tags=["batches"])


_UNAVAILABLE: dict[int | str, dict[str, Any]] = {
    503: {"model": Error, "description": "The stream's ledger does not answer, or other searches are running."}
}


@traces.get(
    "/streams/{name}/trace",
    summary="Trace one record, or find records by their key",
    responses=_UNAVAILABLE,
    dependencies=SLOW,
)
def show_trace(
    request: Request,
    stream: StreamDep,
    *,
    topic: Annotated[str | None, Query(description="With partition and offset.")] = None,
    partition: Annotated[int | None, Query(ge=0, le=2**31 - 1)] = None,
    offset: Annotated[int | None, Query(ge=0, le=2**63 - 1)] = None,
    incarnation: Annotated[int | None, Query(ge=1, le=2**31 - 1, description="Of the topic.")] = None,
    input_id: Annotated[str | None, Query(alias="input", description="If several inputs have the topic.")] = None,
    document_id: Annotated[str | None, Query(min_length=1, max_length=512)] = None,
    key: Annotated[str | None, Query(min_length=1, max_length=10_000)] = None,
    limit: Annotated[int, Query(ge=1, le=100, description="With key: how many records.")] = 20,
) -> Trace:
    """Where the record is, each attempt at its batch, and what became of it in each output.

    Kafka and Elasticsearch are asked too. If one of them does not answer, the text in its place says so. A search for a
    key looks at up to 200,000 records that are in the log, newest first, for up to 15 seconds: ``complete`` and
    ``ended`` say how far it came. Two searches run at once, a third one is refused (503). 404: the stream has no such
    record.
    """
    coordinates = (topic, partition, offset)
    given = [any(coordinate is not None for coordinate in coordinates), document_id is not None, key is not None]
    if sum(given) != 1:
        raise HTTPException(422, _ONE_OF)
    # The ledger is asked in this request's own thread: Kafka and Elasticsearch may take longer than a ledger may.
    ledger = stream.ask(lambda opened: opened)
    definition = stream.ask(lambda opened: opened.streams.get(stream.name).definition)
    context = StreamContext(Stream.from_json(definition), ledger)
    try:
        if key is not None:
            searches: KeySearches = request.app.state.key_searches
            return Trace(search=searches.search(context, key.encode(), limit=limit))
        environ = _environ(stream, context.stream)
        if document_id is not None:
            return Trace(record=trace_document(context, document_id, environ=environ))
        if topic is None or partition is None or offset is None:
            raise HTTPException(422, _ONE_OF)
        asked = Coordinates(topic, partition, offset, incarnation)
        return Trace(record=trace_record(context, asked, input_id=input_id, environ=environ))
    except UnknownRecordError as error:
        raise HTTPException(404, str(error)) from error


def _environ(stream: KnownStream, definition: Stream) -> Mapping[str, str] | None:
    """The stream's connections as Airflow has them; one that it does not have is left out, and the trace says so."""
    environ: dict[str, str] = {}
    for conn_id in definition.connection_ids:
        # Airflow raises errors of several kinds if it does not have a connection.
        with contextlib.suppress(Exception):
            environ |= stream.airflow.connection(conn_id)
    return environ or None
