"""Which holes in the offsets are lost records, and how often Kafka is asked about them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.fake_evidence import FakeEvidence

from headrace.blocks import TopicPartition
from headrace.kafka.errors import RangesGoneError, RangesUnreadableError
from headrace.receiver.kafka_errors import OffsetGaps, holes_between
from headrace.testing.fake_kafka import FakeEntry, FakeKafka


class Setting:
    def __init__(self, *kinds: tuple[str, int], committed_only: bool = True, transactions: bool = False) -> None:
        self.kafka = FakeKafka()
        self.partition = TopicPartition("a", self.kafka.create("a", 1), 0)
        for kind, count in kinds:
            self.kafka.produce("a", 0, *[FakeEntry(b"v", kind=kind)] * count)  # type: ignore[arg-type]
        self.evidence = FakeEvidence(self.kafka, transactions=transactions)
        self.gaps = OffsetGaps(lambda: self.evidence, committed_only=committed_only)

    def first_lost(self) -> tuple[int, int] | None:
        entries = self.kafka.logs["a", 0].entries
        seen = np.array([offset for offset, entry in enumerate(entries) if entry.kind == "data"], dtype=np.int64)
        return self.gaps.first_lost(self.partition, holes_between(seen, 0, len(entries)))


def test_a_hole_of_one_offset_without_explanation_is_lost() -> None:
    """There is neither compaction nor a transaction to explain it."""
    setting = Setting(("data", 3), ("gone", 1), ("data", 2), ("gone", 2))
    assert setting.first_lost() == (3, 4)
    assert setting.gaps.explained == 0


@pytest.mark.parametrize("compacted", [True, None])
def test_compaction_explains_every_hole(compacted: bool | None) -> None:
    """It does so even if the client may not ask Kafka."""
    setting = Setting(("data", 1), ("gone", 5_000), ("data", 1))
    setting.evidence.compacted = compacted
    assert setting.first_lost() is None
    assert setting.first_lost() is None
    assert setting.evidence.questions == 1
    assert setting.gaps.explained == 10_000


def test_transactions_explain_short_holes_after_one_question() -> None:
    """The holes are counted, and Kafka is asked once."""
    setting = Setting(*[("data", 1), ("control", 1)] * 5, ("data", 64), ("control", 64), transactions=True)
    assert setting.first_lost() is None
    asked = setting.evidence.questions
    assert setting.first_lost() is None
    assert setting.evidence.questions == asked
    assert setting.gaps.explained == 2 * 69


def test_transactions_explain_no_hole_above_1000_offsets() -> None:
    assert Setting(("data", 1), ("gone", 1_000), ("data", 1), transactions=True).first_lost() is None
    assert Setting(("data", 1), ("gone", 1_001), ("data", 1), transactions=True).first_lost() == (1, 1_002)


def test_offsets_are_counted_up_to_the_first_lost_one() -> None:
    setting = Setting(
        ("data", 5), ("control", 1), ("data", 2), ("gone", 1_500), ("data", 1), ("control", 1), transactions=True
    )
    assert setting.first_lost() == (8, 1_508)
    assert setting.gaps.explained == 1


def test_records_of_aborted_transactions_are_not_lost() -> None:
    setting = Setting(
        ("data", 1), ("aborted", 2_000), ("control", 1), ("gone", 1_500), ("data", 1), ("aborted", 1_200),
        transactions=True,
    )  # fmt: skip
    # The control record before the lost offsets looks like one of them.
    assert setting.first_lost() == (2_001, 3_502)
    assert setting.gaps.explained == 2_000


def test_a_consumer_of_uncommitted_records_sees_aborted_ones() -> None:
    setting = Setting(("data", 1), ("aborted", 2_000), committed_only=False, transactions=True)
    assert setting.first_lost() == (1, 2_001)


def test_a_long_hole_that_cannot_be_read_again_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    setting = Setting(("data", 1), ("aborted", 2_000), transactions=True)

    def gone(*_: object) -> np.ndarray:  # type: ignore[type-arg]
        raise RangesGoneError("retention")

    monkeypatch.setattr(setting.evidence, "record_offsets", gone)
    assert setting.first_lost() == (1, 2_001)


def test_without_an_answer_nothing_is_counted() -> None:
    setting = Setting(("data", 1), ("gone", 2), ("data", 1))
    setting.evidence.silent = True
    with pytest.raises(RangesUnreadableError):
        setting.first_lost()
    assert setting.gaps.explained == 0


@given(st.sets(st.integers(0, 40)), st.integers(0, 5))
def test_holes_are_all_offsets_that_are_missing(offsets: set[int], beyond: int) -> None:
    until = max(offsets, default=0) + 1 + beyond
    holes = holes_between(np.array(sorted(offsets), dtype=np.int64), 0, until)
    assert {offset for begin, end in holes for offset in range(begin, end)} == set(range(until)) - offsets
    assert all(before[1] < after[0] for before, after in itertools.pairwise(holes))
