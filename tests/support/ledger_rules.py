"""Rules that a ledger's rows keep whatever happens: blocks, batches, attempts, leases, topics.

A ledger that breaks one was changed by something other than headrace, or headrace has a fault. So a person can do
nothing about it, and `headrace streams fsck` does not check it: it compares the ledger with files and with Kafka. The
rules are checked by the tests that do anything in any order, after each run of the hammer, and after each system test.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

from headrace.blocks import InputPartition, ReceiverId
from headrace.clock import time_text
from headrace.fsck.coverage import partition_text
from headrace.ledger import Ledger
from headrace.ledger.batches.allocations import sum_inputs
from headrace.ledger.batches.tables import BatchInputRow, BatchRow
from headrace.ledger.events import VANISHED
from headrace.ledger.receiving.tables import SegmentRow, StoredBlock
from headrace.ledger.snapshots import StreamSnapshot
from headrace.ledger.states import BatchState, PartitionState


class Broken(NamedTuple):
    """A rule that does not hold of ``subject``, and how."""

    rule: str
    subject: str
    detail: str


def broken_rules(ledger: Ledger, stream: str, *, but: Collection[str] = ()) -> list[Broken]:
    """Check all rules of a stream, at one moment, ``but`` for those that a test itself breaks."""
    snapshot = ledger.snapshots.take(stream)
    return [broken for rule in RULES for broken in rule(snapshot) if broken.rule not in but]


def check_blocks(snapshot: StreamSnapshot) -> Iterator[Broken]:
    """Check each block's batch time, writer, sequence and number of records."""
    receivers = {row.receiver_id: row for row in snapshot.receivers}
    last: dict[tuple[ReceiverId, int], int] = {}
    for block in snapshot.blocks:
        info = block.info
        wrong = _time_problem(snapshot, block)
        if wrong:
            yield Broken("batch_time_wrong", f"block {block.block_id}", wrong)
        receiver = receivers.get(info.receiver)
        if receiver is None or info.epoch > receiver.epoch:
            known = "is not registered" if receiver is None else f"has reached only epoch {receiver.epoch}"
            what = f"Receiver {info.receiver} wrote it in epoch {info.epoch}, but that receiver {known}."
            yield Broken("block_wrong", f"block {block.block_id}", what)
        elif info.epoch == receiver.epoch and info.sequence > receiver.last_accepted_sequence:
            what = f"Its sequence is {info.sequence}, after the last accepted one, {receiver.last_accepted_sequence}."
            yield Broken("block_wrong", f"block {block.block_id}", what)
        before = last.get((info.receiver, info.epoch), -1)
        if info.sequence <= before:
            what = f"Its sequence {info.sequence} comes after {before} in epoch {info.epoch} of {info.receiver}."
            yield Broken("block_wrong", f"block {block.block_id}", what)
        last[info.receiver, info.epoch] = info.sequence
        counted = sum(r.records for r in info.ranges)
        if counted != info.records:
            what = f"It has {info.records} records, but its offset ranges count {counted}."
            yield Broken("block_wrong", f"block {block.block_id}", what)


def _time_problem(snapshot: StreamSnapshot, block: StoredBlock) -> str | None:
    stream, info = snapshot.stream, block.info
    if block.batch_time_ms % stream.batch_interval_ms:
        return (
            f"Its batch time {time_text(block.batch_time_ms)} is no multiple of the interval, "
            f"{stream.batch_interval_ms} ms."
        )
    since_ms = info.cut_time_ms if info.event_time_ms is None else max(0, info.event_time_ms)
    earliest_ms = stream.batch_time_after(min(since_ms, block.added_at_ms))
    if block.batch_time_ms < earliest_ms:
        return (
            f"Its batch time is {time_text(block.batch_time_ms)}, but its records can be in no batch before "
            f"{time_text(earliest_ms)}."
        )
    return None


