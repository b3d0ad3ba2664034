"""A custom receiver's life (Spark's ReceiverSuite), where its records go, and which partition it has."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import pytest
from tests.unit.receiver.custom.conftest import RECEIVERS, CustomSetting, MakeCustom
from tests.unit.receiver.custom.custom_receivers import Numbers
from tests.unit.receiver.test_pausing import Disk
from tests.unit.receiver.waiting import eventually

from headrace.fsck.stream_check import check_stream
from headrace.ledger import PartitionState, ReceiverState
from headrace.receiver import Receiver, ReceiverStoppedError, Record, block_store, supervisor
from headrace.receiver.custom_source import CustomSource
from headrace.receiver.receiver import ReceivingError
from headrace.stream import Limits
from headrace.stream_context import StreamContext
from headrace.testing.receivers import run_receiver
from headrace.views.trace import trace_record
from headrace.views.trace_location import Coordinates
from headrace.wal.reader import read_block


class NamedRow(NamedTuple):
    id: str
    text: str


def test_a_custom_receiver_starts_stores_and_stops(make_custom: MakeCustom) -> None:
    setting = make_custom()
    running = setting.start()
    receiver = setting.receiver()
    assert not receiver.is_stopped
    assert (receiver.index, receiver.receivers, receiver.position) == (0, 1, None)
    receiver.store("one")
    receiver.store([b"two", "three"])
    receiver.store(str(number) for number in range(3))
    eventually(lambda: len(setting.stored()) == 6)
    report = running.end()
    assert (report.state, report.records, report.error) == (ReceiverState.STOPPED, 6, None)
    assert receiver.is_stopped
    assert receiver.stopped.is_set()
    values = [b"one", b"two", b"three", b"0", b"1", b"2"]
    assert setting.stored() == [(0, offset, value) for offset, value in enumerate(values)]
    assert len(Numbers.made) == 1


def test_records_of_many_threads_are_stored_once_each(make_custom: MakeCustom) -> None:
    """Spark's "multi-thread receiver"."""
    setting = make_custom()
    running = setting.start()
    receiver = setting.receiver()

    def give(thread: int) -> None:
        for number in range(1_000):
            receiver.store(f"{thread}:{number}")

    for thread in range(10):
        receiver.start_thread(lambda thread=thread: give(thread))  # type: ignore[misc]
    eventually(lambda: setting.ledger.receivers.all("air")[0].stats.get("records") == 10_000)
    assert running.end().records == 10_000
    stored = setting.stored()
    assert [offset for _, offset, _ in stored] == list(range(10_000))
    for thread in range(10):
        own = [value for _, _, value in stored if value.startswith(b"%d:" % thread)]
        assert own == [b"%d:%d" % (thread, number) for number in range(1_000)]


def test_a_record_keeps_its_key_headers_and_timestamp(make_custom: MakeCustom) -> None:
    setting = make_custom()
    running = setting.start()
    headers = [("from", b"here"), ("empty", None)]
    setting.receiver().store([Record("v", key="k", headers=headers, timestamp_ms=1_700_000_000_000), Record(None)])
    running.end()
    first, second = setting.rows()
    assert (first["topic"], first["key"], first["value"], first["timestampType"]) == ("lines", b"k", b"v", 0)
    assert int(first["timestamp"].timestamp() * 1000) == 1_700_000_000_000
    assert [(header["key"], header["value"]) for header in first["headers"]] == headers
    assert (second["key"], second["value"], second["headers"], second["timestampType"]) == (None, None, None, 1)
    assert abs(second["timestamp"].timestamp() - time.time()) < 60


def test_a_restart_stops_waits_and_starts_again_and_is_reported(make_custom: MakeCustom) -> None:
    setting = make_custom()
    running = setting.start()
    first = setting.receiver()
    asked = time.monotonic()
    first.restart("the source went away", ConnectionError("refused"), delay_seconds=0.3)
    second = setting.receiver(starts=2)
    assert time.monotonic() - asked >= 0.3
    assert first.is_stopped
    assert first.stopped.is_set()
    assert not second.is_stopped
    eventually(lambda: [event["error"] for event in setting.errors()] != [])
    (event,) = setting.errors()
    assert event["receiver"] == "air/lines/0"
    assert event["error"] == "the source went away: ConnectionError: refused"
    assert "ConnectionError: refused" in event["stack"]
    second.store("after")
    assert running.end().state is ReceiverState.STOPPED
    assert setting.values() == [b"after"]
    assert len(Numbers.made) == 2


