"""Maintains one input's partitions in the ledger: which exist, and which receiver reads each."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable

from headrace.blocks import TopicPartition
from headrace.ledger.errors import LeaseHeldError
from headrace.ledger.models import JobLease, PositionRow, TopicRow
from headrace.ledger.states import PartitionState
from headrace.receiver.assignment import assign
from headrace.receiver.discovery import AtStart, Discovery, Known, PartitionKey
from headrace.receiver.key_versions import check_key_versions
from headrace.stream.inputs import Input, ReceiverInput
from headrace.stream_context import StreamContext

logger = logging.getLogger(__name__)

# A topic counts as deleted after it is missing from this many discoveries in a row: metadata may be stale.
_LOOKS_UNTIL_DELETED = 3


class Partitioning:
    """Writes discoveries and rebalances to the ledger; the tracker's loop calls it."""

    def __init__(self, context: StreamContext, source: Input, job_lease: JobLease, *, grace_ms: int) -> None:
        """A receiver that was live less than ``grace_ms`` ago keeps its partitions, since it is likely to return."""
        self._stream = context.stream
        self._source = source
        self._ledger = context.ledger
        self._lease = job_lease
        self._grace_ms = grace_ms
        self._looked = False
        self._first_ms: int | None = None
        self._seen_ms: dict[int, int] = {}
        self._absent_looks: dict[tuple[str, str], int] = {}

    def begin(self) -> None:
        """Reactivate failed partitions. A new job calls this once, before it starts receivers.

        The cause of a failure may be gone, or the settings changed; otherwise the partition fails again and is
        reported again.

        Raises:
            KeyVersionsError: the stream must not continue; see `check_key_versions`.
        """
        check_key_versions(self._stream, self._topics())
        failed = [row for row in self._live() if row.state is PartitionState.FAILED]
        for row in failed:
            logger.warning("input %s: %s is tried again; it had failed: %s", self._source.id, row.partition, row.error)
        if failed:
            partitions = [row.partition for row in failed]
            self._ledger.positions.set_state(self._lease, self._source.id, partitions, PartitionState.ACTIVE)

    def known(self) -> Known:
        """Return what the ledger knows, for a discoverer."""
        topics = {
            (row.topic, row.topic_id): AtStart(row.first_partitions, row.first_seen_ms) if row.at_start else None
            for row in self._topics()
        }
        partitions = frozenset(_key(row.partition) for row in self._rows())
        return Known(partitions, topics, began=self._looked or bool(topics))

    def apply(self, discovery: Discovery) -> None:
        """Record topics, set the starting position of new partitions, and end the partitions of topics that are gone.

        Raises:
            KeyVersionsError: the stream must not continue. The topics are recorded; no new partition has a position.
        """
        observed = self._ledger.topics.observe(
            self._lease,
            self._source.id,
            [(seen.topic, seen.topic_id, seen.partitions) for seen in discovery.topics],
            appeared=self._looked,
        )
        self._looked = True
        check_key_versions(self._stream, self._topics())
        incarnations = {(row.topic, row.topic_id): row.incarnation for row in observed}
        starting = {
            TopicPartition(topic, topic_id, number, incarnations[topic, topic_id]): offset
            for (topic, topic_id, number), offset in discovery.starting.items()
        }
        if starting:
            self._ledger.positions.ensure_all(self._lease, self._source.id, starting)
        self._end_gone(set(incarnations), discovery.refused)
        if isinstance(self._source, ReceiverInput):
            self._end_without_receiver()

    def rebalance(self, live: Collection[int], now_ms: int) -> None:
        """Assign partitions to ``live`` receivers (indexes), evenly, with the fewest moves; fence dead receivers."""
        receivers = self._receivers(live, now_ms)
        if not receivers:
            return
        rows = self._live()
        current = {row.partition: _holder(row) for row in rows}
        if isinstance(self._source, ReceiverInput):
            # A custom receiver's position says nothing to another receiver.
            wanted = {each: each.partition for each in current if each.partition in receivers}
        else:
            held = {partition: holder for partition, holder in current.items() if holder is not None}
            wanted = assign([row.partition for row in rows], receivers, held)
        moves = {
            row.partition: wanted[row.partition]
            for row in rows
            if row.partition in wanted and row.wanted_receiver_index != wanted[row.partition]
        }
        if moves:
            logger.info("input %s: %d partitions get a receiver: %s", self._source.id, len(moves), moves)
            self._ledger.positions.assign(self._lease, self._source.id, moves)
        self._fence(
            row.partition for row in rows if row.receiver_index is not None and row.receiver_index not in receivers
        )

    def _receivers(self, live: Collection[int], now_ms: int) -> set[int]:
        """Return the live receivers and those seen within the grace period.

        Empty until every receiver has been seen once or the grace period is over.
        """
        if self._first_ms is None and live:
            self._first_ms = now_ms
        self._seen_ms.update(dict.fromkeys(live, now_ms))
        all_came = len(self._seen_ms) >= self._source.receivers or isinstance(self._source, ReceiverInput)
        if not live or (not all_came and now_ms - (self._first_ms or now_ms) < self._grace_ms):
            return set()
        return {index for index, seen_ms in self._seen_ms.items() if now_ms - seen_ms < self._grace_ms}

    def _fence(self, partitions: Iterable[TopicPartition]) -> None:
        taken = list(partitions)
        if not taken:
            return
        try:
            self._ledger.positions.force_release(self._lease, self._source.id, taken)
            logger.warning("input %s: taken from dead receivers: %s", self._source.id, taken)
        except LeaseHeldError as error:
            logger.info("not yet taken over: %s", error)

    def _end_gone(self, seen: set[tuple[str, str]], refused: Collection[str]) -> None:
        names = {topic: topic_id for topic, topic_id in seen}
        ended: dict[str, list[TopicPartition]] = {}
        for row in self._rows():
            topic = (row.partition.topic, row.partition.topic_id)
            if topic in seen:
                self._absent_looks.pop(topic, None)
                if row.state is PartitionState.ENDED and not self._has_no_receiver(row):
                    self._resume(row)
            elif row.state is PartitionState.ENDED:
                continue
            elif row.partition.topic in names:
                ended.setdefault(f"created again as {names[row.partition.topic]}", []).append(row.partition)
            else:
                self._absent_looks.setdefault(topic, 0)
        for topic in self._absent_looks:
            self._absent_looks[topic] += topic[0] not in refused
        gone = {topic for topic, looks in self._absent_looks.items() if looks >= _LOOKS_UNTIL_DELETED}
        for row in self._live() if gone else ():
            if (row.partition.topic, row.partition.topic_id) in gone:
                ended.setdefault("deleted", []).append(row.partition)
        for how, partitions in ended.items():
            logger.warning("input %s: the topic was %s: %s end", self._source.id, how, partitions)
            error = f"the topic was {how}"
            self._ledger.positions.set_state(self._lease, self._source.id, partitions, PartitionState.ENDED, error)
            self._ledger.positions.request_release(self._lease, self._source.id, partitions)

    def _has_no_receiver(self, row: PositionRow) -> bool:
        """Whether the partition was that of a custom receiver, and the input now has fewer."""
        return isinstance(self._source, ReceiverInput) and row.partition.partition >= self._source.receivers

    def _end_without_receiver(self) -> None:
        gone = [row.partition for row in self._live() if self._has_no_receiver(row)]
        if gone:
            error = f"the input now has {self._source.receivers} receiver(s)"
            logger.warning("input %s: %s: %s end", self._source.id, error, gone)
            self._ledger.positions.set_state(self._lease, self._source.id, gone, PartitionState.ENDED, error)
            self._ledger.positions.request_release(self._lease, self._source.id, gone)

    def _resume(self, row: PositionRow) -> None:
        self._ledger.positions.set_state(self._lease, self._source.id, [row.partition], PartitionState.ACTIVE)

    def _rows(self) -> list[PositionRow]:
        return self._ledger.positions.all(self._stream.name, self._source.id)

    def _live(self) -> list[PositionRow]:
        return self._ledger.positions.all(self._stream.name, self._source.id, live=True)

    def _topics(self) -> list[TopicRow]:
        return self._ledger.topics.all(self._stream.name, self._source.id)


def _holder(row: PositionRow) -> int | None:
    return row.wanted_receiver_index if row.wanted_receiver_index is not None else row.receiver_index


def _key(partition: TopicPartition) -> PartitionKey:
    return partition.topic, partition.topic_id, partition.partition
