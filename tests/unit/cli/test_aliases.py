"""`headrace aliases swap` with a real ledger and a stand-in for Elasticsearch; the integration tests move an alias."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from headrace.batch.places import newest_place
from headrace.cli import aliases
from headrace.cli.main import app
from headrace.clock import ManualClock
from headrace.elasticsearch.administration import Administration
from headrace.elasticsearch.target import ConcreteIndex
from headrace.ledger import Ledger
from headrace.stream import ConsoleOutput, ElasticsearchOutput, KafkaInput, Stream
from headrace.stream.stream import replayed

START_MS = 1_700_000_000_000
T1, T2, T3, T4 = (START_MS + 10_000 * number for number in range(1, 5))
RUN: dict[str, Any] = {"holder": "test", "way": "submit", "lease_ms": 60_000}


class Shop:
    """A stream with the outputs "index" and "console", and its replay "v2" into the index "new"; T1 to T4 are there."""

    def __init__(self, folder: Path) -> None:
        self.stream = Stream(
            name="shop",
            inputs=KafkaInput(bootstrap_servers="127.0.0.1:1", topics="clicks"),
            outputs=[ElasticsearchOutput(id="index", hosts="http://127.0.0.1:1", index="live"), ConsoleOutput()],
            batch_interval="10 s",
            storage=folder / "storage",
            ledger=f"sqlite:///{folder}/ledger.db",
        )
        clock = ManualClock(START_MS)
        self.ledger = Ledger.open(self.stream.ledger, clock=clock)
        self.ledger.streams.register(
            "shop",
            self.stream.to_json(),
            batch_interval_ms=10_000,
            block_interval_ms=200,
            outputs=self.stream.steps,
            max_concurrent_batches=10,
        )
        clock.advance(45_000)
        for at_ms in (T1, T2, T3, T4):
            self.ledger.allocations.allocate("shop", at_ms, manifest_uri="m", manifest_sha256="0")

    def begin(self, at_ms: int) -> Any:
        return self.ledger.attempts.begin("shop", at_ms, **RUN)

    def write(self, *times_ms: int) -> None:
        for at_ms in times_ms:
            self._complete(self.begin(at_ms))

    def fail_after(self, at_ms: int, *outputs: str) -> None:
        attempt = self.begin(at_ms)
        for output in outputs:
            self.ledger.attempts.record_output(attempt, output, {})
        self.ledger.attempts.fail(attempt, "no")

    def replay(self, *times_ms: int, index: str = "new") -> None:
        definition = replayed(self.stream, {"index": {"index": index}}).to_json()
        for at_ms in times_ms:
            self._complete(
                self.ledger.replays.begin("shop", at_ms, target="v2", definition=definition, outputs=["index"], **RUN)
            )

    def lacking(self) -> tuple[list[int], list[int]]:
        return aliases._lacking(self.ledger, "shop", "index", "v2", "new")

    def swap(self, *options: str) -> Any:
        arguments = ["aliases", "swap", "shop", "index", "--to", "new", "--replay", "v2", "--json"]
        result = CliRunner().invoke(app, [*arguments, "--ledger", self.stream.ledger, *options])
        return json.loads(result.stdout) if result.exit_code == 0 else result.output

    def place(self, target: str = "") -> Any:
        """The concrete index that the next batch may write to."""
        (output,) = self.stream.elasticsearch_outputs
        return newest_place(self.ledger, "shop", output, batch_time_ms=T1, interval_ms=10_000, target=target)

    def _complete(self, attempt: Any) -> None:
        for output in attempt.outputs:
            self.ledger.attempts.record_output(attempt, output, {})
        self.ledger.attempts.complete(attempt)


class Moves:
    """Stands in for the administration of a cluster, where the alias points to the index "old", and then to "new"."""

    there: ConcreteIndex | None = ConcreteIndex("new", "u2")

    def concrete_index(self, name: str) -> ConcreteIndex | None:
        assert name == "live"
        return self.there

    def move_alias(self, name: str, new: str) -> str:
        assert (name, new) == ("live", "new")
        return "old"


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shop]:
    monkeypatch.setattr(Administration, "of", lambda *_, **__: contextlib.nullcontext(Moves()))
    made = Shop(tmp_path)
    yield made
    made.ledger.close()


def test_a_batch_whose_other_output_failed_is_missing_too(shop: Shop) -> None:
    shop.write(T1, T3)
    shop.fail_after(T2, "index")
    shop.fail_after(T4, "console")
    shop.replay(T1, T3)
    assert shop.lacking() == ([T2], []), "its documents are in the old index only; T4 will be written by the alias"
    shop.replay(T2)
    assert shop.lacking() == ([], [])


def test_an_abandoned_batch_with_output_is_named_not_waited_for(shop: Shop) -> None:
    shop.write(T1)
    shop.fail_after(T2, "index")
    shop.fail_after(T3)
    for at_ms in (T2, T3):
        shop.ledger.batches.abandon("shop", at_ms, "never")
    shop.replay(T1)
    assert shop.lacking() == ([], [T2])


def test_a_batch_that_was_replayed_into_another_index_is_missing(shop: Shop) -> None:
    shop.write(T1, T2, T3)
    shop.replay(T1, T3)
    shop.replay(T2, index="another")
    assert shop.lacking() == ([T2], [])
    shop.replay(T2)
    assert shop.lacking() == ([], [])


def test_batches_that_may_be_in_either_index_are_to_be_run_again(shop: Shop) -> None:
    shop.write(T1, T3, T4)
    shop.begin(T2)
    shop.replay(T1, T3)
    moved = shop.swap("--until", str(T3))
    assert (moved["run_again"], moved["not_replayed"], moved["old_index"]) == ([T2, T4], [], "old")


def test_batches_before_the_replay_are_named(shop: Shop) -> None:
    shop.write(T1, T2)
    shop.replay(T2)
    assert shop.swap()["not_replayed"] == [T1]


def test_nothing_is_moved_while_batches_are_missing(shop: Shop) -> None:
    shop.write(T1, T2)
    shop.replay(T1)
    refused = " ".join(shop.swap().split())
    assert "Index 'new' lacks 1 batch(es) that output 'index'" in refused
    assert "--until with a time before" in refused


def test_a_replay_that_nobody_ran_is_refused(shop: Shop) -> None:
    assert "no replay 'v2'" in shop.swap()


def test_a_batch_begun_during_the_move_is_to_be_run_again(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have written all of its documents by the old alias, and be recorded later."""
    shop.write(T1)
    shop.replay(T1)

    def move(_: Moves, _name: str, _new: str) -> str:
        shop.begin(T2)
        return "old"

    monkeypatch.setattr(Moves, "move_alias", move)
    assert shop.swap()["run_again"] == [T2]


