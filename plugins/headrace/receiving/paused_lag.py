"""How far behind a receiver is while it pauses: what is not fetched brings no word of where partitions end."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from confluent_kafka import KafkaException

from headrace.clock import Clock
from headrace.receiving.drainage import EndOffsets, Key
from headrace.receiving.kafka_receiver import KafkaReceiver

logger = logging.getLogger(__name__)

_ASK_SECONDS = 2.0


class PausedLag:
    """Asks Kafka for the ends and tells them to ``kafka``; the consuming thread's, while nothing is fetched."""

    def __init__(self, kafka: KafkaReceiver, ends: Callable[[], EndOffsets], clock: Clock) -> None:
        self._kafka = kafka
        self._ends = ends
        self._clock = clock
        self._next_question = 0.0
        self._answer: Callable[[], Mapping[Key, int] | None] | None = None

    def look(self) -> None:
        """Ask when it is time and hear the answer, without waiting."""
        if self._answer is not None:
            ends = self._answer()
            if ends is not None:
                self._answer = None
                self._kafka.hear_ends(ends)
            return
        now = self._clock.monotonic()
        partitions = [(each.topic, each.partition) for each in self._kafka.partitions]
        if now < self._next_question or not partitions:
            return
        self._next_question = now + _ASK_SECONDS
        try:
            self._answer = self._ends().ask(partitions)
        except KafkaException as error:
            logger.warning("Kafka cannot be asked where the partitions end: %s", error)
