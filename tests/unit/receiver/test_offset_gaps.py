"""Which jumps have a reason, and how often Kafka is asked for it."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.blocks import TopicPartition
from headrace.kafka.errors import RangesGoneError
from headrace.receiver.offset_gaps import OffsetGaps, gaps_between
from headrace.testing.fake_kafka import FakeEntry, FakeEvidence, FakeKafka


class Setting:
    def __init__(self, *kinds: tuple[str, int], committed_only: bool = True) -> None:
        self.kafka = FakeKafka()
        self.partition = TopicPartition("a", self.kafka.create("a", 1), 0)
        for kind, count in kinds:
            self.kafka.produce("a", 0, *[FakeEntry(b"v", kind=kind)] * count)  # type: ignore[arg-type]
        self.evidence = FakeEvidence(self.kafka)
        self.gaps = OffsetGaps(lambda: self.evidence, committed_only=committed_only)

    def lost(self) -> list[tuple[int, int]]:
        entries = self.kafka.logs["a", 0].entries
        seen = np.array([offset for offset, entry in enumerate(entries) if entry.kind == "data"], dtype=np.int64)
        return self.gaps.lost(self.partition, gaps_between(seen, 0, len(entries)))


def test_without_compaction_and_transactions_nothing_explains_a_jump() -> None:
    assert Setting(("data", 3), ("gone", 1), ("data", 2), ("gone", 2)).lost() == [(3, 4), (6, 8)]


@pytest.mark.parametrize("compacted", [True, None])
def test_compaction_explains_every_jump_and_so_does_not_being_allowed_to_ask(compacted: bool | None) -> None:
    setting = Setting(("data", 1), ("gone", 5_000), ("data", 1))
    setting.evidence.compacted = compacted
    assert setting.lost() == []
    assert setting.lost() == []
    assert setting.evidence.questions == 1
    # Compaction is known to have removed them, or it is not.
    assert setting.gaps.excused == (0 if compacted else 10_000)


def test_control_records_are_not_asked_after_once_there_are_transactions() -> None:
    setting = Setting(*[("data", 1), ("control", 1)] * 5, ("data", 64), ("control", 64))
    setting.evidence.transactions = True
    assert setting.lost() == []
    asked = setting.evidence.questions
    assert setting.lost() == []
    assert setting.evidence.questions == asked
    assert setting.gaps.excused == 2 * 69


@pytest.mark.parametrize(
    "kinds", [[("gone", 1_000), ("data", 1)] * 10, [("data", 3_000), ("gone", 1_000), ("data", 1)]]
)
def test_transactions_of_other_topics_excuse_no_loss(kinds: list[tuple[str, int]]) -> None:
    setting = Setting(("data", 1), *kinds)
    setting.evidence.transactions = True
    entries = setting.kafka.logs["a", 0].entries
    seen = np.array([offset for offset, entry in enumerate(entries) if entry.kind == "data"], dtype=np.int64)
    jumps = gaps_between(seen, 0, len(entries))
    # One by one, as they come.
    assert [part for jump in jumps for part in setting.gaps.lost(setting.partition, [jump])] == jumps
    assert setting.gaps.excused == 0


def test_an_open_transaction_shows_that_the_topic_has_control_records() -> None:
    setting = Setting(("data", 5_000), ("control", 64))
    setting.evidence.transactions = True
    assert setting.lost() == [(5_000, 5_064)]
    setting.evidence.open_transaction = True
    assert setting.lost() == []
    assert setting.gaps.excused == 64


def test_a_single_control_record_is_excused_and_counted() -> None:
    setting = Setting(("data", 5), ("control", 1), ("data", 2))
    setting.evidence.transactions = True
    assert setting.lost() == []
    assert setting.gaps.excused == 1


def test_what_is_excused_counts_up_to_what_is_lost() -> None:
    """Everything behind that is fetched, and judged, again."""
    setting = Setting(("data", 5), ("control", 1), ("data", 2), ("gone", 50), ("data", 1), ("control", 1))
    setting.evidence.transactions = True
    assert setting.lost() == [(8, 58)]
    assert setting.gaps.excused == 1


def test_aborted_records_are_told_from_lost_ones() -> None:
    setting = Setting(("data", 1), ("aborted", 2_000), ("control", 1), ("gone", 1_500), ("data", 1), ("aborted", 1_200))
    setting.evidence.transactions = True
    # The control record before them cannot be told from what is lost.
    assert setting.lost() == [(2_001, 3_502)]


def test_a_consumer_of_uncommitted_records_has_seen_the_aborted_ones() -> None:
    setting = Setting(("data", 1), ("aborted", 2_000), committed_only=False)
    setting.evidence.transactions = True
    assert setting.lost() == [(1, 2_001)]


def test_what_can_no_longer_be_looked_at_counts_as_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    setting = Setting(("data", 1), ("aborted", 2_000))
    setting.evidence.transactions = True

    def gone(*_: object) -> np.ndarray:  # type: ignore[type-arg]
        raise RangesGoneError("retention")

    monkeypatch.setattr(setting.evidence, "record_offsets", gone)
    assert setting.lost() == [(1, 2_001)]


@given(st.sets(st.integers(0, 40)), st.integers(0, 5))
def test_jumps_are_all_that_is_missing(offsets: set[int], beyond: int) -> None:
    until = max(offsets, default=0) + 1 + beyond
    found = gaps_between(np.array(sorted(offsets), dtype=np.int64), 0, until)
    assert {each for begin, end in found for each in range(begin, end)} == set(range(until)) - offsets
    assert all(before[1] < after[0] for before, after in itertools.pairwise(found))