def check_order_of_batch_times(snapshot: StreamSnapshot) -> Iterator[Broken]:
    """Check that batch times never decrease along a partition, and that its position has the latest."""
    latest: dict[InputPartition, int] = {}
    for block in snapshot.blocks:
        if _is_ahead(snapshot, block.batch_time_ms):
            continue
        for r in block.info.ranges:
            key = (block.info.receiver.input_id, r.partition)
            if block.batch_time_ms < latest.get(key, 0):
                what = (
                    f"Its batch time {time_text(block.batch_time_ms)} is before {time_text(latest[key])}, that of "
                    f"earlier offsets of {partition_text(key)}."
                )
                yield Broken("batch_time_wrong", f"block {block.block_id}", what)
            latest[key] = max(block.batch_time_ms, latest.get(key, 0))
    for row in snapshot.positions:
        key = (row.input_id, row.partition)
        if row.last_batch_time_ms < latest.get(key, 0):
            what = (
                f"Its latest batch time is {time_text(row.last_batch_time_ms)}, but a block of it is in "
                f"{time_text(latest[key])}."
            )
            yield Broken("position_wrong", partition_text(key), what)


def _is_ahead(snapshot: StreamSnapshot, batch_time_ms: int) -> bool:
    """Whether a batch was allocated by a clock that was ahead, and the stream was opened again after that."""
    return max(snapshot.now_ms, snapshot.stream.sealed_until_ms) < batch_time_ms and batch_time_ms in snapshot.batch


def check_unclaimed(snapshot: StreamSnapshot) -> Iterator[Broken]:
    """Check the counts of blocks, records and bytes of each unclaimed batch time."""
    held: dict[int, list[int]] = defaultdict(lambda: [0, 0, 0])
    for block in snapshot.blocks:
        if block.batch_time_ms not in snapshot.batch:
            for place, size in enumerate((1, block.info.records, block.info.payload_bytes)):
                held[block.batch_time_ms][place] += size
    reported = {row.batch_time_ms: [row.blocks, row.records, row.payload_bytes] for row in snapshot.unclaimed}
    for batch_time_ms in sorted({*held, *reported}):
        has, says = held.get(batch_time_ms, [0, 0, 0]), reported.get(batch_time_ms, [0, 0, 0])
        if has != says:
            what = "It has {} blocks without a batch, with {} records and {} bytes".format(*has)
            what += "; {}, {} and {} are counted.".format(*says)
            yield Broken("unclaimed_wrong", time_text(batch_time_ms), what)


def check_segments(snapshot: StreamSnapshot) -> Iterator[Broken]:
    """Check the segments' rows: their writer, and that their blocks do not overlap."""
    epochs = {row.receiver_id: row.epoch for row in snapshot.receivers}
    by_segment: dict[str, list[StoredBlock]] = defaultdict(list)
    for block in snapshot.blocks:
        by_segment[block.info.handle.segment].append(block)
    for segment in snapshot.segments:
        blocks = by_segment.get(segment.path, [])
        for what in _segment_problems(segment, blocks, epochs):
            yield Broken("segment_wrong", segment.path, what)


