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
    TRUNCATED_BELOW_THEN,
    accept,
    left_behind,
    newest_place,
    newest_places,
    place_of,
    written_places,
)
from headrace.clock import ManualClock
from headrace.elasticsearch.target import ConcreteIndex
from headrace.ledger import Ledger
from headrace.stream import ElasticsearchOutput, KafkaInput, KeyIds, Stream

START_MS = 1_700_000_000_000
OUTPUT = ElasticsearchOutput(hosts="http://h:1", index="orders")
APPLYING = OUTPUT.model_copy(update={"document_ids": KeyIds(version_from="position"), "truncates": "apply"})
MOVED = APPLYING.model_copy(update={"index": "moved"})
REPLAYED = APPLYING.model_copy(update={"index": "orders-v2"})
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

    def mark(self, number: int, output: ElasticsearchOutput = APPLYING, replay: str = "") -> tuple[int, int]:
        """The version below which the batch writes nothing, and the part of it that replays inherit."""
        place = newest_place(
            self.ledger, "orders", output, batch_time_ms=self.time(number), interval_ms=10_000, target=replay
        )
        known = place or {}
        return known.get(TRUNCATED_BELOW, 0), known.get(TRUNCATED_BELOW_THEN, 0)

    def run(
        self, *numbers: int, truncate: int = 0, output: ElasticsearchOutput = APPLYING, replay: str = ""
    ) -> list[int]:
        """Write batches as the writer does. Returns the versions below which they wrote nothing, without their own
        truncates."""
        found = []
        for number in numbers:
            below, then = self.mark(number, output, replay)
            found.append(below)
            marks = {TRUNCATED_BELOW: max(truncate, below), TRUNCATED_BELOW_THEN: max(truncate, then)}
            place = place_of(output, ConcreteIndex(f"{output.index}-1", "u"))
            self.write(number, {"rows": 1, PLACE: {**place, **(marks if truncate or below else {})}}, replay=replay)
        return found

    def of_replay(self, *numbers: int, output: ElasticsearchOutput = REPLAYED) -> list[int]:
        """The versions below which a new replay of these batches writes nothing."""
        return [self.mark(number, output, "new")[0] for number in numbers]

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


@pytest.mark.parametrize("more", [0, 3, 10])
def test_places_of_several_names_are_found_together(orders: Orders, more: int) -> None:
    """Few are searched for, of many all results are read. A database may escape what is not ASCII, or not."""
    orders.write(1, written_to_names("o-münchen", "o-a"))
    orders.write(2, written_to_names("o-京都"))
    for number in range(3, BATCHES + 1):
        orders.write(number, written_to_names("o-b"))
    names = ["o-a", "o-münchen", "o-京都", "o-b", *(f"o-new-{number}" for number in range(more))]
    found = newest_places(orders.ledger, "orders", NAMES, names, batch_time_ms=orders.time(5), interval_ms=10_000)
    assert {name: place["index"] for name, place in found.items()} == {name: f"{name}-1" for name in names[:4]}
    assert [orders.index(NAMES.at(name)) for name in names[:3]] == [f"{name}-1" for name in names[:3]]
    mapping = OUTPUT.model_copy(update={"index": {"größe": "a", "b": "c"}})
    orders.write(1, written_to("x", mapping))
    assert orders.index(mapping) == "x"


def test_the_acceptances_of_many_names_all_count(orders: Orders) -> None:
    names = [f"o-{number}" for number in range(250)]
    orders.write(1, written_to_names(*names))
    orders.clock.advance(1_000)
    for name in names:
        accept(orders.ledger, "orders", place_of(NAMES.at(name), ConcreteIndex(f"{name}-2", "u")), by="test")
    of_batch = {"batch_time_ms": orders.time(5), "interval_ms": 10_000}
    found = newest_places(orders.ledger, "orders", NAMES, names, **of_batch)
    assert {name: place["index"] for name, place in found.items()} == {name: f"{name}-2" for name in names}
    assert orders.index(NAMES.at("o-0")) == "o-0-2"


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


def test_a_truncate_holds_behind_a_moved_alias(orders: Orders) -> None:
    orders.run(2, truncate=700)
    orders.write(4, written_to("orders-1"))
    assert orders.mark(5) == (700, 700)
    accept(orders.ledger, "orders", place_of(APPLYING, ConcreteIndex("orders-2", "v")), by="me")
    assert orders.mark(5) == (700, 700)
    assert orders.index(APPLYING) == "orders-2"


def test_a_truncate_does_not_follow_to_another_index(orders: Orders) -> None:
    """A database that was moved to another server begins its positions anew, and needs a new index."""
    orders.run(2, truncate=700)
    assert orders.run(3, 4, output=MOVED) == [0, 0]
    assert orders.mark(5, APPLYING.model_copy(update={"hosts": ("http://other:1",)})) == (0, 0)
    assert orders.mark(5) == (700, 700), "it was moved back"
    orders.run(5, output=MOVED, truncate=30)
    assert (orders.mark(6, MOVED), orders.mark(6)) == ((30, 30), (700, 700))


def test_a_truncate_holds_for_other_hosts_of_the_cluster(orders: Orders) -> None:
    hosts = ("http://h:3", "http://h:1", "http://h:2")
    wider, other = (APPLYING.model_copy(update={"hosts": some}) for some in (hosts, hosts[::2]))
    orders.run(2, truncate=700)
    assert orders.mark(3, APPLYING.model_copy(update={"hosts": ("http://h:1/",)}))[0] == 700
    orders.run(*range(3, 6), output=other)
    assert orders.mark(6, wider)[0] == 700
    orders.run(6, output=wider)
    assert orders.mark(7, other)[0] == 700


