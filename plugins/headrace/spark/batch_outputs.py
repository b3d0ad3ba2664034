"""What a batch does in Spark: inputs from the log, the user's transform, and each output in turn."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any

from headrace.indexing.columns import COORDINATES, HEADERS, INCARNATION, KEY, REJECTED_BECAUSE, VALUE
from headrace.indexing.reports import IndexingReport
from headrace.spark.decoding import REASON, DecodedInput, decode_input
from headrace.spark.outputs.console import print_batch
from headrace.spark.outputs.registry import needs_empty_batches
from headrace.spark.sessions import is_connect
from headrace.spark.transforms import BatchContext, apply_transform, load_transform
from headrace.stream import ConsoleOutput, ElasticsearchOutput, Stream
from headrace.wal.storage import open_storage

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from headrace.batching.manifest import Manifest
    from headrace.spark.job_scope import JobScope

Counts = dict[str, Any]
__all__ = ["BatchOutputs", "Counts", "needs_empty_batches"]


@dataclass
class BatchOutputs:
    """Writes one batch's outputs. ``out`` is where console outputs print, ``tell`` gets lines on the progress."""

    stream: Stream
    manifest: Manifest
    attempt: int
    session: Callable[[], SparkSession]
    scope: Callable[[SparkSession], JobScope]
    out: IO[str]
    tell: Callable[[str], None]
    partitions: int | None = None

    def write(self, record: Callable[[str, Counts], None]) -> dict[str, Counts]:
        """Write every output; ``record`` is told the counts of each as soon as it is done."""
        results: dict[str, Counts] = {}
        outputs = {output.id: output for output in self.stream.outputs}
        spared = self.manifest.records == 0
        running = {name for name, output in outputs.items() if not spared or needs_empty_batches(output, self.stream)}
        frames: Mapping[str, DataFrame] = {}
        inputs: Mapping[str, DecodedInput] = {}
        undecodable = 0
        letters: Mapping[str, DataFrame] = {}
        scope: JobScope | None = None
        if running:
            spark = self.session()
            scope = self.scope(spark)
            scope.enter("inputs")
            inputs = self._inputs(spark)
            undecodable, letters = self._undecodable(inputs)
            frames = self._frames(inputs, outputs)
        for name, output in outputs.items():
            started = time.monotonic()
            if scope is not None:
                scope.enter(name)
            counts = self._write_one(output, frames.get(name) if name in running else None, letters)
            counts = {
                "undecodable": undecodable,
                **counts,
                "duration_seconds": round(time.monotonic() - started, 3),
            }
            record(name, counts)
            results[name] = counts
            self.tell(f"output {name}: {_readable(counts)}")
        return results

    def _inputs(self, spark: SparkSession) -> dict[str, DecodedInput]:
        from headrace.spark.wal_source import WalDataSource

        spark.dataSource.register(WalDataSource)
        partitions = self.partitions
        if partitions is None and not is_connect(spark):
            partitions = spark.sparkContext.defaultParallelism
        inputs = {}
        for source in self.stream.inputs:
            reader = spark.read.format("wal").option("manifests", json.dumps([self.manifest.uri]))
            reader = reader.option("input", source.id)
            if partitions is not None:
                reader = reader.option("numPartitions", partitions)
            inputs[source.id] = decode_input(reader.load(), source)
        return inputs

    def _frames(self, inputs: Mapping[str, DecodedInput], outputs: Mapping[str, Any]) -> dict[str, DataFrame]:
        transform = load_transform(self.stream)
        context = BatchContext.of(
            self.stream.name, self.manifest.batch_time_ms, self.manifest.interval_ms, self.attempt
        )
        decoded = {name: views.decoded for name, views in inputs.items()}
        frames = apply_transform(transform, decoded, tuple(outputs), context)
        if transform is None:
            # The value's own bytes are the document: nothing is gained by parsing and writing them anew.
            (views,) = inputs.values()
            indexed = [name for name, output in outputs.items() if isinstance(output, ElasticsearchOutput)]
            frames.update(dict.fromkeys(indexed, views.original))
        return frames

    def _undecodable(self, inputs: Mapping[str, DecodedInput]) -> tuple[int, Mapping[str, DataFrame]]:
        """How many records do not decode, and those of the inputs that have any."""
        found = {name: views.undecodable for name, views in inputs.items() if views.undecodable is not None}
        counts = {name: rows.count() for name, rows in found.items()}
        total = sum(counts.values())
        if total:
            kept = any(isinstance(output, ElasticsearchOutput) for output in self.stream.outputs)
            where = "go to the dead letters as they are" if kept else "are left out: no output keeps dead letters"
            self.tell(f"{total:,} records do not decode and {where}")
        return total, {name: rows for name, rows in found.items() if counts[name]}

    def _write_one(
        self,
        output: Any,
        frame: DataFrame | None,
        undecodable: Mapping[str, DataFrame],
    ) -> Counts:
        if isinstance(output, ConsoleOutput):
            rows = print_batch(frame, batch_time_ms=self.manifest.batch_time_ms, rows=output.rows, out=self.out)
            return {"printed": rows}
        if frame is None:
            return {"rows": 0}
        return self._index(output, frame, undecodable)

    def _index(self, output: ElasticsearchOutput, frame: DataFrame, undecodable: Mapping[str, DataFrame]) -> Counts:
        from headrace.spark.documents import write_documents

        name, batch_time_ms, manifest = self.stream.name, self.manifest.batch_time_ms, self.manifest.uri
        with self._report(output.id) as uri:
            report = write_documents(
                frame, output, report=uri, stream=name, batch_time_ms=batch_time_ms, manifest=manifest
            )
        total = report.counts
        for input_id, rows in undecodable.items():
            with self._report(f"{output.id}-undecodable-{input_id}") as uri:
                letters = write_undecodable(
                    rows, output, report=uri, stream=name, batch_time_ms=batch_time_ms, manifest=manifest
                )
            total.add(letters.counts)
        return total.to_dict()

    @contextmanager
    def _report(self, name: str) -> Iterator[str]:
        """The URI of a write's report, which is deleted once it was read: the ledger has its counts then."""
        storage = open_storage(f"{self.stream.folder_url}/reports")
        file = f"{self.manifest.batch_time_ms}-{self.attempt}-{name}.json"
        try:
            yield f"{self.stream.folder_url}/reports/{file}"
        finally:
            storage.delete(file)


