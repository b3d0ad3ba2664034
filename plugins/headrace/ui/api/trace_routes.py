"""The route that traces one record of a stream, or searches for the records with a key."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Annotated, Any

from fastapi import APIRouter, HTTPException, Query, Request

from headrace.connections import CONNECTION_PREFIX
from headrace.stream import Stream
from headrace.stream_context import StreamContext
from headrace.trace.errors import UnknownRecordError
from headrace.trace.positions import Coordinates
from headrace.trace.trace import trace_document, trace_record
from headrace.ui.api import models
from headrace.ui.api.access import SLOW, KnownStream, StreamDep
from headrace.ui.api.key_searches import KeySearches
from headrace.ui.api.models.trace import Trace, search_answer, trace_answer

_ONE_OF = "Give topic, partition and offset; or document_id; or key."

traces = APIRouter(tags=["batches"])


_UNAVAILABLE: dict[int | str, dict[str, Any]] = {
    503: {"model": models.Error, "description": "The stream's ledger does not answer, or other searches are running."}
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
    given = [any(each is not None for each in coordinates), document_id is not None, key is not None]
    if sum(given) != 1:
        raise HTTPException(422, _ONE_OF)
    # The ledger is asked in this request's own thread: Kafka and Elasticsearch may take longer than a ledger may.
    ledger = stream.ask(lambda opened: opened)
    definition = stream.ask(lambda opened: opened.streams.get(stream.name).definition)
    context = StreamContext(Stream.from_json(definition), ledger)
    try:
        if key is not None:
            searches: KeySearches = request.app.state.key_searches
            return search_answer(searches.search(context, key.encode(), limit=limit))
        environ = _environ(stream, context.stream)
        if document_id is not None:
            return trace_answer(trace_document(context, document_id, environ=environ))
        if topic is None or partition is None or offset is None:
            raise HTTPException(422, _ONE_OF)
        asked = Coordinates(topic, partition, offset, incarnation)
        return trace_answer(trace_record(context, asked, input_id=input_id, environ=environ))
    except UnknownRecordError as error:
        raise HTTPException(404, str(error)) from error


def _environ(stream: KnownStream, definition: Stream) -> Mapping[str, str] | None:
    """The stream's connections as Airflow has them; one that it does not have is left out, and the trace says so."""
    found: dict[str, str] = {}
    for conn_id in definition.connection_ids:
        # Airflow raises errors of several kinds if it does not have a connection.
        with contextlib.suppress(Exception):
            found |= stream.airflow.environ(f"{CONNECTION_PREFIX}{conn_id}") or {}
    return found or None
