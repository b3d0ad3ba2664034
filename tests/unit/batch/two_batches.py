"""A stream with two batches, whose attempts are made by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from headrace.batch.allocation import allocate
from headrace.clock import ManualClock
from headrace.hooks.ledger import register
from headrace.ledger import Ledger
from headrace.ledger.batches.tables import Attempt
from headrace.stream import ConsoleOutput, KafkaInput, Stream
from headrace.stream_context import StreamContext

NOW_MS = 1_700_000_000_000
INTERVAL_MS = 60_000
LEASE_MS = 30_000


class TwoBatches:
    """The clock stands still. One batch can run at a time."""

    def __init__(self, folder: Path, *, ordered: bool) -> None:
        self.clock = ManualClock(NOW_MS)
        stream = Stream(
            name="shop",
            inputs=KafkaInput(bootstrap_servers="127.0.0.1:1", topics="clicks"),
            outputs=ConsoleOutput(),
            batch_interval="1 min",
            storage=folder,
            ledger=f"sqlite:///{folder}/ledger.db",
            ordered=ordered,
        )
        self.ledger = Ledger.open(stream.ledger, clock=self.clock)
        self.context = StreamContext(stream, self.ledger, clock=self.clock)
        register(self.ledger, stream)
        first_ms = NOW_MS // INTERVAL_MS * INTERVAL_MS
        self.times = (first_ms, first_ms + INTERVAL_MS)
        for time_ms in self.times:
            self.clock.advance(max(0, time_ms - self.clock.now_ms()))
            allocate(self.context, time_ms)

    def begin(self, time_ms: int, **attributes: Any) -> Attempt:
        return self.ledger.attempts.begin(
            "shop", time_ms, holder="task", way="connect", lease_ms=LEASE_MS, attributes=attributes, revision=1
        )

    def fail(self, time_ms: int, **attributes: Any) -> None:
        self.ledger.attempts.fail(self.begin(time_ms, **attributes), "it failed")

    def complete(self, time_ms: int) -> None:
        attempt = self.begin(time_ms)
        self.ledger.attempts.record_output(attempt, "console", {})
        self.ledger.attempts.complete(attempt)
