"""The routes that read streams: the list, one stream, its timeline, its events and gaps."""

from __future__ import annotations

from dataclasses import fields
from typing import Annotated, Any

from fastapi import APIRouter, HTTPException, Query, Request

from headrace.ledger.states import EventKind
from headrace.monitoring import history
from headrace.monitoring.stream_detail import stream_detail
from headrace.ui.api import models
from headrace.ui.api.access import CallerDep, StreamDep, may_operate
from headrace.ui.api.airflow_side import AirflowSide
from headrace.ui.api.catalogue import Catalogue, may_read
from headrace.ui.api.parameters import BeforeId, FromTime, UntilTime, optional_ms

streams = APIRouter(tags=["streams"])


@streams.get("/streams", summary="List the streams that you may read")
def list_streams(request: Request, caller: CallerDep) -> models.StreamList:
    """Each stream with its state and numbers, sorted by name. A ledger that does not answer is in ``problems``."""
    airflow: AirflowSide = request.app.state.airflow
    catalogue: Catalogue = request.app.state.catalogue
    known: dict[str, bool] = {}

    def readable(dag_id: str) -> bool:
        if dag_id not in known:
            known[dag_id] = airflow.may(caller, "GET", dag_id)
        return known[dag_id]

    found, problems = catalogue.summaries(readable)
    return models.StreamList(
        streams=tuple(
            models.StreamSummary.model_validate(
                shallow(each) | {"may": {"read": True, "operate": may_operate(airflow, caller, *each.batch_dag_ids)}}
            )
            for each in found
        ),
        problems=tuple(map(models.Problem.model_validate, problems)),
    )


@streams.get("/streams/{name}", summary="Show one stream")
def show_stream(stream: StreamDep) -> models.StreamDetail:
    """Its state and numbers, receiver job, receivers, partitions, and what holds its log."""
    place = stream.place
    facts = stream.airflow.facts((place.batch_dag_id, place.receiver_dag_id))
    found = stream.ask(lambda ledger: stream_detail(ledger, stream.name, place, facts))
    return models.StreamDetail.model_validate(
        shallow(found.summary) | shallow(found) | {"may": {"read": True, "operate": stream.may_operate}}
    )


@streams.get("/streams/{name}/timeline", summary="Show a stream's batches and samples over time")
def show_timeline(
    stream: StreamDep,
    from_time: FromTime = None,
    until: UntilTime = None,
    points: Annotated[int, Query(ge=10, le=1000, description="The largest number of batches, and of samples.")] = 200,
) -> models.Timeline:
    """By default the last ``points`` batch times. A longer range is thinned."""
    from_ms, until_ms = optional_ms(from_time, "from"), optional_ms(until, "until")
    if from_ms is not None and until_ms is not None and from_ms >= until_ms:
        raise HTTPException(422, "from has to be before until.")
    found = stream.ask(
        lambda ledger: history.timeline(ledger, stream.name, from_ms=from_ms, until_ms=until_ms, points=points)
    )
    return models.Timeline.model_validate(found)


@streams.get("/streams/{name}/events", summary="List a stream's events")
def list_events(
    stream: StreamDep,
    kind: Annotated[list[str] | None, Query(description="Only these kinds; may be repeated.")] = None,
    before_id: BeforeId = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
) -> models.EventPage:
    """Newest first. Events of blocks are left out unless their kind is asked for."""
    known = {each.value for each in EventKind}
    unknown = sorted(set(kind or ()) - known)
    if unknown:
        raise HTTPException(422, f"There is no kind {', '.join(unknown)}; there are {', '.join(sorted(known))}.")
    kinds = [EventKind(each) for each in kind or ()]
    found = stream.ask(lambda ledger: history.events(ledger, stream.name, kinds, before_id=before_id, limit=limit))
    return models.EventPage.model_validate(found)


@streams.get("/streams/{name}/gaps", summary="List a stream's gaps")
def list_gaps(
    stream: StreamDep,
    before_id: BeforeId = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
) -> models.GapPage:
    """Offsets that were given up, newest first."""
    found = stream.ask(lambda ledger: history.gaps(ledger, stream.name, before_id=before_id, limit=limit))
    return models.GapPage.model_validate(found)


@streams.get("/dags/{dag_id}", summary="Find the stream of a DAG, and the batch of a run")
def stream_of_dag(
    request: Request,
    caller: CallerDep,
    dag_id: str,
    run_id: Annotated[str | None, Query(description="A run of the DAG.")] = None,
) -> models.OfDag:
    """For the page inside Airflow's page of a DAG or of a run. 404 if the DAG is not of a stream."""
    airflow: AirflowSide = request.app.state.airflow
    catalogue: Catalogue = request.app.state.catalogue
    declared = catalogue.of_dag(dag_id)
    if (
        declared is None
        or not may_read(declared, lambda each: airflow.may(caller, "GET", each))
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
    return models.OfDag(stream=declared.name, batch_time_ms=batch_time_ms)


def shallow(value: Any) -> dict[str, Any]:
    """The fields of a dataclass, by name; not copied."""
    return {field.name: getattr(value, field.name) for field in fields(value)}
