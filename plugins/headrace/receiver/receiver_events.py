"""Reports a receiver's findings as events of the stream (rule 11, no silence): torn tails and damage that it found in
its log when it took over, and offsets that Kafka took back after they were read."""

from __future__ import annotations

from headrace.ledger import Ledger
from headrace.ledger.models import ReceiverLease
from headrace.ledger.states import EventKind
from headrace.receiver.partition_state import Gap
from headrace.wal.errors import ranges_text
from headrace.wal.frame import receiver_directory
from headrace.wal.recovery import LogRecovery, cut_is_reported, unreported_cuts
from headrace.wal.scan import TornTail
from headrace.wal.storage import LogStorage

# The number of newest events among which a repeated finding is looked for.
_NEWEST = 1_000


def report_recovery(found: LogRecovery, lease: ReceiverLease, ledger: Ledger, log: LogStorage) -> None:
    """Append an event for each torn tail that was cut off, and for each damage.

    ``log_repaired`` has the path of the tail's copy, and includes cuts of a receiver that was killed before it could
    report them. ``log_damaged`` is for damage and for tails that could not be cut. Each is reported once, although a
    writer that ends before its first block leaves its findings to the next one.
    """
    stream = lease.receiver_id.stream
    who = {"receiver": str(lease.receiver_id), "epoch": lease.epoch}
    # Includes the tails that this receiver cut off.
    cuts = unreported_cuts(log, receiver_directory(lease.receiver_id))
    repaired = {event.payload.get("kept") for event in ledger.events.latest(stream, [EventKind.LOG_REPAIRED])}
    for tail in cuts:
        if tail.kept not in repaired:
            ledger.events.append(stream, EventKind.LOG_REPAIRED, {**who, **_reported(tail), "kept": tail.kept})
        cut_is_reported(log, tail)
    damaged: list[dict[str, object]] = [_reported(tail) for tail in found.torn_tails if tail.kept is None]
    for damage in found.damage:
        lost = None if damage.ranges is None else ranges_text(damage.ranges)
        damaged.append({"segment": damage.segment, "offset": damage.offset, "error": str(damage), "lost": lost})
    if not damaged:
        return
    latest = ledger.events.latest(stream, [EventKind.LOG_DAMAGED])
    known = {(event.payload.get("segment"), event.payload.get("offset")) for event in latest}
    for each in damaged:
        if (each["segment"], each["offset"]) not in known:
            ledger.events.append(stream, EventKind.LOG_DAMAGED, {**who, **each})


def _reported(tail: TornTail) -> dict[str, object]:
    return {
        "segment": tail.segment,
        "offset": tail.offset,
        "bytes": tail.length,
        "error": f"torn tail: {tail.reason}",
    }


def report_reused(gap: Gap, lease: ReceiverLease, ledger: Ledger) -> None:
    """Report that Kafka took back the offsets of ``gap`` and gives them to other records, unless another receiver has
    reported it. They are not a gap in the ledger: blocks contain these offsets.

    The next receiver then continues at the position without a check. Raises LedgerUnavailableError; repeat the call
    then.
    """
    if gap.until_offset > gap.from_offset:
        _report_offsets(gap, lease, ledger)
    ledger.positions.forget_epoch_end(lease, gap.partition)


def _report_offsets(gap: Gap, lease: ReceiverLease, ledger: Ledger) -> None:
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
