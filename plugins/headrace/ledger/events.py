"""Records a stream's events in order, its gaps, and its totals.

Gaps are offsets lost by Kafka or by a log that is not synced, or abandoned by a person. Each gap is also an event.

Totals only grow, for metrics: what batches, attempts and outputs of a stream have counted so far. Rows of batches,
blocks and attempts are deleted in time, so a sum over them would fall. A total is written in the transaction of what it
counts, under the stream's lock, and is never deleted.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cache
from itertools import takewhile
from typing import Any, NamedTuple

from sqlalchemy import Connection, delete, insert, select, update

from headrace.blocks import OffsetRange, TopicPartition
from headrace.ledger.database import LockedStream, Repository, insert_or_update
from headrace.ledger.model import partition_key
from headrace.ledger.receiving.tables import receivers
from headrace.ledger.states import EventKind
from headrace.ledger.tables import EventRow, GapRow, events, gaps, listener_cursors, totals
from headrace.secrets import without_secrets

_insert_event = insert(events)


def record(
    connection: Connection,
    stream_name: str,
    now_ms: int,
    kind: EventKind,
    payload: Mapping[str, Any],
    *,
    batch_time_ms: int | None = None,
) -> None:
    """Add an event within the caller's transaction, which holds the stream's lock."""
    record_all(connection, stream_name, now_ms, kind, [payload], batch_time_ms=batch_time_ms)


def record_all(
    connection: Connection,
    stream_name: str,
    now_ms: int,
    kind: EventKind,
    payloads: Collection[Mapping[str, Any]],
    *,
    batch_time_ms: int | None = None,
) -> None:
    """Add events of one kind within the caller's transaction, which holds the stream's lock."""
    if payloads:
        of_all = {"stream": stream_name, "at_ms": now_ms, "kind": kind.value, "batch_time_ms": batch_time_ms}
        rows = [{**of_all, "block_id": None, "payload": _cleaned(payload)} for payload in payloads]
        connection.execute(_insert_event, rows)


def record_batches(
    connection: Connection, stream_name: str, now_ms: int, kind: EventKind, payloads: Mapping[int, Mapping[str, Any]]
) -> None:
    """Add an event of one kind for each of these batch times, like `record_all`."""
    if payloads:
        of_all = {"stream": stream_name, "at_ms": now_ms, "kind": kind.value, "block_id": None}
        rows = [{**of_all, "batch_time_ms": time, "payload": _cleaned(payload)} for time, payload in payloads.items()]
        connection.execute(_insert_event, rows)


def record_blocks(
    connection: Connection, stream_name: str, now_ms: int, payloads: Mapping[int, Mapping[str, Any]]
) -> None:
    """Add the events of blocks, by block id. They are deleted with the blocks' rows, and are not in the batches'
    timelines."""
    of_all = {"stream": stream_name, "at_ms": now_ms, "kind": EventKind.BLOCK_ADDED.value, "batch_time_ms": None}
    rows = [{**of_all, "block_id": block_id, "payload": dict(payload)} for block_id, payload in payloads.items()]
    connection.execute(_insert_event, rows)


def _cleaned(value: Any) -> Any:
    """The payload without the secrets in its texts: most are names, and some are of errors, or of a person."""
    if isinstance(value, str):
        return without_secrets(value)
    if isinstance(value, Mapping):
        return {name: _cleaned(inside) for name, inside in value.items()}
    return [_cleaned(inside) for inside in value] if isinstance(value, list | tuple) else value


class Standing(NamedTuple):
    """How far a stream is in its ledger: an event that was looked for, and the newest one that is not of a block, each
    as (id, time, kind) or None; and by input and index, each receiver's epoch and its last accepted block."""

    found: tuple[int, int, str] | None
    newest: tuple[int, int, str] | None
    receivers: Mapping[tuple[str, int], tuple[int, int]]


