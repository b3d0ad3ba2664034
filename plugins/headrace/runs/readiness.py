"""Determines when a stream began to receive, and whether a batch time has all the blocks that it can still get."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from headrace.errors import HeadraceError
from headrace.runs.receiver_job import newest_job
from headrace.stream import Stream

if TYPE_CHECKING:
    from headrace.ledger import Ledger
    from headrace.ledger.receiving.tables import PositionRow, ReceiverRow
    from headrace.ledger.tables import JobRow, StreamRow
    from headrace.receiver.health import InputProblem


LONG_AGO_MS = 0


@dataclass(frozen=True, slots=True)
class Beginning:
    """When the stream's first receiver began, in milliseconds since the epoch; None if it has not, with the ``reason``.

    ``LONG_AGO_MS`` if the current receiver job is not the stream's first, or one of its receivers has been restarted.
    """

    at_ms: int | None
    reason: str = ""


def find_beginning(ledger: Ledger, stream_name: str) -> Beginning:
    """When the stream began to receive."""
    job = ledger.jobs.current(stream_name)
    if job is None:
        return Beginning(
            None, f"stream {stream_name!r} has no receiver job yet: its receiver DAG starts it, unless that is paused"
        )
    receivers = ledger.receivers.all(stream_name)
    if receivers:
        first_ms = min(receiver.registered_at_ms for receiver in receivers)
        # A receiver's row describes its newest instance, and has the time at which that one registered.
        is_first = job.epoch == 1 and not any(receiver.restarts for receiver in receivers)
        return Beginning(first_ms if is_first else LONG_AGO_MS)
    if job.alive(ledger.now_ms()):
        return Beginning(None, f"the receiver job (epoch {job.epoch}) is {job.state.value} and has no receivers yet")
    why = f": {job.error}" if job.error else ""
    return Beginning(None, f"the receiver job (epoch {job.epoch}) ended before its receivers began{why}")


# How many partitions a reason names; it gives the number of the others.
_MAX_NAMED = 5
# A partition that was drained this recently counts as drained: its receiver asks Kafka once a second.
_DRAINED_FOR_MS = 5_000


# A batch whose inputs cannot be received waits for at least this time and at least this many intervals.
_NOT_RECEIVED_MS = 60_000
_NOT_RECEIVED_INTERVALS = 3


class InputsNotReceivedError(HeadraceError):
    """The batch's inputs were not received, so its records are unknown."""


@dataclass(frozen=True, slots=True)
class Readiness:
    """``complete`` is False if the wait was given up: blocks that come later join the next open batch.

    ``inputs_missing``: the batch waits for inputs that are not received; ``failed``: that wait has timed out.
    """

    ready: bool
    reason: str
    complete: bool = True
    inputs_missing: bool = False
    failed: bool = False


def input_wait_ms(interval_ms: int) -> int:
    """How long a batch waits for inputs that are not received before its run fails, in milliseconds."""
    return max(_NOT_RECEIVED_MS, _NOT_RECEIVED_INTERVALS * interval_ms)


