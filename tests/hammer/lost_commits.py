"""Lost commits: the ledger's COMMIT is done and its answer is lost, or it is not done and reported as failed.

The driver's call is replaced, so the rest is as when a connection breaks or a disk fails: SQLAlchemy rolls back, the
ledger translates the error, and the caller decides. Which commits are lost depends on the seed, on the transaction's
place, and on how often that place has committed before, not on the order of the threads.
"""

from __future__ import annotations

import sqlite3
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any

import headrace.ledger
from headrace.ledger import Ledger

_LEDGER = str(Path(headrace.ledger.__file__).parent)
_DATABASE = f"{_LEDGER}/database.py"


class Lost(StrEnum):
    """What is lost of a commit."""

    ANSWER = "done, but its answer is lost"
    COMMIT = "not done, and reported as failed"


@dataclass(frozen=True, slots=True)
class LostCommit:
    """The commit of the transaction in the function ``place`` that was lost, the ``number``-th there, from 0."""

    place: str
    number: int
    lost: Lost

    def __str__(self) -> str:
        return f"commit {self.number} of {self.place} was {self.lost}"


class LostCommits:
    """Loses a ``share`` of the ledger's commits, as ``seed`` determines. ``lost`` has those lost, ``committed`` the
    number of commits at each place."""

    def __init__(self, seed: int, *, share: float) -> None:
        self.lost: list[LostCommit] = []
        self.committed: Counter[str] = Counter()
        self._seed = seed
        self._share = share
        self._counting = threading.Lock()
        self._is_on = True

    def stop(self) -> None:
        """Lose no more."""
        self._is_on = False

    @contextmanager
    def on(self, ledger: Ledger) -> Iterator[None]:
        """Lose commits of this process on the ledger's database, until the end of the ``with`` block."""
        dialect: Any = ledger._database.engine.dialect
        commit = dialect.do_commit

        def lose_or_commit(connection: Any) -> None:
            lost = self._meet(sys._getframe(1))
            if lost is not Lost.COMMIT:
                commit(connection)
            if lost is not None:
                raise sqlite3.OperationalError(f"the test's own fault: the commit was {lost}")

        dialect.do_commit = lose_or_commit
        try:
            yield
        finally:
            dialect.do_commit = commit

    def _meet(self, frame: FrameType) -> Lost | None:
        place = write_place(frame)
        if place is None:
            return None
        with self._counting:
            number = self.committed[place]
            self.committed[place] += 1
            chance = Random(f"{self._seed}/{place}/{number}")
            if not self._is_on or chance.random() >= self._share:
                return None
            lost = chance.choice(list(Lost))
            self.lost.append(LostCommit(place, number, lost))
            return lost


def write_place(frame: FrameType | None) -> str | None:
    """The ledger's function whose transaction a call below ``frame`` ends, such as "Blocks.add"; None if it reads."""
    writes = False
    while frame is not None:
        file = frame.f_code.co_filename
        if file == _DATABASE:
            writes = writes or frame.f_code.co_name == "write"
        elif file.startswith(_LEDGER):
            return f"{frame.f_code.co_qualname}" if writes else None
        frame = frame.f_back
    return None
