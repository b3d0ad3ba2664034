"""A run is recorded write by write. Cut after any write, its files give the ledger of that moment.

What no file can know may differ: the state of a batch since its last result, when a batch without a result was
allocated, and the writer's last block, which counts although the ledger may not have accepted it.
"""

from __future__ import annotations

import random
import shutil
import sqlite3
import threading
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.support.ledger_rules import broken_rules
from tests.unit.batch.life import KINDS, LEASE_MS, NAME, Life
from tests.unit.batch.recovery.ledger_contents import all_blocks, check_whole, contents

from headrace.batch.recover import RecoveryRefusedError, recover
from headrace.batch.set_back import LedgerSetBackError, refuse_if_set_back
from headrace.fsck.findings import Problem
from headrace.fsck.stream_check import check_stream
from headrace.ledger import BatchState, Ledger
from headrace.stream_folder import MARK_PATH
from headrace.wal.storage import LocalStorage, SystemCalls

CUTS = 34
"""In each of six runs: more than 200."""


@dataclass(frozen=True)
class Cut:
    """The files and the ledger at one moment. ``torn``: the file that was being written, whose end is missing."""

    files: dict[str, bytes]
    ledger: bytes
    torn: str | None


class RecordingCalls(SystemCalls):
    """The operating system's calls. After any write it may record a cut."""

    def __init__(self, root: Path, database: Path, choice: random.Random) -> None:
        self.cuts: list[Cut] = []
        self._root, self._database, self._random = root, database, choice
        self._lock = threading.Lock()

    def replace(self, source: Path, target: Path) -> None:
        super().replace(source, target)
        self._may_cut(target)

    def link(self, source: Path, target: Path) -> None:
        super().link(source, target)
        self._may_cut(target)

    def unlink(self, path: Path) -> None:
        super().unlink(path)
        self._may_cut(None)

    def fdatasync(self, fd: int) -> None:
        super().fdatasync(fd)
        self._may_cut(None)

    def _may_cut(self, written: Path | None) -> None:
        with self._lock:
            if self._random.random() < 0.5:
                return
            files = {
                str(path.relative_to(self._root)): path.read_bytes() for path in self._root.rglob("*") if path.is_file()
            }
            torn = None
            if written is not None and self._random.random() < 0.6:
                torn = str(written.relative_to(self._root))
                files[torn] = files[torn][: self._random.randrange(len(files[torn]))]
            with closing(sqlite3.connect(self._database)) as database:
                self.cuts.append(Cut(files, database.serialize(), torn))


@pytest.fixture
def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Life, list[Cut]]]:
    """Lives by a seed. Returns cuts of the run, drawn at random."""

    def live(seed: int, **options: Any) -> tuple[Life, list[Cut]]:
        root, database = tmp_path / "storage", tmp_path / "lost.db"
        calls = RecordingCalls(root, database, random.Random(seed))
        monkeypatch.setattr("tests.unit.batch.life.open_storage", lambda url: LocalStorage(url, calls=calls))
        life = Life(tmp_path, f"sqlite:///{database}", seed, **options)
        for number in range(250):
            life.step()
            if number % 15 == 0:
                life.finish()
        return life, random.Random(seed).sample(calls.cuts, min(CUTS, len(calls.cuts)))

    return live


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(100, 102))
def test_a_cut_after_any_write_gives_the_ledger_of_that_moment(
    recorded: Callable[..., tuple[Life, list[Cut]]], tmp_path: Path, kind: str, seed: int
) -> None:
    life, cuts = recorded(seed, **KINDS[kind])
    assert len(cuts) == CUTS
    assert [cut for cut in cuts if cut.torn]
    life.clock.advance(LEASE_MS + 1_000)
    for number, cut in enumerate(cuts):
        shutil.rmtree(tmp_path / "storage")
        for path, data in cut.files.items():
            (tmp_path / "storage" / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "storage" / path).write_bytes(data)
        (tmp_path / f"{number}.db").write_bytes(cut.ledger)
        if number % 3 == 1:
            with (
                Ledger.open(f"sqlite:///{tmp_path}/{number - 1}.db", clock=life.clock) as other,
                Ledger.open(f"sqlite:///{tmp_path}/{number}.db", clock=life.clock) as before,
            ):
                check_beside(life, other, before, cut)
        with (
            Ledger.open(f"sqlite:///{tmp_path}/{number}.db", clock=life.clock) as before,
            Ledger.open(f"sqlite:///{tmp_path}/{number}-new.db", clock=life.clock) as rebuilt,
        ):
            try:
                recover(NAME, rebuilt, life.storage.below(NAME), definition=life.stream)
            except RecoveryRefusedError as refused:
                assert "holds no checkpoint, no manifest and no block" in str(refused)
                assert all_blocks(before) == {}
            else:
                compare(before, rebuilt, cut)


