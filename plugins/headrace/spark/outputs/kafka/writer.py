"""The Kafka output: sends a batch to a topic in one transaction, which is committed once."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import quote

from headrace.spark.outputs.report_files import counted

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from headrace.spark.outputs.writer import Counts, WrittenBatch
    from headrace.stream import KafkaOutput


class KafkaWriter:
    """Sends ``value``, and if present ``key``, ``headers`` and ``partition``, of every row to a topic.

    A consumer that reads committed records sees all of a batch or nothing. A batch is sent to a topic once. If it is
    run again, after a crash or on purpose, its messages are counted as ``repeated`` and not sent, even if the transform
    has changed. To send it again, replay it to another topic.

    One task sends all rows, in their order, after all tasks have computed them. So the transaction is open only while
    the rows are sent.
    """

    def __init__(self, output: KafkaOutput) -> None:
        self._output = output

    @property
    def needs_empty_batches(self) -> bool:
        """True: rows that are made without records can be sent as messages."""
        return True

    def write(self, frame: DataFrame | None, batch: WrittenBatch) -> Counts:
        """Send the rows. Returns ``messages``, ``repeated`` and ``bytes`` (of keys and values, before compression).

        Raises OutputRowsError; within Spark KafkaOutputError, AttemptReplacedError, or a connection's errors.
        """
        if frame is None:
            return {"messages": 0, "repeated": 0, "bytes": 0}
        from headrace.spark.outputs.kafka.message_columns import in_one_partition, prepare_messages
        from headrace.spark.outputs.kafka.sink import FORMAT, KafkaDataSource

        rows = in_one_partition(prepare_messages(frame, self._output.id))
        frame.sparkSession.dataSource.register(KafkaDataSource)
        options = self._options(batch)

        def save(report: str) -> None:
            rows.write.format(FORMAT).options(**options, report=report).mode("append").save()

        return counted(save, batch, self._output.id)

    def _options(self, batch: WrittenBatch) -> dict[str, str]:
        output = self._output
        # Ids of streams and outputs contain no ".", so these names are unique. By its first id an output that was
        # renamed finds what it has sent.
        place = f"{output.step}.{batch.target}" if batch.target else output.step
        options = {
            "connection": output.connection,
            "bootstrap_servers": output.bootstrap_servers,
            "topic": output.topic,
            "transaction": f"headrace-{batch.stream.name}.{place}-{batch.batch_time_ms}",
            "attempt": str(batch.attempt),
            "transaction_timeout_seconds": str(output.transaction_timeout_seconds),
            "sent_folder": f"{batch.stream.folder_url}/sent/{quote(place, safe='')}/{output.topic}",
            "sent_name": f"{batch.batch_time_ms}.json",
        }
        return {name: value for name, value in options.items() if value is not None}
