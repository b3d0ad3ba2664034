"""Finds the offset of a time in partitions: the first record a consumer sees with a timestamp at or after that time.

Kafka's own lookup by time also counts offsets that no consumer sees: transaction markers, which carry the broker's time
whatever the records' timestamps are, and records of aborted transactions. The offset it returns is never too late. So
records are read from there until one has a late enough timestamp; usually that is the first.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import closing
from typing import Any, Self

import numpy as np
import pyarrow as pa

from headrace.blocks import TopicPartition
from headrace.kafka.offset_questions import Kept, OffsetQuestions
from headrace.kafka.offset_ranges import RangeRun, RecordedRange
from headrace.kafka.range_reader import KafkaRangeReader, RangeClients
from headrace.kafka.topic_watch import SeenTopic
from headrace.stream.inputs import KafkaInput

# Usually the first record is enough, otherwise one of the next.
_OFFSETS_AHEAD = 5_000


class OffsetsByTime:
    """Queries and reads one input's Kafka, with the input's isolation level. Resolves the connection in this process's
    environment. Must be closed.

    Its methods raise RangesUnreadableError when Kafka does not answer, RangesGoneError when offsets are gone meanwhile.
    """

    def __init__(self, source: KafkaInput, *, quiet: bool = False) -> None:
        """``quiet``: librdkafka writes nothing to standard error; errors that matter are raised."""
        self._source = source
        self._clients = RangeClients.of(source).for_offsets(_OFFSETS_AHEAD)
        if quiet:
            self._clients = self._clients.quiet()
        self._questions: OffsetQuestions = self._clients.questions()
        self._reader: KafkaRangeReader | None = None

    def close(self) -> None:
        """Close the consumer."""
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def look(self) -> tuple[list[SeenTopic], list[str]]:
        """The input's topics, and the named ones that do not exist. Raises TopicsNotFoundError as well."""
        return self._questions.look(self._source)

    def topic_ids(self, topics: Collection[str]) -> Mapping[str, str | None]:
        """Each topic's id, None for a topic that does not exist."""
        return self._questions.topic_ids(topics)

    def kept(self, partitions: Collection[TopicPartition]) -> dict[TopicPartition, Kept | None]:
        """What Kafka has of each partition, None where there is no such partition."""
        found = self._questions.kept([_key(each) for each in partitions])
        return {each: found[_key(each)] for each in partitions}

    def first_at(self, untils: Mapping[TopicPartition, int], timestamp_ms: int) -> dict[TopicPartition, int]:
        """For each partition, the first offset below its ``until`` whose record has this timestamp or a later one;
        ``until`` if there is none."""
        reported = self._questions.first_at([_key(each) for each in untils], timestamp_ms)
        result = {}
        for partition, until in untils.items():
            begin = reported[_key(partition)]
            result[partition] = until if begin is None else self._first(partition, begin, until, timestamp_ms)
        return result

    def timestamp_of_first(self, partition: TopicPartition, begin: int, until: int) -> int | None:
        """The timestamp (ms) of the first record in [begin, until), None if there is no record."""
        for batch in self._records(partition, begin, until):
            return int(_times(batch)[0])
        return None

    def _first(self, partition: TopicPartition, begin: int, until: int, timestamp_ms: int) -> int:
        for batch in self._records(partition, begin, until):
            young = np.flatnonzero(_times(batch) >= timestamp_ms)
            if len(young):
                return int(batch.column("offset")[int(young[0])].as_py())
        return until

    def _records(self, partition: TopicPartition, begin: int, until: int) -> Iterator[pa.RecordBatch]:
        if begin >= until:
            return
        if self._reader is None:
            self._reader = KafkaRangeReader(self._clients, questions=self._questions)
        # Closed with this generator, also when the caller stops after the first batch.
        with closing(self._reader.read([RangeRun.of([RecordedRange(partition, begin, until, None)])])) as reading:
            yield from reading


def _key(partition: TopicPartition) -> tuple[str, int]:
    return partition.topic, partition.partition


def _times(records: pa.RecordBatch) -> np.ndarray[Any, Any]:
    return records.column("timestamp").cast(pa.int64()).to_numpy()  # type: ignore[no-any-return]
