"""The shape of the rows that the sink takes. Every name is defined here and nowhere else.

=============  ==========================  ============================================================================
column         type                        meaning
=============  ==========================  ============================================================================
topic          string                      the record's topic; needed by record ids, wanted for dead letters
partition      int                         its partition
offset         long                        its offset; the external version of key ids
incarnation    int, optional               which topic of that name, from 1 (all are, where the column is not there)
key            binary | string, optional   the record's key; needed by key ids
value          binary | string             the record's value, which *is* the document (a row that no transform changed)
document       string | binary             or the JSON document that a transform made of it; null is a tombstone
headers        list<struct<key, value>>    optional, the record's headers, for dead letters
timestamp      timestamp                   optional, the record's time, for dead letters
original_key,  binary; list<...>           optional, the record as Kafka gave it, for the dead letters of transformed
original_...                               rows; without them the log is read, if there is a manifest
rejected_...   string                      ``rejected_because``: a row that has a reason here is a dead letter at once
=============  ==========================  ============================================================================

Exactly one of ``value`` and ``document`` is there. The columns of column ids, those that tell rows of one record
apart, and the version column are named by the options ``id_columns`` and ``version_from``. Other columns are ignored.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from headrace.elasticsearch.errors import UnsuitableRowsError
from headrace.elasticsearch.options import DocumentIdKind, IndexingOptions

TOPIC = "topic"
PARTITION = "partition"
OFFSET = "offset"
INCARNATION = "incarnation"
KEY = "key"
VALUE = "value"
DOCUMENT = "document"
HEADERS = "headers"
TIMESTAMP = "timestamp"
ORIGINAL_KEY = "original_key"
ORIGINAL_VALUE = "original_value"
ORIGINAL_HEADERS = "original_headers"
REJECTED_BECAUSE = "rejected_because"

COORDINATES = (TOPIC, PARTITION, OFFSET)

RECORD_COLUMNS = frozenset(
    {KEY, VALUE, TOPIC, PARTITION, OFFSET, TIMESTAMP, "timestampType", HEADERS, INCARNATION},
)
"""The columns of a record as the log has it (headrace.wal.payload.RECORD_SCHEMA)."""


def needed_columns(options: IndexingOptions) -> tuple[str, ...]:
    """The columns, beside the document, without which these options cannot be carried out."""
    needed: list[str] = []
    if options.document_id is DocumentIdKind.RECORD:
        needed += [*COORDINATES, *options.id_columns]
    elif options.document_id is DocumentIdKind.KEY:
        needed.append(KEY)
        needed += [] if options.version_from else COORDINATES
    else:
        needed += options.id_columns
    if options.version_from:
        needed.append(options.version_from)
    return tuple(dict.fromkeys(needed))


def check_columns(names: Iterable[str], options: IndexingOptions) -> None:
    """Raise UnsuitableRowsError unless rows with these column names can be indexed as the options say."""
    have: Collection[str] = tuple(names)
    missing = [name for name in needed_columns(options) if name not in have]
    if missing:
        raise UnsuitableRowsError(
            f"The rows for index {options.index!r} have no column {', '.join(map(repr, missing))}, which "
            f"document_id={options.document_id.value} needs; they have {', '.join(map(repr, have))}.",
            remedy="Let the transform keep these columns, or choose other document ids.",
        )
    documents = [name for name in (VALUE, DOCUMENT) if name in have]
    if len(documents) != 1:
        raise UnsuitableRowsError(
            f"The rows for index {options.index!r} have {'both' if documents else 'neither'} 'value' "
            f"{'and' if documents else 'nor'} 'document'; exactly one of them is the document.",
            remedy="Pass the DataFrame through headrace.spark.documents.prepare_documents.",
        )