def _segment_problems(segment: SegmentRow, blocks: list[StoredBlock], epochs: dict[ReceiverId, int]) -> Iterator[str]:
    if segment.epoch > epochs.get(segment.receiver_id, 0):
        known = epochs.get(segment.receiver_id)
        yield f"Segment of receiver {segment.receiver_id}, epoch {segment.epoch}; the ledger knows epoch {known} of it."
    if blocks and segment.removed_at_ms is not None:
        yield f"It was removed, but the ledger has {len(blocks)} blocks of it."
    strange = [
        block.block_id
        for block in blocks
        if (block.info.receiver, block.info.epoch) != (segment.receiver_id, segment.epoch)
    ]
    if strange:
        yield (
            f"Segment of receiver {segment.receiver_id}, epoch {segment.epoch}; it contains block {strange[0]} of "
            "another writer."
        )
    ends: Any = sorted((block.info.handle.offset, block.info.handle.length, block.block_id) for block in blocks)
    for (offset, length, first), (following, _, second) in itertools.pairwise(ends):
        if offset + length > following:
            yield f"Blocks {first} and {second} overlap in it at byte {following}."
    if segment.bytes is not None and ends and ends[-1][0] + ends[-1][1] > segment.bytes:
        yield f"It was closed with {segment.bytes} bytes, but block {ends[-1][2]} ends at {ends[-1][0] + ends[-1][1]}."
    latest_ms, reported_ms = max((block.batch_time_ms for block in blocks), default=0), segment.last_batch_time_ms
    if segment.closed_at_ms is not None and reported_ms is not None and reported_ms < latest_ms:
        yield (
            f"It was closed with {time_text(reported_ms)} as its latest batch time, but has a block of "
            f"{time_text(latest_ms)}."
        )


def check_allocations(snapshot: StreamSnapshot) -> Iterator[Broken]:
    """Check that each batch has its allocated blocks and their ranges, until their rows are deleted."""
    for batch in snapshot.batches:
        name = time_text(batch.batch_time_ms)
        for what in _time_problems(snapshot, batch):
            yield Broken("batch_time_wrong", name, what)
        blocks = snapshot.blocks_by_batch.get(batch.batch_time_ms, [])
        if batch.state is BatchState.ABSORBED:
            continue
        if len(blocks) > batch.blocks:
            what = f"It was allocated {batch.blocks} blocks, but the ledger has {len(blocks)} of its times."
            yield Broken("batch_blocks_wrong", name, what)
        elif len(blocks) == batch.blocks:
            yield from _check_sums(snapshot, batch, blocks)


def _time_problems(snapshot: StreamSnapshot, batch: BatchRow) -> Iterator[str]:
    if batch.batch_time_ms % batch.interval_ms or batch.interval_ms != snapshot.stream.batch_interval_ms:
        interval_ms = snapshot.stream.batch_interval_ms
        yield f"It is not the end of an interval of {interval_ms} ms (its own is {batch.interval_ms})."
    if snapshot.stream.sealed_until_ms < batch.batch_time_ms <= snapshot.now_ms:
        yield f"It was allocated, but the stream is sealed only until {snapshot.stream.sealed_until_ms}."


def _check_sums(snapshot: StreamSnapshot, batch: BatchRow, blocks: list[StoredBlock]) -> Iterator[Broken]:
    name = time_text(batch.batch_time_ms)
    inputs = snapshot.inputs_by_batch.get(batch.batch_time_ms, [])
    if batch.cleaned_at_ms is not None and blocks:
        what = f"It is marked as cleaned, but {len(blocks)} blocks of it are there."
        yield Broken("batch_blocks_wrong", name, what)
    if batch.built:
        if sum(row.records for row in inputs) != batch.records:
            what = f"It has {batch.records} records, but its offset ranges count {sum(row.records for row in inputs)}."
            yield Broken("batch_inputs_wrong", name, what)
        return
    summed = sum(block.info.records for block in blocks), sum(block.info.payload_bytes for block in blocks)
    if summed != (batch.records, batch.payload_bytes):
        what = (
            f"It has {batch.records} records of {batch.payload_bytes} bytes, but its blocks {summed[0]} of {summed[1]}."
        )
        yield Broken("batch_blocks_wrong", name, what)
    wanted = {(row.input_id, row.partition): row for row in sum_inputs(batch.stream, batch.batch_time_ms, blocks)}
    reported = {(row.input_id, row.partition): row for row in inputs}
    for key in sorted({*wanted, *reported}):
        if wanted.get(key) != reported.get(key):
            takes, hold = _range(reported.get(key)), _range(wanted.get(key))
            what = f"Of {partition_text(key)} it takes {takes}, and its blocks hold {hold}."
            yield Broken("batch_inputs_wrong", name, what)