def blocks_ready(
    ledger: Ledger, stream_name: str, *, batch_time_ms: int, grace_ms: int, waiting_since_ms: int = 0
) -> Readiness:
    """Return whether the batch at ``batch_time_ms`` still has to wait for blocks, by the ledger's clock.

    Waiting makes a batch fuller; correctness does not depend on it (rule 4 of the design). So by arrival the wait ends
    with the first of these: the batch is already allocated, no receiver is alive, every live receiver has stored all it
    cut up to the batch time, or ``grace_ms`` have passed since the batch time.

    By timestamp the batch's records may still be in Kafka. So, as long as its inputs are received, the batch waits
    until every active partition has passed the batch time, or was drained at the end of the allowed lateness.

    The live receivers determine which of the two applies; if none is alive, the stream's definition does.

    A batch without records whose inputs were not received for its whole interval does not count as empty, because its
    records are unknown. It waits for the inputs for `input_wait_ms` from ``waiting_since_ms`` (or from the batch
    time, if that is later), and then fails. A batch by timestamp that such an input holds up fails in the same way.
    Records that were already received are not held back. No batch waits for the inputs of a stream that was stopped on
    purpose.
    """
    from headrace.receiver.health import input_problems

    if ledger.batches.find(stream_name, batch_time_ms) is not None:
        return Readiness(True, "the batch is allocated already")
    now_ms = ledger.now_ms()
    if now_ms < batch_time_ms:
        return Readiness(False, f"the batch's interval ends in {batch_time_ms - now_ms} ms")
    row = ledger.streams.get(stream_name)
    job = newest_job(ledger, stream_name)
    receivers = ledger.receivers.all(stream_name)
    live = [receiver for receiver in receivers if receiver.alive(now_ms)]
    batch_by, otherwise = _received_by(job, row, live)
    problems = [] if row.desired_state.value == "stopped" else input_problems(job, receivers, now_ms)
    is_starting = job is not None and job.alive(now_ms) and job.state.value == "starting"
    # A starting job has its own time limit, so this wait has not begun yet.
    since_ms = now_ms if is_starting else max(batch_time_ms, waiting_since_ms)
    if batch_by == "timestamp":
        readiness = _passed(ledger, row, live, batch_time_ms, now_ms)
        if not readiness.ready:
            readiness = _not_received(readiness.reason, problems, row, since_ms=since_ms, now_ms=now_ms)
    else:
        unknown = [problem for problem in problems if problem.asked_ms <= batch_time_ms - row.batch_interval_ms]
        if unknown and batch_time_ms > row.zero_time_ms and not _has_records(ledger, row, batch_time_ms):
            readiness = _not_received(
                "the batch's records are not known", unknown, row, since_ms=since_ms, now_ms=now_ms
            )
        else:
            readiness = _sealed(ledger, stream_name, live, batch_time_ms, grace_ms=grace_ms, now_ms=now_ms)
    missed = [problem for problem in problems if problem.asked_ms < batch_time_ms and batch_time_ms > row.zero_time_ms]
    if readiness.ready and missed:
        readiness = replace(readiness, reason=f"{readiness.reason}; but {_reported(missed)}", complete=False)
    return replace(readiness, reason=readiness.reason + otherwise)


def _has_records(ledger: Ledger, row: StreamRow, batch_time_ms: int) -> bool:
    """Whether the batch would get records that were already received."""
    waiting = ledger.blocks.waiting(row.name, batch_time_ms)
    return waiting is not None and (waiting.last_ms == batch_time_ms or Stream.from_json(row.definition).coalesces)


def _not_received(
    reason: str, problems: Sequence[InputProblem], row: StreamRow, *, since_ms: int, now_ms: int
) -> Readiness:
    """The readiness of a batch that waits: for a bounded time if an input is not received, else without a bound."""
    if not problems:
        return Readiness(False, reason)
    wait_ms = input_wait_ms(row.batch_interval_ms)
    left_ms = min(max(since_ms, problem.asked_ms) for problem in problems) + wait_ms - now_ms
    reported = f"{reason}: {_reported(problems)}"
    if left_ms <= 0:
        return Readiness(False, f"{reported}; waited {_seconds(wait_ms)} for it", inputs_missing=True, failed=True)
    return Readiness(
        False, f"{reported}; the task fails if this lasts another {_seconds(left_ms)}", inputs_missing=True
    )


def _reported(problems: Sequence[InputProblem]) -> str:
    more = f" and {len(problems) - _MAX_NAMED} more" if len(problems) > _MAX_NAMED else ""
    return ", ".join(str(problem) for problem in problems[:_MAX_NAMED]) + more