class Events(Repository):
    """The append-only events of the streams."""

    def append(
        self,
        stream_name: str,
        kind: EventKind,
        payload: Mapping[str, Any] | None = None,
        *,
        batch_time_ms: int | None = None,
    ) -> None:
        """Add an event; the payload must be JSON values.

        Raises:
            StreamNotFoundError: there is no such stream.
        """
        with self._database.write_stream(stream_name) as (connection, locked):
            record(connection, stream_name, locked.now_ms, kind, payload or {}, batch_time_ms=batch_time_ms)

    def page(
        self,
        stream_name: str,
        after_id: int = 0,
        kinds: Collection[EventKind] | None = None,
        limit: int = 1000,
        *,
        blocks: bool = True,
    ) -> list[EventRow]:
        """Return up to ``limit`` events with ids above ``after_id``, oldest first; without those of blocks if not
        ``blocks``.

        After the last id of a page, no event with a lower one is added any more.
        """
        query = _selected().where(events.c.stream == stream_name, events.c.event_id > after_id)
        if not blocks:
            query = query.where(events.c.block_id.is_(None))
        with self._ordered(stream_name, kinds, blocks=blocks) as connection:
            return _limited(connection, query, kinds, limit, newest_first=False)

    def latest(
        self,
        stream_name: str,
        kinds: Collection[EventKind] | None = None,
        limit: int = 100,
        *,
        before_id: int | None = None,
    ) -> list[EventRow]:
        """Return the newest ``limit`` events, those with ids below ``before_id`` if it is given, newest first."""
        query = _selected().where(events.c.stream == stream_name)
        if before_id is not None:
            query = query.where(events.c.event_id < before_id)
        with self._ordered(stream_name, kinds) as connection:
            return _limited(connection, query, kinds, limit, newest_first=True)

    def newest_id(self, stream_name: str) -> int:
        """Return the id of the newest event; 0 if there is none."""
        query = select(events.c.event_id).where(events.c.stream == stream_name).order_by(events.c.event_id.desc())
        with self._database.read() as connection:
            return connection.execute(query.limit(1)).scalar_one_or_none() or 0

    def standing(self, stream_name: str, event_id: int) -> Standing:
        """Return how far the ledger is, in one transaction. ``event_id``: the event that is looked for."""
        columns = select(events.c.event_id, events.c.at_ms, events.c.kind).where(events.c.stream == stream_name)
        newest = columns.where(events.c.block_id.is_(None)).order_by(events.c.event_id.desc()).limit(1)
        table = receivers.c
        instances = select(table.input_id, table.receiver_index, table.epoch, table.last_accepted_sequence)
        with self._database.read() as connection:
            found, last = (
                None if row is None else tuple(row)
                for row in (
                    connection.execute(columns.where(events.c.event_id == event_id)).one_or_none(),
                    connection.execute(newest).one_or_none(),
                )
            )
            rows = connection.execute(instances.where(table.stream == stream_name)).all()
        return Standing(found, last, {(row[0], row[1]): (row[2], row[3]) for row in rows})

    def of_batch(self, stream_name: str, batch_time_ms: int) -> list[EventRow]:
        """Return the events of one batch, oldest first."""
        query = _selected().where(events.c.stream == stream_name, events.c.batch_time_ms == batch_time_ms)
        return self._rows(EventRow, query.order_by(events.c.event_id))

    def prune(self, stream_name: str, before_ms: int, limit: int = 5000, *, before_id: int | None = None) -> int:
        """Delete up to ``limit`` of the oldest events, if older than ``before_ms``, and with ids below ``before_id`` if
        it is given. Returns the number deleted.

        Listeners that have not got them yet have missed them (see `ListenerCursors`).
        """
        # What says that Kafka's offsets have other records stays: a batch that is read again there must know of it.
        these = (events.c.stream == stream_name, events.c.kind != EventKind.OFFSETS_REUSED)
        oldest = select(events.c.event_id, events.c.at_ms, events.c.block_id).where(*these)
        if before_id is not None:
            oldest = oldest.where(events.c.event_id < before_id)
        with self._database.write_stream(stream_name) as (connection, _):
            rows = connection.execute(oldest.order_by(events.c.event_id).limit(limit)).all()
            old = [row.event_id for row in takewhile(lambda row: row.at_ms < before_ms, rows)]
            if old:
                _count_missed(
                    connection, stream_name, [row.event_id for row in rows[: len(old)] if row.block_id is None]
                )
                connection.execute(delete(events).where(*these, events.c.event_id <= old[-1]))
            return len(old)

    def _ordered(
        self, stream_name: str, kinds: Collection[EventKind] | None, *, blocks: bool = True
    ) -> AbstractContextManager[Connection]:
        """A transaction that sees the events with ids below one that it sees. All but those of blocks are added under
        the stream's lock, so their ids ascend in the order of commits."""
        if blocks and (kinds is None or EventKind.BLOCK_ADDED in kinds):
            return self._database.settled(stream_name)
        return self._database.read()


