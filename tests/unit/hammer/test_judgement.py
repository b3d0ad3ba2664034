"""The judgement: one thing wrong is enough, and a fault that did not hit is one."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from typing import Any

import pytest
from examples.demo.proof import Document, Place, Proof
from tests.hammer.journal import Injection
from tests.hammer.judgement import (
    Fsck,
    Judgement,
    KafkaAgainstReceipts,
    by_kind,
    compare_with_receipts,
    uncovered,
    wrong_keys,
)
from tests.hammer.kinds import Fault
from tests.hammer.load import Receipts
from tests.hammer.pipeline import records
from tests.hammer.schedule import ScheduleOptions, make_schedule

FAULTS = make_schedule(ScheduleOptions(seed=1, minutes=1))
PLACE = Place("hammer", 0, 1)


def injected(fault: Fault, **changes: Any) -> Injection:
    return Injection(
        **{"fault": fault.number, "kind": fault.kind.name, "planned": fault.at, "injected": 5.0, **changes}
    )


@pytest.fixture
def judgement() -> Judgement:
    """One that holds."""
    return Judgement(
        seed=1,
        kafka=KafkaAgainstReceipts(acknowledged=10),
        proof=Proof(produced=10, held=10, read=10, indexed=9, dead_lettered=1),
        refused=0,
        planned=FAULTS,
        injections=[injected(fault) for fault in FAULTS],
        collateral={},
        batches={"completed": 3},
        uncovered=[],
        gaps=[],
        receiver_jobs=1,
        fsck=Fsck(0, ""),
    )


def test_a_run_without_a_flaw_holds(judgement: Judgement) -> None:
    assert judgement.holds
    assert judgement.to_dict()["problems"] == []
    assert judgement.to_dict()["faults"]["hit"] == len(FAULTS)


@pytest.mark.parametrize(
    ("changes", "reported"),
    [
        (
            {"injections": [replace(injected(fault), unnamed="nothing named Kafka") for fault in FAULTS]},
            "was not seen: nothing named Kafka",
        ),
        ({"kafka": KafkaAgainstReceipts(10, missing=[PLACE])}, "1 acknowledged records are not in Kafka: hammer+0+1"),
        ({"kafka": KafkaAgainstReceipts(10, other=[PLACE])}, "are others in Kafka"),
        ({"kafka": KafkaAgainstReceipts(10, unasked=[PLACE])}, "knows nothing of"),
        ({"proof": Proof(10, 10, 10, 9, 0, lost=[PLACE])}, "1 lost"),
        ({"proof": Proof(10, 10, 10, 9, 2, doubled=[PLACE])}, "1 there more than once"),
        ({"proof": Proof(10, 10, 10, 10, 0, changed=[PLACE])}, "1 changed"),
        ({"proof": Proof(10, 10, 10, 10, 0, misjudged=[PLACE])}, "instead of the dead letters"),
        ({"proof": Proof(10, 10, 10, 11, 0, unknown=["x"])}, "without a record"),
        ({"proof": Proof(10, 11, 11, 10, 0)}, "should be one number"),
        ({"batches": {"completed": 3, "failed": 1}}, "not all batches are completed"),
        ({"batches": {}}, "not all batches are completed"),
        ({"keys": ["3 keys came back after they were deleted: 0-1"]}, "3 keys came back"),
        ({"uncovered": ["hammer-0: offsets 1 to 2 are in no batch"]}, "in no batch"),
        ({"gaps": ["a gap"]}, "gap"),
        ({"receiver_jobs": 2}, "2 receiver jobs"),
        ({"receiver_jobs": 0}, "0 receiver jobs"),
        ({"fsck": Fsck(1, "block 7 has no batch")}, "block 7 has no batch"),
        ({"broken_rules": ["block_wrong: block 7"]}, "the ledger breaks a rule: block_wrong: block 7"),
        ({"injections": [injected(fault, missed="nobody there") for fault in FAULTS]}, "missed: nobody there"),
        ({"injections": [injected(fault, injected=None) for fault in FAULTS]}, "missed"),
        ({"injections": []}, "never had their turn"),
    ],
)
def test_each_flaw_is_reported_and_fails_the_judgement(
    judgement: Judgement, changes: dict[str, Any], reported: str
) -> None:
    flawed = replace(judgement, **changes)
    assert not flawed.holds
    assert reported in "; ".join(flawed.problems())


def test_hits_and_misses_are_counted_by_kind() -> None:
    first, second = FAULTS[:2]
    counts = by_kind([injected(first), injected(first), injected(first, missed="no"), injected(second)])
    assert counts["hit"] == 3
    assert counts["missed"] == 1
    assert counts["kinds"][first.kind.name] == {"hit": 2, "missed": 1}


class TestReceipts:
    def setup_method(self) -> None:
        self.sent = list(islice(records(1), 6))
        self.receipts = Receipts(places={one.number: Place("hammer", 0, one.number) for one in self.sent})
        self.held: dict[Place, bytes | None] = {Place("hammer", 0, one.number): one.value for one in self.sent}

    def compare(self) -> KafkaAgainstReceipts:
        return compare_with_receipts(self.receipts, self.sent, self.held)

    def test_all_as_told(self) -> None:
        assert self.compare() == KafkaAgainstReceipts(acknowledged=6)

    def test_a_record_that_kafka_has_lost(self) -> None:
        del self.held[Place("hammer", 0, 3)]
        assert self.compare().missing == [Place("hammer", 0, 3)]

    def test_a_record_that_is_another(self) -> None:
        self.held[Place("hammer", 0, 3)] = self.sent[4].value
        assert self.compare().other == [Place("hammer", 0, 3)]

    def test_a_record_that_was_written_twice(self) -> None:
        self.held[Place("hammer", 0, 6)] = self.sent[4].value
        assert self.compare().unasked == [Place("hammer", 0, 6)]

    def test_a_refused_record_may_be_there_and_may_not(self) -> None:
        del self.receipts.places[5]
        self.receipts.refused[5] = "timed out"
        assert list(self.compare().problems()) == []
        del self.held[Place("hammer", 0, 5)]
        assert list(self.compare().problems()) == []
        self.held[Place("hammer", 0, 5)] = self.held[Place("hammer", 0, 6)] = self.sent[5].value
        assert len(self.compare().unasked) == 2


@pytest.mark.parametrize(
    ("taken", "reported"),
    [
        ({0: [(5, 10, 1), (0, 5, 2)]}, []),
        ({0: [(0, 4, 1), (5, 10, 2)]}, ["t-0: offsets 4 to 5 are in no batch"]),
        ({0: [(0, 6, 1), (5, 10, 2)]}, ["t-0: offsets 5 to 6 are in two batches, one of them 2"]),
        ({0: [(0, 9, 1)]}, ["t-0: offsets 9 to 10 are in no batch"]),
        ({0: [(1, 10, 1)]}, ["t-0: offsets 0 to 1 are in no batch"]),
        ({0: [(0, 11, 1)]}, ["t-0: batches go to offset 11, and Kafka ends at 10"]),
        ({}, ["t-0: offsets 0 to 10 are in no batch"]),
    ],
)
def test_offsets_that_are_in_no_batch_or_in_two(
    taken: dict[int, list[tuple[int, int, int]]], reported: list[str]
) -> None:
    assert uncovered({0: (0, 10)}, taken, topic="t") == reported


def test_a_key_has_its_last_records_document_or_none_if_deleted() -> None:
    held = [Place("hammer", 0, offset) for offset in (1_001, 1, 2, 502, 1_503, 3)]
    documents = [Document("0-3", {"offset": 1_503}), Document("0-2", {"offset": 502})]
    assert wrong_keys(held, documents) == []
    late = [Document("0-1", {"offset": 1}), Document("0-2", {"offset": 2})]
    assert wrong_keys(held, late) == [
        "1 keys are not in the index: 0-3",
        "1 keys came back after they were deleted: 0-1",
        "1 keys have another document than their last one: 0-2",
    ]
