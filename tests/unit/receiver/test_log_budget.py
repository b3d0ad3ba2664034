"""A log that is as large as its stream allows: receiving pauses, and goes on once cleanup has made room."""

from __future__ import annotations

import os
import time
from types import SimpleNamespace
from typing import Any

import pytest
from tests.unit.receiver.conftest import MakeSetting, MakeStream, Setting
from tests.unit.receiver.waiting import LIMIT_SECONDS, eventually

from headrace.batch.allocation import allocate
from headrace.batch.checkpoint import write_checkpoint
from headrace.batch.cleanup import clean_up
from headrace.clock import ManualClock
from headrace.ledger import EventKind
from headrace.ledger.errors import LedgerUnavailableError
from headrace.receiver.pausing import LogBudget
from headrace.stream import Limits, Stream
from headrace.stream_context import StreamContext
from headrace.wal.storage import open_storage

RECORDS = 3_000
BUDGET = 150_000


def backlogged(make_stream: MakeStream, make_setting: MakeSetting) -> Setting:
    """A stream whose log is at its budget after less than half of what Kafka has."""
    # What is queued is small beside the budget, so that it may be exceeded by little on however slow a machine.
    limits = Limits(
        max_log_bytes=BUDGET,
        segment_bytes=20_000,
        segment_interval="1 s",
        max_rate=1_500,
        max_queued_blocks=2,
        max_block_bytes=16_384,
    )
    setting = make_setting(make_stream(limits=limits))
    setting.topic(1)
    setting.assign(0)
    setting.kafka.produce("flights", 0, *[os.urandom(150) for _ in range(RECORDS)])
    return setting