def _limited(
    connection: Connection, query: Any, kinds: Collection[EventKind] | None, limit: int, *, newest_first: bool
) -> list[EventRow]:
    order = events.c.event_id.desc() if newest_first else events.c.event_id.asc()
    # One query per kind uses the index; one query for all kinds would search or sort all events.
    parts = [query] if kinds is None else [query.where(events.c.kind == kind.value) for kind in kinds]
    rows = [row for part in parts for row in EventRow.rows(connection, part.order_by(order).limit(limit))]
    return sorted(rows, key=lambda row: row.event_id, reverse=newest_first)[:limit]


def _selected() -> Any:
    return select(
        events.c.event_id, events.c.stream, events.c.at_ms, events.c.kind, events.c.batch_time_ms, events.c.payload
    )


def _count_missed(connection: Connection, stream_name: str, event_ids: Sequence[int]) -> None:
    """Add those of ``event_ids``, which ascend and are deleted now, to the missed events of listeners that have not got
    them."""
    if not event_ids:
        return
    behind = select(listener_cursors.c.listener, listener_cursors.c.event_id).where(
        listener_cursors.c.stream == stream_name, listener_cursors.c.event_id < event_ids[-1]
    )
    for name, cursor in connection.execute(behind).all():
        missed = sum(event_id > cursor for event_id in event_ids)
        this = (listener_cursors.c.stream == stream_name, listener_cursors.c.listener == name)
        values = {"missed": listener_cursors.c.missed + missed, "event_id": event_ids[-1]}
        connection.execute(update(listener_cursors).where(*this).values(**values))


def add_gap(
    connection: Connection,
    locked: LockedStream,
    input_id: str,
    partition: TopicPartition,
    *,
    from_offset: int,
    until_offset: int,
    reason: str,
    batch_time_ms: int | None = None,
    counted: int = 0,
) -> None:
    """Write a gap and its event, within the caller's transaction. ``counted`` of its offsets are in the total of lost
    offsets already."""
    fields = {
        "input_id": input_id,
        **partition_key(partition),
        "incarnation": partition.incarnation,
        "from_offset": from_offset,
        "until_offset": until_offset,
        "reason": reason,
    }
    connection.execute(
        insert(gaps).values(stream=locked.row.name, **fields, batch_time_ms=batch_time_ms, at_ms=locked.now_ms)
    )
    add_totals(connection, locked.row.name, {"gap_offsets": until_offset - from_offset - counted})
    record(connection, locked.row.name, locked.now_ms, EventKind.GAP, fields, batch_time_ms=batch_time_ms)


VANISHED = "the log lost the block before it reached the disk (delivery at_most_once)"
"""The reason of the gaps of `Gaps.add_vanished`."""


def remove_vanished(
    connection: Connection, stream_name: str, batch_time_ms: int
) -> Counter[tuple[str, TopicPartition]]:
    """Delete the gaps of a batch's vanished blocks, within the caller's transaction. Returns their offsets by input and
    partition, which stay in the total of lost offsets."""
    offsets: Counter[tuple[str, TopicPartition]] = Counter()
    vanished = (gaps.c.stream == stream_name, gaps.c.batch_time_ms == batch_time_ms, gaps.c.reason == VANISHED)
    for row in GapRow.rows(connection, select(gaps).where(*vanished)):
        offsets[row.input_id, row.partition] += row.until_offset - row.from_offset
    if offsets:
        connection.execute(delete(gaps).where(*vanished))
    return offsets


