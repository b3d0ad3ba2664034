"""The proof holds for what is right, and fails for everything that can be wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from examples.demo.proof import DeadLetter, Document, Place, Proof, prove

GOOD = {Place("t", partition, offset): b'{"n": %d}' % offset for partition in (0, 1) for offset in range(5)}
BAD = {Place("t", 0, 5): b"{broken", Place("t", 1, 5): None}
RECORDS: dict[Place, bytes | None] = {**GOOD, **BAD}


class World:
    """What Kafka, the index and the dead letters hold; right to begin with."""

    def __init__(self) -> None:
        self.produced = self.held = len(RECORDS)
        self.records = dict(RECORDS)
        self.documents = [Document(str(place), json.loads(value)) for place, value in GOOD.items()]
        self.dead_letters = [DeadLetter(str(place), place, value) for place, value in BAD.items()]

    def prove(self) -> Proof:
        return prove(
            produced=self.produced,
            held=self.held,
            records=self.records,
            malformed=BAD.keys(),
            documents=self.documents,
            dead_letters=self.dead_letters,
        )


def test_holds_for_what_is_right() -> None:
    proof = World().prove()
    assert proof.holds
    assert (proof.read, proof.indexed, proof.dead_lettered) == (12, 10, 2)
    assert list(proof.problems()) == []


def test_the_order_in_which_documents_are_found_does_not_matter() -> None:
    world = World()
    world.documents.reverse()
    assert world.prove().holds


def _lose_a_document(world: World) -> None:
    del world.documents[3]


def _lose_a_dead_letter(world: World) -> None:
    del world.dead_letters[1]


def _lose_all(world: World) -> None:
    world.documents.clear()
    world.dead_letters.clear()


def _double_a_document(world: World) -> None:
    world.documents.append(world.documents[0])


def _double_a_dead_letter(world: World) -> None:
    world.dead_letters.append(DeadLetter("another-id", Place("t", 0, 5), b"{broken"))


def _index_and_dead_letter_the_same(world: World) -> None:
    world.dead_letters.append(DeadLetter("t+0+0", Place("t", 0, 0), b'{"n": 0}'))


def _index_under_an_id_of_its_own(world: World) -> None:
    world.documents.append(Document("AXy0-automatic", {"n": 0}))


def _index_under_another_spelling(world: World) -> None:
    world.documents.append(Document("t+0+00", {"n": 0}))


def _index_for_another_incarnation(world: World) -> None:
    world.documents.append(Document("t+0+0+2", {"n": 0}))


def _index_what_was_never_sent(world: World) -> None:
    world.documents.append(Document("t+0+6", {"n": 6}))


def _change_a_document(world: World) -> None:
    world.documents[2] = Document(world.documents[2].id, {"n": 99})


def _add_a_field(world: World) -> None:
    world.documents[2] = Document(world.documents[2].id, {"n": 2, "more": None})


def _change_a_dead_letter(world: World) -> None:
    world.dead_letters[0] = DeadLetter("t+0+5", Place("t", 0, 5), b"{broken ")


def _empty_instead_of_no_value(world: World) -> None:
    world.dead_letters[1] = DeadLetter("t+1+5", Place("t", 1, 5), b"")


def _swap_two_documents(world: World) -> None:
    one, two = world.documents[0], world.documents[1]
    world.documents[0], world.documents[1] = Document(one.id, two.source), Document(two.id, one.source)


def _index_a_malformed_record(world: World) -> None:
    world.dead_letters.pop(0)
    world.documents.append(Document("t+0+5", {}))


def _dead_letter_a_good_record(world: World) -> None:
    world.documents.pop(0)
    world.dead_letters.append(DeadLetter("t+0+0", Place("t", 0, 0), b'{"n": 0}'))


@pytest.mark.parametrize(
    ("break_it", "field"),
    [
        (_lose_a_document, "lost"),
        (_lose_a_dead_letter, "lost"),
        (_lose_all, "lost"),
        (_double_a_document, "doubled"),
        (_double_a_dead_letter, "doubled"),
        (_index_and_dead_letter_the_same, "doubled"),
        (_index_under_an_id_of_its_own, "unknown"),
        (_index_under_another_spelling, "unknown"),
        (_index_for_another_incarnation, "unknown"),
        (_index_what_was_never_sent, "unknown"),
        (_change_a_document, "changed"),
        (_add_a_field, "changed"),
        (_change_a_dead_letter, "changed"),
        (_empty_instead_of_no_value, "changed"),
        (_swap_two_documents, "changed"),
        (_index_a_malformed_record, "misjudged"),
        (_dead_letter_a_good_record, "misjudged"),
    ],
)
def test_fails_for_what_is_wrong(break_it: Callable[[World], None], field: str) -> None:
    world = World()
    break_it(world)
    proof = world.prove()
    assert not proof.holds
    assert getattr(proof, field)
    assert list(proof.problems())


def test_loss_and_doubling_do_not_cancel_out() -> None:
    world = World()
    world.documents[0] = world.documents[1]
    proof = world.prove()
    assert proof.indexed == len(GOOD)
    assert (proof.lost, proof.doubled) == ([Place("t", 0, 0)], [Place("t", 0, 1)])


@pytest.mark.parametrize("counts", [(11, 12), (12, 13), (13, 13)])
def test_fails_when_the_counts_of_what_there_was_to_do_disagree(counts: tuple[int, int]) -> None:
    world = World()
    world.produced, world.held = counts
    proof = world.prove()
    assert not proof.holds
    assert "should be one number" in next(iter(proof.problems()))


def test_nothing_proves_nothing() -> None:
    proof = prove(produced=0, held=0, records={}, malformed=(), documents=(), dead_letters=())
    assert not proof.holds


@pytest.mark.parametrize(
    ("source", "value", "same"),
    [
        ({"a": 1}, b'{"a": 1.0}', True),
        ({"a": True}, b'{"a": 1}', False),
        ({"a": None}, b"{}", False),
        ({"a": [1, {"b": False}]}, b'{"a": [1, {"b": 0}]}', False),
        ({"a": "é"}, '{"a": "é"}'.encode(), True),
        ({}, b"{broken", False),
    ],
)
def test_what_counts_as_the_same_value(source: Any, value: bytes, same: bool) -> None:
    place = Place("t", 0, 0)
    proof = prove(
        produced=1,
        held=1,
        records={place: value},
        malformed=(),
        documents=[Document(str(place), source)],
        dead_letters=(),
    )
    assert proof.holds is same


@pytest.mark.parametrize("text", ["t+0+1", "a+b+0+1"])
def test_a_place_reads_its_own_id(text: str) -> None:
    place = Place.of_id(text)
    assert place is not None
    assert str(place) == text


@pytest.mark.parametrize("text", ["", "t", "t+0", "t+x+1", "t+-1+2", "t+0+٣", "t+01+2"])
def test_other_ids_name_no_place(text: str) -> None:
    assert Place.of_id(text) is None


def test_the_problems_name_some_of_the_places() -> None:
    world = World()
    world.documents.clear()
    (sentence,) = world.prove().problems()
    assert sentence == "10 lost: t+0+0, t+0+1, t+0+2, …"
