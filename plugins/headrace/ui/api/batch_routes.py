"""The routes that read batches: pages of them, and one in detail."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated
from urllib.parse import quote

from fastapi import APIRouter, HTTPException, Query, Request

from headrace.ledger import Ledger
from headrace.ledger.states import BatchState
from headrace.ledger.timelines import BatchOrder, BatchRange, Page
from headrace.monitoring.batch_detail import Attempt, BatchDetail, batch_detail
from headrace.monitoring.batch_lines import batch_line
from headrace.monitoring.unfinished import last_error
from headrace.ui.api import models
from headrace.ui.api.access import KnownStream, StreamDep
from headrace.ui.api.airflow_side import Run
from headrace.ui.api.parameters import (
    BatchTime,
    FromTime,
    UntilTime,
    cursor_of,
    optional_ms,
    place_of,
    time_ms,
)
from headrace.ui.api.stream_routes import shallow

batches = APIRouter(tags=["batches"])


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
) -> models.BatchPage:
    """In one of several orders. Orders other than by time sort the newest 10,000 batches of the range."""
    after = place_of(cursor)
    if after is not None and (after.value is None) is not order.by_time:
        raise HTTPException(422, "The cursor is of another order: begin again without it.")
    wanted = BatchRange(tuple(state or ()), optional_ms(from_time, "from"), optional_ms(until, "until"), folded)

    def read(ledger: Ledger) -> tuple[Page, list[str | None], dict[str, int]]:
        page = ledger.batch_pages.page(stream.name, wanted, order, limit, after)
        return page, [last_error(ledger, row) for row in page.rows], ledger.batch_pages.counts(stream.name)

    page, errors, counts = stream.ask(read)
    lines = [batch_line(row, error=error) for row, error in zip(page.rows, errors, strict=True)]
    return models.BatchPage(
        batches=tuple(map(models.BatchLine.model_validate, lines)),
        next_cursor=cursor_of(page.after),
        total_by_state=counts,
        window=page.window,
    )


@batches.get("/streams/{name}/batches/{batch_time}", summary="Show one batch")
def show_batch(request: Request, stream: StreamDep, batch_time: BatchTime) -> models.BatchDetail:
    """What it holds, its attempts, the result of each output, and links to its run, logs and Spark's pages."""
    batch_time_ms = time_ms(batch_time, "batch_time")
    found = stream.ask(lambda ledger: batch_detail(ledger, stream.name, batch_time_ms))
    links = _links(request, stream, found, batch_time_ms)
    attempts = tuple(
        models.Attempt.model_validate(shallow(each) | {"links": _attempt_links(request, stream, each)})
        for each in found.all_attempts
    )
    return models.BatchDetail.model_validate(
        shallow(found.line) | shallow(found) | {"links": links, "all_attempts": attempts}
    )


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


def _links(request: Request, stream: KnownStream, batch: BatchDetail, batch_time_ms: int) -> models.Links:
    """Of the newest attempt; without one, of the run whose interval ends at the batch time."""
    run = own_run(stream, batch_time_ms, batch.run_ids)
    own = [each for each in batch.all_attempts if each.target is None]
    grid = f"{_root(request)}/dags/{quote(stream.place.batch_dag_id)}"
    if run is None:
        return models.Links(grid=grid, spark_ui=own[-1].spark_ui if own else None)
    address = f"{grid}/runs/{quote(run.run_id, safe='')}"
    return models.Links(run=address, logs=_logs(address, own), spark_ui=own[-1].spark_ui if own else None, grid=grid)


def _attempt_links(request: Request, stream: KnownStream, attempt: Attempt) -> models.Links:
    if attempt.run_id is None or attempt.target is not None:
        return models.Links(spark_ui=attempt.spark_ui)
    address = f"{_root(request)}/dags/{quote(stream.place.batch_dag_id)}/runs/{quote(attempt.run_id, safe='')}"
    return models.Links(run=address, logs=_logs(address, [attempt]), spark_ui=attempt.spark_ui)


def _logs(run: str, attempts: list[Attempt]) -> str | None:
    """The page of the task that ran the newest attempt; the run's own page does not name it."""
    outputs = attempts[-1].outputs if attempts else ()
    return f"{run}/tasks/generate_batch.{quote(outputs[0])}" if len(outputs) == 1 else run


def _root(request: Request) -> str:
    """The path of Airflow's own pages: what is before ``/headrace`` in this application's."""
    return str(request.scope.get("root_path", "")).rpartition("/headrace")[0]
