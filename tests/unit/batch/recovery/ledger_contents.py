"""What two ledgers have in common if one was rebuilt from the other's storage."""

from __future__ import annotations

from typing import Any

from sqlalchemy import select
from tests.unit.batch.life import NAME

from headrace.blocks import BlockHandle
from headrace.fsck.coverage import Hole, check_coverage
from headrace.ledger import Ledger
from headrace.ledger.batches.tables import (
    batch_attempts,
    batch_inputs,
    batch_outputs,
    batch_runs,
    batches,
    replay_definitions,
    replays,
)
from headrace.ledger.receiving.tables import StoredBlock, blocks, positions, segments, topics, unclaimed_times
from headrace.ledger.tables import gaps, streams

# What is not promised: who owns what, the ids and times that a ledger gives by itself, and the numbers of attempts.
NOT_PROMISED = {
    "streams": {"job_epoch"},
    "positions": {"receiver_index", "wanted_receiver_index", "leader_epoch", "epoch_end_offset"},
    "blocks": {"block_id", "segment_id", "added_at_ms"},
    "batches": {"attempt", "cleaned_at_ms", "cleanup", "change", "result"},
    "batch_outputs": {"attempt", "recorded_at_ms", "code_version"},
    "batch_runs": {"at_ms"},
    "gaps": {"gap_id"},
    "replays": {"attempt"},
}
TABLES = (
    streams,
    topics,
    positions,
    blocks,
    unclaimed_times,
    batches,
    batch_inputs,
    batch_outputs,
    batch_runs,
    gaps,
    replays,
    replay_definitions,
)


def contents(ledger: Ledger) -> dict[str, list[str]]:
    """Every table's rows, without what is not promised."""
    found: dict[str, list[str]] = {}
    with ledger.streams._database.read() as connection:
        paths = dict(connection.execute(select(segments.c.segment_id, segments.c.path)).all())
        newest = newest_outputs(connection)
        attempts = select(batch_attempts.c.batch_time_ms, batch_attempts.c.number, batch_attempts.c.revision)
        revisions = {(row.batch_time_ms, row.number): row.revision for row in connection.execute(attempts)}
        for table in TABLES:
            rows = []
            for row in connection.execute(select(table)):
                fields = {k: v for k, v in row._mapping.items() if k not in NOT_PROMISED.get(table.name, ())}
                if table is blocks:
                    fields["segment"] = paths[row.segment_id]
                if table is batch_outputs:
                    fields["revision"] = revisions[row.batch_time_ms, row.attempt]
                if table is batch_outputs and (row.batch_time_ms, row.attempt, row.output_id) not in newest:
                    continue
                if fields.get("state") == "running":
                    # Whoever ran it is lost.
                    fields["state"] = "allocated"
                rows.append(str(sorted((name, str(value)) for name, value in fields.items())))
            found[table.name] = sorted(rows)
    return found


def newest_outputs(connection: Any) -> set[tuple[Any, ...]]:
    """Of each output of each batch what counts: its newest attempt's record of success."""
    newest: dict[tuple[Any, ...], Any] = {}
    query = select(batch_outputs).where(batch_outputs.c.target == "")
    for row in connection.execute(query.order_by(batch_outputs.c.attempt)):
        newest[row.batch_time_ms, row.output_id] = row
    return {(row.batch_time_ms, row.attempt, row.output_id) for row in newest.values() if row.state == "completed"}


def all_blocks(ledger: Ledger) -> dict[BlockHandle, StoredBlock]:
    with ledger.streams._database.read() as connection:
        times = connection.execute(select(blocks.c.batch_time_ms).distinct()).scalars().all()
    return {block.info.handle: block for time_ms in times for block in ledger.allocations.blocks_of(NAME, time_ms)}


def holes(ledger: Ledger) -> list[Hole]:
    """What is in no block, batch or gap."""
    return check_coverage(ledger.snapshots.take(NAME))[1]


def check_whole(ledger: Ledger) -> None:
    """Along each partition the blocks meet, or what lies between is no block's; and the position ends them."""
    ends: dict[Any, int] = {}
    for block in sorted(all_blocks(ledger).values(), key=lambda block: block.block_id):
        for r in block.info.ranges:
            place = (block.info.receiver.input_id, r.partition)
            assert ends.get(place, 0) <= r.from_offset
            ends[place] = r.until_offset
    for row in ledger.positions.all(NAME):
        assert row.next_offset >= ends.get((row.input_id, row.partition), 0)