def test_an_object_that_was_replaced_can_store_nothing_more(make_custom: MakeCustom) -> None:
    setting = make_custom()
    running = setting.start()
    first = setting.receiver()
    first.restart("again", delay_seconds=0)
    setting.receiver(starts=2)
    with pytest.raises(ReceiverStoppedError, match="not taken"):
        first.store("late")
    running.end()
    assert setting.values() == []


def test_an_error_in_on_start_is_reported_and_leads_to_a_restart(
    make_custom: MakeCustom, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.receiver.receiver_lifecycle.RESTART_DELAY_SECONDS", 0.05)
    Numbers.on_start_error = OSError("no such host")
    setting = make_custom()
    running = setting.start()
    eventually(lambda: len(Numbers.made) >= 3)
    eventually(lambda: setting.ledger.receivers.all("air")[0].last_error is not None)
    Numbers.on_start_error = None
    setting.receiver(starts=4)
    eventually(lambda: setting.errors() != [])
    running.end()
    # The same error again and again is one event.
    assert [event["error"] for event in setting.errors()] == [
        "The receiver could not be started: OSError: no such host"
    ]


class Exiting(Receiver):
    """The first one exits in on_stop."""

    starts = 0

    def on_start(self) -> None:
        self.first = Exiting.starts == 0
        Exiting.starts += 1
        self.store("first" if self.first else "second")
        if self.first:
            self.restart("the source went away", delay_seconds=0)

    def on_stop(self) -> None:
        if self.first:
            raise SystemExit(3)


def test_an_exit_in_on_stop_is_reported_and_leads_to_a_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Exiting, "starts", 0)
    with run_receiver(Exiting) as running:
        running.wait_for(2)
    assert running.values == [b"first", b"second"]
    assert running.errors == ["the source went away", "The receiver's on_stop failed: SystemExit: 3"]


