"""The route that traces one record of a stream, or searches for the records with a key."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Annotated

from fastapi import APIRouter, HTTPException, Query

from headrace.connections import CONNECTION_PREFIX
from headrace.stream import Stream
from headrace.stream_context import StreamContext
from headrace.trace.errors import UnknownRecordError
from headrace.trace.key_search import search_key
from headrace.trace.positions import Coordinates
from headrace.trace.trace import trace_document, trace_record
from headrace.ui.api.access import KnownStream, StreamDep
from headrace.ui.api.models.trace import Trace, search_answer, trace_answer

MAX_SEARCHED = 200_000
"""How many records a search for a key looks at: a person waits for the answer. The command searches more."""
_ONE_OF = "Give topic, partition and offset; or document_id; or key."

traces = APIRouter(tags=["batches"])


@traces.get("/streams/{name}/trace", summary="Trace one record, or find records by their key")
def show_trace(
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
    key looks at up to 200,000 records that are in the log, newest first. 404: the stream has no such record.
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
            return search_answer(search_key(context, key.encode(), limit=limit, max_records=MAX_SEARCHED))
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
