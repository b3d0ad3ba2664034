"""Polls the stream's progress during the run, and reports it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from examples.demo.elasticsearch_side import ElasticsearchSide
from examples.demo.observing import Observer, Snapshot
from tests.hammer.errors import HammerError
from tests.hammer.journal import Journal
from tests.hammer.load import Load
from tests.hammer.pipeline import INDEX, STREAM

from headrace.errors import HeadraceError

if TYPE_CHECKING:
    from headrace.ledger import Ledger

_LOOK_SECONDS = 1.0
_REPORT_SECONDS = 15.0


class Watch:
    """Polls from its own thread while its context is entered, so that a hanging ledger blocks nothing else."""

    def __init__(self, ledger: Ledger, elasticsearch: ElasticsearchSide, load: Load, journal: Journal) -> None:
        self._ledger = ledger
        self._elasticsearch = elasticsearch
        self._load = load
        self._observer = self._make(0)
        self._journal = journal
        self._newest: Snapshot | None = None
        self._trouble: str | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()

    def expect(self, held: int) -> None:
        """Set the final number of records that Kafka holds; no more will come."""
        self._observer = self._make(held)
        self._newest = None

    def _make(self, held: int) -> Observer:
        return Observer(
            STREAM,
            ledger=self._ledger,
            to_produce=held,
            # With refused deliveries there may be more in Kafka than were acknowledged.
            produced=lambda: held or self._load.acknowledged,
            elasticsearch=self._elasticsearch,
            index=INDEX,
        )

    def until(self, condition: Callable[[Snapshot], bool], *, stall: float) -> None:
        """Wait until a snapshot meets the condition. Raises HammerError after ``stall`` seconds without progress."""
        moved = time.monotonic()
        progress: object = None
        while True:
            now, newest = time.monotonic(), self._newest
            if newest is not None and condition(newest):
                return
            if newest is not None and (now_at := _progress(newest)) != progress:
                progress, moved = now_at, now
            if now - moved > stall:
                raise HammerError(
                    f"The stream stands still: nothing has moved for {now - moved:.0f} s. {self.describe()}"
                )
            self._stop.wait(0.5)

    def describe(self) -> str:
        """The stream's progress, in one line."""
        newest = self._newest
        if newest is None:
            return f"not seen: {self._trouble}" if self._trouble else "not seen yet"
        states = ", ".join(f"{number} {state}" for state, number in sorted(newest.states.items())) or "none"
        line = (
            f"produced {newest.produced}, received {newest.received}, indexed {newest.indexed}"
            f"+{newest.dead_lettered}; receiver job {newest.receiving}; batches {states}, {newest.cleaned} cleaned up"
        )
        if newest.unclaimed:
            line += "; blocks wait"
        if self._trouble:
            line += f"; now {self._trouble}"
        return line + (f"; error: {newest.error.splitlines()[0][:200]}" if newest.error else "")

    def _run(self) -> None:
        reported = time.monotonic()
        while not self._stop.wait(_LOOK_SECONDS):
            observer = self._observer
            try:
                snapshot = observer.look()
                self._trouble = None
                if observer is self._observer:
                    self._newest = snapshot
            except HeadraceError as error:
                self._trouble = str(error).splitlines()[0][:160]
            except Exception as error:  # a server that breaks in the middle of an answer
                self._trouble = f"{type(error).__name__}: {str(error)[:160]}"
            if time.monotonic() - reported > _REPORT_SECONDS:
                reported = time.monotonic()
                self._journal.say(self.describe())


def _progress(snapshot: Snapshot) -> object:
    """A value that changes with any progress. It counts checkpointed batches too: after a receiver's down-time many
    batches are empty."""
    return snapshot.progress, sum(batch.checkpointed_at_ms is not None for batch in snapshot.batches)
