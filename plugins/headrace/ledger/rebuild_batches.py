"""Inserts the batches of a rebuilt ledger, with substitutes for their lost attempts.

Attempts are lost with the ledger. A batch gets one ended attempt for each definition that wrote it, and one for each of
its replays; the recorded outputs belong to these. Numbers of later attempts are above every number that an attempt of
the lost ledger had.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

from sqlalchemy import Connection

from headrace.ledger.batch_tables import (
    BatchInputRow,
    batch_attempts,
    batch_inputs,
    batch_outputs,
    batch_runs,
    batches,
    replay_definitions,
    replays,
)
from headrace.ledger.database import LockedStream, insert_all
from headrace.ledger.rebuild_data import FoundBatch, FoundStream
from headrace.ledger.receiving_tables import unclaimed_times
from headrace.ledger.states import AttemptState, BatchState

HOLDER = "a lost ledger"
"""The holder of the attempts in a rebuilt ledger."""


def insert_batches(connection: Connection, locked: LockedStream, found: FoundStream) -> None:
    """Insert the batches with their inputs, outputs and replays, the runs, and the unclaimed times."""
    stream, now_ms = locked.row.name, locked.now_ms
    insert_all(connection, batches, (_row(batch, found.last_attempt) for batch in found.batches))
    insert_all(connection, batch_inputs, (row for batch in found.batches for row in _inputs(batch)))
    definitions = [{"stream": stream, **row.to_columns()} for row in found.replay_definitions]
    insert_all(connection, replay_definitions, definitions)
    for batch in found.batches:
        if batch.row.state is not BatchState.ABSORBED:
            _insert_attempts(connection, locked, found, batch)
    insert_all(
        connection,
        batch_runs,
        (
            {"stream": stream, "run_id": run_id, "batch_time_ms": time_ms, "at_ms": now_ms}
            for run_id, time_ms in found.runs.items()
        ),
    )
    insert_all(connection, unclaimed_times, _unclaimed(stream, found))


def _inputs(batch: FoundBatch) -> Iterator[dict[str, Any]]:
    for each in batch.inputs:
        values = {field.name: getattr(each, field.name) for field in fields(each)}
        yield BatchInputRow(stream=batch.row.stream, batch_time_ms=batch.row.batch_time_ms, **values).to_columns()


def _row(batch: FoundBatch, last_attempt: int) -> dict[str, Any]:
    attempt = 0 if batch.row.state is BatchState.ABSORBED else last_attempt
    return {**batch.row.to_columns(), "attempt": attempt, "history": batch.history}


def _insert_attempts(connection: Connection, locked: LockedStream, found: FoundStream, batch: FoundBatch) -> None:
    """Insert the last attempts at the batch, and before them one for each replay."""
    key = {"stream": locked.row.name, "batch_time_ms": batch.row.batch_time_ms}
    attempts: list[dict[str, Any]] = []
    outputs: list[dict[str, Any]] = []
    written = _by_revision(batch)
    first = found.last_attempt + 1 - len(written)
    numbers = range(first - len(batch.replays), first)
    for number, replay in zip(numbers, batch.replays, strict=True):
        state = AttemptState.COMPLETED if replay.state is BatchState.COMPLETED else AttemptState.FENCED
        of = {"number": number, "target": replay.target, "state": state}
        attempts.append(
            _attempt(locked, key, of, replay.outputs, replay.code_version) | {"replay_revision": replay.revision}
        )
        outputs += _outputs(locked, key, of, replay.recorded, replay.code_version)
    completed = batch.row.state is BatchState.COMPLETED
    state = AttemptState.COMPLETED if completed else AttemptState.FENCED
    for number, (revision, recorded) in enumerate(written, first):
        of = {"number": number, "target": "", "state": state}
        attempts.append(_attempt(locked, key, of, tuple(recorded), batch.row.code_version) | {"revision": revision})
        outputs += _outputs(locked, key, of, recorded, batch.row.code_version)
    insert_all(connection, batch_attempts, attempts)
    insert_all(connection, batch_outputs, outputs)
    insert_all(
        connection,
        replays,
        (
            {
                **key,
                **{name: getattr(replay, name) for name in _REPLAY},
                # The attempt that ran it is lost.
                "state": BatchState.ALLOCATED if replay.state is BatchState.RUNNING else replay.state,
                "attempt": number,
                "outputs": replay.outputs,
            }
            for number, replay in zip(numbers, batch.replays, strict=True)
        ),
    )


def _by_revision(batch: FoundBatch) -> list[tuple[int | None, dict[str, Mapping[str, Any]]]]:
    """Return the recorded outputs by the revision that wrote them, the newest last; one empty group without any."""
    groups: dict[int | None, dict[str, Mapping[str, Any]]] = {}
    for output_id, counts in batch.outputs.items():
        groups.setdefault(batch.revisions.get(output_id), {})[output_id] = counts
    return sorted(groups.items(), key=lambda group: group[0] or 0) or [(None, {})]


_REPLAY = ("target", "revision", "code_version", "started_at_ms", "completed_at_ms", "error")


def _attempt(
    locked: LockedStream, key: dict[str, Any], of: dict[str, Any], outputs: tuple[str, ...], code_version: str | None
) -> dict[str, Any]:
    times = dict.fromkeys(("started_at_ms", "heartbeat_ms", "ended_at_ms"), locked.now_ms)
    return {
        **key,
        **of,
        **times,
        "holder": HOLDER,
        "way": "",
        "source": "log",
        "outputs": outputs,
        "attributes": {},
        "replay_revision": None,
        "revision": None,
        "code_version": code_version,
        "lease_ms": 0,
        "lease_until_ms": 0,
    }


def _outputs(
    locked: LockedStream,
    key: dict[str, Any],
    of: dict[str, Any],
    recorded: Mapping[str, Mapping[str, Any]],
    code_version: str | None,
) -> Iterator[dict[str, Any]]:
    for output_id, counts in recorded.items():
        yield {
            **key,
            "attempt": of["number"],
            "output_id": output_id,
            "target": of["target"],
            "state": AttemptState.COMPLETED,
            "counts": dict(counts),
            "recorded_at_ms": locked.now_ms,
            "code_version": code_version,
        }


def _unclaimed(stream: str, found: FoundStream) -> Iterator[dict[str, Any]]:
    claimed = {batch.row.batch_time_ms for batch in found.batches}
    sums: dict[int, list[int]] = defaultdict(lambda: [0, 0, 0])
    for block in found.blocks:
        if block.batch_time_ms not in claimed:
            each = sums[block.batch_time_ms]
            each[0] += 1
            each[1] += block.info.records
            each[2] += block.info.payload_bytes
    for time_ms, (count, records, payload_bytes) in sums.items():
        yield {
            "stream": stream,
            "batch_time_ms": time_ms,
            "blocks": count,
            "records": records,
            "payload_bytes": payload_bytes,
        }
