"""A log that Kafka cut off below the position, and let grow again: told in the ledger, once, and read on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tests.unit.receiver.waiting import eventually

from headrace.ledger import EventKind
from headrace.ledger.errors import PartitionNotAssignedError
from headrace.ledger.states import PartitionState, ReceiverState


@pytest.fixture
def begin(make_stream: Callable[..., Any], make_setting: Callable[..., Any]) -> Callable[[str], Any]:
    """Ten records of a topic's one partition, received by a receiver that has ended."""

    def received(policy: str) -> Any:
        setting = make_setting(make_stream(on_lost_offsets=policy))
        setting.topic(1)
        setting.assign(0)
        setting.kafka.produce("flights", 0, *[b"old"] * 10)
        with setting.running():
            eventually(lambda: setting.positions() == [10])
        return setting

    return received


def reused(setting: Any) -> list[tuple[str, int, int, int]]:
    events = setting.events(EventKind.OFFSETS_REUSED)
    return [(e["topic"], e["partition"], e["from_offset"], e["until_offset"]) for e in events]


@pytest.mark.parametrize("policy", ["fail", "reset"])
def test_offsets_that_are_given_to_other_records_are_an_event(begin: Callable[[str], Any], policy: str) -> None:
    setting = begin(policy)

    def reported(epoch: int) -> int | None:
        (row,) = setting.ledger.receivers.all("air")
        return row.stats.get("lost_offsets") if row.epoch == epoch else None

    with setting.kafka.lock:
        del setting.kafka.logs["flights", 0].entries[5:]
    (before,) = setting.ledger.receivers.all("air")
    for number in (1, 2):
        # The second finds the same, and need not say so again.
        with setting.running():
            eventually(lambda epoch=before.epoch + number: reported(epoch) == 5)  # type: ignore[misc]
            if policy == "fail":
                eventually(lambda: setting.ledger.positions.all("air")[0].state is PartitionState.FAILED)
        setting.ledger.positions.set_state(setting.job, "records", setting.partitions, PartitionState.ACTIVE)
    assert reused(setting) == [("flights", 0, 5, 10)]
    setting.kafka.produce("flights", 0, *[b"new"] * 7)
    with setting.running():
        eventually(lambda: setting.positions() == [12])
    assert [value for _, _, value in setting.stored()] == [*[b"old"] * 10, *[b"new"] * 2]
    assert setting.ledger.gaps.page("air") == []
    assert reused(setting) == [("flights", 0, 5, 10)]


@pytest.mark.parametrize("policy", ["fail", "reset"])
def test_a_log_that_was_cut_off_and_grew_again_while_no_receiver_ran_is_an_event(
    begin: Callable[[str], Any], policy: str
) -> None:
    setting = begin(policy)
    setting.kafka.elect("flights", 0, high=5)
    setting.kafka.produce("flights", 0, *[b"new"] * 7)
    if policy == "fail":
        with setting.running():
            eventually(lambda: setting.ledger.positions.all("air")[0].state is PartitionState.FAILED)
        assert reused(setting) == [("flights", 0, 5, 10)]
        # As the next receiver job does.
        setting.ledger.positions.set_state(setting.job, "records", setting.partitions, PartitionState.ACTIVE)
    with setting.running():
        eventually(lambda: setting.positions() == [12])
    assert reused(setting) == [("flights", 0, 5, 10)]
    assert [value for _, _, value in setting.stored()] == [*[b"old"] * 10, *[b"new"] * 2]
    assert setting.ledger.gaps.page("air") == []


def test_a_partition_that_is_taken_by_force_meanwhile_is_reported_by_its_next_owner(
    begin: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    setting = begin("reset")
    setting.kafka.elect("flights", 0, high=5)
    setting.kafka.produce("flights", 0, *[b"new"] * 7)
    asked: list[Any] = []

    def forget(lease: Any, partition: Any) -> None:
        asked.append(partition)
        raise PartitionNotAssignedError(lease.receiver_id, partition, 1)

    monkeypatch.setattr(setting.ledger.positions, "forget_epoch_end", forget)
    with setting.running() as running:
        eventually(lambda: setting.positions() == [12])
    assert asked == setting.partitions
    assert running.report.state is ReceiverState.STOPPED


def test_a_topic_that_was_created_again_had_nothing_taken_back(
    make_stream: Callable[..., Any], make_setting: Callable[..., Any]
) -> None:
    setting = make_setting(make_stream(on_lost_offsets="reset"))
    setting.topic(1)
    setting.assign(0)
    setting.kafka.produce("flights", 0, *[b"old"] * 10)
    with setting.running():
        eventually(lambda: setting.positions() == [10])
        with setting.kafka.lock:
            setting.kafka.create("flights", 1)
    with setting.running():
        eventually(lambda: bool(setting.ledger.receivers.all("air")[0].stats.get("troubled")))
    assert setting.events(EventKind.OFFSETS_REUSED) == []
