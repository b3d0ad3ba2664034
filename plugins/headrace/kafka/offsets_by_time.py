"""Where a time begins in partitions: the first record with a timestamp at or after it, as a consumer sees records.

Kafka's own answer by time also counts what no consumer sees: the markers of transactions, which carry the broker's
time whatever the records' timestamps are, and records of aborted transactions. It is never too late, so from there on
records are read until one is young enough; mostly that is the first.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import closing
from typing import Any, Self

import numpy as np
import pyarrow as pa

from headrace.blocks import TopicPartition
from headrace.kafka.offset_questions import Kept, OffsetQuestions
from headrace.kafka.offset_ranges import RangeRun
from headrace.kafka.range_reader import KafkaRangeReader, RangeClients
from headrace.kafka.topic_watch import SeenTopic
from headrace.stream.inputs import KafkaInput

# The first record mostly answers, and where not, the next ones.
_OFFSETS_AHEAD = 5_000


class OffsetsByTime:
    """Asks and reads one input's Kafka, with its isolation level; its connection is looked up in this process's
    environment. Close it.

    Its methods raise RangesUnreadableError where Kafka does not answer, RangesGoneError where offsets go meanwhile.
    """

    def __init__(self, source: KafkaInput, *, quiet: bool = False) -> None:
        """``quiet``: librdkafka writes nothing of its own to standard error; what matters is raised."""
        self._source = source
        self._clients = RangeClients.of(source).for_offsets(_OFFSETS_AHEAD)
        if quiet:
            self._clients = self._clients.quiet()
        self._questions: OffsetQuestions = self._clients.questions()
        self._reader: KafkaRangeReader | None = None

    def close(self) -> None:
        """Leave Kafka."""
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def look(self) -> tuple[list[SeenTopic], list[str]]:
        """The input's topics, and the named ones that are not there. Raises TopicsNotFoundError as well."""
        return self._questions.look(self._source)

    def topic_ids(self, topics: Collection[str]) -> Mapping[str, str | None]:
        """Each topic's id, None for a topic that is not there."""
        return self._questions.topic_ids(topics)

    def kept(self, partitions: Collection[TopicPartition]) -> dict[TopicPartition, Kept | None]:
        """What Kafka has of each partition, None where there is no such partition."""
        found = self._questions.kept([_key(each) for each in partitions])
        return {each: found[_key(each)] for each in partitions}

    def first_at(self, untils: Mapping[TopicPartition, int], timestamp_ms: int) -> dict[TopicPartition, int]:
        """In each partition the first offset below its ``until`` whose record has this timestamp or a later one, else
        ``until``."""
        reported = self._questions.first_at([_key(each) for each in untils], timestamp_ms)
        result = {}
        for partition, until in untils.items():
            begin = reported[_key(partition)]
            result[partition] = until if begin is None else self._first(partition, begin, until, timestamp_ms)
        return result

    def timestamp_of_first(self, partition: TopicPartition, begin: int, until: int) -> int | None:
        """The timestamp of the first record in these offsets, None if they hold none."""
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
        # Closed with this generator, also where the first batch is enough.
        with closing(self._reader.read([RangeRun(partition, begin, (until,), (None,))])) as reading:
            yield from reading


def _key(partition: TopicPartition) -> tuple[str, int]:
    return partition.topic, partition.partition


def _times(batch: pa.RecordBatch) -> np.ndarray[Any, Any]:
    return batch.column("timestamp").cast(pa.int64()).to_numpy()  # type: ignore[no-any-return]
