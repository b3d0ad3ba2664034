"""Reads the partitions that it is given from Kafka, by position, with ``assign()`` and no consumer group.

It never decides where to begin (the ledger does), never commits before something is stored, and never lets one
partition's trouble stop another: an offset out of range, a damaged message or a topic that is gone stay that
partition's state, visible in ``status()``.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from confluent_kafka import Consumer, KafkaError, KafkaException
from confluent_kafka import TopicPartition as KafkaPartition

from headrace.blocks import TopicPartition
from headrace.clock import Clock, SystemClock
from headrace.errors import HeadraceError
from headrace.receiving.commits import OffsetCommits
from headrace.receiving.damage_search import DamageSearch
from headrace.receiving.errors import KafkaClientError
from headrace.receiving.jumps import JumpJudge, Offsets, jumps_between
from headrace.receiving.partition_state import FetchState, Gap, OwnedPartition, PartitionStatus
from headrace.receiving.record_batches import Converted, Cursor, RecordChunk, chunks_of, convert

logger = logging.getLogger(__name__)

ConsumerFactory = Callable[[dict[str, Any]], Any]

# As many messages as one consume() may bring: beyond 20,000 nothing is gained, and each brings its Python objects.
_MOST_RECORDS = 20_000
# Before the size of a message is known: 500 of 1 MB is what a small process still bears.
_FIRST_RECORDS = 500
# Kafka's answer to one question, while the other partitions wait.
_QUERY_SECONDS = 5.0
_FIRST_BACKOFF_SECONDS = 1.0
_LONGEST_BACKOFF_SECONDS = 60.0
_LAG_SECONDS = 1.0
# 1 + 2 + 4 + ... + 60: about two minutes. What is still unreadable then is lasting damage and not a passing one.
_DAMAGE_ATTEMPTS = 7

_OUT_OF_RANGE = frozenset({KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE})
# librdkafka says by no code of its own that Kafka's log was cut off before the position and has grown again.
_TRUNCATED = "log truncation detected"
_LEADERLESS = "no broker has this partition at the moment (it has no leader)"
# What librdkafka cannot take, or passes over unless it is fetched again: damaged messages, and those that it cannot
# decompress, for it knows no such codec or has no memory.
_DAMAGED = frozenset(
    {
        KafkaError._BAD_MSG,
        KafkaError._BAD_COMPRESSION,
        KafkaError._NOT_IMPLEMENTED,
        KafkaError._CRIT_SYS_RESOURCE,
        KafkaError.INVALID_MSG,
        KafkaError.MSG_SIZE_TOO_LARGE,
    }
)


@dataclass(slots=True)
class _Findings:
    """What one consume() brought besides records. ``held`` partitions stay at their position for now."""

    ends: dict[tuple[str, int], int] = field(default_factory=dict)
    held: set[tuple[str, int]] = field(default_factory=set)
    lost: list[tuple[tuple[str, int], str]] = field(default_factory=list)
    skipped: list[Gap] = field(default_factory=list)
    jumped: dict[tuple[str, int], Offsets] = field(default_factory=dict)


class KafkaReceiver:
    """One consumer, of one thread: ``commits.note``, ``status`` and the counters alone may be used from another."""

    def __init__(
        self,
        config: Mapping[str, Any],
        *,
        on_lost_offsets: Literal["fail", "reset"] = "fail",
        jumps: JumpJudge | None = None,
        max_chunk_bytes: int = 16 * 1024 * 1024,
        clock: Clock | None = None,
        consumer_factory: ConsumerFactory = Consumer,
    ) -> None:
        """``config`` as of ``kafka_config.consumer_config``. Chunks are of at most about ``max_chunk_bytes``.

        ``jumps`` says which offsets that Kafka passed over are lost; without it none is.
        """
        self._on_lost_offsets = on_lost_offsets
        self._jumps = jumps
        self._max_chunk_bytes = max_chunk_bytes
        self._clock = clock or SystemClock()
        self._lock = threading.Lock()
        self._owned: dict[tuple[str, int], OwnedPartition] = {}
        self._records_at_once = _FIRST_RECORDS
        self._commits = OffsetCommits()
        self._fatal: str | None = None
        self._closed = False
        self._next_lags = 0.0
        self._heard_ends: Mapping[tuple[str, int], int] = {}
        self.client_error: str | None = None
        """The client's last error that concerns no partition, None since it went well again."""
        self.connected: bool | None = None
        """Whether any broker is reachable, None while unknown."""
        self.below_position = 0
        self.not_owned = 0
        self.errors = 0
        self.unreadable_headers = 0
        self.lost_offsets = 0
        """In gaps, as far as this receiver has told them."""
        self._consumer = consumer_factory(
            {
                **config,
                "on_commit": self._commits.on_commit,
                "error_cb": self._on_error,
                "stats_cb": self._on_statistics,
            }
        )

    # -- assignment ------------------------------------------------------------------------------------------------

    def assign(self, partition: TopicPartition, next_offset: int) -> None:
        """Begin to read ``partition`` at ``next_offset``; what is assigned already goes on undisturbed."""
        key = (partition.topic, partition.partition)
        with self._lock:
            known = self._owned.get(key)
            self._owned[key] = OwnedPartition(partition, next_offset)
        if known is not None:
            self._consumer_unassign(key)
        self._consumer_assign(key, next_offset)

    def unassign(self, partition: TopicPartition) -> None:
        """Stop reading it; what was handed out stays handed out."""
        key = (partition.topic, partition.partition)
        with self._lock:
            owned = self._owned.get(key)
            if owned is None or owned.partition != partition:
                return
            del self._owned[key]
        self._consumer_unassign(key)

    @property
    def partitions(self) -> dict[TopicPartition, int]:
        """The partitions owned now, with their next offsets."""
        with self._lock:
            return {owned.partition: owned.next_offset for owned in self._owned.values()}

    # -- reading ---------------------------------------------------------------------------------------------------

    def fetch(self, timeout: float, max_records: int | None = None) -> list[RecordChunk | Gap]:
        """What has arrived, in order: chunks of records and gaps. Waits up to ``timeout`` seconds for something.

        Raises KafkaClientError when the client cannot go on.
        """
        self._heard_ends = {}
        self.serve()
        most = self._records_at_once if max_records is None else min(max_records, self._records_at_once)
        try:
            messages = self._consumer.consume(most, timeout)
        except KafkaException as error:
            raise KafkaClientError(f"Kafka's client failed: {error}.") from error
        found = _Findings()
        if any([message.error() is not None for message in messages]):
            messages = self._sort_out(messages, found)
        if self._fatal is not None:
            raise KafkaClientError(f"Kafka's client cannot go on: {self._fatal}.")
        if not messages and not found.ends and not found.held and not found.skipped:
            return []
        chunks = self._convert(messages, found)
        gaps = [*self._jump_gaps(found), *self._lost_gaps(found)]
        self.lost_offsets += sum(each.until_offset - each.from_offset for each in [*found.skipped, *gaps])
        return [*found.skipped, *chunks, *gaps]

    def _convert(self, messages: Sequence[Any], found: _Findings) -> list[RecordChunk]:
        with self._lock:
            cursors = {key: Cursor(owned.partition, owned.next_offset) for key, owned in self._owned.items()}
        converted = convert(messages, cursors)
        self.below_position += converted.below_position
        self.not_owned += converted.not_owned
        self.unreadable_headers += converted.unreadable_headers
        positions, epochs = self._positions(converted.positions, cursors, found)
        self._find_jumps(converted, positions, cursors, found)
        if found.jumped:
            # What came after a jump is fetched again behind it.
            messages = [each for each in messages if not _is_beyond(each, found.jumped)]
            converted = convert(messages, cursors)
            positions.update((cursors[key].partition, begin) for key, (begin, _) in found.jumped.items())
        if converted.batch is not None:
            average = max(1, converted.batch.nbytes // converted.batch.num_rows)
            # A quarter of a chunk at a time, so that one consume() cannot bring much more than a block.
            self._records_at_once = max(1, min(_MOST_RECORDS, self._max_chunk_bytes // 4 // average))
        standing = {cursor.partition: cursor.next_offset for cursor in cursors.values()}
        chunks = chunks_of(converted, standing, positions, self._max_chunk_bytes)
        with self._lock:
            for partition, position in positions.items():
                owned = self._owned[partition.topic, partition.partition]
                if (partition.topic, partition.partition) in found.held:
                    owned.next_offset, owned.leader_epoch = position, None
                else:
                    owned.progressed(position, epochs.get(partition))
            for key, end in found.ends.items():
                at_end = self._owned.get(key)
                if at_end is not None and key not in found.held and at_end.next_offset >= end:
                    at_end.state, at_end.error = FetchState.AT_END, None
        return chunks

    def _positions(
        self,
        last: Mapping[TopicPartition, int],
        cursors: Mapping[tuple[str, int], Cursor],
        found: _Findings,
    ) -> tuple[dict[TopicPartition, int], dict[TopicPartition, int]]:
        """The position of each partition that something arrived for: past control records and compacted ones. And the
        leader epochs of those positions."""
        positions = dict(last)
        epochs: dict[TopicPartition, int] = {}
        touched = [
            key
            for key, cursor in cursors.items()
            if (cursor.partition in last or key in found.ends) and key not in found.held
        ]
        for told in self._consumer.position([KafkaPartition(*key) for key in touched]) if touched else ():
            key = (told.topic, told.partition)
            cursor = cursors[key]
            candidates = (positions.get(cursor.partition, cursor.next_offset), found.ends.get(key, 0), told.offset)
            positions[cursor.partition] = max(candidates)
            if told.leader_epoch is not None and told.offset == positions[cursor.partition]:
                epochs[cursor.partition] = told.leader_epoch
        return {partition: position for partition, position in positions.items() if position >= 0}, epochs

    # -- jumps -----------------------------------------------------------------------------------------------------

    def _find_jumps(
        self,
        converted: Converted,
        positions: Mapping[TopicPartition, int],
        cursors: Mapping[tuple[str, int], Cursor],
        found: _Findings,
    ) -> None:
        """Note the first loss in each partition that jumped; where Kafka does not answer, the jump as an empty one."""
        if self._jumps is None:
            return
        for partition, position in positions.items():
            key = (partition.topic, partition.partition)
            begin = cursors[key].next_offset
            if position - begin <= converted.counts.get(partition, 0):
                continue
            jumps = jumps_between(_offsets_of(converted, partition), begin, position)
            try:
                lost = self._jumps.lost(partition, jumps)
            except HeadraceError as error:
                logger.warning("%s passed over %s, and why is not known yet: %s", _name(partition), jumps[:10], error)
                found.jumped[key] = (jumps[0][0], jumps[0][0])
                continue
            if lost:
                found.jumped[key] = lost[0]

    def _jump_gaps(self, found: _Findings) -> list[Gap]:
        gaps = []
        for key, (begin, until) in found.jumped.items():
            owned = self._owned[key]
            if key in found.held:
                # It is fetched again from before the jump, for another trouble's sake.
                continue
            self._consumer_unassign(key)
            if begin == until:
                self._back_off(owned, f"offset {begin} did not come, and Kafka does not tell why")
                continue
            logger.error("%s: Kafka passed over [%d, %d)", _name(owned.partition), begin, until)
            with self._lock:
                owned.progressed(until)
            self._consumer_assign(key, until)
            gaps.append(Gap(owned.partition, begin, until, "jump: Kafka passed over these offsets and cannot say why"))
        return gaps

    # -- errors ----------------------------------------------------------------------------------------------------

    def _sort_out(self, messages: Sequence[Any], found: _Findings) -> list[Any]:
        """The records among ``messages``; the rest goes into ``found``."""
        good = []
        for message in messages:
            key = (message.topic(), message.partition())
            error = message.error()
            if error is None:
                if key not in found.held and self._is_past_damage(key, found):
                    good.append(message)
            elif error.code() == KafkaError._PARTITION_EOF:
                if key in self._owned and key not in found.held and self._is_past_damage(key, found):
                    found.ends[key] = message.offset()
            elif key[0] is None or key not in self._owned:
                self._on_error(error)
            else:
                self._on_partition_error(key, error, found)
        return good

    def _on_partition_error(self, key: tuple[str, int], error: Any, found: _Findings) -> None:
        self.errors += 1
        owned = self._owned[key]
        if error.code() in _OUT_OF_RANGE:
            found.held.add(key)
            found.lost.append((key, error.str()))
            self._consumer_unassign(key)
        elif error.code() in _DAMAGED:
            if key not in found.held:
                found.held.add(key)
                self._on_damage(owned, error, found)
        else:
            owned.error = f"{error.name()}: {error.str()}"
            logger.warning("%s: %s", _name(owned.partition), owned.error)

    def _lost_gaps(self, found: _Findings) -> list[Gap]:
        """After the records that came before: what became of partitions whose offset Kafka does not have."""
        gaps = [self._on_lost(self._owned[key], error) for key, error in found.lost if key in self._owned]
        return [gap for gap in gaps if gap is not None]

    def _on_lost(self, owned: OwnedPartition, error_text: str) -> Gap | None:
        """Kafka does not have the position: find out what it has, then fail or go on at its earliest."""
        if _TRUNCATED in error_text.lower():
            self._fail(
                owned,
                f"{error_text}. Kafka took back what was read of it below {owned.next_offset}, and gives these offsets "
                "to other records, which are not read. Start the receiver job anew to go on at the position.",
            )
            return None
        key = (owned.partition.topic, owned.partition.partition)
        position = owned.next_offset
        try:
            low, high = self._consumer.get_watermark_offsets(KafkaPartition(*key), timeout=_QUERY_SECONDS, cached=False)
        except KafkaException as error:
            self._back_off(owned, f"offset {position} is out of range, and Kafka's range is unknown: {error}")
            return None
        # A search for what can be read begins anew where it is still needed.
        owned.search = None
        if low <= position <= high:
            self._back_off(owned, f"offset {position} was out of range for a moment, Kafka has [{low}, {high})")
        elif position > high:
            self._fail(
                owned,
                f"Kafka's log ends at {high}, before the position {position}: the topic was re-created or its log "
                "truncated. A re-created topic is read from its beginning once the tracker has seen its new id.",
            )
        elif self._on_lost_offsets == "fail":
            self._fail(
                owned,
                f"offsets [{position}, {low}) are gone from Kafka (retention). "
                'Set on_lost_offsets="reset" and start the receiver job anew: it goes on at the earliest and records '
                "the gap.",
            )
        else:
            logger.error("%s: offsets [%d, %d) are gone from Kafka", _name(owned.partition), position, low)
            with self._lock:
                owned.progressed(low)
            self._consumer_assign(key, low)
            return Gap(owned.partition, position, low, "retention: Kafka no longer has these offsets")
        return None

    def _on_damage(self, owned: OwnedPartition, error: Any, found: _Findings) -> None:
        """Often transient, so fetched again; what stays damaged is passed over only where lost offsets may be."""
        self._consumer_unassign((owned.partition.topic, owned.partition.partition))
        text = f"{error.name()}: {error.str()}"
        if owned.search is not None:
            owned.search.was_damaged()
            self._search_on(owned, owned.search, found)
        elif owned.attempts < _DAMAGE_ATTEMPTS:
            self._back_off(owned, text)
        elif self._on_lost_offsets == "fail":
            remedy = 'Set on_lost_offsets="reset" and start the receiver job anew: it passes over it as a gap.'
            self._fail(owned, f"{text}. {remedy}")
        else:
            self._begin_search(owned, text)

    def _begin_search(self, owned: OwnedPartition, error: str) -> None:
        key = (owned.partition.topic, owned.partition.partition)
        try:
            _, high = self._consumer.get_watermark_offsets(KafkaPartition(*key), timeout=_QUERY_SECONDS, cached=False)
        except KafkaException as failure:
            self._back_off(owned, f"{error}; and where it ends is unknown: {failure}")
            return
        logger.error("%s: %s; looking for what can be read after it", _name(owned.partition), error)
        with self._lock:
            owned.search = DamageSearch(owned.next_offset, high)
        self._wait_until(owned, error, 0.0)

    def _is_past_damage(self, key: tuple[str, int], found: _Findings) -> bool:
        """Whether what came is to be taken; what is read while the end of some damage is looked for is not."""
        owned = self._owned.get(key)
        if owned is None or owned.search is None:
            return True
        at = owned.search.at
        owned.search.was_readable()
        if owned.search.found == at:
            self._end_search(owned, at, found)
            return True
        found.held.add(key)
        self._consumer_unassign(key)
        self._search_on(owned, owned.search, found)
        return False

    def _search_on(self, owned: OwnedPartition, search: DamageSearch, found: _Findings) -> None:
        if search.found is not None:
            self._end_search(owned, search.found, found)
            self._wait_until(owned, owned.error or "", 0.0)
        elif search.hopeless:
            owned.search = None
            self._back_off(owned, f"{owned.error}; nothing after it can be read either")
        else:
            self._wait_until(owned, owned.error or "", 0.0)

    def _end_search(self, owned: OwnedPartition, until: int, found: _Findings) -> None:
        logger.error("%s: passing over [%d, %d)", _name(owned.partition), owned.next_offset, until)
        found.skipped.append(Gap(owned.partition, owned.next_offset, until, f"damaged: {owned.error}"))
        with self._lock:
            owned.search = None
            owned.next_offset, owned.leader_epoch, owned.attempts = until, None, 0

    def _back_off(self, owned: OwnedPartition, error: str) -> None:
        seconds = min(_LONGEST_BACKOFF_SECONDS, _FIRST_BACKOFF_SECONDS * 2**owned.attempts)
        logger.warning("%s: %s; fetched again in %.0f s", _name(owned.partition), error, seconds)
        owned.attempts += 1
        self._wait_until(owned, error, seconds)

    def _wait_until(self, owned: OwnedPartition, error: str, seconds: float) -> None:
        with self._lock:
            owned.state, owned.error = FetchState.BACKING_OFF, error
            owned.retry_at = self._clock.monotonic() + seconds

    def _fail(self, owned: OwnedPartition, error: str) -> None:
        logger.error("%s is not read any more: %s", _name(owned.partition), error)
        with self._lock:
            owned.state, owned.error = FetchState.FAILED, error

    def _resume_due(self) -> None:
        now = self._clock.monotonic()
        for key, owned in list(self._owned.items()):
            if owned.state is FetchState.BACKING_OFF and owned.retry_at <= now:
                with self._lock:
                    owned.state = FetchState.FETCHING
                if owned.search is None:
                    self._consumer_assign(key, owned.next_offset, owned.leader_epoch)
                else:
                    self._consumer_assign(key, owned.search.at)

    def _on_error(self, error: Any) -> None:
        """The client's own errors; most pass, since librdkafka reconnects by itself."""
        self.client_error = f"{error.name()}: {error.str()}"
        if error.fatal() or error.code() == KafkaError._FATAL:
            self._fatal = self.client_error
        if error.code() == KafkaError._ALL_BROKERS_DOWN:
            self.connected = False

    def _on_statistics(self, text: str) -> None:
        statistics = json.loads(text)
        brokers = statistics.get("brokers", {}).values()
        self.connected = any(broker.get("state") == "UP" for broker in brokers)
        if self.connected:
            self.client_error = None
        topics = statistics.get("topics", {})
        with self._lock:
            for (topic, number), owned in self._owned.items():
                known = topics.get(topic, {}).get("partitions", {}).get(str(number), {})
                self._on_leader(owned, known.get("leader"))

    def _on_leader(self, owned: OwnedPartition, leader: int | None) -> None:
        """librdkafka waits for one without a word."""
        if leader == -1 and owned.state in (FetchState.FETCHING, FetchState.AT_END):
            logger.warning("%s: %s", _name(owned.partition), _LEADERLESS)
            owned.state, owned.error = FetchState.LEADERLESS, _LEADERLESS
        elif leader is not None and leader >= 0 and owned.state is FetchState.LEADERLESS:
            owned.state, owned.error = FetchState.FETCHING, None

    # -- the rest --------------------------------------------------------------------------------------------------

    def serve(self) -> None:
        """What is due besides reading: commits, partitions whose backoff is over, lags. ``fetch`` does it too."""
        self._commits.send(self._consumer)
        self._resume_due()
        now = self._clock.monotonic()
        if now >= self._next_lags:
            self._next_lags = now + _LAG_SECONDS
            self._measure_lags()

    @property
    def commits(self) -> OffsetCommits:
        return self._commits

    def status(self) -> list[PartitionStatus]:
        """Each partition's state and lag; the lag is about a second old."""
        with self._lock:
            return [
                PartitionStatus(
                    each.partition,
                    each.next_offset,
                    each.state,
                    None if each.end_offset is None else max(0, each.end_offset - each.next_offset),
                    each.error,
                )
                for each in self._owned.values()
            ]

    def hear_ends(self, ends: Mapping[tuple[str, int], int]) -> None:
        """Where partitions end, from whoever has asked Kafka while nothing was fetched; good until the next fetch."""
        self._heard_ends = ends
        self._measure_lags()

    def _measure_lags(self) -> None:
        """From what the last fetch answers said, or was heard since: Kafka is not asked."""
        for key, owned in self._owned.items():
            try:
                _, high = self._consumer.get_watermark_offsets(KafkaPartition(*key), cached=True)
            except (KafkaException, TypeError):
                continue
            high = max(high, self._heard_ends.get(key, -1))
            owned.end_offset = high if high >= 0 else owned.end_offset

    def close(self, commit_seconds: float = 2.0) -> None:
        """Send open commits, wait a little for their acknowledgement, then leave; 0 seconds leave without a word."""
        if self._closed:
            return
        until = self._clock.monotonic() + commit_seconds
        for partition in self.partitions:
            self._consumer_unassign((partition.topic, partition.partition))
        if commit_seconds > 0:
            self._commits.send(self._consumer)
        while self._commits.open and self._clock.monotonic() < until and self.connected is not False:
            self._consumer.consume(1, 0.05)
        self._closed = True
        self._consumer.close()

    def _consumer_assign(self, key: tuple[str, int], offset: int, leader_epoch: int | None = None) -> None:
        # incremental: the other partitions keep what is prefetched for them. There is no subscription and no group
        # member; this only adds to what assign() would set. By the epoch Kafka finds out whether the log was cut off.
        known = leader_epoch is not None
        position = KafkaPartition(*key, offset, leader_epoch=leader_epoch) if known else KafkaPartition(*key, offset)
        self._consumer.incremental_assign([position])

    def _consumer_unassign(self, key: tuple[str, int]) -> None:
        try:
            self._consumer.incremental_unassign([KafkaPartition(*key)])
        except KafkaException as error:
            # Not assigned any more: it was backing off or failed.
            logger.debug("%s/%d was not assigned: %s", *key, error)


def _offsets_of(converted: Converted, partition: TopicPartition) -> np.ndarray[Any, Any]:
    """The offsets of its records, in order."""
    batch = converted.batch
    if batch is None or partition not in converted.counts:
        return np.empty(0, dtype=np.int64)
    offsets: np.ndarray[Any, Any] = batch.column("offset").to_numpy()
    if len(converted.counts) > 1:
        mine = batch.column("partition").to_numpy() == partition.partition
        mine &= np.array([topic == partition.topic for topic in batch.column("topic").to_pylist()])
        offsets = offsets[mine]
    return offsets


def _is_beyond(message: Any, jumped: Mapping[tuple[str, int], Offsets]) -> bool:
    jump = jumped.get((message.topic(), message.partition()))
    return jump is not None and message.offset() >= jump[0]


def _name(partition: TopicPartition) -> str:
    return f"{partition.topic}/{partition.partition}"
