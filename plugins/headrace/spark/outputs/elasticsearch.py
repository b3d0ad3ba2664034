"""The Elasticsearch output: writes rows as documents, and undecodable records as dead letters."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from headrace.elasticsearch.bulk_bodies import TOMBSTONE
from headrace.elasticsearch.columns import COORDINATES, HEADERS, INCARNATION, KEY, REJECTED_BECAUSE, TIMESTAMP, VALUE
from headrace.elasticsearch.counts import IndexingCounts
from headrace.elasticsearch.errors import TooManyDeadLettersError
from headrace.elasticsearch.output_options import sink_options
from headrace.elasticsearch.reports import IndexingReport
from headrace.spark.incarnations import lacks_incarnation
from headrace.spark.outputs.report_files import report_file
from headrace.stream import ColumnIds, ElasticsearchOutput

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from headrace.spark.outputs.writer import Counts, WrittenBatch
    from headrace.stream import KafkaInput


class ElasticsearchOutputWriter:
    """Writes rows as documents. Repeated writes give no duplicates (rule 7 of the design)."""

    def __init__(self, output: ElasticsearchOutput) -> None:
        self._output = output

    @property
    def needs_empty_batches(self) -> bool:
        """Whether ids come from columns: rows that are made without records have no coordinates for other ids."""
        return isinstance(self._output.document_ids, ColumnIds)

    def write(self, frame: DataFrame | None, batch: WrittenBatch) -> Counts:
        """Write the undecodable records to the dead letters, then index the rows.

        The order matters: the second write deletes the dead letters of earlier attempts that this one has not written.
        Returns the counts of `headrace.elasticsearch.counts.IndexingCounts`, and ``index``, the concrete index, if it
        is known.

        Raises:
            TooManyDeadLettersError: there are more dead letters than the output's limit allows. They and all other
                documents were written.
        """
        if frame is None:
            return {"rows": 0}
        from headrace.spark.documents import write_documents

        incarnations = None
        if batch.incarnations is not None and lacks_incarnation(frame.columns):
            incarnations = batch.incarnations()
        total = IndexingCounts()
        for input_id, rows in batch.undecodable.items():
            with report_file(batch, f"{self._output.id}-undecodable-{input_id}") as uri:
                total.add(write_undecodable(rows, self._output, batch, report=uri).counts)
        with report_file(batch, self._output.id) as uri:
            report = write_documents(
                frame,
                self._output,
                report=uri,
                stream=batch.stream.name,
                batch_time_ms=batch.batch_time_ms,
                attempt=batch.attempt,
                manifest=batch.manifest_uri,
                read_again=_read_again(batch),
                earlier=_earlier(batch),
                inputs=batch.stream.inputs,
                incarnations=incarnations,
                written_before=batch.written_before,
                withdraw_letters=batch.written_before or batch.tried_before,
            )
        total.add(report.counts)
        self._check_limit(total, batch.stream.name)
        # An alias may point to another index later.
        written_to = {} if report.concrete_index is None else {"index": report.concrete_index}
        return {**total.to_dict(), **written_to}

    def _check_limit(self, counts: IndexingCounts, stream: str) -> None:
        counted = Counter(counts.dead_letter_reasons)
        del counted[TOMBSTONE]
        passed = self._output.dead_letter_limit.passed(counted.total(), counts.rows)
        if passed is None:
            return
        reasons = ", ".join(f"{number:,} {reason}" for reason, number in counted.most_common(5))
        raise TooManyDeadLettersError(
            f"Of {counts.rows:,} rows for index {self._output.index!r} {counted.total():,} are dead letters, {passed}: "
            f"{reasons}.",
            remedy=f"They are kept in {self._output.dead_letters!r} (headrace dlq list {stream} --output "
            f"{self._output.id}). Correct the mapping, the decoder or the transform, or raise the output's "
            "dead_letter_limit; the batch's next run writes what is missing.",
        )


def write_undecodable(
    undecodable: DataFrame, output: ElasticsearchOutput, batch: WrittenBatch, *, report: str
) -> IndexingReport:
    """Write records that do not decode to the output's dead letters, with their bytes from Kafka."""
    from pyspark.sql import functions as F  # noqa: N812

    from headrace.spark.decoding import REASON
    from headrace.spark.elasticsearch_sink import FORMAT, ElasticsearchDataSource

    reason = F.col(REASON).alias(REJECTED_BECAUSE)
    rows = undecodable.select(*COORDINATES, INCARNATION, KEY, VALUE, HEADERS, TIMESTAMP, reason)
    options = sink_options(
        output,
        stream=batch.stream.name,
        batch_time_ms=batch.batch_time_ms,
        attempt=batch.attempt,
        report=report,
        manifest=batch.manifest_uri,
        read_again=_read_again(batch),
    )
    for name in ("id_columns", "id_batch_time", "version_from"):
        options.pop(name, None)
    options.update(document_id="record", tombstones="dead_letter")
    undecodable.sparkSession.dataSource.register(ElasticsearchDataSource)
    rows.write.format(FORMAT).options(**options).mode("append").save()
    return IndexingReport.load(report)


def _read_again(batch: WrittenBatch) -> tuple[KafkaInput, ...]:
    return batch.stream.inputs if batch.from_kafka else ()


def _earlier(batch: WrittenBatch) -> dict[str, list[str]]:
    """The manifests of the window's other batches, newest first, by where their records are."""
    manifests: dict[str, list[str]] = {}
    for origin in reversed(batch.earlier):
        manifests.setdefault(origin.source, []).append(origin.manifest_uri)
    return manifests
