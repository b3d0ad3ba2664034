"""Commits offsets to Kafka, for lag tools only: headrace reads nothing from them (rule 1 of the design).

A commit that fails is counted, shown and repeated with the next one. It never stops a receiver.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Iterable
from typing import Any

from confluent_kafka import KafkaException
from confluent_kafka import TopicPartition as KafkaPartition

from headrace.blocks import OffsetRange

logger = logging.getLogger(__name__)


class OffsetCommits:
    """Commits stored offsets asynchronously.

    The pushing thread calls ``note``. The consuming thread calls ``send`` and runs the callback: librdkafka's Python
    client deadlocked when one thread committed while another consumed (commit() keeps the interpreter's lock while it
    waits for the client's).
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[tuple[str, int], int] = {}
        self._failures = 0
        self._due = False
        self._last_error: str | None = None
        self._allowed_until = math.inf

    @property
    def failures(self) -> int:
        with self._lock:
            return self._failures

    @property
    def last_error(self) -> str | None:
        with self._lock:
            return self._last_error

    @property
    def open(self) -> int:
        """The number of partitions whose last stored position is not known to be committed."""
        with self._lock:
            return len(self._open)

    def allow_until(self, monotonic_seconds: float) -> None:
        """Send nothing after this time. If a receiver was asleep past its lease, another has taken its place: a late
        commit would set that one's committed offsets back."""
        with self._lock:
            self._allowed_until = monotonic_seconds

    def note(self, ranges: Iterable[OffsetRange]) -> None:
        """Note the ends of ``ranges`` for the next commit."""
        with self._lock:
            for each in ranges:
                self._open[each.partition.topic, each.partition.partition] = each.until_offset
            self._due = True

    def repeat(self) -> None:
        """Have everything that is not acknowledged yet committed again."""
        with self._lock:
            self._due = True

    def send(self, consumer: Any, now: float) -> None:
        """Commit everything noted and not acknowledged, unless ``now`` (monotonic seconds) is past the allowed time.

        Kafka's errors are counted, not raised.
        """
        with self._lock:
            if not self._due or now > self._allowed_until:
                return
            self._due = False
            offsets = [KafkaPartition(topic, number, offset) for (topic, number), offset in self._open.items()]
        if not offsets:
            return
        try:
            consumer.commit(offsets=offsets, asynchronous=True)
        except (KafkaException, RuntimeError) as error:
            self._failed(str(error))

    def forget(self, topic: str, partition: int) -> None:
        """Forget a partition that another receiver has now: a late commit would set its committed offset back."""
        with self._lock:
            self._open.pop((topic, partition), None)

    def on_commit(self, error: object, partitions: Iterable[Any]) -> None:
        """librdkafka's callback: ``error`` is for all partitions; each may also have its own."""
        for each in partitions:
            failed = each.error or error
            if failed is not None:
                self._failed(str(failed))
                continue
            with self._lock:
                if self._open.get((each.topic, each.partition)) == each.offset:
                    del self._open[each.topic, each.partition]

    def _failed(self, error: str) -> None:
        with self._lock:
            self._failures += 1
            repeated = error == self._last_error
            self._last_error = error
        if not repeated:
            logger.warning("a commit to Kafka failed and is repeated with the next block: %s", error)