def check_beside(life: Life, ledger: Ledger, before: Ledger, cut: Cut) -> None:
    """The ledger of one moment beside the files of another one, which had the ledger ``before``.

    An older one is refused, unless it lacks nothing that the files prove accepted: then it receives that again. What
    the files of a newer one lack is reported.
    """
    try:
        refuse_if_set_back(life.context_in(ledger))
    except LedgerSetBackError as refused:
        error: str | None = str(refused)
        assert any(f"{NAME}/{file}" in str(error) for file in ("log/", "checkpoints/", MARK_PATH))
    else:
        error = None
    findings = check_stream(ledger, NAME, kafka=False).findings
    segments = ledger.snapshots.take(NAME).segments
    removed = {row.path for row in segments if row.removing_at_ms is not None}
    if error is None:
        assert Problem.BLOCK_UNKNOWN not in {finding.problem for finding in findings}
        positions = {(row.input_id, row.partition): row.next_offset for row in ledger.positions.all(NAME)}
        known = all_blocks(ledger)
        for handle, block in all_blocks(before).items():
            if handle not in known and handle.segment not in removed:
                key = block.info.receiver.input_id
                assert all(positions.get((key, r.partition), 0) <= r.from_offset for r in block.info.ranges), handle
    reported = " ".join(f"{finding.subject} {finding.detail}" for finding in findings)
    present = {row.path for row in segments} - removed
    for handle in all_blocks(ledger):
        data = cut.files.get(f"{NAME}/log/{handle.segment}", b"")
        if handle.segment in present and len(data) < handle.offset + handle.length:
            assert handle.segment in reported, handle


def compare(before: Ledger, rebuilt: Ledger, cut: Cut) -> None:
    """The rebuilt ledger is the one before, but for what no file can know."""
    where = f"torn: {cut.torn}, newest: {sorted(cut.files)[-1]}"
    # Cleanup claims segments, deletes each file, then its rows.
    leaving = {row.path for row in before.segments.page(NAME, limit=1_000) if row.removing_at_ms is not None}
    blocks, again = (
        {handle: block for handle, block in all_blocks(ledger).items() if handle.segment not in leaving}
        for ledger in (before, rebuilt)
    )
    positions = {(row.input_id, row.partition): row.next_offset for row in rebuilt.positions.all(NAME)}
    for handle in blocks.keys() - again.keys():
        # A missing segment may have held the offsets before it: Kafka is read again from there on.
        info = blocks[handle].info
        assert all(positions[info.receiver.input_id, r.partition] <= r.from_offset for r in info.ranges), where
    newest: dict[Any, int] = {}
    for block in blocks.values():
        writer = (block.info.receiver, block.info.epoch)
        newest[writer] = max(newest.get(writer, -1), block.info.sequence)
    for handle in again.keys() - blocks.keys():
        info = again[handle].info
        assert info.sequence > newest.get((info.receiver, info.epoch), -1), where
    check_whole(rebuilt)
    known = {batch.batch_time_ms: batch for batch in before.batches.page(NAME, 1_000)}
    found = {batch.batch_time_ms: batch for batch in rebuilt.batches.page(NAME, 1_000)}
    for time_ms, batch in known.items():
        if batch.state is BatchState.ABSORBED and time_ms not in found:
            # It had no block, and the batch that absorbed it has no result yet.
            assert known[batch.absorbed_by_ms or 0].result == 0, where
            continue
        now = found[time_ms]
        assert (now.records, now.blocks, now.manifest_sha256) == (batch.records, batch.blocks, batch.manifest_sha256)
        if batch.result == batch.change and batch.change and now.result:
            assert now.state is batch.state or batch.state is BatchState.RUNNING, where
            assert (now.steps, now.required, now.abandoned_steps) == (
                batch.steps,
                batch.required,
                batch.abandoned_steps,
            )
        # What has completed and lost its log is never run again.
        if batch.cleaned_at_ms is not None and batch.result == batch.change:
            assert now.state is batch.state, where
    lines = contents(rebuilt)["batch_inputs"]
    assert set(contents(before)["batch_inputs"]) <= set(lines), where
    assert check_stream(rebuilt, NAME, kafka=False).findings == [], where
    # A life makes topics anew while their partitions are read.
    assert broken_rules(rebuilt, NAME, but=["topic_wrong"]) == [], where
