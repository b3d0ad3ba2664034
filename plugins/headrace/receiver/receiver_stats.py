"""A receiver's numbers, which its heartbeat sends to the ledger: rates, queues, lag, and what it cannot read."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Collection, Mapping
from typing import Any

from headrace.blocks import TopicPartition
from headrace.receiver.block_store import StoreCounts
from headrace.receiver.health import OPEN_TRANSACTIONS, UNREADABLE_TOPICS
from headrace.receiver.lag_watch import Lag, LagWatch
from headrace.receiver.pausing import Pausing
from headrace.receiver.record_source import FetchState, RecordSource
from headrace.wal.recovery import LogRecovery

# The window of the rate: long enough to be steady, short enough to show a stall.
_RATE_SECONDS = 10.0
# The lag is listed for at most this many partitions, the largest first.
_MAX_LISTED = 500


class ReceiverStats:
    """Collects a receiver's numbers. Used by the pushing thread."""

    def __init__(
        self,
        source: RecordSource,
        counts: StoreCounts,
        lag_watch: LagWatch,
        *,
        pausing: Pausing,
        recovery: LogRecovery,
        stored_positions: Callable[[], Mapping[TopicPartition, int]],
        now_ms: Callable[[], int],
    ) -> None:
        """``recovery`` is what this receiver's writer found in the log. ``stored_positions`` returns the ledger's
        positions, ``now_ms`` its time."""
        self._source = source
        self._counts = counts
        self._lag_watch = lag_watch
        self._pausing = pausing
        self._torn_tail_bytes = sum(tail.length for tail in recovery.torn_tails)
        self._log_damages = len(recovery.damage)
        self._stored_positions = stored_positions
        self._now_ms = now_ms
        self._stored: deque[tuple[float, int]] = deque()

    def collect(self, now: float, queued: tuple[int, int]) -> dict[str, Any]:
        """Return the stats as JSON values.

        ``rate`` is in records/s over the last 10 s. ``lag_seconds``: everything that Kafka had this long ago is stored;
        None if unknown for a partition. ``lag`` has these seconds and the lag in offsets of each partition: by topic
        and number, (offsets, seconds), each None if unknown. ``lag_unknown`` counts the partitions whose lag is not in
        ``total_lag``, which is None if the lag of no partition is known. ``totals`` only grow while this receiver
        lives; the ledger sums them over its instances.
        """
        source, counts = self._source, self._counts
        self._stored.append((now, counts.records))
        while len(self._stored) > 2 and now - self._stored[0][0] > _RATE_SECONDS:
            self._stored.popleft()
        seconds = now - self._stored[0][0]
        statuses = source.status()
        partition_errors = {
            f"{status.partition.topic}-{status.partition.partition}": {
                "state": status.state.value,
                "error": status.error,
            }
            for status in statuses
            if status.error is not None
        }
        lag_of = self._lag_watch.lags(self._stored_positions())
        lags = [lag.records for lag in lag_of.values()]
        return {
            "records": counts.records,
            "blocks": counts.blocks,
            "bytes": counts.payload_bytes,
            "rate": round((counts.records - self._stored[0][1]) / seconds, 1) if seconds > 0 else 0.0,
            "queued_blocks": queued[0],
            "queued_bytes": queued[1],
            "partitions": len(statuses),
            "at_end": sum(status.state is FetchState.AT_END for status in statuses),
            "failed": sum(status.state is FetchState.FAILED for status in statuses),
            "leaderless": sum(status.state is FetchState.LEADERLESS for status in statuses),
            "lag": self._listed(lag_of),
            "total_lag": self._total(lags),
            "lag_unknown": sum(lag is None for lag in lags),
            "lag_seconds": self._seconds_behind(list(lag_of.values())),
            UNREADABLE_TOPICS: self._lag_watch.unreadable_topics(
                lag_of, statuses, None if source.connected else source.client_error
            ),
            OPEN_TRANSACTIONS: self._lag_watch.open_transactions(),
            "troubled": partition_errors,
            "commit_failures": source.commits.failures,
            "commit_error": source.commits.last_error,
            "store_failures": counts.write_failures,
            "torn_tail_bytes": self._torn_tail_bytes,
            "log_damages": self._log_damages,
            "below_position": source.below_position,
            "not_owned": source.not_owned,
            "lost_offsets": source.lost_offsets,
            "offsets_without_record": source.offsets_without_record,
            "unreadable_headers": source.unreadable_headers,
            "dropped": counts.dropped_records,
            "late_records": counts.late_records,
            "copied_blocks": counts.copies.written,
            "copied_bytes": counts.copies.bytes_written,
            "copy_failures": counts.copies.failures,
            "partition_errors": source.errors,
            "connected": source.connected,
            "client_error": source.client_error,
            "disk": self._pausing.disk,
            **counts.recent_seconds(),
            "totals": self.totals(),
        }

    def totals(self) -> dict[str, float]:
        """Return the numbers that only grow."""
        source, counts = self._source, self._counts
        return {
            "store_failures": counts.write_failures,
            "dropped_records": counts.dropped_records,
            "late_records": counts.late_records,
            "commit_failures": source.commits.failures,
            "partition_errors": source.errors,
            "unreadable_headers": source.unreadable_headers,
            "pauses": self._pausing.pauses,
            "paused_seconds": round(self._pausing.paused_seconds, 3),
            **{name: round(value, 6) for name, value in counts.durations.items()},
        }

    def _listed(self, lags: Mapping[TopicPartition, Lag]) -> dict[str, dict[str, tuple[int | None, float | None]]]:
        largest = sorted(lags.items(), key=lambda item: -(item[1].records or 0))[:_MAX_LISTED]
        listed: dict[str, dict[str, tuple[int | None, float | None]]] = defaultdict(dict)
        for partition, lag in largest:
            seconds = 0 if lag.records == 0 else self._seconds_behind([lag])
            # Each topic's name once: the names would be most of the heartbeat.
            listed[partition.topic][str(partition.partition)] = (lag.records, seconds)
        return listed

    def _total(self, lags: Collection[int | None]) -> int | None:
        known = [lag for lag in lags if lag is not None]
        # Without a connection a receiver does not even know its partitions.
        return sum(known) if known or (not lags and self._source.connected) else None

    def _seconds_behind(self, lags: Collection[Lag]) -> float | None:
        behind = [lag for lag in lags if lag.records != 0]
        drained = [lag.drained_ms for lag in behind if lag.drained_ms is not None]
        if len(drained) < len(behind):
            return None
        return round(max(0, self._now_ms() - min(drained)) / 1000, 1) if drained else 0.0
