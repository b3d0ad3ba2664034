"""Remembers the leader epoch of the records read, with which Kafka detects that its log was truncated since.

A leader without all of its predecessor's records (an unclean election) begins a new epoch below the offsets that were
read, and gives those offsets to other records. Once the log has grown past the position again, offsets alone do not
show this; the end of the epoch in which the records were read does (KIP-320).
"""

from __future__ import annotations

import threading
from collections.abc import Iterable

from headrace.blocks import TopicPartition
from headrace.kafka.records import EpochRecords
from headrace.ledger.models import EpochEnd

# Covers the elections between reading a record and storing it, which takes seconds.
_MOST_KEPT = 100


class LeaderEpochs:
    """The consuming thread notes what it reads; the pushing thread queries what it stores. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._read: dict[TopicPartition, list[EpochRecords]] = {}

    def begin(self, partition: TopicPartition, known: EpochEnd | None) -> None:
        """Begin to track a partition; ``known`` is the epoch end of its earlier records, if known."""
        with self._lock:
            # All records below the end are of that epoch or an earlier one.
            self._read[partition] = [] if known is None else [EpochRecords(-1, known.end_offset, known.leader_epoch)]

    def forget(self, partition: TopicPartition) -> None:
        """Stop tracking a partition that is no longer read."""
        with self._lock:
            self._read.pop(partition, None)

    def note(self, partition: TopicPartition, records: Iterable[EpochRecords]) -> None:
        """Note what was read from a partition, in the order of offsets."""
        with self._lock:
            read = self._read.get(partition)
            if read is None:
                return
            for each in records:
                if read and read[-1].leader_epoch == each.leader_epoch:
                    read[-1] = EpochRecords(read[-1].first_offset, each.until_offset, each.leader_epoch)
                else:
                    read.append(each)
            del read[:-_MOST_KEPT]

    def end_at(self, partition: TopicPartition, until_offset: int) -> EpochEnd | None:
        """Return the epoch of the last record below ``until_offset``, and the end of what was read in it up to there.

        Returns None if that is unknown.
        """
        with self._lock:
            for each in reversed(self._read.get(partition, ())):
                if each.first_offset < until_offset:
                    # The offsets after its last record (control records, compacted) may be of another epoch.
                    return EpochEnd(each.leader_epoch, min(until_offset, each.until_offset))
        return None