def write_undecodable(
    undecodable: DataFrame, output: ElasticsearchOutput, *, report: str, stream: str, batch_time_ms: int, manifest: str
) -> IndexingReport:
    """Write records that do not decode to the output's dead letters, with the bytes that Kafka gave."""
    from pyspark.sql import functions as F  # noqa: N812

    from headrace.spark.documents import sink_options
    from headrace.spark.elasticsearch_sink import FORMAT, ElasticsearchDataSource

    rows = undecodable.select(*COORDINATES, INCARNATION, KEY, VALUE, HEADERS, F.col(REASON).alias(REJECTED_BECAUSE))
    options = sink_options(output, stream=stream, batch_time_ms=batch_time_ms, report=report, manifest=manifest)
    for name in ("id_columns", "id_batch_time", "version_from"):
        options.pop(name, None)
    options.update(document_id="record", tombstones="dead_letter")
    undecodable.sparkSession.dataSource.register(ElasticsearchDataSource)
    rows.write.format(FORMAT).options(**options).mode("append").save()
    return IndexingReport.load(report)


def _readable(counts: Counts) -> str:
    shown = {name: value for name, value in counts.items() if value and isinstance(value, int | float)}
    return ", ".join(f"{name} {value:,}" for name, value in shown.items()) or "nothing to do"
