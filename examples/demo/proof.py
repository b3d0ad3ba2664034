"""The proof: compares Kafka's records with the index and the dead letters, record by record.

It does not depend on how headrace works: its inputs are a plain consumer's records and Elasticsearch's documents.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Place(NamedTuple):
    """The place of a record in Kafka."""

    topic: str
    partition: int
    offset: int

    def __str__(self) -> str:
        return f"{self.topic}+{self.partition}+{self.offset}"

    @classmethod
    def of_id(cls, document_id: str) -> Place | None:
        """The place that a document id ``topic+partition+offset`` names; None if it has another form."""
        parts = document_id.rsplit("+", 2)
        if len(parts) != 3 or not parts[1].isdecimal() or not parts[2].isdecimal():
            return None
        place = cls(parts[0], int(parts[1]), int(parts[2]))
        return place if str(place) == document_id else None  # "007" is not 7


class Document(NamedTuple):
    """A document of the index."""

    id: str
    source: Any


class DeadLetter(NamedTuple):
    """A dead letter; ``value`` holds the original bytes, None for a record without a value."""

    id: str
    place: Place | None
    value: bytes | None


@dataclass(frozen=True, slots=True)
class Proof:
    """The result of the comparison. Each list has the places (``unknown``: the document ids) that are wrong."""

    produced: int
    """Records whose delivery was reported to the producer."""
    held: int
    """Records that Kafka holds, according to its offsets."""
    read: int
    """Records that a plain consumer read again."""
    indexed: int
    dead_lettered: int
    lost: list[Place] = field(default_factory=list)
    """In neither the index nor the dead letters."""
    doubled: list[Place] = field(default_factory=list)
    """More than once in the index and the dead letters together."""
    changed: list[Place] = field(default_factory=list)
    """Present, but with another value than the record's."""
    misjudged: list[Place] = field(default_factory=list)
    """Dead-lettered although well-formed, or indexed although malformed."""
    unknown: list[str] = field(default_factory=list)
    """Documents without a record in Kafka."""

    @property
    def complete(self) -> bool:
        """Whether the counts of produced, held and read records agree, and are above 0."""
        return self.produced == self.held == self.read > 0

    @property
    def holds(self) -> bool:
        """Whether every record is present exactly once, unchanged and in the right place, and nothing else is."""
        return self.complete and not any((self.lost, self.doubled, self.changed, self.misjudged, self.unknown))

    def counts(self) -> dict[str, int]:
        """The number of documents, of dead letters, and of each kind of problem."""
        return {
            "indexed": self.indexed,
            "dead_lettered": self.dead_lettered,
            "lost": len(self.lost),
            "doubled": len(self.doubled),
            "changed": len(self.changed),
            "misjudged": len(self.misjudged),
            "unknown": len(self.unknown),
        }

    def problems(self, examples: int = 3) -> Iterator[str]:
        """A sentence for each kind of problem, with some examples."""
        if not self.complete:
            yield (
                f"{self.produced} records were produced, Kafka's offsets say {self.held}, and {self.read} were read "
                "again: these should be one number above 0"
            )
        for what, found in (
            ("lost", self.lost),
            ("there more than once", self.doubled),
            ("changed", self.changed),
            ("in the index instead of the dead letters, or the other way round", self.misjudged),
            ("in the index or the dead letters without a record in Kafka", self.unknown),
        ):
            if found:
                some = ", ".join(str(one) for one in found[:examples]) + (", …" if len(found) > examples else "")
                yield f"{len(found)} {what}: {some}"


def prove(
    *,
    produced: int,
    held: int,
    records: Mapping[Place, bytes | None],
    malformed: Collection[Place],
    documents: Iterable[Document],
    dead_letters: Iterable[DeadLetter],
) -> Proof:
    """Compare. ``malformed`` are the places of the records that belong in the dead letters; all others do not."""
    tally = _Tally(records, frozenset(malformed))
    indexed = dead_lettered = 0
    for document in documents:
        indexed += 1
        tally.take_document(document)
    for letter in dead_letters:
        dead_lettered += 1
        tally.take_dead_letter(letter)
    return Proof(
        produced=produced,
        held=held,
        read=len(records),
        indexed=indexed,
        dead_lettered=dead_lettered,
        lost=sorted(records.keys() - tally.seen.keys()),
        doubled=sorted(place for place, times in tally.seen.items() if times > 1),
        changed=tally.changed,
        misjudged=tally.misjudged,
        unknown=tally.unknown,
    )


class _Tally:
    def __init__(self, records: Mapping[Place, bytes | None], malformed: frozenset[Place]) -> None:
        self._records = records
        self._malformed = malformed
        self.seen: Counter[Place] = Counter()
        self.changed: list[Place] = []
        self.misjudged: list[Place] = []
        self.unknown: list[str] = []

    def take_document(self, document: Document) -> None:
        place = self._see(Place.of_id(document.id), document.id)
        if place is None:
            return
        if place in self._malformed:
            self.misjudged.append(place)
        elif not _same(document.source, self._records[place]):
            self.changed.append(place)

    def take_dead_letter(self, letter: DeadLetter) -> None:
        place = self._see(letter.place, letter.id)
        if place is None:
            return
        if place not in self._malformed:
            self.misjudged.append(place)
        elif letter.value != self._records[place]:
            self.changed.append(place)

    def _see(self, place: Place | None, document_id: str) -> Place | None:
        if place is None or place not in self._records:
            self.unknown.append(document_id)
            return None
        self.seen[place] += 1
        return place


def _same(source: Any, value: bytes | None) -> bool:
    """Whether a document equals the record's value. 1 and 1.0 are the same number in JSON; True is not a number."""
    if value is None:
        return False
    try:
        return _exactly_equal(source, json.loads(value))
    except ValueError:
        return False


def _exactly_equal(one: Any, other: Any) -> bool:
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_exactly_equal(item, other[name]) for name, item in one.items())
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_exactly_equal, one, other))
    return isinstance(one, bool) == isinstance(other, bool) and bool(one == other)
