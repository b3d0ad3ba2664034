"""Which receiver gets which partition, and what is known if Kafka answers for some partitions only."""

from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import OFFSET_INVALID, KafkaError, KafkaException
from hypothesis import given
from hypothesis import strategies as st

from headrace.kafka.offsets import EARLIEST
from headrace.receiver.partitioning import FirstSeen, KafkaDiscoverer, Known, assign
from headrace.stream import KafkaInput


class TestAssignment:
    def test_even_and_interleaved(self) -> None:
        assert assign([("a", 0), ("a", 1), ("a", 2), ("a", 3)], [0, 1], {}) == {
            ("a", 0): 0,
            ("a", 1): 1,
            ("a", 2): 0,
            ("a", 3): 1,
        }

    def test_without_receivers_nothing(self) -> None:
        assert assign([1, 2], [], {}) == {}

    @given(
        st.sets(st.integers(0, 60)),
        st.sets(st.integers(0, 6), min_size=1),
        st.dictionaries(st.integers(0, 60), st.integers(0, 8)),
    )
    def test_even_and_with_fewest_moves(
        self, partitions: set[int], receivers: set[int], current: dict[int, int]
    ) -> None:
        result = assign(partitions, receivers, current)
        assert set(result) == partitions
        counts = sorted(list(result.values()).count(receiver) for receiver in receivers)
        assert counts[-1] - counts[0] <= 1
        stayed = sum(current.get(partition) == owner for partition, owner in result.items())
        held = sorted((sum(current.get(p) == r for p in partitions) for r in receivers), reverse=True)
        least, more = divmod(len(partitions), len(receivers))
        best = sum(min(count, least + (rank < more)) for rank, count in enumerate(held))
        assert stayed == best
        assert assign(partitions, receivers, result) == result


