"""Versions in an index that count something else than the stream's topic does.

With key ids the offset is a document's version. An index that was filled from another topic, cluster or environment may
hold versions that the topic has not reached. Every update of such a document would be taken for an older one, and the
document would stay as it is, without an error.

A version at or beyond the end of the key's partition proves it: no record of the topic has had this offset. A version
below the end proves nothing, since an older batch that is run again meets newer documents. Nor does one beyond the
stream's own position, if Kafka Connect or another stream writes the same topic into the index.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from headrace.elasticsearch.counts import HeldVersion
from headrace.elasticsearch.errors import ForeignVersionsError
from headrace.errors import HeadraceError
from headrace.kafka.offsets import Partition
from headrace.kafka.range_reader import RangeClients
from headrace.ledger.states import EventKind

if TYPE_CHECKING:
    from headrace.stream_context import StreamContext

_ANSWER_SECONDS = 5.0
_REMEDY = (
    "The index was filled from another topic, cluster or environment, or the topic has lost records. Until the topic "
    "passes these offsets, no update of such a document is written. Index into a new index, and run the batches again "
    "or replay them into it. Or delete these documents, wait for index.gc_deletes of the index (a minute by default), "
    "and run the batch again."
)


def check_held_versions(
    context: StreamContext, batch_time_ms: int, index: str, held: Mapping[Partition, HeldVersion]
) -> str | None:
    """Check the highest versions that the index holds of keys of each partition of a Kafka topic.

    Returns a warning if Kafka cannot be asked for the end of a partition; then an event is added too. Raises
    ForeignVersionsError if a version is at or beyond the end.
    """
    received: dict[Partition, int] = {}
    for row in context.ledger.positions.all(context.name):
        partition = (row.partition.topic, row.partition.partition)
        received[partition] = max(row.next_offset, received.get(partition, 0))
    beyond = {place: found for place, found in held.items() if found.version >= received.get(place, 0)}
    if not beyond:
        return None
    try:
        ends = _ends(context, beyond)
    except HeadraceError as error:
        place, found = next(iter(beyond.items()))
        what = (
            f"{_described(index, place, found)}, and the stream has received its offsets up to "
            f"{received.get(place, 0):,}. Whether the topic has had this offset is not known: {error.what}"
        )
        payload = {"index": index, "what": what, "remedy": _REMEDY}
        context.ledger.events.append(
            context.name, EventKind.VERSIONS_BEYOND_POSITION, payload, batch_time_ms=batch_time_ms
        )
        return f"{what} {_REMEDY}"
    for place, found in beyond.items():
        end = ends.get(place, received.get(place, 0))
        if found.version >= end:
            raise ForeignVersionsError(
                f"{_described(index, place, found)}, and the partition ends at offset {end:,}: it is no offset of this "
                "topic.",
                remedy=_REMEDY,
            )
    return None


def _described(index: str, place: Partition, found: HeldVersion) -> str:
    return (
        f"Index {index!r} holds version {found.version:,} of document {found.id!r}, whose key is in partition "
        f"{place[1]} of topic {place[0]!r}"
    )


def _ends(context: StreamContext, partitions: Collection[Partition]) -> dict[Partition, int]:
    """The ends of the partitions in Kafka. Those of a custom receiver, which nobody else counts, are left out."""
    ends: dict[Partition, int] = {}
    for source in context.stream.kafka_inputs:
        if mine := [place for place in partitions if source.matches(place[0])]:
            kept = RangeClients.of(source).quiet().questions(answer_seconds=_ANSWER_SECONDS).kept(mine)
            for place, found in kept.items():
                if found is not None:
                    ends[place] = max(found.end, ends.get(place, 0))
    return ends