@pytest.mark.parametrize("hosts", [("http://other:1",), ("http://h:1", "http://other:1")])
def test_a_truncate_is_found_behind_those_of_another_place(orders: Orders, hosts: tuple[str, ...]) -> None:
    """The other server's index has the same name."""
    orders.run(1, truncate=700)
    other = APPLYING.model_copy(update={"hosts": hosts})
    orders.run(2, output=other, truncate=5)
    orders.run(*range(3, BATCHES + 1), output=other)
    assert orders.mark(5)[0] == 700


def test_a_truncate_is_found_by_place_not_by_output_id(orders: Orders) -> None:
    orders.run(2, truncate=700)
    assert orders.mark(3, APPLYING.model_copy(update={"id": "search"})) == (700, 700)
    renamed = REPLAYED.model_copy(update={"id": "search", "renamed_from": "elasticsearch"})
    assert orders.of_replay(3, output=renamed) == [700]
    added = REPLAYED.model_copy(update={"id": "added"})
    assert orders.of_replay(3, output=added) == [0], "the stream has written nothing to this output"


def test_a_replay_knows_the_truncates_of_earlier_batches(orders: Orders) -> None:
    orders.run(1)
    orders.run(2, truncate=700)
    orders.run(3, 4)
    assert orders.of_replay(1, 2, 3, 30) == [0, 0, 700, 700]


def test_a_repeated_batch_keeps_a_later_truncate_to_itself(orders: Orders) -> None:
    """It writes nothing that the truncate has deleted, but a replay of it and of the next does."""
    orders.run(1, 2, 3)
    orders.run(4, truncate=700)
    assert orders.run(1, 2, 3, 4, 5, 1) == [700] * 6
    assert orders.of_replay(1, 2, 3, 4, 5) == [0, 0, 0, 0, 700]


def test_a_truncate_of_a_batch_run_again_is_found(orders: Orders) -> None:
    """It was a dead letter at first. The batches behind it know a lower one only."""
    orders.run(1, truncate=300)
    orders.run(*range(2, BATCHES))
    orders.run(3, truncate=700)
    for number in range(BATCHES - 3, BATCHES):
        orders.write(number, {"rows": 0})
    assert orders.of_replay(1, 3, 4, 20) == [0, 300, 700, 700]
    assert orders.mark(2) == (700, 300)
    assert orders.run(BATCHES) == [700]


def test_a_truncate_that_was_applied_stays_applied(orders: Orders) -> None:
    """The transform drops it when the batch runs again. A rebuilt ledger has only the newest result of each batch."""
    orders.run(1)
    orders.run(2, truncate=700)
    orders.run(2)
    newest = orders.ledger.attempts.recorded("orders", [orders.time(2)])[orders.time(2)]["elasticsearch"].counts[PLACE]
    assert (newest[TRUNCATED_BELOW], newest[TRUNCATED_BELOW_THEN]) == (700, 700)
    assert orders.of_replay(1, 2, 3) == [0, 0, 700]
    assert orders.mark(3) == (700, 700)


def test_a_result_of_an_earlier_version_has_one_mark(orders: Orders) -> None:
    """What a batch took over and what it found cannot be told apart there."""
    of_then = {"rows": 1, PLACE: {**place_of(APPLYING, ConcreteIndex("orders-1", "u")), TRUNCATED_BELOW: 700}}
    orders.write(3, of_then)
    assert orders.run(4, 2) == [700, 700]
    assert orders.of_replay(1, 2, 3, 4, 5) == [0, 0, 0, 700, 700]
    orders.write(1, of_then)
    assert orders.of_replay(1, 2, 3) == [0, 700, 700]


def test_a_replay_knows_the_truncates_of_its_batches_index(orders: Orders) -> None:
    """The stream was moved to another index in between, or one batch was."""
    orders.run(2, truncate=700)
    orders.run(3, 4)
    orders.run(5, 6, output=MOVED)
    orders.run(7, output=MOVED, truncate=30)
    assert orders.of_replay(4, 5, 6, 7, 8, 9) == [700, 0, 0, 0, 30, 30]
    orders.run(4, output=MOVED)
    assert orders.of_replay(3, 4, 5) == [700, 0, 0]


def test_a_replay_keeps_its_own_truncates(orders: Orders) -> None:
    """Those of the stream were dead letters. Between two batches there is a long time without records."""
    orders.write(1, written_to("orders-1"))
    orders.run(1, truncate=700, output=REPLAYED, replay="v2")
    orders.run(2, output=REPLAYED, replay="v2")
    assert orders.mark(BATCHES + 1_000, REPLAYED, "v2") == (700, 700)
    assert orders.mark(3, REPLAYED, "v3") == (0, 0)
    assert orders.mark(3) == (0, 0)


def test_a_stream_goes_on_in_the_index_of_a_replay(orders: Orders) -> None:
    orders.run(1)
    orders.run(1, output=REPLAYED, replay="v2")
    orders.run(2, output=REPLAYED, replay="v2", truncate=700)
    assert (orders.mark(3, REPLAYED), orders.mark(1, REPLAYED)) == ((700, 700), (700, 0))
    assert orders.mark(3) == (0, 0)


def test_a_truncate_holds_for_versions_of_its_kind_only(orders: Orders) -> None:
    """The output does not apply truncates any more. Offsets are other versions than positions."""
    orders.run(2, truncate=700)
    assert orders.run(3, output=APPLYING.model_copy(update={"truncates": "dead_letter"})) == [700]
    assert orders.mark(4, OUTPUT.model_copy(update={"document_ids": KeyIds()})) == (0, 0)
