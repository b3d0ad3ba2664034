"""Judges a run from outside, without tolerance: compares Kafka with the producer's receipts and Elasticsearch with
Kafka, and uses `headrace streams fsck` for the ledger."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from typing import Any

from examples.demo.proof import Document, Place, Proof
from tests.hammer.journal import Injection
from tests.hammer.kinds import Fault
from tests.hammer.load import Receipts
from tests.hammer.pipeline import Numbered, last_documents

_EXAMPLES = 3


@dataclass(frozen=True, slots=True)
class KafkaAgainstReceipts:
    """Kafka compared with the producer's receipts. It does not test headrace, but the proof depends on it."""

    acknowledged: int
    missing: list[Place] = field(default_factory=list)
    """Acknowledged, and Kafka does not hold it."""
    other: list[Place] = field(default_factory=list)
    """Acknowledged, and Kafka holds another value there."""
    unasked: list[Place] = field(default_factory=list)
    """Held by Kafka without a receipt, and not explained by reported delivery errors."""

    def problems(self) -> Iterator[str]:
        """A sentence on each kind of thing that is wrong."""
        yield from _report("acknowledged records are not in Kafka", self.missing)
        yield from _report("acknowledged records are others in Kafka", self.other)
        yield from _report("records are in Kafka that the producer knows nothing of", self.unasked)


def compare_with_receipts(
    receipts: Receipts, sent: Iterable[Numbered], held: Mapping[Place, bytes | None]
) -> KafkaAgainstReceipts:
    """``sent`` are all records in order of their numbers, ``held`` is what a plain consumer read."""
    missing, other, known = [], [], set()
    for record in sent:
        place = receipts.places.get(record.number)
        if place is None:
            continue
        known.add(place)
        if place not in held:
            missing.append(place)
        elif held[place] != record.value:
            other.append(place)
    unasked = sorted(held.keys() - known)
    # A record whose delivery failed may have been written all the same.
    return KafkaAgainstReceipts(len(known), missing, other, unasked if len(unasked) > len(receipts.refused) else [])


@dataclass(frozen=True, slots=True)
class Fsck:
    """The exit code and the output of `headrace streams fsck`."""

    exit_code: int
    output: str


@dataclass(frozen=True, slots=True)
class Judgement:
    """All findings of a run."""

    seed: int
    kafka: KafkaAgainstReceipts
    proof: Proof
    refused: int
    """Deliveries that failed according to the producer."""
    planned: Sequence[Fault]
    injections: Sequence[Injection]
    collateral: Mapping[str, int]
    batches: Mapping[str, int]
    """Batches with records, by state."""
    uncovered: Sequence[str]
    """Offsets that are in no batch, or in two, according to the ledger."""
    gaps: Sequence[str]
    receiver_jobs: int
    """Receiver jobs of the stream that ran in the end."""
    fsck: Fsck
    broken_rules: Sequence[str] = ()
    """Rules of the ledger's rows that do not hold (`tests.support.ledger_rules`)."""
    not_possible: Sequence[str] = ()
    """Kinds of faults that cannot be injected on this machine, and why."""
    keys: Sequence[str] = ()
    """What is wrong with the documents by key."""
    seconds: Mapping[str, float] = field(default_factory=dict)

    @property
    def holds(self) -> bool:
        """Whether nothing at all is wrong."""
        return not any(True for _ in self.problems())

    def problems(self) -> Iterator[str]:
        """A sentence on each thing that is wrong."""
        yield from self.kafka.problems()
        yield from self.proof.problems()
        yield from self.keys
        undone = {state: number for state, number in self.batches.items() if state != "completed"}
        if undone or not self.batches:
            yield f"not all batches are completed: {dict(self.batches)}"
        yield from self.uncovered
        yield from (f"the ledger tells of a gap: {gap}" for gap in self.gaps)
        if self.receiver_jobs != 1:
            yield f"{self.receiver_jobs} receiver jobs run in the end, it should be one"
        if self.fsck.exit_code != 0:
            yield f"headrace streams fsck ended with {self.fsck.exit_code}: {self.fsck.output.strip()[-2_000:]}"
        yield from (f"the ledger breaks a rule: {broken}" for broken in self.broken_rules)
        yield from self._unproved()
        yield from (
            f"fault #{injection.fault} ({injection.kind}) was not seen: {injection.unnamed}"
            for injection in self.injections
            if injection.unnamed
        )

    def _unproved(self) -> Iterator[str]:
        """Faults that did not happen prove nothing."""
        for injection in self.injections:
            if not injection.hit:
                yield f"fault #{injection.fault} ({injection.kind}) missed: {injection.missed}"
        never = {fault.number for fault in self.planned} - {injection.fault for injection in self.injections}
        if never:
            yield f"faults {sorted(never)} never had their turn"

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        proof = self.proof
        return {
            "holds": self.holds,
            "seed": self.seed,
            "problems": list(self.problems()),
            "records": {
                "acknowledged": self.kafka.acknowledged,
                "refused": self.refused,
                "held_by_kafka": proof.held,
                **proof.counts(),
            },
            "batches": dict(self.batches),
            "faults": {"planned": len(self.planned), **by_kind(self.injections)},
            "collateral": dict(self.collateral),
            "receiver_jobs": self.receiver_jobs,
            "fsck": asdict(self.fsck),
            "not_possible": list(self.not_possible),
            "seconds": dict(self.seconds),
        }


def by_kind(injections: Collection[Injection]) -> dict[str, Any]:
    """How many injections hit and missed, all together and by kind."""
    hit = Counter(injection.kind for injection in injections if injection.hit)
    missed = Counter(injection.kind for injection in injections if not injection.hit)
    kinds = {kind: {"hit": hit[kind], "missed": missed[kind]} for kind in sorted({*hit, *missed})}
    return {"hit": hit.total(), "missed": missed.total(), "kinds": kinds}


def wrong_keys(held: Iterable[Place], documents: Iterable[Document]) -> list[str]:
    """A sentence on each kind of difference between the documents by key and what Kafka's records leave."""
    expected = last_documents(held)
    found = {document.id: document.source for document in documents}
    other = [key for key in expected.keys() & found.keys() if expected[key] != found[key]]
    return [
        *_report("keys are not in the index", sorted(expected.keys() - found.keys())),
        *_report("keys came back after they were deleted", sorted(found.keys() - expected.keys())),
        *_report("keys have another document than their last one", sorted(other)),
    ]


Range = tuple[int, int]


def uncovered(
    held: Mapping[int, Range], taken: Mapping[int, Collection[tuple[int, int, int]]], *, topic: str
) -> list[str]:
    """What batches leave out or take twice, by partition: ``held`` are Kafka's [first, end), ``taken`` each batch's
    (from, until, batch time)."""
    found = []
    for partition, (first, end) in held.items():
        at = first
        for start, until, batch in sorted(taken.get(partition, ())):
            if start > at:
                found.append(f"{topic}-{partition}: offsets {at} to {start} are in no batch")
            elif start < at:
                found.append(f"{topic}-{partition}: offsets {start} to {at} are in two batches, one of them {batch}")
            at = max(at, until)
        if at < end:
            found.append(f"{topic}-{partition}: offsets {at} to {end} are in no batch")
        if at > end:
            found.append(f"{topic}-{partition}: batches go to offset {at}, and Kafka ends at {end}")
    return found


def _report(what: str, found: Sequence[object]) -> Iterator[str]:
    if found:
        some = ", ".join(str(one) for one in islice(found, _EXAMPLES)) + (", …" if len(found) > _EXAMPLES else "")
        yield f"{len(found)} {what}: {some}"
