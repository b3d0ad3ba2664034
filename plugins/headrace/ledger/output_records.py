"""Records what the outputs of an attempt have done, within a transaction: success, failure and dead letters, with their
totals and events."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sqlalchemy import Connection, select, update

from headrace.ledger.attempt_statements import outputs_of
from headrace.ledger.batch_tables import Attempt, batch_outputs
from headrace.ledger.database import LockedStream
from headrace.ledger.events import record, record_all
from headrace.ledger.states import AttemptState, EventKind
from headrace.ledger.totals import add_totals, output_totals

LIMIT_EXCEEDED = "dead_letter_limit_exceeded"
"""The count of an output, as text, that names the limit that its dead letters exceed. The output has failed."""


def record_success(
    connection: Connection,
    locked: LockedStream,
    attempt: Attempt,
    output_id: str,
    *,
    counts: Mapping[str, Any],
    code_version: str | None,
) -> None:
    """Record an output's success. A second record by the same attempt replaces the first."""
    this = (*outputs_of(attempt), batch_outputs.c.output_id == output_id)
    first = connection.execute(select(batch_outputs.c.recorded_at_ms).where(*this)).scalar_one() is None
    values = {"counts": dict(counts), "recorded_at_ms": locked.now_ms, "code_version": code_version}
    connection.execute(update(batch_outputs).where(*this).values(state=AttemptState.COMPLETED, **values))
    if not attempt.target:
        amounts = {"writes": 1, **output_totals(counts)} if first else {}
        add_totals(connection, attempt.stream, amounts, output_id=output_id)
        payload = {"attempt": attempt.number, "output": output_id, "counts": dict(counts)}
        of_batch = {"batch_time_ms": attempt.batch_time_ms}
        record(connection, attempt.stream, locked.now_ms, EventKind.OUTPUT_COMPLETED, payload, **of_batch)
        _report_dead_letters(connection, locked, attempt, output_id, counts)


def record_failures(
    connection: Connection,
    locked: LockedStream,
    attempt: Attempt,
    error: str,
    *,
    failures: Mapping[str, str],
    counts: Mapping[str, Mapping[str, Any]],
) -> None:
    """Record the failure of each output of the attempt that has no record.

    ``failures`` are the reasons of single outputs; of the others it is ``error``. ``counts`` are those of outputs that
    have written dead letters, although they failed.
    """
    left = [*outputs_of(attempt), batch_outputs.c.state == AttemptState.RUNNING]
    failed = connection.execute(select(batch_outputs.c.output_id).where(*left)).scalars().all()
    reasons = {output_id: failures.get(output_id, error) for output_id in failed}
    for output_id, reason in reasons.items():
        values = {"error": reason, "counts": dict(counts.get(output_id, {})), "recorded_at_ms": locked.now_ms}
        this = (*left, batch_outputs.c.output_id == output_id)
        connection.execute(update(batch_outputs).where(*this).values(state=AttemptState.FAILED, **values))
    if attempt.target:
        return
    payloads = [{"attempt": attempt.number, "output": output, "error": text} for output, text in reasons.items()]
    of_batch = {"batch_time_ms": attempt.batch_time_ms}
    record_all(connection, attempt.stream, locked.now_ms, EventKind.OUTPUT_FAILED, payloads, **of_batch)
    for output_id in reasons.keys() & counts.keys():
        letters = counts[output_id]
        amounts = {"dead_lettered": letters.get("dead_lettered", 0), LIMIT_EXCEEDED: int(LIMIT_EXCEEDED in letters)}
        add_totals(connection, attempt.stream, amounts, output_id=output_id)
        _report_dead_letters(connection, locked, attempt, output_id, letters)


def _report_dead_letters(
    connection: Connection, locked: LockedStream, attempt: Attempt, output_id: str, counts: Mapping[str, Any]
) -> None:
    records = counts.get("dead_lettered")
    if records:
        payload = {"attempt": attempt.number, "output": output_id, "records": records}
        payload["reasons"] = dict(counts.get("dead_letter_reasons") or {})
        payload["exceeded"] = counts.get(LIMIT_EXCEEDED)
        of_batch = {"batch_time_ms": attempt.batch_time_ms}
        record(connection, attempt.stream, locked.now_ms, EventKind.DEAD_LETTERS, payload, **of_batch)
