"""Stops a stream when offsets can no longer serve as the versions of keys (rule 7 of the design).

When a topic gets more partitions, or is created again, keys start again at low offsets. Elasticsearch would refuse
their new values as older than the ones it has. So nothing more is received until the stream names a better version.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from headrace.ledger.models import TopicRow
from headrace.receiver.errors import KeyVersionsError
from headrace.stream import ElasticsearchOutput, KeyIds, Stream


def check_key_versions(stream: Stream, topics: Collection[TopicRow]) -> None:
    """Raise if outputs use offsets as key versions and keys of ``topics`` (of one input) may have moved.

    ``topics`` come from the ledger, so every later job finds what one job has found.

    Raises:
        KeyVersionsError: a topic has grown since it was first seen, or was created again.
    """
    outputs = versioned_by_offsets(stream)
    moved = _moved(topics) if outputs else []
    if not moved:
        return
    raise KeyVersionsError(
        f"Output {', '.join(outputs)} of stream {stream.name!r} uses a record's offset as the version of its key, "
        f"and {'; '.join(moved)}: keys begin again at low offsets, and Elasticsearch would refuse their new values as "
        "older than what it has. Nothing more is received.",
        remedy="Name a column that grows with every change of a key in version_from, its values above the offsets so "
        "far, or index the topic again into another index, by a stream of another name.",
    )


def versioned_by_offsets(stream: Stream) -> list[str]:
    """Return the ids of the outputs that use a record's offset as the version of its key."""
    return [
        output.id
        for output in stream.outputs
        if isinstance(output, ElasticsearchOutput)
        and isinstance(output.document_ids, KeyIds)
        and output.document_ids.version_from is None
    ]


def _moved(topics: Collection[TopicRow]) -> list[str]:
    """Return what happened to the topics, one clause each."""
    grown = [
        f"topic {row.topic} has grown from {row.first_partitions} to {row.partitions} partitions"
        for row in topics
        if row.partitions > row.first_partitions
    ]
    # The incarnation does not serve here: it also counts topics of the same name in other inputs.
    seen = Counter(row.topic for row in topics)
    return grown + [f"topic {topic} was created again" for topic, times in seen.items() if times > 1]
