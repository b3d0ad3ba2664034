"""A running job's sign in the stream's folder, with which a task that has another ledger sees it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.unit.receiver.tracking.setting import Setting
from tests.unit.receiver.waiting import eventually

from headrace.batch.recover import RecoveryRefusedError, recover_if_lost
from headrace.ledger import Ledger
from headrace.ledger.errors import LedgerUnavailableError
from headrace.ledger.tables import JobLease
from headrace.receiver.tracker import TrackerEnd, find_sign
from headrace.stream_context import StreamContext
from headrace.wal.storage import open_storage


def short_lease(job: JobLease) -> JobLease:
    return replace(job, lease_ms=300)


def test_an_idle_job_renews_its_sign_and_deletes_it_when_it_stops(setting: Setting) -> None:
    setting.job = short_lease(setting.job)
    folder = open_storage(setting.stream.folder_url)
    started_ms = setting.ledger.now_ms()
    setting.begin()
    eventually(lambda: find_sign(folder) is not None)
    first = find_sign(folder)
    assert first is not None and first.lease_ms == 300 and first.written_ms >= started_ms
    eventually(lambda: (sign := find_sign(folder)) is not None and sign.written_ms > first.written_ms)
    assert setting.end().end is TrackerEnd.STOPPED
    assert find_sign(folder) is None


def test_a_task_with_a_wrong_empty_ledger_begins_no_job_beside_an_idle_one(
    setting: Setting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.batch.recover.LEASE_MS", 1_500)
    setting.job = short_lease(setting.job)
    setting.kafka.produce("flights", 0, b"once")
    setting.begin()
    eventually(lambda: setting.positions() == 1)
    stream = setting.stream.model_copy(update={"recover": "automatic"})
    with Ledger.open(f"sqlite:///{tmp_path}/wrong.db") as wrong:
        context = StreamContext(stream, wrong)
        with pytest.raises(RecoveryRefusedError, match="it has another ledger"):
            recover_if_lost(context)
        assert wrong.streams.all() == []
        assert setting.end().end is TrackerEnd.STOPPED
        waits: list[float] = []
        assert recover_if_lost(context, wait=waits.append) is not None
        assert waits == [], "the job had received nothing for long, and has stopped"


def test_a_job_that_was_cut_off_leaves_its_sign(setting: Setting) -> None:
    folder = open_storage(setting.stream.folder_url)
    setting.begin()
    eventually(lambda: find_sign(folder) is not None)
    setting.ledger.jobs.release(setting.job)
    setting.ledger.jobs.acquire("air", holder="another", lease_ms=60_000)
    eventually(lambda: setting.report is not None)
    assert setting.report is not None and setting.report.end is TrackerEnd.LOST
    assert find_sign(folder) is not None, "it is the next job's"


def test_the_sign_is_not_renewed_while_the_ledger_does_not_answer(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    setting.job = short_lease(setting.job)
    folder = open_storage(setting.stream.folder_url)
    asked = []

    def away(*_: Any, **__: Any) -> None:
        asked.append(find_sign(folder))
        raise LedgerUnavailableError("it does not answer")

    setting.begin()
    eventually(lambda: find_sign(folder) is not None)
    monkeypatch.setattr(setting.ledger.jobs, "renew", away)
    eventually(lambda: len(asked) == 3)
    assert asked[1] == asked[2]
