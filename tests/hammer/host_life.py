"""A stream by a fake clock whose hosts fail: a full disk of the ledger, slow syncs of the log, wrong clocks.

It lives as `Life` does, and loses no commits. While a fault lasts, the stream's summary has to name the part and the
remedy (`WORDS`), as pages and commands show it.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import ClassVar

from tests.hammer.disk import SmallDisk
from tests.hammer.kinds import WORDS, Target
from tests.hammer.life import NAME, Life, WrongOutcomeError
from tests.hammer.onlooker import Shown

from headrace.errors import HeadraceError
from headrace.ledger.errors import LedgerFullError
from headrace.views.stream_state import State
from headrace.views.streams import default_place, summarize

_HOUR, _YEAR = 3_600, 365 * 86_400
AHEAD_SECONDS = (_HOUR, -_HOUR, _YEAR, -_YEAR)
_SYNC_SECONDS = 6.0
_SLOW_WRITES = 4
# Of a second each, until the stream is well again.
_TRIES = 60
# Of the stream's time: the lease of its receiver job ends within it.
_FULL_SECONDS = 40.0


class HostLife(Life):
    """One whose ledger is on ``disk``. ``hit`` has the faults that it had."""

    steps: ClassVar[int] = 4

    def __init__(self, folder: Path, seed: int, disk: SmallDisk) -> None:
        super().__init__(folder, seed, share=0, ledger=disk.folder)
        self._disk = disk
        self.hit: list[str] = []
        self._steps_left = self.steps

    def _kinds(self) -> list[Callable[[], None]]:
        faults = [self.fill_ledgers_disk, self.slow_the_syncs, self.set_clock]
        left = [fault for fault in faults if fault.__name__ not in self.hit]
        self._steps_left -= 1
        # Each comes once.
        return left if len(left) > self._steps_left else super()._kinds() + left * 4

    def fill_ledgers_disk(self) -> None:
        """No byte is free below the ledger, for longer than the receiver job's lease."""
        self._begin("fill_ledgers_disk")
        self._shrink()
        with self._disk.full():
            self._try(self.produce)
            self._let_pass(_FULL_SECONDS)
            self._must_show(Target.LEDGER_DISK)
        self.restart_job()

    def slow_the_syncs(self) -> None:
        """Each write of a receiver into the log, with its sync, takes seconds of the stream's time."""
        self._begin("slow_the_syncs")
        index = self._receiver()
        for _ in range(_SLOW_WRITES):
            self.running.hold_log(index)
            self._produce_to_all()
            self.advance(_SYNC_SECONDS)
            self.running.resume(index)
            self.advance(1.0)
            self.run_all()
        self._must_show(Target.SYNCS)

    def set_clock(self) -> None:
        """The host of a receiver has another time of day; of all time that passes it has the same."""
        self._begin("set_clock")
        index = self._receiver()
        self.running.set_clock(index, self.random.choice(AHEAD_SECONDS))
        self.produce()
        self.advance(3.0)
        self._must_show(Target.CLOCK)
        self.run_due()
        self.running.set_clock(index, 0)
        self.advance(3.0)

    def _begin(self, fault: str) -> None:
        """Let the stream be well first: another fault's end, or a late batch, would lead in what is shown."""
        self.hit.append(fault)
        for _ in range(_TRIES):
            self._produce_to_all()
            self.advance(1.0)
            self.run_all()
            shown = self._shown()
            if shown.state == State.WELL and shown.remedy is None:
                return
        raise WrongOutcomeError(f"The stream is not well before {self.hit}: {shown}.")

    def _receiver(self) -> int:
        return self.random.randrange(self.stream.receivers)

    def _produce_to_all(self) -> None:
        """A record for each partition."""
        for partition in range(self._partitions):
            self._produce(partition, b"%d" % self.random.getrandbits(40))

    # -- while a disk is full --------------------------------------------------------------------------------------

    def _shrink(self) -> None:
        """Leave the ledger's files no space that they do not use, or it would go on for long."""
        with closing(sqlite3.connect(self._disk.folder / "ledger.db", timeout=5.0)) as connection:
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def _let_pass(self, seconds: float) -> None:
        for _ in range(int(seconds)):
            self._try(lambda: self.running.advance(1.0))
            # A receiver job that has ended moves no clock.
            if self.running._failure is not None:
                self.running.clock.advance(1_000)

    def _try(self, step: Callable[[], object]) -> None:
        with self._tolerated():
            step()

    def advance(self, seconds: float) -> None:
        """Let time pass. While the disk is full, nobody starts a job that has ended."""
        if not self._disk.is_full:
            super().advance(seconds)
            return
        self._try(lambda: self.running.advance(seconds))

    def _show(self, error: HeadraceError) -> None:
        """Note an error of a step, which names the disk and says what to do."""
        if not isinstance(error, LedgerFullError):
            super()._show(error)
            return
        self.shown.append(error)
        words = WORDS[Target.LEDGER_DISK]
        if not Shown("error", error.what, error.remedy).names(words):
            raise WrongOutcomeError(f"An error on a full disk does not name it: {error!r}.") from error

    # -- what a person is shown ------------------------------------------------------------------------------------

    def _shown(self) -> Shown:
        ledger = self.running.ledger
        return Shown.of(summarize(ledger, ledger.streams.get(NAME), default_place(NAME, self.stream.ledger), {}))

    def _must_show(self, target: Target) -> None:
        shown = self._shown()
        if not shown.names(WORDS[target]):
            raise WrongOutcomeError(f"A fault of {target} is not shown with its part and its remedy: {shown}.")