def answered(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    if isinstance(value, int):
        future.set_exception(KafkaException(KafkaError(value, "from the fake")))
    else:
        future.set_result(value)
    return future


class Admin:
    """Describes topics and tells offsets, or fails with an error's code where one is given instead."""

    def __init__(self, topics: dict[str, Any], offsets: dict[tuple[str, int], Any]) -> None:
        self._topics, self._offsets = topics, offsets
        self.asked: dict[tuple[str, int], Any] = {}

    def describe_topics(self, topics: Any, **_: object) -> dict[str, Future[Any]]:
        return {topic: answered(self._topics[topic]) for topic in topics.topic_names}

    def list_offsets(self, wanted: dict[Any, Any], **_: object) -> dict[Any, Future[Any]]:
        self.asked |= {(partition.topic, partition.partition): spec for partition, spec in wanted.items()}
        return {partition: answered(self._offsets[partition.topic, partition.partition]) for partition in wanted}

    def list_groups(self, group: str, **_: object) -> list[SimpleNamespace]:
        member = SimpleNamespace(client_id="rogue", client_host="/10.0.0.1")
        return [SimpleNamespace(id=group, error=None, members=[member])]


def topic(name: str, partitions: int) -> SimpleNamespace:
    return SimpleNamespace(topic_id=f"id-{name}", partitions=range(partitions), is_internal=False)


def at(offset: int) -> SimpleNamespace:
    return SimpleNamespace(offset=offset)


@pytest.mark.parametrize("answer", [KafkaError.LEADER_NOT_AVAILABLE, at(OFFSET_INVALID)], ids=["error", "no offset"])
@pytest.mark.parametrize(
    ("wish", "offset"), [("earliest", 5), ({"timestamp_ms": 7}, 5), ({"offsets": {"a": {0: 3, 1: 3}}}, 3)]
)
def test_a_partition_without_a_leader_keeps_no_other_back(wish: Any, offset: int, answer: Any) -> None:
    """The others begin."""
    source = KafkaInput(bootstrap_servers="nowhere:9092", topics=("a",), starting_offsets=wish)
    admin = Admin({"a": topic("a", 2)}, {("a", 0): at(5), ("a", 1): answer})
    discovery = KafkaDiscoverer(source, "group", admin).discover(Known())
    assert discovery.starting == {("a", "id-a", 0): offset}
    assert discovery.foreign == ("rogue at /10.0.0.1",)
    (problem,) = discovery.problems
    assert problem.startswith("where to begin in a-1 is not known yet")


def test_a_topic_that_may_not_be_described_keeps_no_other_back() -> None:
    """The others begin."""
    source = KafkaInput(bootstrap_servers="nowhere:9092", topics=("a", "b", "c"))
    topics = {"a": topic("a", 1), "b": KafkaError.TOPIC_AUTHORIZATION_FAILED, "c": KafkaError.UNKNOWN_TOPIC_OR_PART}
    discovery = KafkaDiscoverer(source, "group", Admin(topics, {("a", 0): at(5)})).discover(Known())
    assert discovery.starting == {("a", "id-a", 0): 5}
    assert (set(discovery.refused), discovery.missing) == ({"b"}, ("c",))
    (problem,) = discovery.problems
    assert "b may not be described" in problem


def test_latest_means_the_streams_beginning_for_late_partitions() -> None:
    """Such a partition answers later than the others."""
    source = KafkaInput(bootstrap_servers="nowhere:9092", topics=("a",), starting_offsets="latest")
    admin = Admin({"a": topic("a", 3)}, {("a", 1): at(70), ("a", 2): at(0)})
    began_ms = 1_700_000_000_000
    known = Known(frozenset({("a", "id-a", 0)}), {("a", "id-a"): FirstSeen(2, began_ms)}, began=True)
    discovery = KafkaDiscoverer(source, "group", admin).discover(known)
    assert discovery.starting == {("a", "id-a", 1): 70, ("a", "id-a", 2): 0}
    assert began_ms - 60_000 <= admin.asked["a", 1]._value < began_ms
    assert admin.asked["a", 2] is EARLIEST, "the topic has grown"


@pytest.mark.parametrize("offsets", [{"a": {0: 5_000}}, {"a": {0: 10}}])
def test_given_offsets_are_not_those_of_a_topic_created_again(offsets: dict[str, dict[int, int]]) -> None:
    source = KafkaInput(bootstrap_servers="nowhere:9092", topics=("a",), starting_offsets={"offsets": offsets})
    admin = Admin({"a": topic("a", 1)}, {("a", 0): at(0)})
    known = Known(frozenset({("a", "id-before", 0)}), {("a", "id-before"): FirstSeen(1, 1)}, began=True)
    discovery = KafkaDiscoverer(source, "group", admin).discover(known)
    assert (discovery.starting, discovery.problems) == ({("a", "id-a", 0): 0}, ())
    assert admin.asked["a", 0] is EARLIEST


def test_given_offsets_hold_for_a_later_topic_not_its_growth() -> None:
    """The topic was added to the input, or the client may describe it since a moment ago."""
    offsets = {"b": {0: 40, 1: 50}}
    source = KafkaInput(bootstrap_servers="nowhere:9092", topics=("a", "b"), starting_offsets={"offsets": offsets})
    admin = Admin({"a": topic("a", 1), "b": topic("b", 2)}, {("a", 0): at(0), ("b", 0): at(90), ("b", 1): at(90)})
    seen = {("a", "id-a"): FirstSeen(1, 1)}
    known = Known(frozenset({("a", "id-a", 0)}), seen, began=True)
    discovery = KafkaDiscoverer(source, "group", admin).discover(known)
    assert discovery.starting == {("b", "id-b", 0): 40, ("b", "id-b", 1): 50}
    seen["b", "id-b"] = FirstSeen(1, 1, at_start=False)
    known = Known(frozenset({("a", "id-a", 0), ("b", "id-b", 0)}), seen, began=True)
    KafkaDiscoverer(source, "group", admin).discover(known)
    assert admin.asked["b", 1] is EARLIEST, "the topic has grown"
