"""Checks the batches: their blocks, their offset ranges, and absorbed batch times."""

from __future__ import annotations

from collections.abc import Iterator

from headrace.clock import time_text
from headrace.fsck.coverage import partition_text
from headrace.fsck.findings import Finding, Problem
from headrace.ledger.allocations import sum_inputs
from headrace.ledger.models import BatchInputRow, BatchRow, StoredBlock
from headrace.ledger.snapshots import StreamSnapshot
from headrace.ledger.states import BatchState


def check_allocations(snapshot: StreamSnapshot) -> Iterator[Finding]:
    """Check that each batch has its allocated blocks and their ranges, until cleanup may delete them from the log."""
    for batch in snapshot.batches:
        name = time_text(batch.batch_time_ms)
        for what in _time_problems(snapshot, batch):
            yield Finding(Problem.BATCH_TIME_WRONG, name, what)
        blocks = snapshot.blocks_by_batch.get(batch.batch_time_ms, [])
        if batch.state is BatchState.ABSORBED:
            continue
        if len(blocks) > batch.blocks:
            what = f"It was allocated {batch.blocks} blocks, and the ledger has {len(blocks)} of its times."
            yield Finding(Problem.BATCH_BLOCKS_WRONG, name, what)
        elif len(blocks) < batch.blocks:
            yield from _what_is_gone(batch, len(blocks))
        else:
            yield from _check_sums(snapshot, batch, blocks)


def _time_problems(snapshot: StreamSnapshot, batch: BatchRow) -> Iterator[str]:
    if batch.batch_time_ms % batch.interval_ms or batch.interval_ms != snapshot.stream.batch_interval_ms:
        yield f"It is no end of an interval of {snapshot.stream.batch_interval_ms} ms (its own is {batch.interval_ms})."
    if batch.batch_time_ms > snapshot.stream.sealed_until_ms:
        yield f"It was allocated, and the stream is sealed only until {snapshot.stream.sealed_until_ms}."


def _what_is_gone(batch: BatchRow, left: int) -> Iterator[Finding]:
    is_done = batch.checkpointed_at_ms is not None or batch.state is BatchState.ABANDONED
    if not is_done:
        what = (
            f"It is {batch.state.value} and in no checkpoint, and of its {batch.blocks} blocks the ledger has {left}."
        )
        yield Finding(Problem.CLEANED_TOO_EARLY, time_text(batch.batch_time_ms), what)


def _check_sums(snapshot: StreamSnapshot, batch: BatchRow, blocks: list[StoredBlock]) -> Iterator[Finding]:
    name = time_text(batch.batch_time_ms)
    inputs = snapshot.inputs_by_batch.get(batch.batch_time_ms, [])
    if batch.cleaned_at_ms is not None and blocks:
        what = f"It is marked as cleaned, and {len(blocks)} blocks of it are there."
        yield Finding(Problem.BATCH_STATE_WRONG, name, what)
    if batch.built:
        if sum(row.records for row in inputs) != batch.records:
            what = f"It has {batch.records} records, and its ranges {sum(row.records for row in inputs)}."
            yield Finding(Problem.BATCH_INPUTS_WRONG, name, what)
        return
    summed = sum(block.info.records for block in blocks), sum(block.info.payload_bytes for block in blocks)
    if summed != (batch.records, batch.payload_bytes):
        what = (
            f"It has {batch.records} records of {batch.payload_bytes} bytes, and its blocks {summed[0]} of {summed[1]}."
        )
        yield Finding(Problem.BATCH_BLOCKS_WRONG, name, what)
    wanted = {(row.input_id, row.partition): row for row in sum_inputs(batch.stream, batch.batch_time_ms, blocks)}
    reported = {(row.input_id, row.partition): row for row in inputs}
    for key in sorted({*wanted, *reported}):
        if wanted.get(key) != reported.get(key):
            takes, hold = _range(reported.get(key)), _range(wanted.get(key))
            what = f"Of {partition_text(key)} it takes {takes}, and its blocks hold {hold}."
            yield Finding(Problem.BATCH_INPUTS_WRONG, name, what)


def _range(row: BatchInputRow | None) -> str:
    if row is None:
        return "nothing"
    return f"[{row.from_offset}, {row.until_offset}) with {row.records} records in {row.blocks} blocks"


def check_built(snapshot: StreamSnapshot) -> Iterator[Finding]:
    """Check that ranges built from Kafka are before the stream's starting offsets, and do not overlap each other."""
    starting = {(row.input_id, row.partition): row.starting_offset for row in snapshot.positions}
    reached: dict[object, tuple[int, int]] = {}
    for row in snapshot.inputs:
        batch = snapshot.batch.get(row.batch_time_ms)
        if batch is None or not batch.built:
            continue
        key = (row.input_id, row.partition)
        until, other_ms = reached.get(key, (0, 0))
        name = partition_text(key)
        if row.until_offset > starting.get(key, row.until_offset):
            what = f"{_offsets(row)} was built from Kafka, and the stream began at {starting[key]}."
            yield Finding(Problem.OFFSETS_TWICE, f"{name} at {row.from_offset}", what)
        if row.from_offset < until:
            what = f"{_offsets(row)} begins before {until}, where batch {time_text(other_ms)} ends."
            yield Finding(Problem.OFFSETS_TWICE, f"{name} at {row.from_offset}", what)
        reached[key] = max((row.until_offset, row.batch_time_ms), (until, other_ms))


def _offsets(row: BatchInputRow) -> str:
    return f"[{row.from_offset}, {row.until_offset}) of batch {time_text(row.batch_time_ms)}"


def check_absorbed(snapshot: StreamSnapshot) -> Iterator[Finding]:
    """Check that absorbed batch times and the batches that absorbed them name each other."""
    for batch in snapshot.batches:
        name = time_text(batch.batch_time_ms)
        if batch.absorbed_by_ms is not None or batch.state is BatchState.ABSORBED:
            owner = None if batch.absorbed_by_ms is None else snapshot.batch.get(batch.absorbed_by_ms)
            if owner is None or batch.batch_time_ms not in owner.absorbed or batch.state is not BatchState.ABSORBED:
                what = (
                    f"It is {batch.state.value}, absorbed by {time_text(batch.absorbed_by_ms)}, and that batch does "
                    "not say so."
                )
                yield Finding(Problem.ABSORBED_WRONG, name, what)
            if snapshot.inputs_by_batch.get(batch.batch_time_ms):
                yield Finding(Problem.ABSORBED_WRONG, name, "It was absorbed, and has offset ranges of its own.")
        for batch_time_ms in batch.absorbed:
            taken = snapshot.batch.get(batch_time_ms)
            if taken is None or taken.absorbed_by_ms != batch.batch_time_ms or batch_time_ms >= batch.batch_time_ms:
                by = None if taken is None else taken.absorbed_by_ms
                what = f"It says that it absorbed {time_text(batch_time_ms)}, which is absorbed by {time_text(by)}."
                yield Finding(Problem.ABSORBED_WRONG, name, what)