def _received_by(job: JobRow | None, row: StreamRow, live: Sequence[ReceiverRow]) -> tuple[str, str]:
    """Return the ``batch_by`` of the live receivers, and a note if it differs from the stream's definition.

    A batch's task registers a changed definition at once, but the receiver job continues with the one that it started
    with. By arrival no partition ever passes a batch time; by timestamp a receiver may still have older records to
    store, whatever is sealed.
    """
    if job is None or not any(receiver.job_epoch == job.epoch for receiver in live):
        return row.batch_by, ""
    batch_by = str(job.attributes.get("batch_by", row.batch_by))
    if batch_by == row.batch_by:
        return batch_by, ""
    return batch_by, (
        f"; the stream is by {row.batch_by}, but its receiver job of epoch {job.epoch} still receives by {batch_by}: "
        "`headrace streams stop` and `headrace streams start` restart it"
    )


def _sealed(
    ledger: Ledger, stream_name: str, live: Sequence[ReceiverRow], batch_time_ms: int, *, grace_ms: int, now_ms: int
) -> Readiness:
    if not live:
        return Readiness(True, "no receiver is alive to wait for")
    late = [
        f"{row.receiver_id} (paused: {row.paused_reason})" if row.paused_reason else str(row.receiver_id)
        for row in ledger.receivers.unsealed(stream_name, batch_time_ms)
    ]
    if not late:
        return Readiness(True, f"all {len(live)} live receiver(s) have stored their blocks")
    if now_ms >= batch_time_ms + grace_ms:
        return Readiness(True, f"{', '.join(late)} had not stored all blocks within {grace_ms} ms", complete=False)
    return Readiness(False, f"waiting for {', '.join(late)}")


def _passed(ledger: Ledger, row: StreamRow, live: Sequence[ReceiverRow], batch_time_ms: int, now_ms: int) -> Readiness:
    if batch_time_ms <= row.sealed_until_ms:
        return Readiness(True, "a later batch is allocated, so nothing can join this one any more")
    behind = _declared(row, ledger.positions.unpassed(row.name, batch_time_ms))
    if not behind:
        if ledger.positions.all(row.name):
            return Readiness(True, "every active partition has passed the batch time or was read to its end")
        # Also for a batch time from before the stream began: the topic may begin with records of that time, and sealing
        # it would make them late.
        return Readiness(False, "waiting for the receiver job: it has not found any partition yet")
    owners: dict[tuple[str, int | None], ReceiverRow] = {
        (receiver.receiver_id.input_id, receiver.receiver_id.index): receiver for receiver in live
    }
    named = []
    for position in behind[:_MAX_NAMED]:
        owner = owners.get((position.input_id, position.receiver_index))
        awaited = _awaited(row, position, batch_time_ms, now_ms, owner=owner)
        named.append(f"{position.partition.topic}-{position.partition.partition} ({awaited})")
    more = f" and {len(behind) - len(named)} more" if len(behind) > len(named) else ""
    return Readiness(False, f"waiting for {', '.join(named)}{more}")


def _declared(row: StreamRow, positions: list[PositionRow]) -> list[PositionRow]:
    """The positions of inputs and topics that the stream still declares; no receiver reads the others any more."""
    if not positions:
        return positions
    inputs = {source.id: source for source in Stream.from_json(row.definition).inputs}
    return [
        position
        for position in positions
        if position.input_id in inputs and inputs[position.input_id].matches(position.partition.topic)
    ]


def _awaited(
    row: StreamRow, position: PositionRow, batch_time_ms: int, now_ms: int, *, owner: ReceiverRow | None
) -> str:
    """What is missing from a partition before the batch can be allocated, in words."""
    if owner is None:
        return "no receiver is alive to read it"
    if owner.paused_reason:
        return f"its receiver is paused: {owner.paused_reason}"
    if now_ms - position.drained_ms < _DRAINED_FOR_MS:
        return (
            f"read to its end; late records are accepted until {_seconds(row.allowed_lateness_ms)} after the interval"
        )
    reached_ms = max(position.watermark_ms, position.drained_ms - row.allowed_lateness_ms)
    return f"{_seconds(batch_time_ms - reached_ms)} behind" if reached_ms > 0 else "nothing was read from it yet"


def _seconds(milliseconds: int) -> str:
    return f"{milliseconds / 1000:.1f} s"
