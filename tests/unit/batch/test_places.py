"""Which concrete index an output's batches were written to last, by a real ledger, and what a person has accepted."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.batch.places import (
    PLACE,
    PLACES,
    TRUNCATED_BELOW,
    accept,
    left_behind,
    newest_place,
    place_of,
    written_places,
)
from headrace.clock import ManualClock
from headrace.elasticsearch.target import ConcreteIndex
from headrace.ledger import Ledger
from headrace.stream import ElasticsearchOutput, KafkaInput, KeyIds, Stream

START_MS = 1_700_000_000_000
OUTPUT = ElasticsearchOutput(hosts="http://h:1", index="orders")
BATCHES = 31
"""More than are searched one by one."""


class Orders:
    """A stream with allocated batches."""

    def __init__(self, folder: Path) -> None:
        stream = Stream(
            name="orders",
            inputs=KafkaInput(bootstrap_servers="h:1", topics="orders"),
            outputs=OUTPUT,
            batch_interval="10 s",
            storage=folder / "storage",
            ledger=f"sqlite:///{folder}/ledger.db",
        )
        self.clock = ManualClock(START_MS)
        self.ledger = Ledger.open(stream.ledger, clock=self.clock)
        self._definition = stream.to_json()
        self.ledger.streams.register(
            "orders", self._definition, batch_interval_ms=10_000, block_interval_ms=200, outputs=stream.steps
        )
        self.clock.advance(10_000 * (BATCHES + 1))
        for number in range(1, BATCHES + 1):
            self.ledger.allocations.allocate("orders", self.time(number), manifest_uri="m", manifest_sha256="0")

    def time(self, number: int) -> int:
        return START_MS + 10_000 * number

    def write(self, number: int, counts: dict[str, Any], *, replay: str = "") -> None:
        self.clock.advance(1_000)
        begun: dict[str, Any] = {"holder": "h", "way": "connect", "lease_ms": 1_000}
        at_ms = self.time(number)
        if replay:
            claim = self.ledger.replays.begin(
                "orders", at_ms, target=replay, definition=self._definition, outputs=["elasticsearch"], **begun
            )
        else:
            claim = self.ledger.attempts.begin("orders", at_ms, force=True, **begun)
        self.ledger.attempts.record_output(claim, "elasticsearch", counts)
        self.ledger.attempts.complete(claim)

    def index(self, output: ElasticsearchOutput = OUTPUT, target: str = "") -> str | None:
        place = newest_place(
            self.ledger, "orders", output, batch_time_ms=self.time(5), interval_ms=10_000, target=target
        )
        return None if place is None else place["index"]


@pytest.fixture
def orders(tmp_path: Path) -> Iterator[Orders]:
    made = Orders(tmp_path)
    yield made
    made.ledger.close()


def written_to(index: str | None, output: ElasticsearchOutput = OUTPUT) -> dict[str, Any]:
    return {"rows": 1, PLACE: place_of(output, ConcreteIndex(index, "u"))}


def test_the_place_is_that_of_the_batch_that_was_written_last(orders: Orders) -> None:
    assert orders.index() is None
    orders.write(3, written_to("orders-1"))
    orders.write(2, written_to("orders-2"))
    orders.write(4, {"rows": 0})
    assert orders.index() == "orders-2", (
        "an older batch was repeated after the alias had moved; an empty one is nowhere"
    )


def test_a_place_is_found_behind_days_without_records(orders: Orders) -> None:
    orders.write(1, written_to("orders-1"))
    elsewhere = place_of(OUTPUT.model_copy(update={"index": "others"}), ConcreteIndex("others", "u"))
    for number in range(2, BATCHES + 1):
        orders.write(number, {"rows": 3, PLACE: elsewhere} if number < 10 else {"rows": 0})
    assert orders.index() == "orders-1"


def test_a_place_is_found_by_server_and_name_not_by_output_id(orders: Orders) -> None:
    orders.write(3, written_to("orders-1"))
    assert orders.index(OUTPUT.model_copy(update={"id": "search"})) == "orders-1"
    assert orders.index(OUTPUT.model_copy(update={"index": "others"})) is None
    assert orders.index(OUTPUT.model_copy(update={"hosts": ("http://other:1",)})) is None


def test_an_accepted_place_counts_until_a_batch_is_written(orders: Orders) -> None:
    orders.write(3, written_to("orders-1"))
    orders.clock.advance(1_000)
    accept(orders.ledger, "orders", place_of(OUTPUT, ConcreteIndex("orders-2", "u2")), by="test")
    assert orders.index() == "orders-2"
    accept(orders.ledger, "orders", place_of(OUTPUT, None), by="test")
    assert orders.index() is None
    orders.write(4, written_to("orders"))
    assert orders.index() == "orders"


def test_the_places_of_a_stream_and_of_its_replays_are_apart(orders: Orders) -> None:
    orders.write(3, written_to("orders-1"))
    orders.write(3, written_to("orders-2"), replay="v2")
    orders.clock.advance(1_000)
    assert (orders.index(), orders.index(target="v2"), orders.index(target="v3")) == ("orders-1", "orders-2", None)
    accept(orders.ledger, "orders", place_of(OUTPUT, ConcreteIndex("orders-3", "u3")), by="test", target="v2")
    assert (orders.index(), orders.index(target="v2")) == ("orders-1", "orders-3")


NAMES = OUTPUT.model_copy(update={"index": "o-{topic}"})


def written_to_names(*names: str) -> dict[str, Any]:
    places = [place_of(NAMES.at(name), ConcreteIndex(f"{name}-1", "u")) for name in names]
    return {"rows": 1, PLACE: place_of(NAMES, None), PLACES: places}


def test_each_name_has_the_place_that_was_written_last(orders: Orders) -> None:
    """Among those of a batch, behind batches that name others, and of a plain index that was there before."""
    orders.write(1, written_to_names("o-a", "o-b"))
    orders.write(2, written_to("o-c-1", NAMES.at("o-c")))
    for number in range(3, BATCHES + 1):
        orders.write(number, written_to_names("o-b"))
    assert [orders.index(NAMES.at(name)) for name in ("o-a", "o-b", "o-c", "o-d")] == ["o-a-1", "o-b-1", "o-c-1", None]
    accept(orders.ledger, "orders", place_of(NAMES.at("o-a"), ConcreteIndex("o-a-2", "u")), by="test")
    assert [orders.index(NAMES.at(name)) for name in ("o-a", "o-b")] == ["o-a-2", "o-b-1"]


def test_a_batch_was_written_to_the_places_of_its_names() -> None:
    assert [place["index"] for place in written_places(NAMES, written_to_names("o-a", "o-b"))] == ["o-a-1", "o-b-1"]
    assert written_places(NAMES, {"rows": 0}) == []
    assert written_places(NAMES, written_to("orders-1")) == [written_to("orders-1")[PLACE]], "a plain name before"
    assert [place["index"] for place in written_places(OUTPUT, {"index": "old"})] == ["old"]


def test_indices_that_rows_do_not_name_any_more_are_known(orders: Orders) -> None:
    """Of a result its indices; of an attempt that failed, what its definition says."""
    orders.write(1, written_to_names("o-a", "o-b"))
    begun: dict[str, Any] = {"force": True, "holder": "h", "way": "connect", "lease_ms": 1_000}
    failed = orders.ledger.attempts.begin("orders", orders.time(1), **begun)
    orders.ledger.attempts.fail(failed, "it failed")
    claim = orders.ledger.attempts.begin("orders", orders.time(1), **begun)
    assert left_behind(orders.ledger, NAMES, claim, ["o-b", "o-c"]) == ["o-a", "orders"]
    assert left_behind(orders.ledger, OUTPUT, claim, ["orders"]) == ["o-a", "o-b"]
    orders.ledger.attempts.fail(claim, "it failed")
    other = orders.ledger.attempts.begin("orders", orders.time(2), **begun)
    assert left_behind(orders.ledger, NAMES, other, ["o-b"]) == []


def test_the_mark_of_a_truncate_holds_for_other_places_too(orders: Orders) -> None:
    """What is older is written nowhere: not behind an alias that was moved, nor by a replay of later batches."""
    by_position = KeyIds(version_from="position")
    output = OUTPUT.model_copy(update={"document_ids": by_position, "truncates": "apply"})
    orders.write(2, {"rows": 1, PLACE: {**place_of(output, ConcreteIndex("orders-1", "u")), TRUNCATED_BELOW: 700}})
    orders.write(4, written_to("orders-1"))

    def mark(number: int, target: str = "") -> int:
        place = newest_place(
            orders.ledger, "orders", output, batch_time_ms=orders.time(number), interval_ms=10_000, target=target
        )
        return 0 if place is None else int(place.get(TRUNCATED_BELOW, 0))

    assert mark(5) == 700
    accept(orders.ledger, "orders", place_of(output, ConcreteIndex("orders-2", "v")), by="me")
    assert mark(5) == 700
    assert [mark(number, "again") for number in (1, 2, 3, 30)] == [0, 0, 700, 700]
