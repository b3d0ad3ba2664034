"""`CustomSource`: the records of a user's `Receiver` as a `RecordSource`, with offsets that headrace counts.

The receiver runs in threads of its own (``receiver_lifecycle``); the consuming thread takes what it has handed over.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import pyarrow as pa

from headrace.blocks import OffsetRange, TopicPartition
from headrace.clock import Clock
from headrace.kafka.records import RecordChunk
from headrace.ledger.receiving.tables import EpochEnd
from headrace.receiver.event_times import Ends, Key
from headrace.receiver.receiver import Record, check_receiver_class, load_receiver_class
from headrace.receiver.receiver_lifecycle import STOP_SECONDS, Handoff, LifecycleState, ReceiverLifecycle, Taken
from headrace.receiver.record_source import (
    Acknowledgements,
    FetchState,
    Gap,
    LeaderEpochs,
    PartitionStatus,
    SourceError,
)
from headrace.stream.inputs import Input
from headrace.wal.frame import RECORD_SCHEMA

# Kafka's names for a timestamp that the record's source gave, and for one of the time of storing.
_CREATE_TIME, _APPEND_TIME = 0, 1
_FINISH_SECONDS = 0.05


class CustomSource:
    """One custom receiver and its partition: the input's id and the receiver's index.

    Used by the consuming thread, except as `RecordSource` says.
    """

    below_position = not_owned = unreadable_headers = lost_offsets = offsets_without_record = 0

    def __init__(self, source: Input, *, max_block_bytes: int, clock: Clock) -> None:
        """``clock`` gives the timestamp of records that have none. Raises ReceiverClassError."""
        check_receiver_class(source)
        self._source = source
        self._max_block_bytes = max_block_bytes
        self._clock = clock
        self._partition: TopicPartition | None = None
        # A partition that is not read has an empty handoff, which nobody fills.
        self._handoff = Handoff(0, 0, None, clock)
        self._lifecycle: ReceiverLifecycle | None = None
        self.leader_epochs = LeaderEpochs()

    def assign(
        self,
        partition: TopicPartition,
        next_offset: int,
        epoch_end: EpochEnd | None = None,  # noqa: ARG002 - of Kafka
        source_position: str | None = None,
    ) -> None:
        """Start the receiver, whose first record gets ``next_offset``; or start it again, if it had stopped itself."""
        if partition == self._partition and self._lifecycle is not None:
            self._lifecycle.resume()
            return
        self._end("another partition is read now")
        self._partition = partition
        self._handoff = Handoff(max(1, self._max_block_bytes // 4), next_offset, source_position, self._clock)
        self._lifecycle = ReceiverLifecycle(
            lambda: load_receiver_class(self._source)(**self._source.keywords),
            self._handoff,
            name=f"{partition.topic}-{partition.partition}",
            index=partition.partition,
            receivers=self._source.receivers,
            max_call_bytes=self._max_block_bytes,
            clock=self._clock,
        )
        self._lifecycle.start()

    def unassign(self, partition: TopicPartition) -> None:
        """Stop the receiver; what was not taken from it is not stored."""
        if partition == self._partition:
            self._partition = None
            self._end("the receiver's partition was taken away")

    def put_back(self, partition: TopicPartition, next_offset: int, error: str, *, seconds: float) -> None:
        """Only Kafka's topics can be withheld (`UnauthorizedTopics`), never this one."""
        raise NotImplementedError(f"{partition} cannot be read again")

    def fetch(self, timeout: float, max_records: int | None = None) -> list[RecordChunk | Gap]:
        """Return what the receiver has given, as one chunk."""
        partition, handoff = self._partition, self._handoff
        if partition is None:
            self._clock.wait(threading.Event(), timeout)
            return []
        first_offset = handoff.next_offset
        taken = handoff.take(timeout, max_records, self._max_block_bytes // 4)
        return [] if taken is None else [self._chunk(partition, first_offset, taken)]

    def serve_paused(self) -> None:
        """While the receiver is paused, its calls of ``store`` wait."""

    def serve(self) -> None:
        """There is nothing to do."""

    def finish(self) -> Iterator[RecordChunk | Gap]:
        """Stop the receiver, and yield what it still gives until it has stopped."""
        if self._lifecycle is None:
            return
        self._lifecycle.end()
        until = self._clock.monotonic() + STOP_SECONDS + 1.0
        is_over = False
        while not is_over:
            is_over = self._lifecycle.join(0.0) or self._clock.monotonic() > until
            yield from self.fetch(0.0 if is_over else _FINISH_SECONDS)
        while rest := self.fetch(0.0):
            yield from rest
        if not self._lifecycle.join(0.0):
            self._lifecycle.note(
                f"The receiver's on_stop, or its threads, did not end in {STOP_SECONDS:.0f} s. What they still give is "
                "not stored"
            )

    def close(self, commit_seconds: float = 2.0) -> None:
        """Stop the receiver, and wait up to ``commit_seconds`` for its end."""
        self._end("the receiver ends", commit_seconds)

    @property
    def partitions(self) -> dict[TopicPartition, int]:
        return {} if self._partition is None else {self._partition: self._handoff.next_offset}

    @property
    def unstored(self) -> int:
        """The number of records that the receiver has given and that are not known to be stored."""
        return self._handoff.unstored

    @property
    def commits(self) -> Acknowledgements:
        return self._handoff

    @property
    def connected(self) -> bool | None:
        state = None if self._lifecycle is None else self._lifecycle.state
        return None if state in (None, LifecycleState.STARTING) else state is not LifecycleState.RESTARTING

    @property
    def client_error(self) -> str | None:
        return None if self._lifecycle is None else self._lifecycle.error

    @property
    def errors(self) -> int:
        return 0 if self._lifecycle is None else self._lifecycle.errors

    def status(self) -> list[PartitionStatus]:
        partition, lifecycle = self._partition, self._lifecycle
        if partition is None or lifecycle is None:
            return []
        state = {
            LifecycleState.STOPPED: FetchState.FAILED if lifecycle.is_failed else FetchState.AT_END,
            LifecycleState.RESTARTING: FetchState.BACKING_OFF,
        }.get(lifecycle.state, FetchState.FETCHING)
        # An error after which receiving went on is the receiver's, see `client_error`.
        error = lifecycle.error if state in (FetchState.FAILED, FetchState.BACKING_OFF) else None
        return [PartitionStatus(partition, self._handoff.next_offset, state, error)]

    def take_errors(self) -> Sequence[SourceError]:
        return () if self._lifecycle is None else self._lifecycle.take_errors()

    def _end(self, reason: str, seconds: float = 0.0) -> None:
        if self._lifecycle is None:
            return
        self._lifecycle.end()
        if lost := self._handoff.close(reason):
            self._lifecycle.note(f"{lost} records that were given without a position are not stored: {reason}")
        self._lifecycle.join(seconds)

    def _chunk(self, partition: TopicPartition, first_offset: int, taken: Taken) -> RecordChunk:
        records = taken.records
        number, now_ms = len(records), self._clock.now_ms()
        columns = {
            "key": [record.key for record in records],
            "value": [record.value for record in records],
            "topic": pa.repeat(partition.topic, number),
            "partition": pa.repeat(partition.partition, number),
            "offset": range(first_offset, first_offset + number),
            "timestamp": [now_ms if record.timestamp_ms is None else record.timestamp_ms for record in records],
            "timestampType": [_APPEND_TIME if record.timestamp_ms is None else _CREATE_TIME for record in records],
            "headers": [_header_values(record) for record in records],
            "incarnation": pa.repeat(partition.incarnation, number),
        }
        arrays = [
            columns[field.name].cast(field.type)
            if isinstance(columns[field.name], pa.Array)
            else pa.array(columns[field.name], field.type)
            for field in RECORD_SCHEMA
        ]
        batch = pa.RecordBatch.from_arrays(arrays, schema=RECORD_SCHEMA)
        covered = OffsetRange(partition, first_offset, first_offset + number, number)
        return RecordChunk(batch, (covered,), batch.nbytes, source_position=taken.position)


def _header_values(record: Record) -> list[dict[str, object]] | None:
    return [{"key": name, "value": value} for name, value in record.headers] or None


class NoTopicIds:
    """``TopicIds`` of an input that is not Kafka's: its topic is never created again."""

    def __init__(self, source: Input) -> None:
        self._source = source

    def ask(self, topics: Collection[str]) -> Callable[[float], Mapping[str, str | None] | None]:
        return lambda _seconds: dict.fromkeys(topics, self._source.topic_id)


class NoEndOffsets:
    """``EndOffsets`` of an input that is not Kafka's: nobody knows what its source still has."""

    def ask(self, _partitions: Collection[Key]) -> Callable[[], Ends | None]:
        return lambda: None
