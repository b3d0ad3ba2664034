"""Asks Elasticsearch for one document by its id, and for the dead letters of one record."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from headrace.elasticsearch.options import IndexingOptions
from headrace.elasticsearch.transport import Cluster
from headrace.errors import HeadraceError
from headrace.stream import ElasticsearchOutput
from headrace.stream.outputs import KeyIds
from headrace.stream_context import StreamContext
from headrace.trace.errors import UnknownRecordError
from headrace.trace.location import locate
from headrace.trace.models import RecordPosition, TracedDocument, TracedLetter
from headrace.trace.positions import Coordinates
from headrace.trace.record_reader import RecordReader

if TYPE_CHECKING:
    from headrace.elasticsearch.administration import Administration

MAX_RETRY_SECONDS = 5.0
"""How long an unavailable Elasticsearch is waited for, for each output: a person waits for the answer."""
_REQUEST_SECONDS = 10.0
_MAX_LETTERS = 20
# A key is in one partition at a time; this many records are read to find which one.
_MAX_CANDIDATES = 100


class DocumentLookup:
    """Looks up the documents and dead letters of one output. ``output`` is the definition that wrote them.

    Every method raises ElasticsearchRefusedError or ElasticsearchUnavailableError.
    """

    def __init__(self, administration: Administration, output: ElasticsearchOutput, stream_name: str) -> None:
        self._administration = administration
        self._output = output
        self._stream_name = stream_name

    @classmethod
    @contextmanager
    def open(
        cls, output: ElasticsearchOutput, stream_name: str, environ: Mapping[str, str] | None = None
    ) -> Iterator[DocumentLookup]:
        """Open a client for the output's cluster. Raises the errors of its connection."""
        from headrace.elasticsearch.administration import Administration

        timeout = min(output.request_timeout_seconds, _REQUEST_SECONDS)
        with Administration.of(
            Cluster.of(output, environ), timeout_seconds=timeout, max_retry_seconds=MAX_RETRY_SECONDS
        ) as administration:
            yield cls(administration, output, stream_name)

    def document(self, index: str, id_: str) -> TracedDocument:
        """The document with this id; not ``found`` if there is none, or no index."""
        answer = self._administration.ask(
            f"Asking for document {id_!r}", index, lambda client: client.get(index=index, id=id_), missing_is_none=True
        )
        if answer is None:
            return TracedDocument(index, id_, found=False)
        return TracedDocument(answer["_index"], id_, True, answer.get("_version"), source=answer.get("_source"))

    def letters(self, position: RecordPosition, index: str) -> tuple[TracedLetter, ...]:
        """The dead letters of the record for this index or the output's, the newest batch first."""
        from headrace.elasticsearch.dead_letter_index import DeadLetterIndex, LetterFilter

        options = IndexingOptions.of(self._output, stream_name=self._stream_name, batch_time_ms=None)
        partition = position.partition
        wanted = LetterFilter(
            topic=partition.topic,
            partition=partition.partition,
            from_offset=position.offset,
            until_offset=position.offset,
            replayed=True,
        )
        letters = DeadLetterIndex(self._administration, options).find(wanted, _MAX_LETTERS, contents=False)
        return tuple(
            TracedLetter(
                self._output.dead_letters,
                letter.id,
                letter.reason.type,
                letter.reason.text,
                letter.fields.get("batch_time"),
                letter.fields.get("attempt"),
                letter.fields.get("replayed_at"),
            )
            for letter in letters
            if (letter.fields.get("incarnation") or 1) == partition.incarnation
            and letter.fields.get("index") in (None, index, self._output.index)
        )


def is_value(document: Any, value: bytes | None) -> bool | None:
    """Whether a document's contents are this value; None if the value is no JSON or the index stores no contents."""
    if document is None or value is None:
        return None
    try:
        return bool(json.loads(value) == document)
    except ValueError:
        return None


def record_of_document(
    context: StreamContext, document_id: str, environ: Mapping[str, str] | None = None
) -> Coordinates:
    """Find the record of a document whose id is the record's key, by the document's version, which is its offset.

    Raises:
        UnknownRecordError: there is no such document, or its version is not an offset.
        ElasticsearchUnavailableError, ElasticsearchRefusedError: the index cannot be asked.
    """
    outputs = [
        output
        for output in context.stream.outputs
        if isinstance(output, ElasticsearchOutput) and isinstance(output.document_ids, KeyIds)
    ]
    tried = []
    for output in outputs:
        if isinstance(output.document_ids, KeyIds) and output.document_ids.version_from is not None:
            tried.append(f"the versions in {output.index} are those of {output.document_ids.version_from!r}")
            continue
        with DocumentLookup.open(output, context.name, environ) as lookup:
            document = lookup.document(output.index, document_id)
        if document.version is None:
            tried.append(f"{output.index} has no document {document_id!r}")
            continue
        found = _with_key(context, document_id.encode(), document.version, environ)
        if found is not None:
            return found
        tried.append(
            f"the document in {output.index} has version {document.version}, and no record with this offset and key "
            "can be read"
        )
    reasons = "; ".join(tried) or "no output has ids by key"
    raise UnknownRecordError(
        f"Document {document_id!r} of stream {context.name!r} does not lead to a record: {reasons}.",
        remedy="Give the record's topic, partition and offset, or search for its key with --key.",
    )


def _with_key(context: StreamContext, key: bytes, offset: int, environ: Mapping[str, str] | None) -> Coordinates | None:
    reader = RecordReader(context, environ)
    rows = [row for row in context.ledger.positions.all(context.name) if offset < row.next_offset]
    for row in rows[:_MAX_CANDIDATES]:
        position = RecordPosition(row.input_id, row.partition, offset)
        block = locate(context, position, row).block
        try:
            record = reader.read(position, block)
        except HeadraceError:
            continue
        if record is not None and record.key == key:
            partition = row.partition
            return Coordinates(partition.topic, partition.partition, offset, partition.incarnation)
    return None
