"""What of a disk is left to others, and when a batch may use it: by timestamp only receiving lets it complete."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.unit.receiver.waiting import eventually

from headrace.clock import ManualClock
from headrace.ledger.errors import LedgerUnavailableError
from headrace.receiver import pausing
from headrace.receiver.pausing import DiskReserve, room_for, space_of
from headrace.stream import Stream
from headrace.stream.settings import MIB
from headrace.stream_context import StreamContext
from headrace.testing.fake_kafka import FakeEntry

TOTAL = 1_000_000 * MIB
RESERVE = 256


def records_of_this_moment() -> list[FakeEntry]:
    return [FakeEntry(b"x", timestamp_ms=int(time.time() * 1000)) for _ in range(20)]


def test_a_batch_that_waits_for_its_records_gets_them_out_of_the_reserve(
    make_stream: Callable[..., Stream], make_setting: Callable[[Stream], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Down to the hard reserve: below it the receiver pauses whatever waits, and goes on by itself above it."""
    space = SimpleNamespace(free=TOTAL)
    monkeypatch.setattr(pausing, "space_of", lambda _: (space.free, TOTAL))
    # So late that partitions pass a batch's time by their records only, however slow the machine.
    lateness = {"allowed_lateness": timedelta(minutes=10)}
    setting = make_setting(make_stream(batch_by="timestamp").model_copy(update=lateness))
    setting.topic(2)
    setting.assign(0, 0)
    setting.kafka.produce("flights", 0, *records_of_this_moment())

    def paused_for() -> str:
        return setting.ledger.receivers.all("air")[0].paused_reason or ""

    with setting.running():
        eventually(lambda: setting.positions() == [20, 0])
        space.free = RESERVE * MIB // 5
        eventually(lambda: "nearly full" in paused_for())
        first_ms = setting.ledger.batches.next_unclaimed("air")
        eventually(lambda: time.time() * 1000 > first_ms)
        for partition in (0, 1):
            setting.kafka.produce("flights", partition, *records_of_this_moment())
        assert len(setting.ledger.positions.unpassed("air", first_ms)) == 2
        space.free = RESERVE * MIB // 2
        eventually(lambda: setting.positions() == [40, 20])
        assert not setting.ledger.positions.unpassed("air", first_ms)
        # It has all that it can get: what makes room is that somebody runs it.
        eventually(lambda: "nearly full" in paused_for())


@pytest.mark.parametrize(
    ("free", "only_receiving_helps", "pauses"),
    [
        (RESERVE + 1, False, False),
        (RESERVE - 1, False, True),
        (RESERVE - 1, True, False),
        (RESERVE / 4 + 1, True, False),
        (RESERVE / 4 - 1, True, True),
    ],
)
@pytest.mark.parametrize("has_paused", [False, True])
def test_a_quarter_of_the_reserve_is_kept_whatever_waits(
    free: float, only_receiving_helps: bool, pauses: bool, has_paused: bool
) -> None:
    space, clock = SimpleNamespace(free=0 if has_paused else TOTAL), ManualClock(1_000)
    found = DiskReserve(lambda: (space.free, TOTAL), clock)
    assert (found.poll() is not None) is has_paused
    clock.advance(1_000)
    space.free = int(free * MIB)
    # Once paused it goes on with half as much again, or where nothing else helps.
    expected = pauses or (has_paused and not only_receiving_helps)
    assert (found.poll(lambda: only_receiving_helps) is not None) is expected


@pytest.mark.parametrize(
    ("batch_by", "away", "pauses"), [("timestamp", False, False), ("timestamp", True, True), ("arrival", False, True)]
)
def test_what_waits_is_asked_of_the_ledger(
    make_stream: Callable[..., Stream], monkeypatch: pytest.MonkeyPatch, batch_by: str, away: bool, pauses: bool
) -> None:
    def next_unclaimed(_: str) -> int:
        if away:
            raise LedgerUnavailableError("it does not answer")
        return 1_000

    ledger: Any = SimpleNamespace(
        batches=SimpleNamespace(page=lambda *_: [], next_unclaimed=next_unclaimed),
        positions=SimpleNamespace(unpassed=lambda *_: ["a partition"]),
    )
    lease: Any = SimpleNamespace(receiver_id=SimpleNamespace(stream="air"))
    monkeypatch.setattr(pausing, "space_of", lambda _: (RESERVE * MIB // 2, TOTAL))
    found = pausing.Pausing(StreamContext(make_stream(batch_by=batch_by), ledger, clock=ManualClock(1_000)), lease)
    found.poll()
    assert (found.reason is not None) is pauses


def test_some_of_a_disk_is_left_to_others() -> None:
    """Of a small disk a part, of a large one a fixed size; and it takes some more to go on than to pause."""
    clock = ManualClock(1_000)
    for total, reserve in ((1_000 * MIB, 50), (1_000_000 * MIB, 256)):
        space = SimpleNamespace(free=0)
        found = DiskReserve(lambda space=space, total=total: (space.free, total), clock)  # type: ignore[misc]
        for free, pauses in ((reserve + 1, False), (reserve - 1, True), (1.4 * reserve, True), (1.6 * reserve, False)):
            space.free = int(free * MIB)
            clock.advance(1_000)
            reason = found.poll()
            assert (reason is not None) is pauses, (total, free)
            assert reason is None or f"{reserve:.1f} MiB are reserved" in reason


def test_an_object_store_has_no_reserve_and_a_folder_that_is_not_there_yet_has_its_parents(tmp_path: Path) -> None:
    assert space_of("s3://bucket/air") is None
    assert DiskReserve(lambda: None, ManualClock(1_000)).poll() is None
    space = space_of((tmp_path / "not" / "yet").as_uri())
    assert space is not None
    assert 0 < space[0] < space[1]
    assert room_for((tmp_path / "not" / "yet").as_uri(), 1_000)
    assert list(tmp_path.iterdir()) == []
