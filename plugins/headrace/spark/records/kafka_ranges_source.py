"""Reads the records of batches again from Kafka, by their recorded offset ranges: the "kafka_ranges" data source, and
`KafkaBlocks` for tasks that read them themselves.

    register_source(spark, KafkaRangesDataSource)
    (spark.read.format("kafka_ranges").option("manifests", json.dumps([uri])).option("input", "clicks")
        .option("stream", source.model_dump_json()).load())

Options (their names are case-insensitive): ``manifests``, the URIs of the batches' manifests as a JSON list; ``input``,
the id of the input to read; ``stream``, this input of the stream (a ``KafkaInput``) as JSON; ``numPartitions``, the
approximate number of partitions (default: this machine's cores); ``stallSeconds``, how long Kafka may return nothing
(default 60). Columns and rows are byte for byte those of the "wal" data source. It works in classic sessions and over
Spark Connect.

The input's connection is resolved in the environment of the process that plans the read, or makes the blocks. Its
secrets are sent to executors inside the pickled reader, and are in no option and no plan's text.
"""

from __future__ import annotations

import json
import os
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Self

import pyarrow as pa
from pydantic import ValidationError
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from headrace.batch.manifest import Manifest
from headrace.errors import HeadraceError
from headrace.kafka.range_reader import STALL_SECONDS, KafkaRangeReader, RangeClients, check_ranges
from headrace.kafka.ranges import MIN_TASK_RECORDS, RangeRun, RecordedRange, deal, in_order, joined
from headrace.processes import freeze_imports
from headrace.spark.attempts.shared_jobs import used_by_task
from headrace.spark.records.arrow_types import arrow_schema
from headrace.spark.records.record_columns import RECORD_SCHEMA
from headrace.spark.records.wal_source import to_spark
from headrace.stream.inputs import KafkaInput

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from headrace.spark.attempts.shared_jobs import BlockTask

FORMAT = "kafka_ranges"


