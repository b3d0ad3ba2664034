"""Which writer writes which kind of output. Imports no pyspark: Airflow asks what an empty batch needs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.stream import ConsoleOutput, ElasticsearchOutput, KafkaOutput, ParquetOutput

if TYPE_CHECKING:
    from headrace.spark.outputs.writer import OutputWriter
    from headrace.stream import Output, Stream


def writer_of(output: Output) -> OutputWriter:
    """The writer for an output of a stream. Only its kind's own module, and what that needs, is imported."""
    if isinstance(output, ElasticsearchOutput):
        from headrace.spark.outputs.elasticsearch import ElasticsearchOutputWriter

        return ElasticsearchOutputWriter(output)
    if isinstance(output, ConsoleOutput):
        from headrace.spark.outputs.console import ConsoleWriter

        return ConsoleWriter(output)
    if isinstance(output, ParquetOutput):
        from headrace.spark.outputs.parquet import ParquetWriter

        return ParquetWriter(output)
    if isinstance(output, KafkaOutput):
        from headrace.spark.outputs.kafka import KafkaWriter

        return KafkaWriter(output)
    from headrace.spark.outputs.foreach_batch import ForeachBatchWriter

    return ForeachBatchWriter(output)


def needs_empty_batches(output: Output, stream: Stream) -> bool:
    """Whether a batch without records has to run Spark for this output.

    A transform can make rows of nothing (a count of 0), and some outputs can take them; without a transform nothing
    comes of nothing.
    """
    return stream.transform_of(output) is not None and writer_of(output).needs_empty_batches
