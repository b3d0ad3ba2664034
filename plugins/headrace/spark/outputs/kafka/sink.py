"""The "headrace_kafka" data source: sends a DataFrame's rows as the transaction of one batch.

One transaction has one producer, so the rows must be in one partition, as from `in_one_partition`. The output's
connection is resolved in the process that plans the write. Its secrets are sent inside the pickled writer, and are in
no option and no plan.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from headrace.spark.outputs.errors import KafkaOutputError, OutputOptionsError
from headrace.spark.outputs.kafka.client import client_config, topic_id
from headrace.spark.outputs.kafka.sent_batches import Sent, SentRecords
from headrace.spark.outputs.kafka.transaction import BatchTransaction
from headrace.spark.outputs.report_files import leave_counts

FORMAT = "headrace_kafka"


class KafkaDataSource(DataSource):
    """The data source that Spark registers; it is write-only. `KafkaWriter` sets its options."""

    @classmethod
    def name(cls) -> str:
        return FORMAT

    def writer(self, schema: StructType, overwrite: bool) -> KafkaSink:  # noqa: ARG002 - neither matters
        """Check that the topic exists. Raises KafkaOutputError, OutputOptionsError, or a connection's errors."""
        options = self.options
        try:
            transaction = BatchTransaction(
                config=client_config(options.get("connection"), options.get("bootstrap_servers")),
                topic=options["topic"],
                name=options["transaction"],
                attempt=int(options["attempt"]),
                timeout_seconds=float(options["transaction_timeout_seconds"]),
                records=SentRecords(options["sent_folder"], options["sent_name"]),
            )
            report = options["report"]
        except (KeyError, ValueError) as error:
            raise OutputOptionsError(
                f"An option of the {FORMAT} data source is missing or invalid: {error!r}."
            ) from None
        topic_id(transaction.config, transaction.topic)
        return KafkaSink(transaction, report)


@dataclass
class TaskMessages(WriterCommitMessage):
    """The single task's commit message; ``before``: whether the batch had been sent before."""

    sent: Sent
    before: bool


class KafkaSink(DataSourceArrowWriter):
    """The writer. It is pickled to the task and to the process that commits."""

    def __init__(self, transaction: BatchTransaction, report: str) -> None:
        self._transaction = transaction
        self._report = report

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Send the batch; it is committed in Kafka when this returns."""
        return TaskMessages(*self._transaction.send(iterator))

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Write the counts for the caller."""
        reported = [message for message in messages if isinstance(message, TaskMessages)]
        if len(reported) > 1:
            raise KafkaOutputError(f"The batch was in {len(reported)} partitions instead of one.")
        messages_sent = {"messages": 0, "repeated": 0, "bytes": 0}
        for each in reported:
            messages_sent["repeated" if each.before else "messages"] = each.sent.messages
            messages_sent["bytes"] = 0 if each.before else each.sent.bytes
        leave_counts(self._report, messages_sent)

    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Do nothing: the task has aborted its transaction, or the next attempt will."""

    def __repr__(self) -> str:
        return f"KafkaSink({self._transaction.topic!r})"