@dataclass(frozen=True, slots=True)
class KafkaBlocks:
    """The records of one input in one or more batches that the log no longer has (`BatchBlocks`).

    A number is one of ``parts``, which have about `MIN_TASK_RECORDS` each.
    """

    input_id: str
    parts: tuple[tuple[RangeRun, ...], ...]
    clients: RangeClients = field(repr=False)

    @classmethod
    def of(cls, manifests: Iterable[Manifest], source: KafkaInput) -> Self:
        """The input's ranges in these manifests. Raises OverlappingRangesError, and as `RangeClients.of` does."""
        ranges = [recorded for manifest in manifests for recorded in manifest.ranges(source.id)]
        most = max(1, sum(recorded.weight for recorded in ranges) // MIN_TASK_RECORDS)
        return cls(source.id, tuple(deal(ranges, most)), RangeClients.of(source))

    @property
    def records(self) -> int | None:
        """The number of records; None if some ranges were not counted."""
        counts = [recorded.records for recorded in self._ranges()]
        return None if None in counts else sum(count or 0 for count in counts)

    @property
    def weight(self) -> int:
        """The number of records, or the most that it can be."""
        return sum(recorded.weight for recorded in self._ranges())

    @property
    def numbers(self) -> int:
        """The number of parts."""
        return len(self.parts)

    @property
    def is_small(self) -> bool:
        """Whether one task is enough to read them."""
        return self.weight <= MIN_TASK_RECORDS

    def run(self, spark: SparkSession, tasks: int, task: BlockTask, schema: str) -> pa.Table:
        """The results of the task, with this schema (as DDL), for all records."""
        tasks = max(1, min(tasks, self.numbers))
        return spark.range(0, self.numbers, 1, tasks).mapInArrow(task.among(tasks).run, schema).toArrow()

    def read(self, numbers: Iterator[pa.RecordBatch]) -> Generator[pa.RecordBatch, None, None]:
        """Yield the records of the parts with these numbers.

        Raises RangesGoneError, before the first record, if Kafka no longer has all of them, and the errors of
        ``KafkaRangeReader.read``.
        """
        freeze_imports()
        target = arrow_schema(RECORD_SCHEMA)
        runs = [run for batch in numbers for number in batch.column(0).to_pylist() for run in self.parts[number]]
        if not runs:
            return
        offsets = sum(run.until_offset - run.from_offset for run in runs)
        # A consumer takes 0.2 s to find its brokers.
        opened = partial(KafkaRangeReader, self.clients.for_offsets(offsets))
        with used_by_task(f"kafka/{self.input_id}", opened) as reader:
            reader.check(runs)
            for batch in reader.read(runs):
                yield to_spark(batch, target)

    def _ranges(self) -> Iterator[RecordedRange]:
        return (recorded for runs in self.parts for run in runs for recorded in run.ranges())


@dataclass
class RangesPartition(InputPartition):
    """The offset ranges that one task reads."""

    runs: tuple[RangeRun, ...]

    def __init__(self, runs: tuple[RangeRun, ...]) -> None:
        super().__init__(None)
        self.runs = runs


class KafkaRangesDataSource(DataSource):
    """The data source that Spark registers."""

    @classmethod
    def name(cls) -> str:
        return FORMAT

    def schema(self) -> StructType:
        return RECORD_SCHEMA

    def reader(self, schema: StructType) -> KafkaRangesReader:  # noqa: ARG002 - the records have one schema
        given = _required(self.options, "stream")
        try:
            source = KafkaInput.model_validate_json(given["stream"])
        except ValidationError as error:
            # The error does not repeat the values.
            problems = "; ".join(detail["msg"] for detail in error.errors(include_url=False, include_input=False))
            raise SourceOptionError(
                f'The option stream of the "{FORMAT}" data source is not a valid input: {problems}.'
            ) from None
        options = SourceOptions.of(self.options)
        return KafkaRangesReader(options, RangeClients.of(source), _seconds(given.get("stallseconds")))


class KafkaRangesReader(DataSourceReader):
    """Plans the partitions in the planning process, and reads a partition on an executor."""

    def __init__(self, options: SourceOptions, clients: RangeClients, stall_seconds: float = STALL_SECONDS) -> None:
        self._options = options
        self._clients = clients
        self._stall_seconds = stall_seconds

    def partitions(self) -> Sequence[InputPartition]:
        """Plan the tasks. Raises RangesGoneError, before anything is read, if Kafka no longer has all records."""
        manifests = self._options.load()
        ranges = [recorded for manifest in manifests for recorded in manifest.ranges(self._options.input_id)]
        check_ranges(self._clients, joined(in_order(ranges)))
        tasks = deal(ranges, self._options.partitions)
        # Spark requires at least one partition.
        return [RangesPartition(task) for task in tasks] or [RangesPartition(())]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield one task's records; raises the errors of ``KafkaRangeReader.read``."""
        if not isinstance(partition, RangesPartition):
            raise TypeError(f"{FORMAT} reads its own partitions, not {type(partition).__name__}")
        if not partition.runs:
            return
        target = arrow_schema(RECORD_SCHEMA)
        offsets = sum(run.until_offset - run.from_offset for run in partition.runs)
        with KafkaRangeReader(self._clients.for_offsets(offsets), stall_seconds=self._stall_seconds) as reader:
            for batch in reader.read(partition.runs):
                yield to_spark(batch, target)

    def __repr__(self) -> str:
        return f"KafkaRangesReader({self._options!r})"


def _seconds(text: str | None) -> float:
    if text is None:
        return STALL_SECONDS
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise SourceOptionError(
            f'The option stallSeconds of the "{FORMAT}" data source must be a number of seconds, not {text!r}.'
        )
    return seconds


_MANIFEST_READERS = 8


class SourceOptionError(HeadraceError):
    """A data source lacks an option, or an option is invalid."""


@dataclass(frozen=True, slots=True)
class SourceOptions:
    """The options of the data source, which reads one input's records of one or more batches."""

    manifests: tuple[str, ...]
    input_id: str
    partitions: int

    @classmethod
    def of(cls, options: Mapping[str, str]) -> Self:
        """Parse options as Spark passes them, with case-insensitive names. Raises SourceOptionError."""
        given = _required(options, "manifests", "input")
        partitions = _number_of_partitions(given.get("numpartitions"))
        return cls(_uris(given["manifests"]), given["input"], partitions)

    def load(self) -> list[Manifest]:
        """Load the manifests, several at a time: a window has one per batch, and a remote storage is slow.

        Raises ManifestError.
        """
        if len(self.manifests) < 2:
            return [Manifest.load(uri) for uri in self.manifests]
        with ThreadPoolExecutor(_MANIFEST_READERS) as pool:
            return list(pool.map(Manifest.load, self.manifests))


def _required(options: Mapping[str, str], *names: str) -> dict[str, str]:
    """The options by lower-case names. Raises SourceOptionError if one of ``names`` is missing."""
    given = {str(name).lower(): str(value) for name, value in options.items()}
    missing = [name for name in names if not given.get(name)]
    if missing:
        raise SourceOptionError(f'The "{FORMAT}" data source needs the option(s) {", ".join(missing)}.')
    return given


def _uris(text: str) -> tuple[str, ...]:
    try:
        uris: Sequence[object] | None = json.loads(text)
    except ValueError:
        uris = None
    if not isinstance(uris, list) or not all(isinstance(uri, str) for uri in uris):
        raise SourceOptionError(f'The option manifests of the "{FORMAT}" data source must be a JSON list of URIs.')
    return tuple(uris)


def _number_of_partitions(text: str | None) -> int:
    if text is None:
        return os.cpu_count() or 1
    if not (text.isascii() and text.isdigit()) or int(text) < 1:
        raise SourceOptionError(
            f'The option numPartitions of the "{FORMAT}" data source must be 1 or more, not {text!r}.'
        )
    return int(text)
