"""What of a stream's output is in the index of a replay, by a real ledger; the alias is in the integration tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.cli.replayed_index import AliasSwapRefusedError, ReplayedIndex
from headrace.clock import ManualClock
from headrace.ledger import Ledger
from headrace.stream import ConsoleOutput, ElasticsearchOutput, KafkaInput, Stream
from headrace.stream.replays import replayed

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

    def known(self) -> ReplayedIndex:
        return ReplayedIndex(self.ledger, "shop", "index", "v2", "new")

    def _complete(self, attempt: Any) -> None:
        for output in attempt.outputs:
            self.ledger.attempts.record_output(attempt, output, {})
        self.ledger.attempts.complete(attempt)


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[Shop]:
    made = Shop(tmp_path)
    yield made
    made.ledger.close()


def test_a_batch_whose_other_output_failed_is_missing_too(shop: Shop) -> None:
    shop.write(T1, T3)
    shop.fail_after(T2, "index")
    shop.fail_after(T4, "console")
    shop.replay(T1, T3)
    assert shop.known().newest_ms == T3
    assert shop.known().missing(T1, T3) == [T2], "its documents are in the old index alone"
    assert shop.known().to_run_again(T1, T3) == [], "T4 will be written through the alias"
    shop.replay(T2)
    assert shop.known().missing(T1, T3) == []


def test_the_newest_counts_though_its_batch_failed(shop: Shop) -> None:
    shop.write(T1)
    shop.fail_after(T2, "index")
    shop.replay(T1)
    assert shop.known().newest_ms == T2
    assert shop.known().missing(T1, T2) == [T2]
    assert shop.known().to_run_again(T1, T1) == [T2]


def test_what_was_abandoned_since_is_named_by_itself(shop: Shop) -> None:
    shop.write(T1)
    shop.fail_after(T2, "index")
    shop.fail_after(T3)
    for at_ms in (T2, T3):
        shop.ledger.batches.abandon("shop", at_ms, "never")
    shop.replay(T1)
    assert (shop.known().missing(T1, T4), shop.known().abandoned(T1, T4)) == ([], [T2])


def test_what_is_being_written_is_to_run_again_also_within_the_range(shop: Shop) -> None:
    shop.write(T1, T3)
    shop.begin(T2)
    shop.replay(T1, T3)
    assert shop.known().missing(T1, T3) == []
    assert shop.known().to_run_again(T1, T3) == [T2]


def test_every_index_of_the_replay_in_the_range_is_looked_at(shop: Shop) -> None:
    shop.write(T1, T2, T3)
    shop.replay(T1, T3)
    shop.replay(T2, index="another")
    with pytest.raises(AliasSwapRefusedError, match="into 'another', not into 'new'"):
        shop.known().check(T1, T3)
    shop.known().check(T3, T3)
    assert shop.known().missing(T1, T3) == [T2]
    shop.replay(T2)
    shop.known().check(T1, T3)


def test_a_replay_that_nobody_ran_is_refused(shop: Shop) -> None:
    with pytest.raises(AliasSwapRefusedError, match="no replay 'v2'"):
        shop.known()
