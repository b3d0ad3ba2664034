"""Maps each kind of output to its writer. Imports no pyspark, because Airflow checks what an empty batch needs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.stream import ConsoleOutput, ElasticsearchOutput, KafkaOutput, ParquetOutput

if TYPE_CHECKING:
    from headrace.spark.outputs.writer import OutputWriter
    from headrace.stream import Output, Stream


def writer_of(output: Output) -> OutputWriter:
    """The writer for an output of a stream. Imports only the module of its kind and what that needs."""
    if isinstance(output, ElasticsearchOutput):
        from headrace.spark.outputs.elasticsearch import ElasticsearchOutputWriter

        return ElasticsearchOutputWriter(output)
    if isinstance(output, ConsoleOutput):
        from headrace.spark.outputs.console import ConsoleWriter

        return ConsoleWriter(output)
    if isinstance(output, ParquetOutput):
        from headrace.spark.outputs.parquet.writer import ParquetWriter

        return ParquetWriter(output)
    if isinstance(output, KafkaOutput):
        from headrace.spark.outputs.kafka.writer import KafkaWriter

        return KafkaWriter(output)
    from headrace.spark.outputs.foreach_batch import ForeachBatchWriter

    return ForeachBatchWriter(output)


def needs_empty_batches(output: Output, stream: Stream) -> bool:
    """Whether a batch without records must run Spark for this output.

    A transform can make rows without records (a count of 0), and some outputs accept them. Without a transform there
    are no rows.
    """
    return stream.transform_of(output) is not None and writer_of(output).needs_empty_batches
