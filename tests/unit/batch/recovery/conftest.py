"""A stream's life by a seed, and the ledger that is rebuilt from what it left in the storage."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.unit.batch.life import LEASE_MS, NAME, Life

from headrace.batch.recover import recover
from headrace.ledger import Ledger


@pytest.fixture
def lost_url(tmp_path: Path) -> str:
    """The ledger that gets lost."""
    return f"sqlite:///{tmp_path}/lost.db"


@pytest.fixture
def new_url(tmp_path: Path) -> str:
    """Where it is rebuilt."""
    return f"sqlite:///{tmp_path}/new.db"


@pytest.fixture
def live(tmp_path: Path, lost_url: str) -> Callable[..., Life]:
    """Lives some steps by a seed."""

    def live(seed: int, steps: int = 120, **options: Any) -> Life:
        life = Life(tmp_path, lost_url, seed, **options)
        for _ in range(steps):
            life.step()
        return life

    return live


def rebuild(life: Life, new_url: str) -> Ledger:
    """Lose the ledger, and rebuild it once nothing of it lives."""
    life.clock.advance(LEASE_MS + 1_000)
    ledger = Ledger.open(new_url, clock=life.clock)
    recover(NAME, ledger, life.storage.below(NAME), definition=life.stream)
    return ledger
