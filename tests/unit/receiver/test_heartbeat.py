"""What a heartbeat reports to the ledger beside the receiver's own state."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from headrace.blocks import ReceiverId, TopicPartition
from headrace.clock import ManualClock
from headrace.ledger.models import ReceiverLease, ReceiverOrders
from headrace.receiver.heartbeat import HEARTBEAT_SECONDS, Heartbeat
from headrace.receiver.partition_state import FetchState, PartitionStatus

PARTITION = TopicPartition("flights", "topic-id", 0)


def test_a_stopped_partition_fails_in_the_ledger_once_its_topic_is_known_not_to_be_created_again() -> None:
    clock = ManualClock()
    failed: list[str] = []
    ledger = SimpleNamespace(
        receivers=SimpleNamespace(heartbeat=lambda *_, **__: ReceiverOrders({}, frozenset(), False, 0, 0)),
        positions=SimpleNamespace(fail=lambda _lease, _partition, error: failed.append(error)),
    )
    commits = SimpleNamespace(last_error=None, open=0, allow_until=lambda _: None)
    status = PartitionStatus(PARTITION, 5, FetchState.FAILED, "offsets [5, 9) are gone")
    kafka: Any = SimpleNamespace(client_error=None, commits=commits, status=lambda: [status], take_errors=lambda: [])
    stats: Any = SimpleNamespace(collect=lambda *_: {})
    generator: Any = SimpleNamespace(queued=(0, 0), sealed_through_ms=lambda: 0)
    pausing: Any = SimpleNamespace(look=lambda: False, report=lambda: None, reason=None)
    ledger_clock: Any = SimpleNamespace(observe=lambda *_: None)
    context: Any = SimpleNamespace(ledger=ledger, clock=clock)
    # None: Kafka did not say. True: the tracker ends the partition.
    answers = iter([None, True, False])
    heartbeat = Heartbeat(
        context,
        ReceiverLease(ReceiverId("air", "records", 0), 1, 1, 10_000, 10_000),
        source=kafka,
        generator=generator,
        stats=stats,
        pausing=pausing,
        end_offsets=None,
        ledger_clock=ledger_clock,
        recreated=lambda _: next(answers),
    )

    def failures_after_a_beat() -> int:
        clock.advance(int(HEARTBEAT_SECONDS * 1000))
        assert heartbeat.beat_if_due()
        return len(failed)

    assert [failures_after_a_beat() for _ in range(4)] == [0, 0, 1, 1]
