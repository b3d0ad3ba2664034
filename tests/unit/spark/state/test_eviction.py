"""What leaves a window follows from the versions, by a real ledger and the stream's own storage; there is no Spark."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.clock import ManualClock
from headrace.ledger import Ledger
from headrace.ledger.batch_tables import Attempt
from headrace.spark.batch_plan import evicted_batches
from headrace.spark.state.version import StateStore
from headrace.stream import ConsoleOutput, KafkaInput, State, Stream
from headrace.stream_context import StreamContext

from .conftest import FIRST_MS, INTERVAL_MS, Versions


class Windowed:
    """A stream with a state over the last two batches; `run` and `give_up` are told a batch by its number, from 0."""

    def __init__(self, folder: Path) -> None:
        self.stream = Stream(
            name="words",
            inputs=KafkaInput(bootstrap_servers="127.0.0.1:1", topics="words"),
            outputs=ConsoleOutput(),
            state=State(update="m:f", fields="word STRING, count BIGINT", keys="word", window="20 s"),
            batch_interval="10 s",
            storage=folder / "storage",
            ledger=f"sqlite:///{folder}/ledger.db",
        )
        clock = ManualClock(FIRST_MS - INTERVAL_MS)
        self.ledger = Ledger.open(self.stream.ledger, clock=clock)
        self.ledger.streams.register(
            "words", self.stream.to_json(), batch_interval_ms=INTERVAL_MS, block_interval_ms=200,
            outputs=self.stream.steps, ordered=True,
        )  # fmt: skip
        clock.advance(100 * INTERVAL_MS)
        self.store = StateStore.of(self.stream)
        self.versions = Versions(self.store)

    def time_ms(self, batch: int) -> int:
        return FIRST_MS + batch * INTERVAL_MS

    def run(self, *batches: int) -> None:
        for batch in batches:
            attempt = self._begin(batch)
            self.versions.update(batch, added=1, attempt=attempt.number)
            for step in attempt.outputs:
                self.ledger.attempts.record_output(attempt, step, {})
            self.ledger.attempts.complete(attempt)

    def give_up(self, batch: int, *, updated: bool, recorded: bool = True) -> None:
        attempt = self._begin(batch)
        if updated:
            self.versions.update(batch, added=1, attempt=attempt.number)
            if recorded:
                self.ledger.attempts.record_output(attempt, "state", {})
        self.ledger.attempts.fail(attempt, "the output cannot be written")
        self.ledger.batches.abandon("words", self.time_ms(batch), "never")

    def leaving(self, batch: int) -> list[int]:
        found = evicted_batches(StreamContext(self.stream, self.ledger), self.time_ms(batch))
        return [(origin.batch_time_ms - FIRST_MS) // INTERVAL_MS for origin in found]

    def _begin(self, batch: int) -> Attempt:
        self.ledger.allocations.allocate("words", self.time_ms(batch), manifest_uri="m", manifest_sha256="0")
        return self.ledger.attempts.begin("words", self.time_ms(batch), holder="test", way="submit", lease_ms=60_000)


@pytest.fixture
def windowed(tmp_path: Path) -> Iterator[Windowed]:
    made = Windowed(tmp_path)
    yield made
    made.ledger.close()


def test_the_batch_that_leaves_the_window_leaves(windowed: Windowed) -> None:
    windowed.run(0, 1)
    assert (windowed.leaving(1), windowed.leaving(2)) == ([], [0])


@pytest.mark.parametrize("recorded", [True, False])
def test_an_abandoned_batch_leaves_if_later_ones_were_built_on_it(windowed: Windowed, recorded: bool) -> None:
    windowed.run(0)
    windowed.give_up(1, updated=True, recorded=recorded)
    assert windowed.leaving(3) == [0, 1], "what batch 3 would start from is batch 1's own table"
    windowed.run(2)
    assert windowed.leaving(3) == [1]


def test_an_abandoned_batch_that_never_came_into_the_table_does_not_leave(windowed: Windowed) -> None:
    windowed.run(0)
    windowed.give_up(1, updated=False)
    windowed.run(2)
    assert windowed.leaving(3) == []
    assert windowed.leaving(4) == [2]


def test_the_ledger_decides_about_a_batch_whose_version_has_been_pruned(windowed: Windowed) -> None:
    windowed.versions.snapshot_every = 1
    windowed.run(0)
    windowed.give_up(1, updated=True)
    windowed.run(2)
    windowed.store.prune(windowed.time_ms(3))
    assert [name.batch_time_ms for name in windowed.store.names()] == [windowed.time_ms(2)]
    assert windowed.leaving(3) == [1]
