"""A receiver's storing: a disk that fails, an answer of the ledger that is lost, and what the ledger does not take."""

from __future__ import annotations

from typing import Any

import pytest
from tests.unit.receiver.conftest import Setting
from tests.unit.receiver.waiting import eventually

from headrace.ledger import Ledger, ReceiverState
from headrace.ledger.errors import LedgerUnavailableError
from headrace.wal.reader import read_block
from headrace.wal.recovery import scan_log


class BrokenDisk:
    """Fails the next ``failures`` writes."""

    def __init__(self, storage: Any, failures: list[int]) -> None:
        self._storage, self._failures = storage, failures

    def __getattr__(self, name: str) -> Any:
        return getattr(self._storage, name)

    def below(self, path: str) -> BrokenDisk:
        return BrokenDisk(self._storage.below(path), self._failures)

    def create_segment(self, path: str) -> Any:
        if self._failures[0]:
            self._failures[0] -= 1
            raise OSError("no space left on device")
        return self._storage.create_segment(path)


def test_three_failures_to_store_are_survived(setting: Setting) -> None:
    setting.assign(0, 0)
    setting.kafka.produce("flights", 0, b"a")
    with setting.running(storage=BrokenDisk(setting.storage, [3])) as running:
        eventually(lambda: setting.positions() == [1, 0])
        assert running.end().state is ReceiverState.STOPPED
    assert setting.stored() == [(0, 0, b"a")]


def test_the_fourth_failure_ends_the_receiver_with_the_error_and_loses_nothing(setting: Setting) -> None:
    setting.assign(0, 0)
    setting.kafka.produce("flights", 0, b"a")
    report = setting.start(storage=BrokenDisk(setting.storage, [99])).join()
    assert report.state is ReceiverState.FAILED
    assert "no space left on device" in (report.error or "")
    (row,) = setting.ledger.receivers.all("air")
    assert (row.state, "no space left" in (row.last_error or "")) == (ReceiverState.FAILED, True)
    assert setting.kafka.committed == {}
    with setting.running():
        eventually(lambda: setting.positions() == [1, 0])
    assert setting.stored() == [(0, 0, b"a")]


class ForgetfulBlocks:
    """A ledger whose answers get lost: the first add happens, and is said to have failed."""

    def __init__(self, blocks: Any) -> None:
        self._blocks, self.lost = blocks, 0

    def add(self, lease: Any, info: Any, epoch_ends: Any) -> Any:
        added = self._blocks.add(lease, info, epoch_ends)
        if not self.lost:
            self.lost += 1
            raise LedgerUnavailableError("the connection broke")
        return added


def test_a_block_whose_answer_was_lost_is_not_stored_twice(setting: Setting) -> None:
    setting.assign(0, 0)
    setting.kafka.produce("flights", 0, b"a")
    ledger = Ledger.open(setting.stream.ledger)
    ledger.blocks = ForgetfulBlocks(ledger.blocks)  # type: ignore[assignment]
    with setting.running(ledger=ledger) as running:
        eventually(lambda: setting.positions() == [1, 0])
        setting.kafka.produce("flights", 0, b"b")
        eventually(lambda: setting.positions() == [2, 0])
        assert running.end().state is ReceiverState.STOPPED
    ledger.close()
    assert setting.stored() == [(0, 0, b"a"), (0, 1, b"b")]


def test_a_block_whose_answer_never_came_is_not_said_to_be_refused(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ledger may have taken it: rebuilt from a log that denies it, it would lose it."""
    monkeypatch.setattr("headrace.receiver.block_store.LEDGER_TIMEOUT_SECONDS", 0.0)
    plain = type(setting.ledger.blocks).add

    def add(self: Any, *args: Any) -> Any:
        added = plain(self, *args)
        if setting.positions() == [2, 0]:
            raise LedgerUnavailableError("The connection broke before the answer came.")
        return added

    monkeypatch.setattr(type(setting.ledger.blocks), "add", add)
    setting.assign(0, 0)
    setting.kafka.produce("flights", 0, b"a")
    running = setting.start(0)
    eventually(lambda: setting.positions() == [1, 0])
    setting.kafka.produce("flights", 0, b"b")
    report = running.join()
    assert report.error is not None
    assert "did not answer" in report.error
    assert setting.positions() == [2, 0]
    assert [each.accepted for each in scan_log(setting.storage.below("log")).settled()] == [True, None]


def test_a_block_keeps_the_leader_epoch_of_each_range_in_the_log_and_the_ledger(setting: Setting) -> None:
    setting.assign(0, 0)
    setting.kafka.produce("flights", 0, b"a")
    setting.kafka.elect("flights", 0)
    with setting.running():
        setting.kafka.produce("flights", 0, b"b")
        eventually(lambda: setting.positions() == [2, 0])
        setting.kafka.elect("flights", 0)
        setting.kafka.produce("flights", 0, b"c")
        eventually(lambda: setting.positions() == [3, 0])
    ends = {}
    for each in setting.ledger.blocks.unclaimed("air"):
        for block in setting.ledger.allocations.blocks_of("air", each.batch_time_ms):
            header, _ = read_block(setting.storage.below("log"), block.info.handle)
            assert header.ranges == block.info.ranges
            ends |= {(of.partition.partition, of.until_offset): of.leader_epoch for of in block.info.ranges}
    assert ends[0, 2] == 1
    assert ends[0, 3] == 2
