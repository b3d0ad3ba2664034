"""Power cuts that lose what was not synced, below the real log and the real ledger: a few seeds of `make faults
POWER=20`. Skipped where there is no LazyFS."""

from __future__ import annotations

import pytest
from tests.hammer.lazyfs import LazyFSError, find_lazyfs
from tests.hammer.power import NOTHING, LeftOut, run_seed

# They cut the power in a write of the log, after a promise, and in a write of the ledger.
SEEDS = (0, 2, 3)


@pytest.fixture(scope="module")
def lazyfs() -> str:
    try:
        return find_lazyfs()
    except LazyFSError as error:
        pytest.skip(str(error).splitlines()[0])


@pytest.mark.parametrize("seed", SEEDS)
def test_a_power_cut_takes_nothing_that_was_promised(lazyfs: str, seed: int) -> None:
    outcome = run_seed(lazyfs, seed, NOTHING)
    assert outcome.promises
    assert not outcome.problems, outcome


@pytest.mark.parametrize(
    "left_out",
    [LeftOut(site="LocalSegmentFile.append: fdatasync"), LeftOut(synchronous="NORMAL")],
    ids=str,
)
def test_without_a_sync_a_power_cut_takes_what_was_promised(lazyfs: str, left_out: LeftOut) -> None:
    assert any(run_seed(lazyfs, seed, left_out).problems for seed in SEEDS)
