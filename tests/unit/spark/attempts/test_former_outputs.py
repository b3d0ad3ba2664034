"""Which former ids an output has at its place, by a real ledger whose definitions and attempts change."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.batch.allocation import allocate
from headrace.ledger import EventKind, Ledger
from headrace.spark.attempts.batch_plan import AttemptPlan, plan_attempt
from headrace.spark.attempts.former_outputs import AmbiguousOutputError
from headrace.stream import ElasticsearchOutput, KafkaInput, KafkaOutput, ParquetOutput, Stream
from headrace.stream_context import StreamContext

T = 10_000


def topic(id_: str, name: str = "out", **fields: Any) -> KafkaOutput:
    return KafkaOutput(id=id_, bootstrap_servers="k:9092", topic=name, **fields)


class History:
    """A stream whose definition changes, and one batch of it."""

    def __init__(self, ledger: Ledger, folder: Path) -> None:
        self._ledger = ledger
        self._folder = folder
        self._context: StreamContext | None = None

    def declare(self, *outputs: Any) -> None:
        stream = Stream(
            name="clicks",
            inputs=KafkaInput(bootstrap_servers="k:9092", topics="clicks"),
            outputs=list(outputs),
            batch_interval="10 s",
            storage=str(self._folder / "storage"),
            ledger=f"sqlite:///{self._folder}/ledger.db",
        )
        self._ledger.streams.register(
            "clicks",
            stream.to_json(),
            batch_interval_ms=10_000,
            block_interval_ms=200,
            outputs=stream.steps,
        )
        first, self._context = self._context is None, StreamContext(stream, self._ledger)
        if first:
            allocate(self._context, T)

    def attempt(self) -> AttemptPlan:
        """Begin an attempt at all outputs, which does not end."""
        assert self._context is not None
        claim = self._ledger.attempts.begin("clicks", T, holder="h", way="connect", lease_ms=1, force=True)
        return plan_attempt(self._context, claim, self._ledger.batches.get("clicks", T))

    def replay(self, *outputs: Any) -> AttemptPlan:
        """Begin an attempt at the batch's replay "v2" with these outputs."""
        assert self._context is not None
        stream = self._context.stream.model_copy(update={"outputs": outputs})
        claim = self._ledger.replays.begin(
            "clicks",
            T,
            target="v2",
            definition=stream.to_json(),
            outputs=[output.step for output in outputs],
            holder="h",
            way="connect",
            lease_ms=1,
        )
        return plan_attempt(StreamContext(stream, self._ledger), claim, self._ledger.batches.get("clicks", T))

    def rebuilt(self) -> None:
        self._ledger.events.append("clicks", EventKind.LEDGER_REBUILT)

    def former(self) -> dict[str, tuple[str, ...]]:
        return {plan.output.id: plan.former_steps for plan in self.attempt().outputs if plan.former_steps}


@pytest.fixture
def history(tmp_path: Path) -> Iterator[History]:
    with Ledger.open(f"sqlite:///{tmp_path}/ledger.db") as ledger:
        yield History(ledger, tmp_path)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (topic("kafka"), topic("enriched")),
        (ParquetOutput(id="p", path="/data"), ParquetOutput(id="files", path="file:///data/")),
        (
            ElasticsearchOutput(hosts="http://h:1", index="i"),
            ElasticsearchOutput(id="b", hosts="http://h:1", index="i"),
        ),
    ],
    ids=["topic", "folder", "index"],
)
def test_a_new_id_at_the_same_place_has_the_former_output(history: History, before: Any, after: Any) -> None:
    history.declare(before)
    assert history.former() == {}
    assert history.former() == {}, "another attempt with the same definition"
    history.declare(after)
    (plan,) = history.attempt().outputs
    assert (plan.former_steps, plan.written_before, plan.tried_before) == ((before.id,), True, True)


def test_a_batch_that_the_former_output_never_began_has_none(history: History) -> None:
    history.declare(topic("kafka"))
    history.declare(topic("enriched"))
    assert history.former() == {}


def test_ids_that_change_places_are_each_others_former_ones(history: History) -> None:
    history.declare(topic("a", "one"), topic("b", "two"))
    history.attempt()
    history.declare(topic("b", "one"), topic("a", "two"))
    assert history.former() == {"a": ("b",), "b": ("a",)}


def test_another_topic_has_no_former_output_of_this_one(history: History) -> None:
    history.declare(topic("a", "one"))
    history.attempt()
    history.declare(topic("b", "two"))
    assert history.former() == {}


def test_two_outputs_into_one_topic_are_not_each_others_heirs(history: History) -> None:
    """One of them failed, the other one was sent and then removed: what is missing must be sent."""
    history.declare(topic("a"), topic("b"))
    history.attempt()
    history.declare(topic("b"))
    assert history.former() == {}


def test_an_output_once_beside_the_former_is_not_its_heir(history: History) -> None:
    history.declare(topic("a"))
    history.attempt()
    history.declare(topic("a"), topic("b"))
    history.declare(topic("b"))
    assert history.former() == {}


def test_of_two_new_outputs_the_one_declared_first_is_the_heir(history: History) -> None:
    history.declare(topic("a"))
    history.attempt()
    history.declare(topic("b"))
    history.declare(topic("b"), topic("c"))
    assert history.former() == {"b": ("a",)}


def test_two_new_outputs_at_one_place_are_refused_until_named(history: History) -> None:
    """They are refused until one of them names the former one."""
    history.declare(topic("a"))
    history.attempt()
    history.declare(topic("b"), topic("c"))
    with pytest.raises(AmbiguousOutputError, match=r"Outputs b and c .* topic out.*renamed_from='a'"):
        history.attempt()
    history.declare(topic("b", renamed_from="a"), topic("c"))
    assert history.former() == {"b": ("b",)}, "the attempt between was begun under its own id"


def test_an_output_of_a_replay_has_this_replays_former_ids_only(history: History) -> None:
    history.declare(topic("a"))
    history.attempt()
    first = history.replay(topic("b", "copy"))
    assert (first.outputs[0].former_steps, first.stream_steps) == ((), ("a",))
    again = history.replay(topic("c", "copy"))
    assert (again.outputs[0].former_steps, again.stream_steps) == (("b",), ("a",))


def test_a_rebuilt_ledger_may_lack_the_former_outputs_attempts(history: History) -> None:
    history.declare(topic("a"))
    history.declare(topic("b"))
    history.rebuilt()
    assert history.former() == {"b": ("a",)}