def _range(row: BatchInputRow | None) -> str:
    if row is None:
        return "nothing"
    return f"[{row.from_offset}, {row.until_offset}) with {row.records} records in {row.blocks} blocks"


def check_absorbed(snapshot: StreamSnapshot) -> Iterator[Broken]:
    """Check that absorbed batch times and the batches that absorbed them name each other."""
    for batch in snapshot.batches:
        name = time_text(batch.batch_time_ms)
        if batch.absorbed_by_ms is not None or batch.state is BatchState.ABSORBED:
            owner = None if batch.absorbed_by_ms is None else snapshot.batch.get(batch.absorbed_by_ms)
            if owner is None or batch.batch_time_ms not in owner.absorbed or batch.state is not BatchState.ABSORBED:
                what = (
                    f"It is {batch.state.value}, absorbed by {time_text(batch.absorbed_by_ms)}, but that batch does "
                    "not say so."
                )
                yield Broken("absorbed_wrong", name, what)
            if snapshot.inputs_by_batch.get(batch.batch_time_ms):
                yield Broken("absorbed_wrong", name, "It was absorbed, but has offset ranges of its own.")
        for batch_time_ms in batch.absorbed:
            taken = snapshot.batch.get(batch_time_ms)
            if taken is None or taken.absorbed_by_ms != batch.batch_time_ms or batch_time_ms >= batch.batch_time_ms:
                by = None if taken is None else taken.absorbed_by_ms
                what = f"It says that it absorbed {time_text(batch_time_ms)}, which is absorbed by {time_text(by)}."
                yield Broken("absorbed_wrong", name, what)


def check_gaps(snapshot: StreamSnapshot) -> Iterator[Broken]:
    """Check that each range of an abandoned batch is a gap, and that no other batch has gaps."""
    reported = defaultdict(set)
    for gap in snapshot.gaps:
        if gap.batch_time_ms is not None and gap.reason != VANISHED:
            reported[gap.batch_time_ms].add((gap.input_id, gap.partition, gap.from_offset, gap.until_offset))
    for batch in snapshot.batches:
        gaps = reported.pop(batch.batch_time_ms, set())
        is_abandoned = batch.state is BatchState.ABANDONED
        if not is_abandoned and gaps:
            what = f"It is {batch.state.value}, but {len(gaps)} gaps say that it was abandoned."
            yield Broken("gap_wrong", time_text(batch.batch_time_ms), what)
        if not is_abandoned:
            continue
        for row in snapshot.inputs_by_batch[batch.batch_time_ms]:
            if (row.input_id, row.partition, row.from_offset, row.until_offset) not in gaps:
                name = partition_text((row.input_id, row.partition))
                what = (
                    f"[{row.from_offset}, {row.until_offset}) of the abandoned batch "
                    f"{time_text(batch.batch_time_ms)} is not recorded as a gap."
                )
                yield Broken("gap_missing", f"{name} at {row.from_offset}", what)
    for batch_time_ms in sorted(reported):
        if snapshot.stream.has_removed(batch_time_ms):
            continue
        yield Broken(
            "gap_wrong",
            time_text(batch_time_ms),
            "Gaps say that it was abandoned, and there is no such batch.",
        )


def check_slots(snapshot: StreamSnapshot) -> Iterator[Broken]:
    """Check that no more batches run than the stream has slots, and that no two attempts write one output."""
    stream = snapshot.stream
    live = [row for row in snapshot.running if not row.target and row.alive(snapshot.now_ms)]
    times = sorted({row.batch_time_ms for row in live if row.started_at_ms >= stream.updated_at_ms})
    slots = 1 if stream.ordered else stream.max_concurrent_batches
    if len(times) > slots:
        what = f"Batches {', '.join(map(str, times))} run, and the stream runs {slots} at a time."
        yield Broken("slots_exceeded", stream.name, what)
    holders: dict[tuple[int, str, str], int] = {}
    for row in snapshot.running:
        for output in row.outputs:
            other = holders.setdefault((row.batch_time_ms, row.target, output), row.number)
            if other != row.number:
                what = f"Attempts {other} and {row.number} both write {output!r}."
                yield Broken("lease_wrong", f"batch {time_text(row.batch_time_ms)}", what)


