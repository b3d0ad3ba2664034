"""Keeps records of topics that this client may no longer describe from being stored, and has them read again later.

A record of such a topic cannot be distinguished from one of another topic with the same name. If the reader continued
and dropped records, the position would stay behind the reader. So the reader goes back to the position and waits there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from queue import Empty, SimpleQueue

from headrace.blocks import TopicPartition
from headrace.kafka.records import RecordChunk
from headrace.kafka.topics import IncarnationGuard
from headrace.receiver.block_generator import BlockGenerator
from headrace.receiver.event_times import EventTimes
from headrace.receiver.record_source import RecordSource

_ERROR = "its topic may not be described, so that its records are not stored; let the connection's user DESCRIBE it"
_READ_AGAIN_SECONDS = 10.0


class UnauthorizedTopics:
    """The pushing thread calls `not_to_store`, the consuming thread `read_again`."""

    def __init__(
        self,
        guard: IncarnationGuard,
        source: RecordSource,
        generator: BlockGenerator[RecordChunk],
        next_offsets: Mapping[TopicPartition, int],
        event_times: EventTimes | None = None,
    ) -> None:
        """``next_offsets`` are the ledger's positions. ``event_times`` is that of a stream by timestamp."""
        self._guard = guard
        self._source = source
        self._generator = generator
        self._next_offsets = next_offsets
        self._event_times = event_times
        self._withheld: set[TopicPartition] = set()
        self._found: SimpleQueue[TopicPartition] = SimpleQueue()

    def not_to_store(self, partitions: Sequence[TopicPartition]) -> list[TopicPartition]:
        """Return those of ``partitions`` whose records must be dropped. Waits as `IncarnationGuard.look` does."""
        found = self._guard.look(partitions)
        for partition in found.unauthorized:
            if partition not in self._withheld:
                self._withheld.add(partition)
                self._found.put(partition)
        # Records read before the reader went back do not follow the position.
        return [each for each in partitions if each in found.recreated or each in self._withheld]

    def read_again(self) -> None:
        """Have the partitions that were found meanwhile read again, later, from their positions in the ledger."""
        while True:
            try:
                partition = self._found.get_nowait()
            except Empty:
                return
            next_offset = self._next_offsets.get(partition)
            if next_offset is not None:
                if self._event_times is not None:
                    # The records that were read and not stored do not count.
                    self._event_times.forget(partition)
                self._source.put_back(partition, next_offset, _ERROR, seconds=_READ_AGAIN_SECONDS)
            # What was read before must be dropped before the partition is stored again.
            self._generator.after_push(partial(self._withheld.discard, partition))
