"""A claim holds for what Kafka had when it was asked, and is made only once all of that is stored."""

from __future__ import annotations

from collections.abc import Callable, Collection

import pytest
from confluent_kafka import KafkaError, KafkaException
from hypothesis import given
from hypothesis import strategies as st

from headrace.blocks import TopicPartition
from headrace.receiver.event_times import EndOffsetTracker, Ends, Key

P0, P1 = TopicPartition("a", "id-a", 0), TopicPartition("a", "id-a", 1)


class Kafka:
    """Answers when told to."""

    def __init__(self) -> None:
        self.ends: dict[Key, int] = {("a", 0): 0, ("a", 1): 0}
        self.answers = True
        self.refuses = False
        self.asked = 0

    def ask(self, partitions: Collection[Key]) -> Callable[[], Ends | None]:
        self.asked += 1
        if self.refuses:
            raise KafkaException(KafkaError(KafkaError._STATE, "closing"))
        ends = {key: self.ends[key] for key in partitions if key in self.ends}
        return lambda: Ends(ends) if self.answers else None


class Setting:
    def __init__(self, lateness_ms: int = 0) -> None:
        self.kafka = Kafka()
        self.now_ms = 10_000
        self.tracker = EndOffsetTracker(self.kafka, lambda: self.stored, lambda: self.now_ms, lateness_ms=lateness_ms)
        self.stored = {P0: 0, P1: 0}

    def poll(self) -> bool:
        return self.tracker.poll()

    def drained(self) -> dict[TopicPartition, int]:
        """What the next heartbeat tells, and the ledger hears."""
        drained = self.tracker.drained()
        self.tracker.reported(drained)
        return drained


@pytest.fixture
def setting() -> Setting:
    return Setting()


def test_an_idle_partition_is_drained_at_every_question(setting: Setting) -> None:
    assert not setting.poll()
    assert setting.poll()
    assert setting.drained() == {P0: 10_000, P1: 10_000}
    assert setting.drained() == {}
    setting.now_ms = 11_000
    setting.poll()
    assert setting.poll()
    assert setting.drained() == {P0: 11_000, P1: 11_000}


def test_what_is_still_queued_is_not_claimed_until_it_is_stored(setting: Setting) -> None:
    setting.kafka.ends["a", 0] = 100
    setting.poll()
    setting.poll()
    assert setting.drained() == {P1: 10_000}
    setting.stored[P0] = 99
    assert setting.drained() == {}
    setting.stored[P0] = 100
    assert setting.drained() == {P0: 10_000}


def test_an_end_that_moves_on_is_claimed_as_it_was_when_asked(setting: Setting) -> None:
    """A partition that is always a little behind: what it had a while ago is stored."""
    for second in range(5):
        setting.now_ms = 10_000 + 1_000 * second
        setting.kafka.ends["a", 0] = 100 * (second + 1)
        setting.poll()
        setting.poll()
        setting.drained()
    setting.stored[P0] = 100
    assert setting.drained() == {P0: 10_000}


def test_without_an_answer_there_is_no_claim_at_a_later_time(setting: Setting) -> None:
    setting.poll()
    setting.poll()
    assert setting.drained()
    setting.kafka.answers = False
    for _ in range(100):
        setting.now_ms += 200
        assert not setting.poll()
        assert setting.drained() == {}
    assert setting.kafka.asked == 2
    setting.kafka.answers = True
    assert setting.poll()
    assert setting.drained() == {P0: 11_000, P1: 11_000}


def test_a_partition_without_an_answer_is_not_claimed(setting: Setting) -> None:
    del setting.kafka.ends["a", 0]
    setting.poll()
    setting.poll()
    assert setting.drained() == {P1: 10_000}


def test_a_question_that_cannot_be_asked_is_asked_later(setting: Setting) -> None:
    setting.kafka.refuses = True
    assert not setting.poll()
    assert not setting.poll()
    assert setting.kafka.asked == 1
    setting.kafka.refuses, setting.now_ms = False, 11_000
    setting.poll()
    assert setting.poll()


def test_a_log_that_ends_before_the_position_drained_nothing(setting: Setting) -> None:
    """It is that of another topic of the name, or lost its end: what comes now will not be read."""
    setting.stored[P0] = 50
    setting.kafka.ends["a", 0] = 20
    setting.poll()
    setting.poll()
    assert setting.drained() == {P1: 10_000}


def test_an_end_that_was_cut_off_is_not_waited_for(setting: Setting) -> None:
    setting.kafka.ends["a", 0] = 100
    setting.poll()
    setting.poll()
    setting.drained()
    setting.kafka.ends["a", 0] = 60
    setting.stored[P0], setting.now_ms = 60, 11_000
    setting.poll()
    setting.poll()
    assert setting.drained()[P0] == 11_000


def test_a_partition_that_is_gone_is_claimed_no_more(setting: Setting) -> None:
    setting.poll()
    del setting.stored[P0]
    setting.poll()
    assert setting.drained() == {P1: 10_000}


def test_kafka_is_asked_when_the_lateness_of_a_batch_ends() -> None:
    setting = Setting(lateness_ms=300)
    asked = []
    for now_ms in range(10_000, 13_000, 100):
        setting.now_ms = now_ms
        before = setting.kafka.asked
        setting.poll()
        if setting.kafka.asked > before:
            asked.append(now_ms)
    assert asked == [10_000, 10_300, 11_300, 12_300]


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("produce"), st.integers(1, 5)),
            st.tuples(st.just("store"), st.integers(1, 5)),
            st.tuples(st.sampled_from(["look", "look", "claim", "silence", "second"]), st.just(0)),
        ),
        max_size=60,
    )
)
def test_a_claim_is_never_ahead_of_the_truth(steps: list[tuple[str, int]]) -> None:
    setting = Setting()
    setting.stored = {P0: 0}
    produced: list[int] = []
    for step, number in steps:
        if step == "produce":
            produced += [setting.now_ms] * number
            setting.kafka.ends["a", 0] = len(produced)
            # Time stands still at a question, so what comes at the same moment may be on either side of it.
            setting.now_ms += 1
        elif step == "store":
            setting.stored[P0] = min(len(produced), setting.stored[P0] + number)
        elif step == "look":
            setting.poll()
        elif step == "silence":
            setting.kafka.answers = not setting.kafka.answers
        elif step == "second":
            setting.now_ms += 1_000
        for drained_ms in setting.drained().values() if step == "claim" else ():
            assert all(at_ms >= drained_ms for at_ms in produced[setting.stored[P0] :])
