"""The "elasticsearch" data source: writes a DataFrame's rows as documents. Repeated writes give no duplicates.

    spark.dataSource.register(ElasticsearchDataSource)
    rows.write.format(FORMAT).option(OPTION, options.to_json()).mode("append").save()

The rows' columns are in ``headrace.elasticsearch.columns``, the options in ``headrace.elasticsearch.options``;
`write_documents` in ``headrace.spark.outputs.elasticsearch`` makes both. It works in classic sessions and over Spark
Connect.

The connection is resolved in the environment of the process that plans the write (the driver, or the Connect server's
application). Its secrets are sent to executors inside the pickled writer, and are in no option and no plan.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSource, DataSourceArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from headrace.clock import SystemClock
from headrace.elasticsearch.cluster import Cluster
from headrace.elasticsearch.columns import check_columns
from headrace.elasticsearch.concrete_index import ConcreteIndex, TargetIndex
from headrace.elasticsearch.counts import IndexingCounts
from headrace.elasticsearch.duplicate_ids import repeated_digests
from headrace.elasticsearch.errors import DocumentsUnaccountedError, IndexingOptionsError, UnsuitableTargetError
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
    from headrace.kafka.range_reader import RangeClients

FORMAT = "elasticsearch"
OPTION = "indexing"
"""The sink's only option: the JSON of `IndexingOptions`."""

logger = logging.getLogger(__name__)


class ElasticsearchDataSource(DataSource):
    """The data source that Spark registers; it is write-only."""

    @classmethod
    def name(cls) -> str:
        return FORMAT

    def writer(self, schema: StructType, overwrite: bool) -> ElasticsearchWriter:
        """Check options, columns and the index before the first row is written. Raises an IndexingError."""
        if overwrite:
            raise IndexingOptionsError(
                "The elasticsearch sink cannot overwrite an index.", remedy='Use mode("append").'
            )
        options = IndexingOptions.from_json(self.options.get(OPTION, ""))
        check_columns(schema.names, options)
        writer = ElasticsearchWriter(options, Cluster.of(options), _kafka_clients(options))
        with warnings_beside(options.report):
            writer.look_at_index()
        return writer


@dataclass
class TaskCounts(WriterCommitMessage):
    """One task's commit message."""

    counts: IndexingCounts
    digests: Any
    """The digests of the rows' ids, for ``repeated_digests``."""


class ElasticsearchWriter(DataSourceArrowWriter):
    """The writer. It is pickled to every task and to the process that commits."""

    def __init__(
        self, options: IndexingOptions, cluster: Cluster, kafka: Mapping[str, RangeClients] | None = None
    ) -> None:
        if not options.report:
            # Duplicate ids and foreign documents are reported there only, so nobody would learn of them.
            raise IndexingOptionsError("A write of the elasticsearch sink needs a report, and the options name none.")
        self._options = options
        self._cluster = cluster
        self._kafka = kafka or {}
        self._seed = secrets.randbits(64)
        self._index_before: ConcreteIndex | None = None

    def look_at_index(self) -> None:
        """Refuse an index in which ids are not unique."""
        self._index_before = self._index_now()
        letters = self._options.dead_letter_index
        if self._index_before is not None and self._index_before.name == letters:
            raise UnsuitableTargetError(
                f"{self._options.index!r} is an alias of {letters!r}, the index of its own dead letters.",
                remedy="Name another dead_letter_index.",
            )

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Index one task's rows. On return every row has its outcome and every dead letter is written."""
        options = self._options
        if (context := TaskContext.get()) is not None:
            options = options.for_task(context.partitionId(), context.attemptNumber())
        originals = self._originals()
        transport = self._transport(options.requests_in_flight)
        try:
            indexer = Indexer(transport, options, originals=originals, seed=self._seed)
            with warnings_beside(options.report):
                counts = indexer.index(iterator)
            return TaskCounts(counts, indexer.digests())
        finally:
            transport.close()
            if originals is not None:
                originals.close()

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Called after all tasks have succeeded: check that the index is still the same, and report the counts.

        The reader of the report raises DuplicateIdsError and ForeignDocumentsError.
        """
        total = IndexingCounts()
        digests = []
        for message in messages:
            if not isinstance(message, TaskCounts):
                raise DocumentsUnaccountedError(
                    "A task of the write returned no counts.", remedy="Run the batch again."
                )
            total.add(message.counts)
            digests.append(message.digests)
        total.check()
        concrete = self._index_after()
        duplicates = repeated_digests(digests)
        if not (duplicates or total.foreign):
            total.letters_withdrawn = self._withdraw_letters()
        if self._options.refresh:
            with closing(self._transport(1)) as transport:
                TargetIndex(transport, self._options, clock=SystemClock()).refresh()
        options = self._options
        report = IndexingReport(
            stream=options.stream_name,
            output=options.output_id,
            batch_time_ms=options.batch_time_ms,
            index=options.index,
            concrete_index=concrete,
            dead_letter_index=options.dead_letter_index,
            tasks=len(messages),
            counts=total,
            duplicates=duplicates,
        )
        report.write(options.report)
        logger.info("Indexed into %s: %s", options.index, total.to_dict())

    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Log the failure. Nothing is undone: the next run counts the indexed documents as repeated."""
        finished = sum(message is not None for message in messages)
        logger.warning(
            "Writing to %s failed after %d of %d tasks; run it again", self._options.index, finished, len(messages)
        )

    def __repr__(self) -> str:
        return f"ElasticsearchWriter({self._options.index!r})"

    def _originals(self) -> BatchOriginalRecords | None:
        if not self._options.manifests:
            return None
        return WindowOriginalRecords(
            [
                KafkaOriginalRecords(uri, self._kafka) if place == KAFKA else ManifestOriginalRecords(uri)
                for place, uri in self._options.manifests
            ]
        )

    def _withdraw_letters(self) -> int:
        options = self._options
        if not options.withdraw_letters or options.batch_time_ms is None or options.attempt is None:
            return 0
        # Only a batch that was tried before has such letters, so other batches do not import the official client.
        from headrace.elasticsearch.administration import Administration
        from headrace.elasticsearch.dead_letter_index import DeadLetterIndex

        with Administration.of(
            self._cluster,
            timeout_seconds=options.request_timeout_seconds,
            max_retry_seconds=options.max_retry_seconds,
        ) as administration:
            return DeadLetterIndex(administration, options).withdraw(options.batch_time_ms, options.attempt)

    def _index_after(self) -> str | None:
        before, now = self._index_before, self._index_now()
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

    def _index_now(self) -> ConcreteIndex | None:
        with closing(self._transport(1)) as transport:
            return TargetIndex(transport, self._options, clock=SystemClock()).concrete()

    def _transport(self, connections: int) -> ElasticsearchTransport:
        return ElasticsearchTransport(
            self._cluster, connections=connections, timeout_seconds=self._options.request_timeout_seconds
        )


def _kafka_clients(options: IndexingOptions) -> dict[str, RangeClients]:
    """The Kafka settings by input id, to read the records of dead letters; empty if the log has all records."""
    if not options.inputs:
        return {}
    from headrace.stream.inputs import KafkaInput

    return KafkaOriginalRecords.clients_of([KafkaInput.model_validate(each) for each in options.inputs])
