"""What `python -m tests.hammer.power` can find, without LazyFS; with it: tests/integration/wal/test_power_cuts.py."""

from __future__ import annotations

import os
import shutil
import sqlite3
from contextlib import closing
from copy import deepcopy
from pathlib import Path
from random import Random

import pytest
from tests.hammer import power, powered_stream
from tests.hammer.power import EACH_SYNC, NOT_SHOWN, NOTHING, LeftOut, PowerOutcome, ending_of
from tests.hammer.powered_stream import LEDGER, NAME, LifePlan, Promises, problems_of, take_steps
from tests.support.faulty_files import sync_sites
from typer.testing import CliRunner

from headrace.cli.main import single_command
from headrace.wal.recovery import QUARANTINE


@pytest.fixture(scope="module")
def lived(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Promises]:
    """The folder of a stream that has lived, a copy of it, and what the stream has promised."""
    parent, promises = tmp_path_factory.mktemp("lived"), Promises()
    folder, copy = parent / "disk", parent / "copy"
    folder.mkdir()
    take_steps(LifePlan(folder, number=0, seed=1, produced=0), promises.take, steps=3)
    shutil.copytree(folder, copy)
    return folder, copy, promises


@pytest.fixture
def disk(lived: tuple[Path, Path, Promises]) -> Path:
    """The folder as it was when the stream ended."""
    folder, copy, _ = lived
    shutil.rmtree(folder)
    shutil.copytree(copy, folder)
    return folder


@pytest.fixture
def promises(lived: tuple[Path, Path, Promises]) -> Promises:
    return deepcopy(lived[2])


def segments(folder: Path) -> list[Path]:
    return sorted((folder / "storage" / NAME / "log").rglob("*.wal"))


def test_a_disk_that_has_all_has_no_problems(disk: Path, promises: Promises) -> None:
    assert promises.stored
    assert promises.batches
    assert problems_of(disk, promises) == []


