"""Reports offsets that Kafka took back after they were read, and gives to other records, as an event of the stream.

They are not a gap: blocks contain these offsets.
"""

from __future__ import annotations

from headrace.ledger import Ledger
from headrace.ledger.models import ReceiverLease
from headrace.ledger.states import EventKind
from headrace.receiver.partition_state import Gap

_NEWEST = 1_000


def report_reused(gap: Gap, lease: ReceiverLease, ledger: Ledger) -> None:
    """Report ``gap.from_offset`` to ``gap.until_offset``, unless another receiver has reported them already.

    The next receiver then continues at the position without a check. Raises LedgerUnavailableError; repeat the call
    then.
    """
    if gap.until_offset > gap.from_offset:
        _report(gap, lease, ledger)
    ledger.positions.forget_epoch_end(lease, gap.partition)


def _report(gap: Gap, lease: ReceiverLease, ledger: Ledger) -> None:
    receiver_id, partition = lease.receiver_id, gap.partition
    of_partition = {
        "input": receiver_id.input_id,
        "topic": partition.topic,
        "topic_id": partition.topic_id,
        "partition": partition.partition,
        "until_offset": gap.until_offset,
    }
    for event in ledger.events.latest(receiver_id.stream, [EventKind.OFFSETS_REUSED], _NEWEST):
        is_same = all(event.payload.get(name) == value for name, value in of_partition.items())
        if is_same and event.payload["from_offset"] <= gap.from_offset:
            return
    payload = {**of_partition, "from_offset": gap.from_offset, "reason": gap.reason}
    ledger.events.append(receiver_id.stream, EventKind.OFFSETS_REUSED, payload)