def check_attempts(snapshot: StreamSnapshot) -> Iterator[Broken]:
    """Check that no later attempt took an output of a running one."""
    for attempt in snapshot.running:
        recorded = snapshot.outputs.get((attempt.batch_time_ms, attempt.target), {})
        ahead = [row for row in recorded.values() if row.attempt > attempt.number and row.output_id in attempt.outputs]
        if ahead:
            what = f"Attempt {attempt.number} runs, and {ahead[0].output_id!r} was taken by attempt {ahead[0].attempt}."
            yield Broken("lease_wrong", f"batch {time_text(attempt.batch_time_ms)}", what)


def check_jobs(snapshot: StreamSnapshot) -> Iterator[Broken]:
    """Check that only the newest job runs, and that receivers run only in it."""
    stream = snapshot.stream
    for job in snapshot.jobs:
        name = f"receiver job {job.epoch}"
        if job.epoch > stream.job_epoch:
            yield Broken("lease_wrong", name, f"The stream's row names job {stream.job_epoch} as the newest.")
        elif job.epoch < stream.job_epoch and not job.state.ended:
            what = f"It is {job.state.value}, held by {job.holder}, but job {stream.job_epoch} has begun since."
            yield Broken("lease_wrong", name, what)
    current = next((job for job in snapshot.jobs if job.epoch == stream.job_epoch), None)
    for receiver in snapshot.receivers:
        name = f"receiver {receiver.receiver_id}"
        if receiver.job_epoch > stream.job_epoch:
            what = f"Job {receiver.job_epoch} scheduled it, but the newest job is {stream.job_epoch}."
            yield Broken("lease_wrong", name, what)
        elif not receiver.state.ended and (
            receiver.job_epoch < stream.job_epoch or current is None or current.state.ended
        ):
            what = f"It is {receiver.state.value}, but its job {receiver.job_epoch} has ended."
            yield Broken("lease_wrong", name, what)


def check_topics(snapshot: StreamSnapshot) -> Iterator[Broken]:
    """Check that each topic has one current incarnation, and that no partition of another incarnation is being read."""
    current: dict[tuple[str, str], list[str]] = defaultdict(list)
    known = {}
    for row in snapshot.topics:
        known[row.input_id, row.topic, row.topic_id] = row
        current[row.input_id, row.topic] += [row.topic_id] if row.current else []
    for (input_id, topic), ids in sorted(current.items()):
        if len(ids) != 1:
            what = f"{len(ids)} of its incarnations are marked as the current one."
            yield Broken("topic_wrong", f"{input_id}/{topic}", what)
    for position in snapshot.positions:
        tp = position.partition
        name = partition_text((position.input_id, tp))
        observed = known.get((position.input_id, tp.topic, tp.topic_id))
        if observed is None or observed.incarnation != tp.incarnation or tp.partition >= observed.partitions:
            what = "The ledger has no such topic."
            if observed is not None:
                what = (
                    f"The ledger has incarnation {observed.incarnation} of its topic, {observed.partitions} partitions."
                )
            yield Broken("topic_wrong", name, what)
        elif position.state is PartitionState.ACTIVE and not observed.current and position.receiver_index is not None:
            what = f"It is read by receiver {position.receiver_index}, but another topic has its name since."
            yield Broken("topic_wrong", name, what)


RULES = (
    check_blocks,
    check_order_of_batch_times,
    check_unclaimed,
    check_segments,
    check_allocations,
    check_absorbed,
    check_gaps,
    check_slots,
    check_attempts,
    check_jobs,
    check_topics,
)
