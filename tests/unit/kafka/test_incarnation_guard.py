"""Which partitions' records must not be stored, when brokers answer late or not at all."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import pytest
from confluent_kafka import KafkaError, KafkaException

from headrace.blocks import TopicPartition
from headrace.kafka.topics import IncarnationGuard

Answer = Mapping[str, str | None] | None
CLICKS = TopicPartition("clicks", "id-1", 0)


class Brokers:
    """Each question goes to the next of them: one hangs (None), one fails, or one answers with the topics' ids."""

    def __init__(self, *each: Mapping[str, str | None] | KafkaException | None) -> None:
        self._each = list(each)
        self.asked = 0
        self.waited = 0.0

    def ask(self, topics: Collection[str]) -> Callable[[float], Answer]:
        broker = self._each[self.asked]
        self.asked += 1

        def answer(seconds: float) -> Answer:
            if isinstance(broker, KafkaException):
                raise broker
            self.waited += seconds if broker is None else 0.0
            return broker

        return answer


def timed_out() -> KafkaException:
    return KafkaException(KafkaError(KafkaError._TIMED_OUT))


def test_a_question_to_a_broker_that_hangs_is_asked_again() -> None:
    brokers = Brokers(None, {"clicks": "id-2"})
    heartbeats: list[float] = []
    foreign = IncarnationGuard(brokers, heartbeats.append).to_drop([CLICKS])
    assert foreign.recreated == (CLICKS,)
    assert brokers.asked == 2
    assert brokers.waited == pytest.approx(2.1)
    assert len(heartbeats) == 10


def test_an_error_of_one_broker_leaves_the_answer_to_another() -> None:
    brokers = Brokers(None, timed_out(), {"clicks": "id-1"})
    assert IncarnationGuard(brokers, lambda _: None).to_drop([CLICKS]).recreated == ()
    assert brokers.asked == 3


def test_after_errors_of_all_brokers_a_second_passes() -> None:
    brokers = Brokers(timed_out(), {"clicks": None})
    waits: list[float] = []
    assert IncarnationGuard(brokers, waits.append).to_drop([CLICKS]).recreated == ()
    assert waits == [1.0]