def test_a_segment_cut_short_is_a_problem(disk: Path, promises: Promises) -> None:
    last = segments(disk)[-1]
    os.truncate(last, last.stat().st_size // 4)
    assert "the log lacks a block that the ledger has" in problems_of(disk, promises)[0]


def test_a_record_that_is_nowhere_is_a_problem(disk: Path, promises: Promises) -> None:
    promises.stored[1] += 2
    (problem,) = problems_of(disk, promises)
    assert problem.startswith("partition 1 lacks the offsets")


def test_other_bytes_are_a_problem(disk: Path, promises: Promises, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(powered_stream, "value_at", lambda *_: b"what was produced")
    assert "has other bytes" in problems_of(disk, promises)[0]


def test_a_ledger_that_breaks_a_rule_is_a_problem(disk: Path, promises: Promises) -> None:
    with closing(sqlite3.connect(disk / LEDGER)) as connection, connection:
        connection.execute("UPDATE blocks SET sequence = sequence + 1000 WHERE rowid = (SELECT min(rowid) FROM blocks)")
    assert any(problem.startswith("rule:") for problem in problems_of(disk, promises))


def test_a_batch_that_is_not_completed_is_a_problem(disk: Path, promises: Promises) -> None:
    with closing(sqlite3.connect(disk / LEDGER)) as connection, connection:
        connection.execute("UPDATE batches SET state = 'allocated'")
    assert f"batch {min(promises.batches)} is not completed" in problems_of(disk, promises)


def test_a_lost_manifest_is_a_problem(disk: Path, promises: Promises) -> None:
    for manifest in (disk / "storage" / NAME / "manifests").glob("*.json"):
        manifest.write_bytes(b"")
    assert "MANIFEST" in "".join(problems_of(disk, promises))


def test_a_torn_tail_that_is_back_is_a_problem(disk: Path, promises: Promises) -> None:
    segment = segments(disk)[0]
    log = disk / "storage" / NAME / "log"
    kept = log / QUARANTINE / f"{segment.relative_to(log)}-{segment.stat().st_size - 1}.torn"
    kept.parent.mkdir(parents=True)
    kept.write_bytes(b"")
    assert any("has its torn tail again" in problem for problem in problems_of(disk, promises))


def test_an_index_of_the_ledger_that_lacks_rows_is_a_problem(disk: Path, promises: Promises) -> None:
    with closing(sqlite3.connect(disk / LEDGER)) as connection:
        found = "SELECT rootpage FROM sqlite_master WHERE type = 'index' AND tbl_name = 'blocks'"
        page = connection.execute(found).fetchone()[0]
        (size,) = connection.execute("PRAGMA page_size").fetchone()
    with (disk / LEDGER).open("r+b") as file:
        file.seek((page - 1) * size)
        # A leaf without entries.
        file.write(bytes([10, 0, 0, 0, 0, *size.to_bytes(2, "big"), 0]))
    (problem,) = problems_of(disk, promises)
    assert problem.startswith("SQLite: ['row 1 missing from index")


def test_a_ledger_without_the_stream_is_a_problem(disk: Path, promises: Promises) -> None:
    for file in disk.glob(f"{LEDGER}*"):
        file.unlink()
    assert "StreamNotFoundError" in problems_of(disk, promises)[0]


def test_each_sync_is_left_out_or_told_not_to_be_shown() -> None:
    assert {each.site for each in EACH_SYNC} - {None} | set(NOT_SHOWN) == set(sync_sites())


def test_each_kind_of_ending_comes_within_few_seeds(tmp_path: Path) -> None:
    endings = [ending_of(Random(seed), tmp_path) for seed in range(60)]
    assert any(ending.is_in_order for ending in endings)
    assert any(ending.after for ending in endings)
    assert {ending.kills_process for ending in endings if ending.log_end} == {True, False}
    assert {ending.injection.splitlines()[1] for ending in endings if ending.injection} == {
        'type="torn-op"',
        'type="clear"',
    }


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> set[LeftOut]:
    """What is left out where seed 1 then shows a loss; no LazyFS runs."""
    shown = set(EACH_SYNC)

    def run_seed(_program: str, seed: int, left_out: LeftOut = NOTHING) -> PowerOutcome:
        problems = ("lost",) if seed == 1 and left_out in shown else ()
        return PowerOutcome(seed, endings=(), reached=1, promises=5, seconds=0.0, problems=problems)

    monkeypatch.setattr(power, "find_lazyfs", lambda: "lazyfs")
    monkeypatch.setattr(power, "run_seed", run_seed)
    return shown


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(single_command(power.cut_power), [*arguments, "--seeds", "3"])
    return result.exit_code, result.output


def test_the_run_holds_if_only_left_out_syncs_lose(shown: set[LeftOut]) -> None:
    code, output = run()
    assert code == 0
    assert output.count("seed 1 shows it") == len(EACH_SYNC)


def test_a_loss_with_all_syncs_fails_the_run(shown: set[LeftOut]) -> None:
    shown.add(NOTHING)
    code, output = run()
    assert code == 1
    assert "--first 1 --seeds 1 --without none" in output


def test_a_left_out_sync_that_nobody_notices_fails_the_run(shown: set[LeftOut]) -> None:
    shown.remove(EACH_SYNC[0])
    code, output = run()
    assert code == 1
    assert f"Without {EACH_SYNC[0]}: no seed of 3 shows it" in output


def test_a_run_without_promises_fails(shown: set[LeftOut], monkeypatch: pytest.MonkeyPatch) -> None:
    empty = PowerOutcome(0, endings=(), reached=1, promises=0, seconds=0.0, problems=())
    monkeypatch.setattr(power, "run_seed", lambda *_: empty)
    assert run("--without", "none")[0] == 1


def test_an_unknown_sync_is_refused(shown: set[LeftOut]) -> None:
    code, output = run("--without", "fsnyc")
    assert code == 2
    assert "fsnyc" in output


def test_without_lazyfs_the_run_says_how_to_build_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAZYFS", "no-such-lazyfs")
    code, output = run()
    assert code == 3
    assert "libs/libpcache" in output