class BatchRuns:
    """The stream's batch DAG, in the hands of a test."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.storage = open_storage(setting.stream.storage.url)

    def records(self) -> int:
        """The records of all batches so far."""
        return sum(each.records for each in self.setting.ledger.batches.page("air", 1_000))

    def run(self) -> None:
        """Run the oldest batch that is due, if there is one, and clean up."""
        ledger, stream = self.setting.ledger, self.setting.stream
        time_ms = ledger.batches.next_unclaimed("air")
        if time_ms is not None and time_ms <= ledger.now_ms():
            allocate(StreamContext(stream, ledger), time_ms)
            attempt = ledger.attempts.begin("air", time_ms, holder="test", way="connect", lease_ms=60_000)
            for output in attempt.outputs:
                ledger.attempts.record_output(attempt, output, {})
            ledger.attempts.complete(attempt)
            write_checkpoint(StreamContext(stream, ledger), time_ms)
        clean_up(StreamContext(stream, ledger))


def test_a_backlog_pauses_receiving_at_the_budget_and_nothing_needed_is_deleted(
    make_stream: MakeStream, make_setting: MakeSetting
) -> None:
    setting = backlogged(make_stream, make_setting)
    runs = BatchRuns(setting)
    with setting.running() as running:
        eventually(lambda: "max_log_bytes" in setting.paused_for())
        assert 0 < setting.positions()[0] < RECORDS
        eventually(lambda: setting.receiver().stats.get("queued_blocks") == 0)
        held = setting.stored()
        # Batches far behind: cleanup runs, and finds nothing that it may delete.
        beat = setting.receiver().heartbeat_ms
        eventually(lambda: setting.receiver().heartbeat_ms > beat + 1_500)
        clean_up(StreamContext(setting.stream, setting.ledger))
        assert setting.stored() == held
        assert [offset for _, offset, _ in held] == list(range(setting.positions()[0]))
        stored = setting.ledger.segments.stored_bytes("air")
        # By what was queued and read before the pause was noticed, which takes longer on a slow machine.
        assert BUDGET <= stored < 3 * BUDGET
        assert setting.receiver().stats["total_lag"] == RECORDS - setting.positions()[0]
        assert setting.receiver().alive(setting.ledger.now_ms())
        assert not setting.ledger.receivers.unsealed("air", setting.receiver().heartbeat_ms - 1_000), "batches go on"
        # Then all is caught up.
        until = time.monotonic() + LIMIT_SECONDS
        while runs.records() < RECORDS or setting.paused_for():
            assert time.monotonic() < until, setting.positions()
            runs.run()
            time.sleep(0.05)
        assert running.report is None
    paused, resumed = (setting.events(kind) for kind in (EventKind.RECEIVING_PAUSED, EventKind.RECEIVING_RESUMED))
    assert {each["cause"] for each in paused} == {"log_budget"}
    assert len(resumed) == len(paused) >= 1
    assert runs.records() == RECORDS
    assert setting.ledger.gaps.page("air") == []


class Segments:
    def __init__(self) -> None:
        self.bytes = 0
        self.asked = 0
        self.away = False

    def stored_bytes(self, _: str) -> int:
        self.asked += 1
        if self.away:
            raise LedgerUnavailableError("it does not answer")
        return self.bytes


def budget(stream: Stream) -> tuple[LogBudget, Segments, ManualClock]:
    segments, clock = Segments(), ManualClock(1_000)
    ledger: Any = SimpleNamespace(segments=segments)
    return LogBudget(StreamContext(stream, ledger, clock=clock), 1_000), segments, clock


def test_receiving_goes_on_well_below_the_budget_and_not_just_below(make_stream: MakeStream) -> None:
    found, segments, clock = budget(make_stream())
    for size, pauses in ((999, False), (1_000, True), (950, True), (901, True), (899, False), (950, False)):
        segments.bytes = size
        clock.advance(1_000)
        assert (found.poll() is not None) is pauses, size


def test_what_a_receiver_stores_itself_counts_before_the_ledger_is_asked_again(make_stream: MakeStream) -> None:
    found, segments, _ = budget(make_stream())
    segments.bytes = 400
    assert found.poll() is None
    segments.bytes = 900
    found.stored(500)
    assert found.poll() is None
    assert segments.asked == 1
    segments.bytes = 1_000
    found.stored(100)
    assert found.poll() is not None
    assert segments.asked == 2


def test_a_ledger_that_does_not_answer_changes_nothing(make_stream: MakeStream) -> None:
    found, segments, clock = budget(make_stream())
    segments.bytes = 1_000
    assert found.poll() is not None
    segments.away = True
    clock.advance(5_000)
    assert found.poll() is not None
    found.stored(5_000)
    assert found.poll() is not None


@pytest.mark.parametrize(
    ("batch_by", "held", "pauses"),
    [
        ("timestamp", ([], None, []), False),
        ("timestamp", ([], 1_000, ["a partition"]), False),
        ("timestamp", ([], 1_000, []), True),
        ("timestamp", (["a batch"], 1_000, ["a partition"]), True),
        ("arrival", ([], 1_000, ["a partition"]), True),
    ],
)
def test_receiving_goes_on_only_where_nothing_else_can_make_room(
    make_stream: MakeStream, batch_by: str, held: tuple[list[str], int | None, list[str]], pauses: bool
) -> None:
    """``held``: batches to be finished, the time that waits to be claimed, what has not passed it."""
    segments = Segments()
    segments.bytes = 2_000
    ledger: Any = SimpleNamespace(
        segments=segments,
        batches=SimpleNamespace(page=lambda *_: held[0], next_unclaimed=lambda _: held[1]),
        positions=SimpleNamespace(unpassed=lambda *_: held[2]),
    )
    found = LogBudget(StreamContext(make_stream(batch_by=batch_by), ledger, clock=ManualClock(1_000)), 1_000)
    assert (found.poll() is not None) is pauses


def test_by_timestamp_a_batch_that_waits_for_its_records_gets_them(
    make_stream: MakeStream, make_setting: MakeSetting
) -> None:
    """No batch could ever complete, and so nothing be deleted, if receivers paused for the one that waits for them."""
    setting = make_setting(make_stream(batch_by="timestamp", limits=Limits(max_log_bytes=1_000)))
    setting.topic(1)
    setting.assign(0)
    setting.kafka.produce("flights", 0, *[os.urandom(100) for _ in range(200)])
    with setting.running() as running:
        eventually(lambda: setting.positions() == [200])
        assert setting.ledger.segments.stored_bytes("air") > 1_000
        first_ms = setting.ledger.batches.next_unclaimed("air")
        eventually(lambda: not setting.ledger.positions.unpassed("air", first_ms))
        # It has all that it can get, and nobody runs it: that is a backlog as any other.
        eventually(lambda: "max_log_bytes" in setting.paused_for())
        assert running.report is None
