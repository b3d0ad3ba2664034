"""In which of its leaders' epochs a partition's records were read: by it Kafka tells whether its log was cut off since.

A leader that has not everything its predecessor had (an unclean election) begins another epoch below the offsets that
were read, and gives them to other records. Offsets alone do not tell once the log has grown past the position again,
the end of the epoch in which they were read does (KIP-320).
"""

from __future__ import annotations

import threading
from collections.abc import Iterable

from headrace.blocks import TopicPartition
from headrace.kafka.record_batches import EpochRecords
from headrace.ledger.rows import EpochEnd

# Elections between a record's being read and its being stored, which are seconds.
_MOST_KEPT = 100


class LeaderEpochs:
    """The consuming thread notes what it reads; the pushing thread asks for what it stores. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._read: dict[TopicPartition, list[EpochRecords]] = {}

    def begin(self, partition: TopicPartition, known: EpochEnd | None) -> None:
        """All that is known of a partition that is read from now on."""
        with self._lock:
            # Below the end all of it is older, and of that epoch or an earlier one.
            self._read[partition] = [] if known is None else [EpochRecords(-1, known.end_offset, known.leader_epoch)]

    def forget(self, partition: TopicPartition) -> None:
        """It is not read any more."""
        with self._lock:
            self._read.pop(partition, None)

    def note(self, partition: TopicPartition, records: Iterable[EpochRecords]) -> None:
        """What was read of a partition, in the order of offsets."""
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
        """The epoch of the last record below ``until_offset``, and the end of what was read of that epoch up to there;
        None where it is not known."""
        with self._lock:
            for each in reversed(self._read.get(partition, ())):
                if each.first_offset < until_offset:
                    # What follows its last record may be another epoch's: control records, compacted offsets.
                    return EpochEnd(each.leader_epoch, min(until_offset, each.until_offset))
        return None