class Gaps(Repository):
    """Finds the gaps of streams, and records those of vanished blocks."""

    def add_vanished(self, stream_name: str, batch_time_ms: int, lost: Iterable[tuple[str, OffsetRange]]) -> None:
        """Record the offset ranges of a batch's blocks that the log lost, each once. ``lost`` has the input's id with
        each range. An abandoned batch is left as it is."""
        with self._database.write_stream(stream_name) as (connection, locked):
            query = select(gaps).where(gaps.c.stream == stream_name, gaps.c.batch_time_ms == batch_time_ms)
            rows = GapRow.rows(connection, query)
            if any(row.reason != VANISHED for row in rows):
                # The batch is abandoned, so that its gaps contain those of its blocks. It may still be read for the
                # stream's state.
                return
            known = {(row.input_id, row.partition, row.from_offset) for row in rows}
            for input_id, offset_range in lost:
                if (
                    offset_range.until_offset > offset_range.from_offset
                    and (input_id, offset_range.partition, offset_range.from_offset) not in known
                ):
                    add_gap(
                        connection,
                        locked,
                        input_id,
                        offset_range.partition,
                        from_offset=offset_range.from_offset,
                        until_offset=offset_range.until_offset,
                        reason=VANISHED,
                        batch_time_ms=batch_time_ms,
                    )

    def page(self, stream_name: str, limit: int = 1000, *, before_id: int | None = None) -> list[GapRow]:
        """Return the newest ``limit`` gaps, those with ids below ``before_id`` if it is given, newest first."""
        query = select(gaps).where(gaps.c.stream == stream_name)
        if before_id is not None:
            query = query.where(gaps.c.gap_id < before_id)
        return self._rows(GapRow, query.order_by(gaps.c.gap_id.desc()).limit(limit))

    def containing(self, stream_name: str, input_id: str, partition: TopicPartition, offset: int) -> GapRow | None:
        """Return the newest gap that holds the offset, or None."""
        query = select(gaps).where(
            gaps.c.stream == stream_name,
            gaps.c.input_id == input_id,
            *(gaps.c[name] == value for name, value in partition_key(partition).items()),
            gaps.c.from_offset <= offset,
            gaps.c.until_offset > offset,
        )
        with self._database.read() as connection:
            return GapRow.row(connection, query.order_by(gaps.c.from_offset.desc()).limit(1))


# Delays of batches, in seconds: from the shortest useful batch interval to a stream that is an hour late.
DELAY_BOUNDS = (1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 900.0, 3600.0)
# Writes of blocks to the log, and the ledger's transactions, in seconds.
DURATION_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)

OUTPUT_COUNTS = (
    "created",
    "updated",
    "repeated",
    "kept",
    "uncompared",
    "superseded",
    "deleted",
    "ignored_tombstones",
    "ignored_events",
    "truncates",
    "dropped",
    "dead_lettered",
    "undecodable",
    "rows",
    "messages",
    "printed",
    "requests",
    "retries",
    "throttled_requests",
    "throttled_seconds",
    "ceiling_seconds",
    "bytes",
    "duration_seconds",
)
"""The counts of outputs that have totals. A user's function may return others, under any number of names."""


def observation(name: str, seconds: float, bounds: Sequence[float]) -> dict[str, float]:
    """Return what one duration adds to the histogram ``name``: 1 to its bucket, and its seconds to the sum.

    A bucket is named by its upper bound, and does not contain those below it.
    """
    place = bisect_left(bounds, seconds)
    bound = bounds[place] if place < len(bounds) else math.inf
    return {f"{name}_le_{bound:g}": 1.0, f"{name}_sum": max(0.0, seconds)}


def batch_delays(batch_time_ms: int, started_at_ms: int | None, completed_at_ms: int) -> dict[str, float]:
    """Return what a completed batch adds to the histograms of delays."""
    delays = observation("total_delay", (completed_at_ms - batch_time_ms) / 1000, DELAY_BOUNDS)
    if started_at_ms is not None:
        delays |= observation("scheduling_delay", (started_at_ms - batch_time_ms) / 1000, DELAY_BOUNDS)
        delays |= observation("processing_time", (completed_at_ms - started_at_ms) / 1000, DELAY_BOUNDS)
    return delays


def output_totals(counts: Mapping[str, Any]) -> dict[str, float]:
    """Return what an output's counts add to its totals."""
    known = {name: counts.get(name) for name in OUTPUT_COUNTS}
    return {name: value for name, value in known.items() if isinstance(value, int | float) and value > 0}


def add_totals(connection: Connection, stream_name: str, amounts: Mapping[str, float], *, output_id: str = "") -> None:
    """Add the amounts to the stream's totals, or to those of one output, within the caller's transaction."""
    rows = [
        # Sorted: two transactions that do not hold the stream's lock would take row locks in the same order.
        {"stream": stream_name, "output_id": output_id, "name": name, "value": float(amount)}
        for name, amount in sorted(amounts.items())
        if amount > 0
    ]
    if rows:
        connection.execute(_add_to_total(connection.dialect.name), rows)


@cache
def _add_to_total(dialect: str) -> Any:
    new = insert_or_update(totals, dialect)
    return new.on_conflict_do_update(
        index_elements=["stream", "output_id", "name"], set_={"value": totals.c.value + new.excluded.value}
    )
