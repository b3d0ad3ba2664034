"""Writes rows as documents, in the tasks of one Spark job. Repeated writes give no duplicates.

The tasks (`IndexingTask`) index their rows, and return their counts and the digests of their ids. The calling process
looks at the index before and after, and checks what the tasks returned. Records that nothing transforms are read from
the log by the task that indexes them, so that they do not pass through the JVM. It works in classic sessions and over
Spark Connect.

A data source's writer would do the same with ``mapInArrow``, but Spark starts a new Python process for each of its
three steps (create the source, make the writer, commit). In a small batch these were most of the write's time.

The calling process and each task's worker look the connection up in their own environments. So its secrets are in no
option, no plan and no task.
"""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from pyspark import TaskContext

from headrace.clock import SystemClock
from headrace.elasticsearch.cluster import Cluster
from headrace.elasticsearch.columns import check_columns
from headrace.elasticsearch.concrete_index import ConcreteIndex, TargetIndex
from headrace.elasticsearch.counts import IndexingCounts
from headrace.elasticsearch.duplicate_ids import repeated_digests
from headrace.elasticsearch.errors import DocumentsUnaccountedError, UnsuitableTargetError
from headrace.elasticsearch.indexer import Indexer
from headrace.elasticsearch.options import KAFKA, IndexingOptions
from headrace.elasticsearch.transport import ElasticsearchTransport
from headrace.elasticsearch.write_report import IndexingReport, warnings_beside
from headrace.spark.original_records import (
    BatchOriginalRecords,
    KafkaOriginalRecords,
    ManifestOriginalRecords,
    WindowOriginalRecords,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from headrace.spark.wal_source import LogBlocks

logger = logging.getLogger(__name__)

_RESULT = "counts STRING, digests BINARY"
_RESULT_SCHEMA = pa.schema([("counts", pa.string()), ("digests", pa.binary())])
# Each row of a result is at most 2 MiB: Spark Connect sends it in one message.
_DIGESTS_IN_A_ROW = 256 * 1024


def index_rows(rows: DataFrame, options: IndexingOptions, blocks: LogBlocks | None = None) -> IndexingReport:
    """Index the rows, with the columns of ``headrace.elasticsearch.columns``. Returns when every row has its outcome.

    With ``blocks`` the rows are the numbers of their records, and the tasks index these records as they are in the log.
    The caller must check the report for duplicate ids and foreign documents.

    Raises:
        UnsuitableRowsError: the ids need a column that the rows do not have. Nothing was written.
        UnsuitableTargetError: the index cannot be written to, or it was replaced during the write.
        DocumentsUnaccountedError: the tasks read other records than those of the blocks.
        IndexingError: within Spark, some row cannot get an outcome. Others may be indexed; write them all again.
    """
    if blocks is None:
        check_columns(rows.columns, options)
    target = TargetWatch(options)
    with warnings_beside(options.report):
        target.look_before()
    task = IndexingTask(options, secrets.randbits(64), blocks)
    results = rows.mapInArrow(task.run, _RESULT).toArrow()
    counts, digests = _collected(results)
    if blocks is not None and counts.rows != blocks.records:
        raise DocumentsUnaccountedError(
            f"The tasks of the write read {counts.rows} records, the blocks of the batch have {blocks.records}.",
            remedy="Run the batch again.",
        )
    concrete = target.look_after()
    duplicates = repeated_digests(digests)
    if options.refresh:
        target.refresh()
    logger.info("Indexed into %s: %s", options.index, counts.to_dict())
    return IndexingReport(options.index, concrete, counts, duplicates)


@dataclass(frozen=True, slots=True)
class IndexingTask:
    """What a task does with its rows. ``seed`` is equal for all tasks (see ``DuplicateIdCheck``)."""

    options: IndexingOptions
    seed: int
    blocks: LogBlocks | None = None

    def run(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Index the task's rows. Yields its counts and digests when every dead letter is written."""
        options = self.options
        if (context := TaskContext.get()) is not None:
            options = options.for_task(context.partitionId(), context.attemptNumber())
        rows = batches if self.blocks is None else self.blocks.read(batches)
        originals = _originals(options)
        try:
            with closing(_transport(options, options.requests_in_flight)) as transport, warnings_beside(options.report):
                indexer = Indexer(transport, options, originals=originals, seed=self.seed)
                counts = indexer.index(rows)
        finally:
            if originals is not None:
                originals.close()
        yield from _result(counts, indexer.digests())


def _result(counts: IndexingCounts, digests: np.ndarray[Any, Any]) -> Iterator[pa.RecordBatch]:
    text: str | None = json.dumps(counts.to_dict())
    for first in range(0, max(1, len(digests)), _DIGESTS_IN_A_ROW):
        part = digests[first : first + _DIGESTS_IN_A_ROW]
        yield pa.record_batch([pa.array([text]), pa.array([part.tobytes()], pa.binary())], schema=_RESULT_SCHEMA)
        text = None


def _collected(results: pa.Table) -> tuple[IndexingCounts, list[np.ndarray[Any, Any]]]:
    total = IndexingCounts()
    digests = []
    for row in results.to_pylist():
        if row["counts"] is not None:
            total.add(IndexingCounts.from_dict(json.loads(row["counts"])))
        digests.append(np.frombuffer(row["digests"], np.uint64))
    indexed = sum(len(part) for part in digests)
    if indexed > total.rows:
        raise DocumentsUnaccountedError(
            f"The tasks of the write returned the digests of {indexed} rows, and counts of {total.rows}.",
            remedy="Run the batch again.",
        )
    total.check()
    return total, digests


def withdraw_letters(options: IndexingOptions) -> int:
    """Delete the dead letters of earlier attempts that this one did not write again. Returns their number."""
    if not options.withdraw_letters or options.batch_time_ms is None or options.attempt is None:
        return 0
    # Only a batch that was tried before has such letters, so other batches do not import the official client.
    from headrace.elasticsearch.administration import Administration
    from headrace.elasticsearch.dead_letter_index import DeadLetterIndex

    with Administration.of(
        Cluster.of(options),
        timeout_seconds=options.request_timeout_seconds,
        max_retry_seconds=options.max_retry_seconds,
    ) as administration:
        return DeadLetterIndex(administration, options).withdraw(options.batch_time_ms, options.attempt)


class TargetWatch:
    """The index as it is before and after the tasks, for the calling process."""

    def __init__(self, options: IndexingOptions) -> None:
        self._options = options
        self._cluster = Cluster.of(options)
        self._before: ConcreteIndex | None = None

    def look_before(self) -> None:
        """Refuse an index in which ids are not unique."""
        self._before = self._now()
        letters = self._options.dead_letter_index
        if self._before is not None and self._before.name == letters:
            raise UnsuitableTargetError(
                f"{self._options.index!r} is an alias of {letters!r}, the index of its own dead letters.",
                remedy="Name another dead_letter_index.",
            )

    def look_after(self) -> str | None:
        """The concrete index. Raises UnsuitableTargetError if it is not the one from before."""
        before, now = self._before, self._now()
        if before is not None and now != before:
            if now is not None and now.name == before.name:
                what = f"{before.name!r} was deleted and created again; its earlier documents are gone"
            else:
                after = None if now is None else now.name
                what = (
                    f"{self._options.index!r} was moved from {before.name!r} to {after!r}; some of its documents "
                    "may be in both"
                )
            raise UnsuitableTargetError(
                f"While the batch was written {what}.",
                remedy="Write to one concrete index, and run the batch again.",
            )
        return None if now is None else now.name

    def refresh(self) -> None:
        """Make the documents visible to searches."""
        with closing(_transport(self._options, 1, self._cluster)) as transport:
            TargetIndex(transport, self._options, clock=SystemClock()).refresh()

    def _now(self) -> ConcreteIndex | None:
        with closing(_transport(self._options, 1, self._cluster)) as transport:
            return TargetIndex(transport, self._options, clock=SystemClock()).concrete()


def _transport(options: IndexingOptions, connections: int, cluster: Cluster | None = None) -> ElasticsearchTransport:
    return ElasticsearchTransport(
        cluster or Cluster.of(options), connections=connections, timeout_seconds=options.request_timeout_seconds
    )


def _originals(options: IndexingOptions) -> BatchOriginalRecords | None:
    """Where the task finds the records of dead letters, if the options name manifests."""
    if not options.manifests:
        return None
    clients = {}
    if options.inputs:
        from headrace.stream.inputs import KafkaInput

        clients = KafkaOriginalRecords.clients_of([KafkaInput.model_validate(each) for each in options.inputs])
    return WindowOriginalRecords(
        [
            KafkaOriginalRecords(uri, clients) if place == KAFKA else ManifestOriginalRecords(uri)
            for place, uri in options.manifests
        ]
    )
