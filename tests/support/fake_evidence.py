"""Answers a receiver's questions about lost offsets, for a `FakeKafka`."""

from __future__ import annotations

from typing import Any

import numpy as np

from headrace.blocks import TopicPartition
from headrace.kafka.errors import RangesUnreadableError
from headrace.testing.fake_kafka import FakeKafka


class FakeEvidence:
    """Implements ``Evidence`` for a `FakeKafka`. It answers with ``compacted`` and ``transactions``.
    With ``silent`` it raises, as when no broker answers. ``questions`` counts the calls."""

    def __init__(self, kafka: FakeKafka, *, compacted: bool | None = False, transactions: bool = False) -> None:
        self._kafka = kafka
        self.compacted = compacted
        self.transactions = transactions
        self.silent = False
        self.questions = 0

    def compaction(self, topic: str) -> bool | None:
        self._asked()
        return self.compacted

    def has_transactions(self) -> bool:
        self._asked()
        return self.transactions

    def record_offsets(self, partition: TopicPartition, offsets: tuple[int, int]) -> np.ndarray[Any, Any]:
        self._asked()
        with self._kafka.lock:
            log = self._kafka.logs[partition.topic, partition.partition]
            here = [each for each in range(*offsets) if log.entries[each - log.low].kind in ("data", "aborted")]
        return np.array(here, dtype=np.int64)

    def _asked(self) -> None:
        self.questions += 1
        if self.silent:
            raise RangesUnreadableError("Kafka is silent.")