def test_the_index_behind_a_moved_alias_is_accepted(shop: Shop) -> None:
    shop.write(T1)
    shop.replay(T1)
    shop.swap()
    assert (shop.place()["index"], shop.place()["uuid"]) == ("new", "u2")


def accepted(shop: Shop, *options: str) -> Any:
    return CliRunner().invoke(app, ["aliases", "accept", "shop", "index", "--ledger", shop.stream.ledger, *options])


@pytest.mark.parametrize(
    ("there", "options", "says"),
    [
        (None, [], "There is no index or alias 'live'"),
        (ConcreteIndex("live", "u2"), ["--create"], "'live' exists"),
        (ConcreteIndex("live", "u2"), ["--replay", "v3"], "no replay 'v3'"),
    ],
)
def test_only_what_is_there_is_accepted(
    shop: Shop, monkeypatch: pytest.MonkeyPatch, there: Any, options: list[str], says: str
) -> None:
    monkeypatch.setattr(Moves, "there", there)
    result = accepted(shop, *options)
    assert result.exit_code == 1
    assert says in result.output
    assert shop.place() is None


def test_an_index_that_is_accepted_is_the_next_batches_place(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    result = accepted(shop)
    assert result.exit_code == 0, result.output
    assert "writes to live, which is new now" in result.output
    assert shop.place()["index"] == "new"
    monkeypatch.setattr(Moves, "there", None)
    assert "which the next batch creates" in accepted(shop, "--create").output
    assert shop.place()["index"] is None
