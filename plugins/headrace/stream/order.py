"""Determines why a stream's batches must run one at a time, in the order of batch times (rule 6 of the design)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from headrace.stream.outputs import ColumnIds, ElasticsearchOutput, KeyIds

if TYPE_CHECKING:
    from headrace.stream.definition import Stream


def reasons_for_order(stream: Stream) -> Iterator[str]:
    """Yields a clause for each part of the stream that needs the order; none if every order gives the same result."""
    if stream.state is not None:
        yield "each batch starts from the state that the one before left"
    for output in stream.outputs:
        if output.window is not None:
            yield f"output {output.id!r} has a window over earlier batches"
        if not isinstance(output, ElasticsearchOutput):
            continue
        ids = output.document_ids
        if isinstance(ids, ColumnIds) and not ids.with_batch_time:
            yield f"output {output.id!r} replaces documents of earlier batches"
        if isinstance(ids, KeyIds) and output.tombstone_action == "delete":
            # Elasticsearch forgets a deleted document's version (index.gc_deletes, a minute by default). An older value
            # that is written after that would restore the document.
            yield f"output {output.id!r} deletes documents by key"