def test_a_thread_that_fails_restarts_its_receiver(make_custom: MakeCustom, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.receiver.receiver_lifecycle.RESTART_DELAY_SECONDS", 0.05)
    setting = make_custom()
    running = setting.start()

    def fail() -> None:
        raise ValueError("bad line")

    setting.receiver().start_thread(fail)
    setting.receiver(starts=2)
    eventually(lambda: setting.errors() != [])
    running.end()
    assert [event["error"] for event in setting.errors()] == ["A thread of the receiver failed: ValueError: bad line"]


def test_a_reported_error_changes_nothing_else(make_custom: MakeCustom) -> None:
    setting = make_custom()
    running = setting.start()
    receiver = setting.receiver()
    receiver.report_error("one line was no JSON")
    eventually(lambda: setting.errors() != [])
    eventually(lambda: setting.ledger.receivers.all("air")[0].last_error == "one line was no JSON")
    # The partition is read all the same.
    assert setting.ledger.receivers.all("air")[0].stats["troubled"] == {}
    receiver.store("next")
    running.end()
    (event,) = setting.errors()
    assert (event["error"], event["stack"]) == ("one line was no JSON", None)
    assert setting.values() == [b"next"]
    assert len(Numbers.made) == 1


def test_a_receiver_that_stops_itself_keeps_its_partition(make_custom: MakeCustom) -> None:
    """The receiver says why it has stopped."""
    setting = make_custom()
    running = setting.start()
    receiver = setting.receiver()
    receiver.store("last")
    receiver.stop("the file has ended")
    eventually(lambda: receiver.stopped.is_set() and setting.values() == [b"last"])
    eventually(lambda: setting.ledger.receivers.all("air")[0].stats.get("at_end") == 1)
    (row,) = setting.ledger.positions.all("air")
    assert (row.state, row.receiver_index) == (PartitionState.ACTIVE, 0)
    assert running.end().state is ReceiverState.STOPPED
    assert setting.errors() == []
    assert len(Numbers.made) == 1


def test_a_receiver_that_stops_with_an_error_fails_its_partition(
    make_custom: MakeCustom,
) -> None:
    """The partition stays so until a person resumes it."""
    setting = make_custom()
    running = setting.start()
    setting.receiver().stop("the source refuses this user", PermissionError("denied"))

    def state() -> tuple[PartitionState, str | None]:
        (row,) = setting.ledger.positions.all("air")
        return row.state, row.error

    eventually(lambda: state() == (PartitionState.FAILED, "the source refuses this user: PermissionError: denied"))
    (row,) = setting.ledger.positions.all("air")
    setting.ledger.positions.set_state(setting.job, "lines", [row.partition], PartitionState.ACTIVE)
    setting.receiver(starts=2).store("again")
    eventually(lambda: setting.values() == [b"again"])
    running.end()


def test_a_stop_stores_what_was_given_and_what_on_stop_gives(make_custom: MakeCustom) -> None:
    setting = make_custom()
    running = setting.start()
    receiver = setting.receiver()
    receiver.last_words = ["bye", ["and", "thanks"]]
    receiver.store("hello")
    running.end()
    assert setting.values() == [b"hello", b"bye", b"and", b"thanks"]
    with pytest.raises(ReceiverStoppedError):
        receiver.store("too late")


def failing_after(records: int) -> Iterator[bytes]:
    for number in range(records):
        yield b"%d" % number
    raise ConnectionError("the server has gone")


def test_what_an_iterable_gave_before_its_error_is_stored(make_custom: MakeCustom) -> None:
    setting = make_custom()
    running = setting.start()
    receiver = setting.receiver()
    with pytest.raises(ConnectionError):
        receiver.store(failing_after(900))
    with pytest.raises(TypeError, match="got int"):
        receiver.store([b"a", b"b", 7, b"d"])  # type: ignore[list-item]
    receiver.store("after")
    running.end()
    assert setting.values() == [*(b"%d" % number for number in range(900)), b"a", b"b", b"after"]


def test_a_call_with_a_position_moves_nothing_if_its_data_fail(make_custom: MakeCustom) -> None:
    """It is the iterable of the records that fails."""
    setting = make_custom()
    running = setting.start()
    receiver = setting.receiver()
    receiver.store(["a"], position=1)
    receiver.store([], position=2)
    with pytest.raises(ConnectionError):
        receiver.store(failing_after(900), position=902)
    assert receiver.position == 2
    with pytest.raises(ConnectionError):
        receiver.store(failing_after(3))
    running.end()
    # The position 2 came without records, so it is stored with the next ones.
    assert setting.values() == [b"a", b"0", b"1", b"2"]
    assert setting.position() == "2"


def test_a_record_of_an_endless_iterable_awaits_no_further_one(make_custom: MakeCustom) -> None:
    setting = make_custom()
    running = setting.start()
    receiver = setting.receiver()
    given: queue.Queue[bytes | None] = queue.Queue()
    receiver.start_thread(lambda: receiver.store(iter(given.get, None)))  # type: ignore[arg-type]
    for number in range(3):
        given.put(b"%d" % number)
        eventually(lambda number=number: len(setting.values()) == number + 1)  # type: ignore[misc]
    given.put(None)
    running.end()
    assert setting.values() == [b"0", b"1", b"2"]


def test_a_stop_that_closes_the_source_stores_what_it_gave(
    make_custom: MakeCustom, monkeypatch: pytest.MonkeyPatch
) -> None:
    setting = make_custom()
    running = setting.start()
    receiver = setting.receiver()
    closed, given = threading.Event(), threading.Event()

    def read() -> Iterator[bytes]:
        for number in range(150):
            yield b"%d" % number
        given.set()
        closed.wait()
        raise OSError("closed")

    monkeypatch.setattr(receiver, "on_stop", closed.set)
    receiver.start_thread(lambda: receiver.store(read()))
    assert given.wait(30)
    running.end()
    assert len(setting.values()) == 150
    assert setting.errors() == []


def test_a_stop_that_no_longer_waits_for_a_receiver_is_an_event(
    make_custom: MakeCustom, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.receiver.custom_source.STOP_SECONDS", -1.0)
    setting = make_custom()
    running = setting.start()
    receiver = setting.receiver()
    go_on = threading.Event()
    monkeypatch.setattr(receiver, "on_stop", go_on.wait)
    assert running.end().state is ReceiverState.STOPPED
    go_on.set()
    (event,) = setting.errors()
    assert "did not end in" in event["error"]
    assert "not stored" in event["error"]


def test_records_dropped_at_the_end_are_counted_in_an_event(
    make_custom: MakeCustom, monkeypatch: pytest.MonkeyPatch
) -> None:
    setting = make_custom()
    # The source is closed with records that nobody has taken.
    monkeypatch.setattr(CustomSource, "fetch", lambda *_: time.sleep(0.01) or [])
    running = setting.start()
    receiver = setting.receiver()
    receiver.store(["a", "b"])
    receiver.store(["c"], position=1)
    running.end()
    # The third comes again, because its position was not stored.
    assert [event["error"] for event in setting.errors()] == [
        "2 records that were given without a position are not stored: the receiver ends"
    ]


def test_a_call_that_waits_returns_once_its_block_is_accepted(make_custom: MakeCustom) -> None:
    setting = make_custom()
    running = setting.start()
    receiver = setting.receiver()
    receiver.store(["a", "b"], wait=True)
    assert setting.values() == [b"a", b"b"]
    receiver.store(["c"], position={"line": 3}, wait=True)
    assert setting.position() == '{"line":3}'
    running.end()


def test_a_call_that_waits_raises_if_the_lease_is_lost_before(make_custom: MakeCustom) -> None:
    setting = make_custom()
    running = setting.start()
    receiver = setting.receiver()
    # Another instance has the lease: this one's blocks are refused.
    setting.ledger.receivers.register(
        setting.ledger.receivers.schedule(setting.job, running_id()), host="another", lease_ms=60_000
    )
    with pytest.raises(ReceiverStoppedError, match="not known"):
        receiver.store(["a"], wait=True)
    assert running.join().state is ReceiverState.LOST
    assert setting.values() == []


def running_id() -> object:
    from headrace.blocks import ReceiverId

    return ReceiverId("air", "lines", 0)


def test_a_restarted_process_gets_the_last_stored_position(make_custom: MakeCustom) -> None:
    """It begins with new offsets."""
    setting = make_custom()
    running = setting.start()
    receiver = setting.receiver()
    receiver.store(["a", "b"], position=2)
    assert receiver.position == 2
    receiver.store("c")
    running.end()
    running = setting.start()
    receiver = setting.receiver(starts=2)
    # "c" came without a position: such a source reads it again.
    assert receiver.position == 2
    receiver.store("c", position=3)
    running.end()
    assert setting.stored() == [(0, 0, b"a"), (0, 1, b"b"), (0, 2, b"c"), (0, 3, b"c")]
    assert setting.position() == "3"


def test_a_position_without_records_is_stored_with_the_next_ones(make_custom: MakeCustom) -> None:
    setting = make_custom()
    running = setting.start()
    receiver = setting.receiver()
    receiver.store([], position="skipped")
    assert receiver.position == "skipped"
    receiver.store("a", wait=True)
    assert setting.position() == '"skipped"'
    running.end()


def test_a_position_without_records_gives_way_to_a_later_one(make_custom: MakeCustom) -> None:
    """It is forgotten when records bring a later position."""
    setting = make_custom()
    running = setting.start()
    receiver = setting.receiver()
    receiver.store([], position=1)
    receiver.store("a", position=2, wait=True)
    receiver.store("b", wait=True)
    assert setting.position() == "2"
    running.end()


def test_store_waits_while_headrace_can_take_no_more(make_custom: MakeCustom) -> None:
    setting = make_custom(limits=Limits(max_rate=50, max_block_bytes=1 << 20))
    running = setting.start()
    receiver = setting.receiver()
    began = time.monotonic()
    # 50 a second: the queue of a quarter of a block holds two of these.
    for _ in range(4):
        receiver.store([b"x" * 2_000] * 50)
    assert time.monotonic() - began < 10
    eventually(lambda: len(setting.stored()) == 200)
    assert time.monotonic() - began > 2
    running.end()


@pytest.mark.parametrize(
    ("given", "error"),
    [
        (3, "store takes bytes, str, a Record, or an iterable of these, got int"),
        ([{"b": 1}], "got dict"),
        ({"b": 1}, "got dict, which has fields; give one record as bytes or a text"),
        (NamedRow("a", "b"), "got NamedRow, which has fields"),
        (Record(5), "a Record's value is bytes, str or None, got int"),  # type: ignore[arg-type]
        (Record(b"a", headers=[("a",)]), "header is"),  # type: ignore[list-item]
        (Record(b"a", timestamp_ms=-1), "timestamp_ms is from 0"),
    ],
)
def test_what_is_no_record_is_refused_in_the_callers_thread(make_custom: MakeCustom, given: object, error: str) -> None:
    setting = make_custom()
    running = setting.start()
    receiver = setting.receiver()
    with pytest.raises((TypeError, ValueError), match=error):
        receiver.store(given)  # type: ignore[arg-type]
    receiver.store("good")
    running.end()
    assert setting.values() == [b"good"]


@pytest.mark.parametrize(
    ("position", "changed"),
    [
        ({"shards": [{0: 17, 1: 4}]}, r"position\['shards'\]\[0\] has the key 0, which would come back as a text"),
        ({None: 1}, "position has the key None"),
        (["a.log", (1, 2)], r"position\[1\] is a tuple, which would come back as a list"),
    ],
)
def test_a_position_that_json_does_not_give_back_is_named(
    make_custom: MakeCustom, position: object, changed: str
) -> None:
    """Such a position is refused."""
    setting = make_custom()
    running = setting.start()
    with pytest.raises(TypeError, match=changed):
        setting.receiver().store("a", position=position)
    with pytest.raises(TypeError, match=changed), run_receiver(Numbers, position=position):
        pass
    running.end()
    assert setting.values() == []


def test_a_position_that_is_no_json_or_too_long_is_refused(make_custom: MakeCustom) -> None:
    setting = make_custom()
    running = setting.start()
    receiver = setting.receiver()
    with pytest.raises(TypeError, match="a position is a JSON value"):
        receiver.store("a", position={1, 2})
    with pytest.raises(ValueError, match="at most 65536 bytes"):
        receiver.store("a", position="x" * 70_000)
    running.end()
    assert setting.values() == []


def test_positioned_records_that_do_not_fit_a_block_are_refused(make_custom: MakeCustom) -> None:
    setting = make_custom(limits=Limits(max_block_bytes=1 << 20))
    running = setting.start()
    receiver = setting.receiver()
    with pytest.raises(ValueError, match="more than 1048576 bytes"):
        receiver.store((b"x" * 1_000 for _ in range(2_000)), position=1)
    running.end()
    assert setting.values() == []


@pytest.mark.parametrize(
    ("reference", "arguments", "error"),
    [
        ("no_such_module:Lines", {}, "The receiver no_such_module:Lines cannot be imported"),
        (f"{RECEIVERS}:Nobody", {}, "has no 'Nobody' to be the receiver"),
        (f"{RECEIVERS}:NotAReceiver", {}, "is NotAReceiver, which does not extend headrace.receiver.Receiver"),
        (f"{RECEIVERS}:not_a_class", {}, "is a int, which does not extend headrace.receiver.Receiver"),
        (f"{RECEIVERS}:Numbers", {"colour": "red"}, "does not take the arguments .colour.: got an unexpected"),
    ],
)
def test_a_class_that_cannot_be_used_is_named_in_the_error(
    make_custom: MakeCustom, reference: str, arguments: dict[str, str], error: str
) -> None:
    """It is the receiver's error."""
    setting = make_custom(reference, arguments=arguments)
    report = setting.start().join()
    assert report.state is ReceiverState.FAILED
    (row,) = setting.ledger.receivers.all("air")
    for text in (report.error, row.last_error):
        assert text is not None
        with pytest.raises(ReceivingError, match=error):
            raise ReceivingError(text)


def test_a_receiver_that_is_used_before_its_start_says_so() -> None:
    with pytest.raises(ReceivingError, match="used before it is started"):
        Receiver().store("a")


def test_threads_that_do_not_end_are_reported_and_left(
    make_custom: MakeCustom, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.receiver.receiver_lifecycle.STOP_SECONDS", 0.1)
    setting = make_custom()
    running = setting.start()
    receiver = setting.receiver()
    go_on = threading.Event()
    receiver.start_thread(go_on.wait, name="deaf")
    receiver.restart("again", delay_seconds=0)
    setting.receiver(starts=2)
    eventually(lambda: any("deaf did not end within" in event["error"] for event in setting.errors()))
    go_on.set()
    running.end()


def test_a_stop_gives_up_what_a_full_disk_does_not_take(
    make_custom: MakeCustom, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_store, "FIRST_CHECK_SECONDS", 0.05)
    monkeypatch.setattr(block_store, "LONGEST_CHECK_SECONDS", 0.2)
    monkeypatch.setattr(supervisor, "DRAIN_SECONDS", 0.5)
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


def owners(setting: CustomSetting) -> dict[int, tuple[int | None, PartitionState]]:
    return {
        row.partition.partition: (row.receiver_index, row.state) for row in setting.ledger.positions.all("air", "lines")
    }


def resized(setting: CustomSetting, receivers: int) -> None:
    setting.source = setting.source.model_copy(update={"receivers": receivers})


def test_each_receiver_has_the_partition_of_its_index(make_custom: MakeCustom) -> None:
    """The id of its topic is fixed."""
    setting = make_custom(receivers=3)
    assert owners(setting) == {index: (index, PartitionState.ACTIVE) for index in range(3)}
    assert {row.partition.topic_id for row in setting.ledger.positions.all("air")} == {"receiver:lines"}
    assert {row.partition.topic for row in setting.ledger.positions.all("air")} == {"lines"}


def test_a_receiver_that_is_not_live_keeps_its_own_partition(make_custom: MakeCustom) -> None:
    setting = make_custom(receivers=2)
    setting.discover(1)
    assert owners(setting)[1] == (1, PartitionState.ACTIVE)
    assert owners(setting)[0][0] in (0, None)


def test_partitions_without_a_receiver_end_and_come_back(make_custom: MakeCustom) -> None:
    setting = make_custom(receivers=2)
    resized(setting, 1)
    setting.discover(0)
    assert owners(setting)[0] == (0, PartitionState.ACTIVE)
    assert owners(setting)[1][1] is PartitionState.ENDED
    setting.discover(0)
    assert owners(setting)[1][1] is PartitionState.ENDED
    resized(setting, 2)
    setting.discover(0, 1)
    assert owners(setting)[1][1] is PartitionState.ACTIVE


def test_two_receivers_number_their_records_by_themselves(make_custom: MakeCustom) -> None:
    setting = make_custom(receivers=2)
    running = [setting.start(index) for index in (0, 1)]
    first, second = (setting.receiver_of(index) for index in (0, 1))
    first.store(["a", "b"], position="first")
    second.store("c", position="second")
    eventually(lambda: len(setting.stored()) == 3)
    for receiver in running:
        receiver.end()
    assert setting.stored() == [(0, 0, b"a"), (0, 1, b"b"), (1, 0, b"c")]
    positions = {row.partition.partition: row.source_position for row in setting.ledger.positions.all("air")}
    assert positions == {0: '"first"', 1: '"second"'}
    assert (first.receivers, second.index) == (2, 1)


def test_a_position_is_kept_in_a_header_of_the_log(make_custom: MakeCustom) -> None:
    setting = make_custom()
    running = setting.start()
    setting.receiver().store("a", position=[1, "x"], wait=True)
    running.end()
    (time,) = setting.ledger.blocks.unclaimed("air")
    (block,) = setting.ledger.allocations.blocks_of("air", time.batch_time_ms)
    header, _ = read_block(setting.context.storage.below("log"), block.info.handle)
    assert header.source_position == '[1,"x"]'
    # The ledger's row of a block has no room for it: the position's row has it.
    assert replace(block.info, source_position=None) == block.info


def test_fsck_finds_nothing_wrong_and_asks_no_kafka(make_custom: MakeCustom) -> None:
    setting = make_custom()
    running = setting.start()
    setting.receiver().store(["a", "b"], wait=True)
    running.end()
    report = check_stream(setting.ledger, "air", kafka=True)
    assert report.findings == []
    assert report.unchecked == []


def test_a_traced_record_is_found_in_the_log_and_not_in_kafka(make_custom: MakeCustom) -> None:
    setting = make_custom()
    running = setting.start()
    setting.receiver().store(["a", "b"], wait=True)
    running.end()
    traced = trace_record(setting.context, Coordinates("lines", 0, 1))
    assert traced.record is not None
    assert (traced.record.value, traced.record.read_from) == (b"b", "log")
