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
operation      string                      optional, of a change event (``headrace.formats.change_events``)
rejected_...   string                      ``rejected_because``: a row with a reason here becomes a dead letter
=============  ==========================  ============================================================================

Exactly one of ``value`` and ``document`` must be present. ``id_0``, ``id_1``, … are the columns of column ids, or those
that distinguish the rows of one record; ``version`` is the version that ``version_from`` names; ``index_0``, … are
those of which the name of the index is made. Other columns are ignored.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

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
VERSION = "version"
OPERATION = "operation"
CHANGE_OPERATION = "op"
"""The record's own column with the operation, of a decoder of change events."""
CHANGE_SOURCE = "source"
"""That with the source of the change, which only a tombstone has not."""

UNKNOWN_INCARNATION = 0

COORDINATES = (TOPIC, PARTITION, OFFSET)


def document_column(names: Collection[str]) -> str:
    """The name of the column that holds the documents, of rows with these columns."""
    return DOCUMENT if DOCUMENT in names else VALUE


def id_column(number: int) -> str:
    """The name of a prepared column of an id, numbered from 0."""
    return f"id_{number}"


def index_column(number: int) -> str:
    """The name of a prepared column of an index's name, numbered from 0 (`IndexNames.placeholders`)."""
    return f"index_{number}"


def columns_of_ids(kind: str, id_columns: Iterable[str], version_column: str | None) -> tuple[str, ...]:
    """The columns of which ids of this kind ("record", "key", "columns") and their versions are made, each once."""
    if kind == "record":
        needed = [*COORDINATES, *id_columns]
    elif kind == "key":
        # By default the version is the offset, which orders the values of one topic's partition.
        needed = [KEY, *(COORDINATES if version_column is None else ())]
    else:
        needed = [*id_columns]
    return tuple(dict.fromkeys([*needed, *([version_column] if version_column else [])]))
