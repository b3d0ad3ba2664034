"""Withholds partitions of topics that can no longer be described: their records are not stored, and are read again.

A record of such a topic cannot be distinguished from one of another topic with the same name. If the reader went on and
dropped records, the position would stand still while the reader is at the end. So the reader goes back to the position
and waits there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from queue import Empty, SimpleQueue

from headrace.blocks import TopicPartition
from headrace.kafka.topic_ids import IncarnationGuard
from headrace.receiver.kafka_receiver import KafkaReceiver

_ERROR = "its topic may not be described, so that its records are not stored; let the connection's user DESCRIBE it"
_READ_AGAIN_SECONDS = 10.0


class WithheldPartitions:
    """The pushing thread calls `not_to_store`, the consuming thread `put_back`."""

    def __init__(self, guard: IncarnationGuard) -> None:
        self._guard = guard
        self._withheld: set[TopicPartition] = set()
        self._news: SimpleQueue[TopicPartition] = SimpleQueue()

    def not_to_store(self, partitions: Sequence[TopicPartition]) -> list[TopicPartition]:
        """Return those of ``partitions`` whose records must be dropped. Waits as `IncarnationGuard.look` does."""
        found = self._guard.look(partitions)
        for partition in found.untold:
            if partition not in self._withheld:
                self._withheld.add(partition)
                self._news.put(partition)
        # Records read before the reader went back do not follow the position.
        return [each for each in partitions if each in found.recreated or each in self._withheld]

    def put_back(
        self,
        kafka: KafkaReceiver,
        position: Callable[[TopicPartition], int | None],
        after_push: Callable[[Callable[[], None]], None],
    ) -> None:
        """Have ``kafka`` read withheld partitions again, later, from their ``position`` in the ledger.

        ``after_push`` calls its argument once everything read so far is stored or dropped.
        """
        while True:
            try:
                partition = self._news.get_nowait()
            except Empty:
                return
            next_offset = position(partition)
            if next_offset is not None:
                kafka.put_back(partition, next_offset, _ERROR, seconds=_READ_AGAIN_SECONDS)
            after_push(partial(self._withheld.discard, partition))
