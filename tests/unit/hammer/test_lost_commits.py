"""A sample of `python -m tests.hammer.commits`, and what it can find. HEADRACE_COMMIT_SEEDS=1000 for more of them."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.hammer.commits import command_of
from tests.hammer.life import Life, WrongOutcomeError
from tests.hammer.lost_commits import Lost, LostCommits, write_place

from headrace.ledger import Ledger
from headrace.ledger.errors import LedgerUnavailableError

SEEDS = int(os.environ.get("HEADRACE_COMMIT_SEEDS", "2"))
REGISTERED: dict[str, Any] = {"batch_interval_ms": 1_000, "block_interval_ms": 200}


@pytest.fixture(scope="module")
def empty_ledger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ledger") / "ledger.db"
    Ledger.open(f"sqlite:///{path}").close()
    return path


@pytest.fixture
def folder(tmp_path: Path, empty_ledger: Path) -> Path:
    shutil.copy(empty_ledger, tmp_path / "ledger.db")
    return tmp_path


@pytest.mark.parametrize("seed", range(SEEDS))
def test_a_stream_loses_and_doubles_nothing_by_lost_commits(folder: Path, seed: int) -> None:
    life = Life(folder, seed)
    try:
        life.run()
    except Exception as error:
        error.add_note(f"Repeat it: {command_of(seed)}")
        raise
    assert {fault.lost for fault in life.faults.lost} == set(Lost)
    assert life.shown or life.faults.lost


class Forgetful(Life):
    """One whose output has lost a record, or has got one twice."""

    def check(self) -> None:
        written = self.index.batches["", "index"]
        place = min(written)
        written[place].add(0)
        with pytest.raises(WrongOutcomeError, match="are in two batches"):
            super().check()
        del self.index.values["", "index"][place]
        super().check()


def test_a_record_that_an_output_lacks_or_has_twice_is_found(folder: Path) -> None:
    """Otherwise the sample shows nothing."""
    with pytest.raises(WrongOutcomeError, match="are lost"):
        Forgetful(folder, 1, share=0.0).run()


def test_a_lost_commit_is_an_error_that_names_the_ledger(folder: Path) -> None:
    kinds = set()
    with Ledger.open(f"sqlite:///{folder}/ledger.db") as ledger:
        for seed in range(8):
            faults = LostCommits(seed, share=1.0)
            with faults.on(ledger), pytest.raises(LedgerUnavailableError) as raised:
                ledger.streams.register(f"shop{seed}", "{}", **REGISTERED)
            assert "The ledger's database failed" in raised.value.what
            assert "the step can be repeated" in str(raised.value.remedy)
            (fault,) = faults.lost
            assert fault.place == "Streams._register"
            is_there = f"shop{seed}" in {row.name for row in ledger.streams.all()}
            assert is_there == (fault.lost is Lost.ANSWER)
            kinds.add(fault.lost)
    assert kinds == set(Lost)


def test_what_only_reads_is_not_lost(folder: Path) -> None:
    faults = LostCommits(0, share=1.0)
    with Ledger.open(f"sqlite:///{folder}/ledger.db") as ledger, faults.on(ledger):
        assert ledger.streams.all() == []
    assert faults.lost == []
    assert write_place(sys._getframe()) is None
