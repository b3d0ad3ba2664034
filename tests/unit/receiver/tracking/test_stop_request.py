"""A job whose ledger is lost ends on a request in the stream's folder."""

from __future__ import annotations

import time
from typing import Any

import pytest
from tests.support.memory_storage import MemoryStorage
from tests.unit.receiver.tracking.setting import Setting
from tests.unit.receiver.waiting import eventually

from headrace.ledger.errors import LedgerUnavailableError
from headrace.receiver import tracker
from headrace.receiver.tracker import (
    STOP_REQUEST_PATH,
    TrackerEnd,
    TrackerReport,
    find_stop_request,
    write_stop_request,
)
from headrace.wal.storage import open_storage


@pytest.fixture
def lost(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> Setting:
    """A job that receives, and whose ledger has just gone away."""

    def away(*_: Any, **__: Any) -> None:
        raise LedgerUnavailableError("it does not answer")

    monkeypatch.setattr(tracker, "_STOP_POLL_SECONDS", 0.0)
    setting.begin()
    eventually(lambda: setting.loads() == [2, 2])
    monkeypatch.setattr(setting.ledger.jobs, "renew", away)
    monkeypatch.setattr(setting.ledger.receivers, "heartbeat", away)
    return setting


def test_a_job_without_its_ledger_ends_when_it_is_asked_to(lost: Setting) -> None:
    folder = open_storage(lost.stream.folder_url)
    write_stop_request(folder, "the ledger is lost", requested_ms=lost.ledger.now_ms() + 1)
    eventually(lambda: lost.report is not None)
    assert lost.report == TrackerReport(TrackerEnd.WITHOUT_LEDGER, "the ledger is lost")
    assert all(handle.stop.is_set() for handles in lost.launcher.handles.values() for handle in handles)


def test_a_request_from_before_the_ledger_last_answered_ends_nothing(lost: Setting) -> None:
    folder = open_storage(lost.stream.folder_url)
    write_stop_request(folder, "long ago", requested_ms=lost.job.lease_until_ms - lost.job.lease_ms)
    over = time.monotonic() + 1.5
    eventually(lambda: time.monotonic() > over)
    assert lost.report is None


def test_a_request_that_cannot_be_read_is_none() -> None:
    folder = MemoryStorage()
    assert find_stop_request(folder, since_ms=0) is None
    for content in (b"{", b"[]", b'{"reason": "x"}', b'{"reason": "x", "requested_ms": "soon"}'):
        folder.write_atomically(STOP_REQUEST_PATH, content)
        assert find_stop_request(folder, since_ms=0) is None
