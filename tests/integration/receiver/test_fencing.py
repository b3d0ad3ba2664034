"""Two processes that both take themselves for one receiver: what the earlier one does counts for nothing."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
from confluent_kafka import ConsumerGroupTopicPartitions
from tests.integration.receiver.launchers import ProcessHandle

from headrace.blocks import ReceiverId
from headrace.ledger import EventKind
from headrace.ledger.receiving.tables import ScheduledReceiver
from headrace.receiver.supervisor import ReceiverTask
from headrace.stream import KafkaInput

pytestmark = pytest.mark.slow

LEASE_MS = 4_000


class Unkillable(ProcessHandle):
    """As a process that hangs in the kernel: it is told to end, and lives."""

    def cancel(self) -> None:
        """Nothing comes of it."""


class Stubborn:
    """Starts receivers that outlive their end."""

    def __init__(self) -> None:
        self.handles: list[Unkillable] = []

    def start(self, task: ReceiverTask) -> Unkillable:
        self.handles.append(Unkillable(task))
        return self.handles[-1]

    def crowding(self) -> None:
        """They hold no task slots."""

    def end(self) -> None:
        for handle in self.handles:
            if handle.process.is_alive():
                handle.process.kill()
            handle.process.join(30)


@pytest.fixture
def stubborn() -> Any:
    launcher = Stubborn()
    yield launcher
    launcher.end()


def committed(rig: Any) -> dict[int, int]:
    source: KafkaInput = rig.stream.inputs[0]
    answer = rig.admin.list_consumer_group_offsets([ConsumerGroupTopicPartitions(source.group)])
    return {each.partition: each.offset for each in answer[source.group].result().topic_partitions}


def epochs_of_blocks(rig: Any) -> list[int]:
    return [
        block.info.epoch
        for each in rig.ledger.blocks.unclaimed("air", limit=100_000)
        for block in rig.ledger.allocations.blocks_of("air", each.batch_time_ms)
    ]


def assert_fenced(rig: Any, zombie: Unkillable, records: int) -> None:
    """The zombie ended without success, and what it did meanwhile is nowhere."""
    zombie.process.join(60)
    assert zombie.process.exitcode == 1
    assert zombie.error() is not None
    (row,) = rig.ledger.receivers.all("air")
    assert (row.epoch, row.alive(rig.ledger.now_ms())) == (2, True)
    rig.produce(100, tag="after")
    rig.await_positions({(rig.topic, 0): records + 100})
    rig.eventually(lambda: committed(rig) == {0: records + 100})
    blocks = epochs_of_blocks(rig)
    assert blocks == sorted(blocks), "an earlier epoch's block came after a later one's"
    assert rig.offsets() == {(rig.topic, 0): list(range(records + 100))}
    ended = rig.ledger.events.page("air", kinds=[EventKind.RECEIVER_STOPPED, EventKind.RECEIVER_FAILED])
    reported = [event for event in ended if "it hangs" not in (event.payload["error"] or "")]
    assert reported == [], "the zombie reported an end of the receiver that is not its own"


def test_a_receiver_that_sleeps_past_its_lease_stores_nothing(rig: Any, stubborn: Stubborn) -> None:
    """Nor does it commit or report anything."""
    rig.create(partitions=1)
    rig.launcher = stubborn
    # Far longer than a process takes to start: one that still starts is not to be taken for one that hangs.
    rig.begin(rig.define(), receiver_lease_ms=LEASE_MS, hang_seconds=30.0)
    rig.produce(100)
    rig.await_positions({(rig.topic, 0): 100})
    zombie = stubborn.handles[0]
    os.kill(zombie.process.pid or 0, signal.SIGSTOP)
    # It wakes up with all of these to be read.
    rig.produce(20_000, tag="meanwhile")
    rig.await_positions({(rig.topic, 0): 20_100})
    assert len(stubborn.handles) == 2
    os.kill(zombie.process.pid or 0, signal.SIGCONT)
    assert_fenced(rig, zombie, 20_100)
    rig.end()


def test_of_two_supervisors_of_one_receiver_the_later_one_stores(rig: Any, stubborn: Stubborn) -> None:
    rig.create(partitions=1)
    rig.launcher = stubborn
    rig.begin(rig.define(), receiver_lease_ms=LEASE_MS, restart_seconds=600.0)
    rig.produce(100)
    rig.await_positions({(rig.topic, 0): 100})
    receiver_id, definition = ReceiverId("air", "records", 0), rig.stream.model_dump_json()
    scheduled = rig.ledger.receivers.schedule(rig.job, receiver_id)
    stubborn.start(ReceiverTask(definition, scheduled, LEASE_MS))
    rig.eventually(lambda: [row.epoch for row in rig.ledger.receivers.all("air")] == [2])
    rig.produce(20_000, tag="both")
    rig.await_positions({(rig.topic, 0): 20_100})
    assert_fenced(rig, stubborn.handles[0], 20_100)
    late = stubborn.start(ReceiverTask(definition, ScheduledReceiver(receiver_id, 1, rig.job), LEASE_MS))
    late.process.join(60)
    assert late.process.exitcode == 1
    (refused,) = rig.ledger.events.page("air", kinds=[EventKind.RECEIVER_REFUSED])
    assert refused.payload["epoch"] == 1
    (row,) = rig.ledger.receivers.all("air")
    assert (row.epoch, row.alive(rig.ledger.now_ms())) == (2, True), "the late task did not end the newer one"
    rig.end()
