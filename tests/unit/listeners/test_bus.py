"""The bus of listeners: order, restarts, slow listeners, and listeners that raise or hang."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import event as sqlalchemy_event

from headrace.ledger.errors import LedgerUnavailableError
from headrace.ledger.states import EventKind, JobState
from headrace.listeners import StreamListener
from headrace.listeners import bus as bus_module
from headrace.listeners.bus import STATUS, ListenerBus

from .conftest import STREAM, WAIT_SECONDS, GapRecorder, Recorder, World, gaps, wait_until

Start = Callable[..., ListenerBus]


def cursor(world: World, name: str) -> int:
    return world.ledger.listener_cursors.open(world.job, [name])[name].event_id


def warnings(caplog: pytest.LogCaptureFixture, text: str) -> list[str]:
    return [record.getMessage() for record in caplog.records if text in record.getMessage()]


def test_events_come_in_the_order_of_their_ids_and_each_once(world: World, start: Start) -> None:
    every, some = Recorder(), GapRecorder()
    bus = start(every=every, some=some)
    gaps(world, *range(30))
    world.add({1: (0, 10)})
    gaps(world, *range(30, 40))
    bus.stop(WAIT_SECONDS)
    assert some.offsets == list(range(40))
    assert every.ids == sorted(set(every.ids))
    assert every.methods == ["on_gap"] * 30 + ["on_block_added"] + ["on_gap"] * 10
    assert (len(every.contexts), every.closed) == (1, 1)


def test_a_new_listener_starts_at_the_present(world: World, start: Start) -> None:
    gaps(world, 0, 1)
    listener = GapRecorder()
    bus = start(listener=listener)
    gaps(world, 2)
    bus.stop(WAIT_SECONDS)
    assert listener.offsets == [2]


def test_a_listener_continues_where_it_was(world: World, start: Start) -> None:
    """It gets what happened meanwhile."""
    first, second = GapRecorder(), GapRecorder()
    bus = start(listener=first)
    gaps(world, 0, 1)
    bus.stop(WAIT_SECONDS)
    gaps(world, 2, 3)
    bus = start(listener=second)
    gaps(world, 4)
    bus.stop(WAIT_SECONDS)
    assert (first.offsets, second.offsets) == ([0, 1], [2, 3, 4])


def test_events_come_again_after_a_crash_with_the_same_ids(world: World, start: Start) -> None:
    """None of them is missing."""
    crashed = GapRecorder()
    # It dies before it writes a cursor for the first time.
    start(listener=crashed, save_seconds=3600.0)
    gaps(world, 0, 1, 2)
    wait_until(lambda: len(crashed.offsets) == 3)
    again = GapRecorder()
    start(listener=again).stop(WAIT_SECONDS)
    assert (again.offsets, again.ids) == (crashed.offsets, crashed.ids)


def test_cursors_are_written_in_batches(world: World, start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    saved: list[Any] = []
    save = world.ledger.listener_cursors.save
    monkeypatch.setattr(world.ledger.listener_cursors, "save", lambda *each: (saved.append(each), save(*each)))
    listeners = {"one": GapRecorder(), "two": GapRecorder()}
    bus = start(**listeners, save_seconds=3600.0)
    gaps(world, *range(50))
    bus.stop(WAIT_SECONDS)
    newest = world.ledger.events.newest_id(STREAM)
    assert [each[1] for each in saved] == [{"one": newest, "two": newest}]
    assert cursor(world, "two") == newest


def test_a_full_queue_drops_events_with_one_warning_and_a_count(
    world: World, start: Start, gate: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    slow, quick = GapRecorder(lambda _: gate.wait()), GapRecorder()
    bus = start(slow=slow, quick=quick, capacity=10)
    for offset in range(100):
        gaps(world, offset)
        # One at a time, so that the quick listener's own queue of ten does not overflow.
        wait_until(lambda offset=offset: len(quick.offsets) > offset)
    wait_until(lambda: bus.status()["slow"]["dropped"] == 89)
    gate.set()
    bus.stop(WAIT_SECONDS)
    # One was being handled, ten waited.
    assert slow.offsets == list(range(11))
    assert quick.offsets == list(range(100))
    assert len(warnings(caplog, "Listener slow is too slow")) == 1
    job = world.ledger.jobs.current(STREAM)
    assert job is not None
    assert {name: each["dropped"] for name, each in job.attributes[STATUS].items()} == {"slow": 89, "quick": 0}


def test_events_before_the_start_are_never_dropped(world: World, start: Start) -> None:
    """They are kept however slow the listener is."""
    start(listener=GapRecorder()).stop(WAIT_SECONDS)
    gaps(world, *range(100))
    listener = GapRecorder(lambda _: time.sleep(0.001))
    bus = start(listener=listener, capacity=5)
    wait_until(lambda: len(listener.offsets) == 100)
    bus.stop(WAIT_SECONDS)
    assert listener.offsets == list(range(100))
    assert bus.status()["listener"]["dropped"] == 0


def test_events_are_not_read_more_often_for_a_hanging_listener(
    world: World, start: Start, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The listener hangs while it catches up."""
    start(hanging=GapRecorder(), other=GapRecorder()).stop(WAIT_SECONDS)
    gaps(world, *range(50))
    hanging, other = GapRecorder(lambda _: gate.wait()), GapRecorder()
    checks, pages = [], []
    must_wait, page = ListenerBus._must_wait, world.ledger.events.page
    monkeypatch.setattr(bus_module, "_BEHIND_SECONDS", 0.001)
    monkeypatch.setattr(ListenerBus, "_must_wait", lambda *each: (checks.append(each), must_wait(*each))[1])
    monkeypatch.setattr(world.ledger.events, "page", lambda *each, **more: (pages.append(each), page(*each, **more))[1])
    # No look is due while this runs, except those for a listener whose queue has room.
    bus = start(hanging=hanging, other=other, capacity=5, poll_seconds=3600.0)
    wait_until(lambda: len(other.offsets) == 50 and len(hanging.offsets) == 1)
    wait_until(lambda: checks[-100:] == [(bus, checks[-1][1])] * 100)
    read, checked = len(pages), len(checks)
    wait_until(lambda: len(checks) > checked + 100)
    assert len(pages) == read
    gate.set()
    wait_until(lambda: len(hanging.offsets) == 50)


