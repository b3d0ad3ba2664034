"""Translates the ledger's events to those that listeners get."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from headrace.ledger.states import EventKind, JobState
from headrace.ledger.tables import EventRow
from headrace.listeners.listener import (
    BatchCompleted,
    BatchInfo,
    BatchStarted,
    BatchSubmitted,
    BlockAdded,
    DeadLetters,
    Gap,
    OutputOperationCompleted,
    OutputOperationStarted,
    ReceiverError,
    ReceiverStarted,
    ReceiverStopped,
    ReceivingPaused,
    ReceivingResumed,
    StreamEvent,
    StreamingStarted,
)


class Call(NamedTuple):
    """The method of a listener to call, and its event."""

    method: str
    event: StreamEvent


def translate(row: EventRow) -> Call | None:
    """Return the call for an event of the ledger; None if listeners do not get this kind.

    Raises KeyError or another error if the payload is not as this version writes it.
    """
    translation = _TRANSLATIONS.get(row.kind)
    if translation is None:
        return None
    method, make = translation
    event = make(row, {"event_id": row.event_id, "at_ms": row.at_ms, "stream": row.stream})
    return None if event is None else Call(method, event)


_Common = dict[str, Any]


_Make = Callable[[EventRow, _Common], StreamEvent | None]


def _of(kind: type[StreamEvent], *names: str) -> _Make:
    """What makes an event whose fields have these names in the payload too."""
    return lambda row, common: kind(**common, **{name: row.payload[name] for name in names})


def _streaming_started(row: EventRow, common: _Common) -> StreamingStarted | None:
    if row.payload["state"] != JobState.RUNNING:
        return None
    return StreamingStarted(**common, job_epoch=row.payload["epoch"])


def _receiver_error(row: EventRow, common: _Common) -> ReceiverError:
    payload = row.payload
    return ReceiverError(
        **common,
        receiver=payload.get("receiver"),
        input_id=payload.get("input"),
        error=payload["error"],
        stack=payload.get("stack"),
    )


def _batch(row: EventRow, **more: Any) -> BatchInfo:
    payload = row.payload
    return BatchInfo(
        batch_time_ms=_batch_time_ms(row),
        interval_ms=payload["interval_ms"],
        records=payload["records"],
        blocks=payload["blocks"],
        payload_bytes=payload["payload_bytes"],
        late_records=payload["late_records"],
        absorbed_ms=tuple(payload["absorbed"]),
        submitted_at_ms=payload.get("allocated_at_ms", row.at_ms),
        attempt=payload.get("attempt", 0),
        started_at_ms=payload.get("started_at_ms"),
        **more,
    )


def _batch_submitted(row: EventRow, common: _Common) -> BatchSubmitted:
    return BatchSubmitted(**common, batch=_batch(row))


def _batch_started(row: EventRow, common: _Common) -> BatchStarted | None:
    # Each attempt at some of the batch's outputs has this event; those after the first continue the batch.
    return None if row.payload["continues"] else BatchStarted(**common, batch=_batch(row))


def _batch_completed(row: EventRow, common: _Common) -> BatchCompleted:
    outputs, failures = row.payload["outputs"], row.payload["failures"]
    batch = _batch(row, completed_at_ms=row.at_ms, outputs=outputs, failures=failures)
    return BatchCompleted(**common, batch=batch)


def _output(row: EventRow) -> dict[str, Any]:
    return {
        "batch_time_ms": _batch_time_ms(row),
        "output_id": row.payload["output"],
        "attempt": row.payload["attempt"],
    }


def _output_started(row: EventRow, common: _Common) -> OutputOperationStarted:
    return OutputOperationStarted(**common, **_output(row))


def _output_completed(row: EventRow, common: _Common) -> OutputOperationCompleted:
    counts: Mapping[str, Any] = row.payload.get("counts", {})
    seconds = counts.get("duration_seconds")
    return OutputOperationCompleted(
        **common,
        **_output(row),
        failure_reason=row.payload.get("error"),
        counts=counts,
        duration_ms=None if seconds is None else round(seconds * 1000),
    )


def _dead_letters(row: EventRow, common: _Common) -> DeadLetters:
    names = ("records", "reasons", "exceeded")
    return DeadLetters(**common, **_output(row), **{name: row.payload[name] for name in names})


def _gap(row: EventRow, common: _Common) -> Gap:
    names = ("input_id", "topic", "topic_id", "partition", "from_offset", "until_offset", "reason")
    return Gap(**common, **{name: row.payload[name] for name in names}, batch_time_ms=row.batch_time_ms)


def _resumed(row: EventRow, common: _Common) -> ReceivingResumed:
    payload = row.payload
    return ReceivingResumed(
        **common, receiver=payload["receiver"], epoch=payload["epoch"], paused_seconds=payload["seconds"]
    )


def _batch_time_ms(row: EventRow) -> int:
    if row.batch_time_ms is None:
        raise ValueError(f"the event {row.event_id} ({row.kind}) has no batch time")
    return row.batch_time_ms


_TRANSLATIONS: dict[str, tuple[str, _Make]] = {
    EventKind.JOB_STATE_CHANGED: ("on_streaming_started", _streaming_started),
    EventKind.RECEIVER_REFUSED: ("on_receiver_error", _receiver_error),
    EventKind.RECEIVER_STARTED: ("on_receiver_started", _of(ReceiverStarted, "receiver", "epoch", "host", "restarts")),
    EventKind.RECEIVER_ERROR: ("on_receiver_error", _receiver_error),
    EventKind.RECEIVER_STOPPED: ("on_receiver_stopped", _of(ReceiverStopped, "receiver", "epoch", "error")),
    EventKind.RECEIVER_FAILED: ("on_receiver_stopped", _of(ReceiverStopped, "receiver", "epoch", "error")),
    EventKind.BATCH_ALLOCATED: ("on_batch_submitted", _batch_submitted),
    EventKind.BATCH_STARTED: ("on_batch_started", _batch_started),
    EventKind.BATCH_COMPLETED: ("on_batch_completed", _batch_completed),
    EventKind.BATCH_FAILED: ("on_batch_completed", _batch_completed),
    EventKind.OUTPUT_STARTED: ("on_output_operation_started", _output_started),
    EventKind.OUTPUT_COMPLETED: ("on_output_operation_completed", _output_completed),
    EventKind.OUTPUT_FAILED: ("on_output_operation_completed", _output_completed),
    EventKind.DEAD_LETTERS: ("on_dead_letters", _dead_letters),
    EventKind.BLOCK_ADDED: ("on_block_added", _of(BlockAdded, "receiver", "batch_time_ms", "records", "payload_bytes")),
    EventKind.GAP: ("on_gap", _gap),
    EventKind.RECEIVING_PAUSED: ("on_receiving_paused", _of(ReceivingPaused, "receiver", "epoch", "cause", "reason")),
    EventKind.RECEIVING_RESUMED: ("on_receiving_resumed", _resumed),
}

METHODS = tuple(sorted({method for method, _ in _TRANSLATIONS.values()}))
"""The methods of a listener that get events."""
BLOCK_METHOD = "on_block_added"
