"""Inserts the receiving side of a rebuilt ledger: topics, positions, receivers, segments, blocks, gaps."""

from __future__ import annotations

from collections import defaultdict

from sqlalchemy import Connection, select

from headrace.ledger.database import LockedStream, insert_all
from headrace.ledger.errors import LedgerError
from headrace.ledger.gaps import add_gap
from headrace.ledger.rebuild_data import FoundStream
from headrace.ledger.receiving_tables import blocks, positions, receivers, segments, topics
from headrace.ledger.states import ReceiverState
from headrace.ledger.tables import gaps


def insert_positions(connection: Connection, found: FoundStream) -> None:
    """Insert the topics and the positions of their partitions, which no receiver owns."""
    insert_all(connection, topics, (topic.to_columns() for topic in found.topics))
    insert_all(
        connection,
        positions,
        (
            {**row.to_columns(), "stream": found.stream.name, "receiver_index": None, "wanted_receiver_index": None}
            for row in found.positions
        ),
    )


def insert_receivers(connection: Connection, locked: LockedStream, found: FoundStream) -> None:
    """Insert the receivers, whose instances are lost."""
    insert_all(
        connection,
        receivers,
        (
            {
                "stream": locked.row.name,
                "input_id": receiver_id.input_id,
                "receiver_index": receiver_id.index,
                "epoch": epoch,
                "job_epoch": found.stream.job_epoch,
                "state": ReceiverState.LOST,
                "host": None,
                "registered_at_ms": locked.now_ms,
                "lease_ms": 0,
                "lease_until_ms": 0,
                "heartbeat_ms": 0,
                "sealed_through_ms": 0,
                "last_accepted_sequence": -1,
                "stats": {},
                "restarts": 0,
            }
            for receiver_id, epoch in found.receiver_epochs.items()
        ),
    )


def insert_segments(connection: Connection, locked: LockedStream, found: FoundStream) -> None:
    """Insert the log's segments, each closed, with the latest batch time of its blocks."""
    latest: dict[str, int] = defaultdict(int)
    for block in found.blocks:
        path = block.info.handle.segment
        latest[path] = max(latest[path], block.batch_time_ms)
    insert_all(
        connection,
        segments,
        (
            {
                "stream": locked.row.name,
                "path": segment.path,
                "input_id": segment.receiver_id.input_id,
                "receiver_index": segment.receiver_id.index,
                "epoch": segment.epoch,
                "opened_at_ms": locked.now_ms,
                "closed_at_ms": locked.now_ms,
                "bytes": segment.bytes,
                "last_batch_time_ms": latest[segment.path],
            }
            for segment in found.segments
        ),
    )


def insert_blocks(connection: Connection, locked: LockedStream, found: FoundStream) -> None:
    """Insert the blocks in order. Their segments must exist. Raises LedgerError for a block without one."""
    known = select(segments.c.path, segments.c.segment_id).where(segments.c.stream == locked.row.name)
    ids = {row.path: row.segment_id for row in connection.execute(known)}
    unknown = {block.info.handle.segment for block in found.blocks} - ids.keys()
    if unknown:
        raise LedgerError(f"Blocks were found in segments that were not: {', '.join(sorted(unknown))}.")
    insert_all(
        connection,
        blocks,
        (
            {
                "stream": locked.row.name,
                "batch_time_ms": block.batch_time_ms,
                "input_id": block.info.receiver.input_id,
                "receiver_index": block.info.receiver.index,
                "epoch": block.info.epoch,
                "sequence": block.info.sequence,
                "cut_time_ms": block.info.cut_time_ms,
                "event_time_ms": block.info.event_time_ms,
                "added_at_ms": locked.now_ms,
                "segment_id": ids[block.info.handle.segment],
                "frame_offset": block.info.handle.offset,
                "frame_length": block.info.handle.length,
                "ranges": [r for r in block.info.ranges if r.until_offset > r.from_offset],
                "records": block.info.records,
                "payload_bytes": block.info.payload_bytes,
            }
            for block in found.blocks
        ),
    )


def insert_gaps(connection: Connection, locked: LockedStream, found: FoundStream) -> None:
    """Insert the gaps, oldest first; gaps found by the rebuild also get events."""
    insert_all(
        connection,
        gaps,
        (
            {name: value for name, value in gap.to_columns().items() if name != "gap_id"}
            for gap in sorted(found.gaps, key=lambda gap: gap.gap_id)
        ),
    )
    for gap in found.found_gaps:
        add_gap(
            connection,
            locked,
            gap.input_id,
            gap.partition,
            from_offset=gap.from_offset,
            until_offset=gap.until_offset,
            reason=gap.reason,
        )