def test_a_listener_that_raises_gets_the_next_event(
    world: World, start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    """It harms no other listener."""

    def fail(offset: int) -> None:
        raise SystemExit(f"no {offset}")

    raising, other = GapRecorder(fail), GapRecorder()
    bus = start(raising=raising, other=other)
    gaps(world, 0, 1, 2)
    bus.stop(WAIT_SECONDS)
    assert raising.offsets == other.offsets == [0, 1, 2]
    status = bus.status()["raising"]
    assert (status["failed"], status["error"]) == (3, "on_gap: SystemExit: no 2")
    assert bus.status()["other"]["failed"] == 0
    # One traceback, then lines.
    assert [record.exc_info is not None for record in caplog.records if "raised" in record.getMessage()] == [
        True, False, False
    ]  # fmt: skip


def test_a_listener_that_hangs_delays_neither_others_nor_the_end(
    world: World, start: Start, gate: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    hanging, other = GapRecorder(lambda _: gate.wait()), Recorder()
    bus = start(hanging=hanging, other=other)
    before = cursor(world, "hanging")
    gaps(world, 0, 1, 2)
    wait_until(lambda: len(other.calls) == 3)
    begun = time.monotonic()
    bus.stop(0.3)
    assert time.monotonic() - begun < WAIT_SECONDS
    assert other.closed == 1
    gate.set()
    wait_until(lambda: not any(thread.name == "headrace-listener-hanging" for thread in threading.enumerate()))
    # It has got only the event in which it hung, and gets it again.
    assert hanging.offsets == [0]
    assert cursor(world, "hanging") == before
    assert cursor(world, "other") == world.ledger.events.newest_id(STREAM)
    assert warnings(caplog, "Listener hanging did not end in time")


def test_a_listener_gets_no_events_after_the_bus_has_stopped(world: World, start: Start) -> None:
    listener = Recorder()
    bus = start(listener=listener)
    bus.stop(WAIT_SECONDS)
    gaps(world, 0)
    world.ledger.jobs.release(world.job, JobState.STOPPED)
    assert listener.calls == []
    assert not any(thread.name.startswith("headrace-listener") for thread in threading.enumerate())


def test_a_listener_whose_start_raises_gets_and_loses_nothing(world: World, start: Start) -> None:
    class NoStart(GapRecorder):
        def start(self, context: object) -> None:
            raise OSError("no server")

    other = GapRecorder()
    bus = start(listener=NoStart(), other=other)
    gaps(world, 0, 1)
    bus.stop(WAIT_SECONDS)
    assert bus.status()["listener"]["error"] == "start: OSError: no server"
    assert other.offsets == [0, 1]
    mended = GapRecorder()
    start(listener=mended).stop(WAIT_SECONDS)
    assert mended.offsets == [0, 1]


def test_a_listener_may_ask_the_job_to_stop(world: World, start: Start) -> None:
    bus = start(listener=GapRecorder(lambda _: world.ledger.jobs.request_stop(STREAM, "a gap")))
    gaps(world, 0)
    bus.stop(WAIT_SECONDS)
    assert world.ledger.jobs.renew(world.job).stop_reason == "a gap"


def test_the_bus_of_a_job_without_its_lease_moves_no_cursor(world: World, start: Start) -> None:
    """The bus ends."""
    old = GapRecorder()
    bus = start(listener=old, save_seconds=3600.0)
    gaps(world, 0)
    wait_until(lambda: old.offsets == [0])
    world.clock.advance(20_000)
    job = world.ledger.jobs.acquire(STREAM, holder="another", lease_ms=10_000)
    new = GapRecorder()
    start(listener=new, lease=job).stop(WAIT_SECONDS)
    newest = world.ledger.events.newest_id(STREAM)
    bus.stop(WAIT_SECONDS)
    assert new.offsets == [0]
    assert world.ledger.listener_cursors.open(job, ["listener"])["listener"].event_id == newest


def test_events_deleted_before_a_listener_got_them_are_counted(
    world: World, start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    """One warning stands for all of them."""
    start(listener=GapRecorder()).stop(WAIT_SECONDS)
    gaps(world, *range(7))
    world.add({1: (0, 10)})
    world.clock.advance(60_000)
    while world.ledger.events.prune(STREAM, world.clock.now_ms(), limit=3):
        pass
    world.ledger.events.append(STREAM, EventKind.RECEIVER_ERROR, {"error": "late"})
    late = Recorder()
    bus = start(listener=late)
    bus.stop(WAIT_SECONDS)
    assert late.methods == ["on_receiver_error"]
    assert bus.status()["listener"]["missed"] == 7
    assert len(warnings(caplog, "Listener listener missed 7 events")) == 1
    again = start(listener=Recorder())
    assert again.status()["listener"]["missed"] == 0


def test_a_ledger_that_is_away_delays_events_and_drops_none(
    world: World, start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    away = threading.Event()
    page = world.ledger.events.page

    def failing(*given: Any, **options: Any) -> Any:
        if away.is_set():
            looks.append(1)
            raise LedgerUnavailableError("it does not answer")
        return page(*given, **options)

    looks: list[int] = []
    monkeypatch.setattr(world.ledger.events, "page", failing)
    listener = GapRecorder(lambda _: time.sleep(0.001))
    bus = start(listener=listener, capacity=5)
    away.set()
    wait_until(lambda: len(looks) > 2)
    gaps(world, *range(60))
    away.clear()
    wait_until(lambda: len(listener.offsets) == 60)
    bus.stop(WAIT_SECONDS)
    assert listener.offsets == list(range(60))
    assert len(warnings(caplog, "the ledger does not answer")) == 1


def test_an_error_that_ends_the_bus_is_in_the_jobs_attributes(
    world: World, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no such column")

    monkeypatch.setattr(world.ledger.events, "page", broken)
    start(listener=GapRecorder())
    wait_until(lambda: STATUS in world.ledger.jobs.current(STREAM).attributes)  # type: ignore[union-attr]
    job = world.ledger.jobs.current(STREAM)
    assert job is not None
    assert job.attributes[STATUS]["listener"]["error"] == "gets no more events: RuntimeError: no such column"


@pytest.mark.parametrize("listener", [Recorder, GapRecorder])
def test_block_events_are_read_only_for_listeners_that_want_them(
    world: World, start: Start, listener: type[StreamListener]
) -> None:
    read: list[str] = []

    def note(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        if statement.startswith("SELECT events.event_id, events.stream"):
            read.append(statement)

    engine = world.ledger.events._database.engine
    sqlalchemy_event.listen(engine, "before_cursor_execute", note)
    start(listener=listener()).stop(WAIT_SECONDS)
    sqlalchemy_event.remove(engine, "before_cursor_execute", note)
    assert read
    assert {"events.block_id IS NULL" in statement for statement in read} == {listener is GapRecorder}


def test_an_idle_bus_reads_once_in_each_look_and_writes_nothing(world: World, start: Start) -> None:
    statements: list[str] = []
    listeners = {"one": GapRecorder(), "two": GapRecorder(), "three": GapRecorder()}
    bus = start(**listeners)
    wait_until(lambda: world.ledger.jobs.current(STREAM).attributes.get(STATUS) is not None)  # type: ignore[union-attr]
    engine = world.ledger.events._database.engine
    note = lambda _c, _cursor, statement, *_: statements.append(statement)  # noqa: E731
    sqlalchemy_event.listen(engine, "before_cursor_execute", note)
    wait_until(lambda: len(statements) > 10)
    sqlalchemy_event.remove(engine, "before_cursor_execute", note)
    bus.stop(WAIT_SECONDS)
    kinds = {statement.partition(" ")[0] for statement in statements[:10]}
    assert kinds <= {"BEGIN", "SELECT"}
    # One query for all three: they are at the same position.
    assert sum(statement.startswith("SELECT") for statement in statements[:10]) == 5
