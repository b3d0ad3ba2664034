"""Partitions of topics that may not be described any more: what was read of them is not stored, and is read again.

A record of such a topic cannot be told from one of another topic of its name. To read on and drop it would leave a
position that stands still behind a reader that is at the end: so the reader goes back to the position, and waits there.
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
    """`not_to_store` is the pushing thread's, `put_back` the consuming thread's."""

    def __init__(self, guard: IncarnationGuard) -> None:
        self._guard = guard
        self._withheld: set[TopicPartition] = set()
        self._news: SimpleQueue[TopicPartition] = SimpleQueue()

    def not_to_store(self, partitions: Sequence[TopicPartition]) -> list[TopicPartition]:
        """Those of ``partitions`` whose records are to be dropped; waits as `IncarnationGuard.look` does."""
        found = self._guard.look(partitions)
        for partition in found.untold:
            if partition not in self._withheld:
                self._withheld.add(partition)
                self._news.put(partition)
        # What was read before the reader went back is not what follows the position.
        return [each for each in partitions if each in found.recreated or each in self._withheld]

    def put_back(
        self,
        kafka: KafkaReceiver,
        position: Callable[[TopicPartition], int | None],
        after_push: Callable[[Callable[[], None]], None],
    ) -> None:
        """Let ``kafka`` read what was withheld again, later, from its ``position`` in the ledger. ``after_push`` calls
        something once all that was read so far is stored or dropped."""
        while True:
            try:
                partition = self._news.get_nowait()
            except Empty:
                return
            next_offset = position(partition)
            if next_offset is not None:
                kafka.put_back(partition, next_offset, _ERROR, seconds=_READ_AGAIN_SECONDS)
            after_push(partial(self._withheld.discard, partition))
