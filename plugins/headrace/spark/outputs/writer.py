"""The interface of output writers, and the writer of each kind of output.

It imports no pyspark, because Airflow asks what an output needs for an empty batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any, Protocol

from headrace.stream import ConsoleOutput, ElasticsearchOutput, KafkaOutput, ParquetOutput

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from headrace.ledger.batch_tables import BatchOrigin
    from headrace.spark.incarnations import BatchIncarnations
    from headrace.spark.transforms import BatchContext
    from headrace.stream import Output, Stream

Counts = dict[str, Any]
"""The outcomes of a batch's rows: names and JSON values that each kind of output defines."""


@dataclass(frozen=True, slots=True)
class WrittenBatch:
    """The batch that is being written.

    ``from_kafka``: the records are read again from Kafka, because the log does not have them. ``undecodable``: returns
    the records that do not decode, by input id, for inputs that have any; it is fast after the rows were written, and
    before it reads all records. ``earlier``: the other batches that the output reads,
    those of its window. ``incarnations``: returns the topic incarnations of all batches that it reads.
    ``written_before``: an earlier attempt may have written documents of this batch to the output. ``tried_before``: an
    earlier attempt included the output and may have written dead letters. ``target``: the name of a replay, "" for the
    stream's own output. ``out``: where a console output prints. ``progress``: receives lines of text on the progress.
    """

    stream: Stream
    context: BatchContext
    batch_time_ms: int
    attempt: int
    manifest_uri: str
    from_kafka: bool
    target: str
    out: IO[str]
    progress: Callable[[str], None]
    undecodable: Callable[[], Mapping[str, DataFrame]] = dict
    earlier: tuple[BatchOrigin, ...] = ()
    incarnations: Callable[[], BatchIncarnations] | None = None
    written_before: bool = False
    tried_before: bool = False


class OutputWriter(Protocol):
    """Writes batches to one output."""

    @property
    def needs_empty_batches(self) -> bool:
        """Whether this output can use rows that a transform makes from a batch without records."""
        ...

    def write(self, frame: DataFrame | None, batch: WrittenBatch) -> Counts:
        """Write the rows. Repeated calls for the same batch have the effect of one.

        ``frame`` is None for an empty batch that needs no Spark; then there is no session.

        Raises:
            HeadraceError: the rows do not fit the output, or its server refuses them; the batch can be run again.
        """
        ...


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
