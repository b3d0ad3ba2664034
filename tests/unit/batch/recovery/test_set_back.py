"""A ledger that is older than the stream's folder, or another one beside it; a folder that is older than its ledger."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from tests.unit.batch.life import KINDS, LEASE_MS, NAME, Life
from tests.unit.batch.recovery.conftest import rebuild
from tests.unit.batch.recovery.ledger_contents import all_blocks, contents

from headrace.batch.checkpoint import checkpoint_paths
from headrace.batch.recover import MayStillRunError, recover, recover_if_lost
from headrace.batch.set_back import LedgerSetBackError, refuse_if_set_back
from headrace.clock import ManualClock
from headrace.fsck.findings import Problem
from headrace.fsck.stream_check import check_stream
from headrace.ledger import Ledger
from headrace.stream_context import StreamContext
from headrace.stream_folder import MARK_PATH


@pytest.fixture
def copy(tmp_path: Path, lost_url: str) -> Iterator[Callable[[Life], Ledger]]:
    """Makes a copy of the ledger as it is."""
    opened: list[Ledger] = []

    def make(life: Life) -> Ledger:
        file = tmp_path / f"copy-{len(opened)}.db"
        with closing(sqlite3.connect(lost_url.removeprefix("sqlite:///"))) as database:
            file.write_bytes(database.serialize())
        opened.append(Ledger.open(f"sqlite:///{file}", clock=life.clock))
        return opened[-1]

    yield make
    for ledger in opened:
        ledger.close()


def store_until(life: Life, is_enough: Callable[[], bool]) -> None:
    for _ in range(200):
        if is_enough():
            return
        life.store()
    raise AssertionError("it never was")


def accepted(life: Life) -> int:
    return len(all_blocks(life.ledger))


@pytest.mark.parametrize("kind", KINDS)
def test_the_ledger_of_a_stream_is_never_refused(live: Callable[..., Life], kind: str, new_url: str) -> None:
    life = live(21, 0, **KINDS[kind])
    for number in range(80):
        life.step()
        if number % 4 == 0:
            refuse_if_set_back(life.context)
    life.finish()
    life.checkpoint()
    life.clean()
    refuse_if_set_back(life.context)
    life.clock.set_back(600_000)
    refuse_if_set_back(life.context)
    life.clock.advance(600_000)
    refuse_if_set_back(life.context_in(rebuild(life, new_url)))


def test_an_older_copy_of_a_ledger_is_refused_by_the_log(
    live: Callable[..., Life], copy: Callable[[Life], Ledger]
) -> None:
    """The receivers have not been restarted since."""
    life = live(22, 30)
    older, before = copy(life), accepted(life)
    refuse_if_set_back(life.context_in(older))
    # Each receiver: of its last block no file shows that it was accepted.
    store_until(life, lambda: accepted(life) >= before + 20)
    with pytest.raises(LedgerSetBackError) as refused:
        refuse_if_set_back(life.context_in(older))
    message = str(refused.value)
    assert "shop/log/" in message
    assert "was accepted, and the ledger's last one is" in message
    assert f"headrace streams recover shop --storage {life.stream.storage.url}" in message
    problems = {finding.problem for finding in check_stream(older, NAME, kafka=False).findings}
    assert Problem.BLOCK_UNKNOWN in problems


def test_an_older_copy_of_a_ledger_is_refused_by_the_logs_epochs(
    live: Callable[..., Life], copy: Callable[[Life], Ledger]
) -> None:
    life = live(23, 30)
    older = copy(life)
    life.restart_job()
    for _ in range(9):
        life.store()
    with pytest.raises(
        LedgerSetBackError, match=r"shop/log/.*was written in epoch \d+ of receiver .* the ledger knows"
    ):
        refuse_if_set_back(life.context_in(older))


def test_an_older_copy_of_a_ledger_is_refused_by_the_checkpoint(
    live: Callable[..., Life], copy: Callable[[Life], Ledger]
) -> None:
    """The log since then has been deleted, and a stream of an earlier version has no mark."""
    life = live(24, 30)
    older = copy(life)
    life.restart_job()
    life.checkpoint()
    life.context.storage.delete(MARK_PATH)
    with pytest.raises(LedgerSetBackError, match=r"shop/checkpoints/.*it knows receiver job 2, and the ledger 1"):
        refuse_if_set_back(life.context_in(older))


def test_of_two_ledgers_on_one_log_the_earlier_one_is_refused(
    live: Callable[..., Life], copy: Callable[[Life], Ledger]
) -> None:
    """The earlier one is the one whose receivers came first."""
    life = live(25, 30)
    other = copy(life)
    first, life.ledger = life.ledger, other
    # Nothing shows yet that there are two.
    refuse_if_set_back(life.context)
    life.clock.advance(LEASE_MS + 1_000)
    life.start_job()
    store_until(life, lambda: accepted(life) > 20)
    refuse_if_set_back(life.context)
    with pytest.raises(LedgerSetBackError, match="a process with another ledger writes to this folder"):
        refuse_if_set_back(life.context_in(first))


@pytest.mark.parametrize("checkpointed", [True, False])
def test_a_new_ledger_with_a_stream_of_the_same_name_is_refused(
    live: Callable[..., Life], new_url: str, checkpointed: bool
) -> None:
    """Somebody registered the stream by hand, so that its ledger is not taken for a lost one."""
    life = live(26, 30)
    life.checkpoint()
    # A stream of an earlier version has no mark.
    for path in [MARK_PATH, *(() if checkpointed else checkpoint_paths(life.context.storage))]:
        life.context.storage.delete(path)
    why = (
        r"it knows receiver job \d, and the ledger 0" if checkpointed else "of a receiver that the ledger does not know"
    )
    with Ledger.open(new_url, clock=life.clock) as ledger:
        life.register(ledger)
        with pytest.raises(LedgerSetBackError, match=why):
            refuse_if_set_back(life.context_in(ledger))


@pytest.mark.parametrize("hours", [-24, 2], ids=["behind", "ahead"])
def test_a_ledger_is_rebuilt_by_a_machine_with_another_clock(
    live: Callable[..., Life], new_url: str, hours: int
) -> None:
    life = live(28, 80)
    life.finish()
    life.checkpoint()
    life.checkpoint()
    expected = contents(life.ledger)
    folder = life.storage.below(NAME)
    clock = ManualClock(life.clock.now_ms() + hours * 3_600_000)
    with Ledger.open(new_url, clock=clock) as ledger:
        if hours < 0:
            # As if somebody wrote to the folder tomorrow.
            with pytest.raises(MayStillRunError, match=r"Z, 1 d ahead of the clock of this machine") as refused:
                recover(NAME, ledger, folder, definition=life.stream)
            assert "Correct this clock if it is behind. Pause" in str(refused.value.remedy)
            assert "Then try again in 1 d 1 h; or say --force" in str(refused.value.remedy)
            # A task that recovers by itself does not wait for a day.
            with pytest.raises(MayStillRunError):
                recover_if_lost(StreamContext(life.stream, ledger), wait=lambda seconds: pytest.fail(f"{seconds} s"))
        recover(NAME, ledger, folder, definition=life.stream, force=hours < 0)
        assert contents(ledger) == expected
        life.ledger, life.clock = ledger, clock
        life.receivers.clear()
        life.start_job()
        for act in (life.store, life.run_batch, life.checkpoint, life.clean) * 4:
            act()
        life.finish()
        problems = {finding.problem for finding in check_stream(ledger, NAME, kafka=False).findings}
        assert problems <= ({Problem.CLOCK_WAS_AHEAD} if hours < 0 else set())
        assert set(expected["batch_inputs"]) <= set(contents(ledger)["batch_inputs"])


@pytest.mark.parametrize("harm", ["older", "half"])
def test_a_folder_behind_its_ledger_is_reported_block_by_block(live: Callable[..., Life], harm: str) -> None:
    """The folder is older than its ledger, or it was copied only in part."""
    life = live(27, 60)
    folder = life.storage.below(NAME)
    files = {path: folder.read(path) for path in folder.paths()}
    for _ in range(60):
        life.random.choice([life.store, life.store, life.advance_clock, life.run_batch, life.restart])()
    for path in folder.paths():
        if path not in files:
            folder.delete(path)
        elif harm == "older":
            folder.write_atomically(path, files[path])
    findings = check_stream(life.ledger, NAME, kafka=False).findings
    reported = " ".join(f"{finding.subject} {finding.detail}" for finding in findings)
    segments = {row.path for row in life.ledger.segments.page(NAME, limit=1_000) if row.removing_at_ms is None}
    for handle, block in all_blocks(life.ledger).items():
        data = files.get(f"log/{handle.segment}", b"") if harm == "older" else None
        there = folder.exists(f"log/{handle.segment}")
        if handle.segment in segments and (not there or (data is not None and len(data) < handle.offset)):
            assert handle.segment in reported, block
    assert {Problem.SEGMENT_MISSING, Problem.MANIFEST_MISSING} <= {finding.problem for finding in findings}
