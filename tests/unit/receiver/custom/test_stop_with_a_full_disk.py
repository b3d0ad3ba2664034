"""A custom receiver that is asked to stop while its disk is full."""

from __future__ import annotations

import pytest
from tests.unit.receiver.custom.conftest import MakeCustom
from tests.unit.receiver.test_full_disk import Disk
from tests.unit.receiver.waiting import eventually

from headrace.ledger import ReceiverState
from headrace.receiver import ReceiverStoppedError, block_store, supervisor
from headrace.stream import Limits
from headrace.stream_context import StreamContext


def test_a_stop_gives_up_what_a_full_disk_does_not_take(
    make_custom: MakeCustom, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_store, "_FIRST_CHECK_SECONDS", 0.05)
    monkeypatch.setattr(block_store, "_LONGEST_CHECK_SECONDS", 0.2)
    monkeypatch.setattr(supervisor, "_DRAIN_TIMEOUT_SECONDS", 0.5)
    setting = make_custom(limits=Limits(max_block_bytes=1 << 20, max_queued_blocks=1))
    disk = Disk(setting.context.storage)
    setting.context = StreamContext(setting.context.stream, setting.ledger, storage=disk)
    running = setting.start()
    receiver = setting.receiver()
    refused: list[Exception] = []

    def fill() -> None:
        try:
            while True:
                receiver.store(b"x" * 200_000, position="somewhere")
        except ReceiverStoppedError as error:
            refused.append(error)

    receiver.store(b"first")
    eventually(lambda: "disk is full" in (setting.ledger.receivers.all("air")[0].paused_reason or ""))
    # A paused receiver takes nothing more from it, until the stop.
    receiver.start_thread(fill)
    report = running.end()
    assert report.state is ReceiverState.FAILED
    assert "could not be stored in time" in str(report.error)
    eventually(lambda: len(refused) == 1)
    assert setting.values() == []
    assert setting.position() is None
