"""What a crash left at the end of a receiver's log, and the next receiver."""

from __future__ import annotations

from typing import Any

import pytest
from tests.unit.receiver.conftest import Setting
from tests.unit.receiver.waiting import eventually

from headrace.ledger import EventKind, ReceiverState
from headrace.ledger.errors import LedgerUnavailableError
from headrace.wal.storage import LogStorage


def torn_log(setting: Setting) -> tuple[LogStorage, str, bytes]:
    """A receiver's log of one block, whose last 7 bytes a crash took: the log, the segment, and what it was."""
    setting.assign(0, 0)
    setting.kafka.produce("flights", 0, b"a")
    log = setting.storage.below("log")
    with setting.running():
        eventually(lambda: setting.positions() == [1, 0])
        (segment,) = log.paths()
    whole = log.read(segment)
    log.write_atomically(segment, whole[:-7])
    return log, segment, whole


def test_what_a_crash_left_in_the_log_is_cut_off_kept_and_reported(setting: Setting) -> None:
    log, segment, whole = torn_log(setting)
    with setting.running():
        eventually(lambda: setting.ledger.receivers.all("air")[0].stats.get("torn_tail_bytes", 0) > 0)
    with setting.running():
        pass
    (event,) = setting.events(EventKind.LOG_REPAIRED)
    assert (event["segment"], event["offset"] + event["bytes"]) == (segment, len(whole) - 7)
    assert log.read(event["kept"]) == whole[event["offset"] : -7]
    assert log.size(segment) == event["offset"]
    assert setting.events(EventKind.LOG_DAMAGED) == []
    setting.kafka.produce("flights", 0, b"b")
    with setting.running():
        eventually(lambda: setting.positions() == [2, 0])
    assert setting.stored() == [(0, 0, b"a"), (0, 1, b"b")]


@pytest.mark.parametrize("how", ["the ledger is away", "killed before it told", "killed when it had told"])
def test_a_tail_that_was_cut_and_not_reported_is_reported_by_the_next_receiver(
    setting: Setting, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    log, segment, whole = torn_log(setting)
    events = type(setting.ledger.events)
    with monkeypatch.context() as patch:
        plain = events.append

        def append(self: Any, stream: str, kind: EventKind, *args: Any) -> None:
            if kind is EventKind.LOG_REPAIRED:
                if how == "killed when it had told":
                    plain(self, stream, kind, *args)
                elif how == "the ledger is away":
                    raise LedgerUnavailableError("A failover.")
                raise KeyError("killed")
            plain(self, stream, kind, *args)

        patch.setattr(events, "append", append)
        assert setting.start(0).join().state is ReceiverState.FAILED
    cut = log.size(segment)
    assert cut < len(whole) - 7
    for _ in range(2):
        with setting.running():
            eventually(lambda: setting.ledger.receivers.all("air")[0].state is ReceiverState.RUNNING)
    (event,) = setting.events(EventKind.LOG_REPAIRED)
    assert (event["segment"], event["offset"], event["bytes"]) == (segment, cut, len(whole) - 7 - cut)
    assert log.read(event["kept"]) == whole[cut:-7]
    assert log.paths("torn-unreported") == []


def test_a_tail_that_the_ledger_relies_on_is_damage_and_reported_once(setting: Setting) -> None:
    setting.assign(0, 0)
    setting.kafka.produce("flights", 0, b"a")
    log = setting.storage.below("log")
    with setting.running():
        eventually(lambda: setting.positions() == [1, 0])
        (segment,) = log.paths()
    (block,) = setting.ledger.blocks.of_segment("air", segment)
    torn = log.read(segment)[: block.info.handle.offset + 50]
    log.write_atomically(segment, torn)
    for _ in range(2):  # Neither life writes a block, so both find it.
        with setting.running():
            eventually(lambda: setting.ledger.receivers.all("air")[0].stats.get("log_damages", 0) > 0)
    (event,) = setting.events(EventKind.LOG_DAMAGED)
    assert (event["segment"], event["offset"], event["lost"]) == (segment, block.info.handle.offset, "flights-0[0, 1)")
    assert log.read(segment) == torn
