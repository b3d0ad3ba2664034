"""Judges what became of a record in an Elasticsearch output: its document, its dead letter, or neither.

The id of the document is known if it is made of the record's coordinates or of its key. If it is made of columns, or of
columns beside the coordinates, only the transform knows it; then the dead letters alone are asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from headrace.errors import HeadraceError
from headrace.stream import ElasticsearchOutput, Stream
from headrace.stream.outputs import ColumnIds, KeyIds
from headrace.trace.document_lookup import DocumentLookup, is_value
from headrace.trace.models import Outcome, OutputTrace, RecordPosition, TracedDocument, TracedLetter, TracedRecord


@dataclass(frozen=True, slots=True)
class DocumentQuestion:
    """A record whose outcome in an output is asked for.

    ``stream`` and ``output`` are the definition that wrote the batch. ``index`` is the concrete index if the ledger has
    it. ``waits`` says why the output has not written the batch, if it has not. ``document_id`` is an id that a person
    gave. ``environ`` is where the output's connection is looked up.
    """

    stream: Stream
    output: ElasticsearchOutput
    position: RecordPosition
    record: TracedRecord | None
    index: str
    written: bool
    waits: str
    document_id: str | None = None
    environ: Mapping[str, str] | None = None

    @property
    def transform(self) -> str | None:
        """The reference of the output's transform, if it has one."""
        return self.stream.transform_of(self.output)


def elasticsearch_outcome(known: OutputTrace, asked: DocumentQuestion) -> OutputTrace:
    """Complete what is known of an output by what Elasticsearch has. Without an answer the outcome is unknown."""
    id_, no_id = _document_id(asked)
    try:
        with DocumentLookup.open(asked.output, asked.stream.name, asked.environ) as lookup:
            letters = lookup.letters(asked.position, asked.index)
            document = None if id_ is None else _compared(lookup.document(asked.index, id_), asked)
    except HeadraceError as error:
        return replace(known, outcome=Outcome.UNKNOWN, text=f"Elasticsearch could not be asked: {error}")
    outcome, text = judge(asked, document, letters, no_id)
    return replace(known, outcome=outcome, text=text, document=document, letters=letters)


def _document_id(asked: DocumentQuestion) -> tuple[str | None, str]:
    """The id of the record's document; or None, and why it is not known."""
    ids, position = asked.output.document_ids, asked.position
    if isinstance(ids, ColumnIds):
        return None, f"the id of its document is made of {', '.join(ids.columns)}, which the transform gives"
    if isinstance(ids, KeyIds):
        return _key_id(asked.record)
    partition = position.partition
    id_ = f"{partition.topic}+{partition.partition}+{position.offset}"
    id_ += f"+{partition.incarnation}" if partition.incarnation > 1 else ""
    if not ids.rows:
        return id_, ""
    if asked.document_id is not None and asked.document_id.startswith(f"{id_}~"):
        return asked.document_id, ""
    return None, f"the ids of its documents are {id_}~ and the values of {', '.join(ids.rows)}: give a whole id"


def _key_id(record: TracedRecord | None) -> tuple[str | None, str]:
    if record is None:
        return None, "the id of its document is its key, and the record could not be read"
    try:
        return (record.key or b"").decode() or None, "the record has no key, of which ids are made"
    except UnicodeDecodeError:
        return None, "its key is not UTF-8, so it cannot be the id of a document"


def _compared(document: TracedDocument, asked: DocumentQuestion) -> TracedDocument:
    """The document, compared with the record's value if that is what the output writes."""
    if asked.transform is not None or asked.record is None or not document.found:
        return document
    return replace(document, same=is_value(document.source, asked.record.value))


def judge(
    asked: DocumentQuestion, document: TracedDocument | None, letters: tuple[TracedLetter, ...], no_id: str
) -> tuple[Outcome, str]:
    """The outcome, and a sentence on it. ``document`` None: it was not looked up, for the reason ``no_id``."""
    open_letters = [letter for letter in letters if letter.replayed_at_ms is None]
    refused = f" It was refused in {len(letters)} batch(es) or replays." if letters and not open_letters else ""
    if document is not None and document.found and not (open_letters and isinstance(asked.output.document_ids, KeyIds)):
        outcome, text = _with_document(asked, document)
        if outcome is not None:
            return outcome, text + (" There is a dead letter of it too." if open_letters else refused)
    else:
        text = ""
    if open_letters:
        letter = open_letters[0]
        return Outcome.DEAD_LETTER, (
            f"It is dead letter {letter.id} in {letter.index}: {letter.reason_type}: {letter.reason}"
        )
    if not asked.written:
        return Outcome.NOT_WRITTEN, asked.waits
    if letters:
        return Outcome.WRITTEN, "It was refused, and its dead letter has been replayed since."
    if document is None:
        return Outcome.WRITTEN, f"The batch is written, and there is no dead letter of the record. {_capital(no_id)}."
    return Outcome.NEITHER, text or _neither(asked)


def _with_document(asked: DocumentQuestion, document: TracedDocument) -> tuple[Outcome | None, str]:
    """The outcome if there is a document with the record's id; None: it is not the record's, and the text says why."""
    ids, offset = asked.output.document_ids, asked.position.offset
    named = f"Document {document.id} in {document.index}, version {document.version}"
    if not isinstance(ids, KeyIds):
        return Outcome.DOCUMENT, f"{named}{_comparison(document, asked)}."
    if ids.version_from is not None:
        return Outcome.UNKNOWN, (
            f"{named}, has the record's key as its id. Its version is the column {ids.version_from!r}, so whether it "
            "is this record's is not known."
        )
    version = document.version if document.version is not None else offset
    if version == offset:
        return Outcome.DOCUMENT, f"{named}, which is the record's offset{_comparison(document, asked)}."
    if version > offset:
        return Outcome.NEWER_DOCUMENT, f"{named}: a record with this key and offset {version} has replaced it."
    return None, f"No document and no dead letter of the record: {named}, is of an earlier record with this key."


def _comparison(document: TracedDocument, asked: DocumentQuestion) -> str:
    if document.same is None:
        return "" if asked.transform is None else f", which {asked.transform} made of it"
    return ", equal to the record's value" if document.same else ", with other contents than the record's value"


def _neither(asked: DocumentQuestion) -> str:
    text = "No document and no dead letter, and the output has written the batch"
    ids, record = asked.output.document_ids, asked.record
    if record is not None and record.value is None and asked.output.tombstone_action != "dead_letter":
        action = "deletes the document of its key" if asked.output.tombstone_action == "delete" else "is ignored"
        return f"{text}: the record has no value, which {action}."
    if asked.transform is None:
        return f"{text}: the document, or the dead letter, was deleted since, or the index was made anew."
    if isinstance(ids, KeyIds):
        return (
            f"{text}: {asked.transform} dropped the record or changed its key, or the document was deleted since, for "
            "example by a later record without a value."
        )
    return f"{text}: {asked.transform} dropped the record, or the document was deleted since."


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
