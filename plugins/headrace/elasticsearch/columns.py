"""The columns of the rows that the sink accepts. Column names are defined only here.

=============  ==========================  ============================================================================
column         type                        meaning
=============  ==========================  ============================================================================
topic          string                      the record's topic; record ids need it, dead letters show it
partition      int                         its partition
offset         long                        its offset; the external version of key ids
incarnation    int, optional               the topic's incarnation, counted from 1; 1 if the column is missing; 0 if it
                                            is not known which, where no id depends on it
key            binary | string, optional   the record's key; key ids need it
value          binary | string             the record's value, which *is* the document (for untransformed rows)
document       string | binary             the JSON document that a transform made of the value; null is a tombstone
headers        list<struct<key, value>>    optional, the record's headers, for dead letters
timestamp      timestamp                   optional, the record's time, for dead letters
rejected_...   string                      ``rejected_because``: a row with a reason here becomes a dead letter
=============  ==========================  ============================================================================

Exactly one of ``value`` and ``document`` must be present. The option ``id_columns`` names the columns of column ids,
or those that distinguish the rows of one record; ``version_from`` names the version column. Other columns are ignored.
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
REJECTED_BECAUSE = "rejected_because"

UNKNOWN_INCARNATION = 0

COORDINATES = (TOPIC, PARTITION, OFFSET)


def needed_columns(options: IndexingOptions) -> tuple[str, ...]:
    """The columns, besides the document, that these options require."""
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
    """Raise UnsuitableRowsError unless rows with these columns can be indexed with these options."""
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
            remedy="Pass the DataFrame through headrace.spark.outputs.documents.prepare_documents.",
        )
