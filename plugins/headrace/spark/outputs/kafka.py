"""The Kafka output: sends a batch to a topic in one transaction, which is committed once.

`KafkaWriter` makes messages of any DataFrame, by Spark's own expressions: SQL text, which works the same in classic
sessions and over Spark Connect. It writes them by the "headrace_kafka" data source. One transaction has one producer,
so the rows must be in one partition, as from `in_one_partition`. The output's connection is resolved in the process
that plans the write. Its secrets are sent inside the pickled writer, and are in no option and no plan.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING
from urllib.parse import quote

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceArrowWriter, WriterCommitMessage
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DataType,
    IntegerType,
    LongType,
    MapType,
    ShortType,
    StringType,
    StructType,
)

from headrace.batch.manifest import Manifest
from headrace.elasticsearch.columns import COORDINATES, HEADERS, KEY, PARTITION, TOPIC, VALUE
from headrace.kafka.producers import KafkaOutputError, OwnTopicError, client_config, topic_id
from headrace.spark.outputs.documents import json_text
from headrace.spark.outputs.kafka_transaction import (
    END,
    BatchTransaction,
    FormerName,
    Sent,
    SentRecords,
    TopicSenders,
)
from headrace.spark.outputs.writer import OutputOptionsError, OutputRowsError, counted, leave_counts
from headrace.spark.records.record_columns import own_columns
from headrace.spark.sessions import register_source

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from headrace.spark.outputs.writer import Counts, WrittenBatch
    from headrace.stream import KafkaOutput, Output


_ORDER = "_order"
_LAST = 2**63 - 1
_MESSAGE_COLUMNS = frozenset({KEY, VALUE, HEADERS, PARTITION})


def prepare_messages(df: DataFrame, output: str) -> DataFrame:
    """The rows of ``df`` as messages of the output with this id.

    The result has a binary ``value`` and, if ``df`` has them, a binary ``key``, ``headers`` as in the log and an INT
    ``partition``. Values and keys may be bytes, text, or a struct, map or array, which is written as JSON; a null value
    is a tombstone. Rows with topic, partition and offset are records of the log: these columns and the record's own
    columns describe its source and are not written. A partition that replaces the record's own is the message's. Raises
    OutputRowsError for any other column.
    """
    schema = df.schema
    types: dict[str, DataType] = {field.name: field.dataType for field in schema.fields}
    own = own_columns(schema)
    is_record = all(name in types for name in COORDINATES)
    _check_columns(types, output, _MESSAGE_COLUMNS.union(own, COORDINATES) if is_record else _MESSAGE_COLUMNS)
    expressions = [_bytes_expression(name, types[name], output) for name in (VALUE, KEY) if name in types]
    if HEADERS in types:
        _check_headers(types[HEADERS], output)
        expressions.append(f"CAST({HEADERS} AS ARRAY<STRUCT<key: STRING, value: BINARY>>) AS {HEADERS}")
    if PARTITION in types and (not is_record or (TOPIC in own and PARTITION not in own)):
        if not isinstance(types[PARTITION], IntegerType | LongType | ShortType):
            raise OutputRowsError(
                f"The column 'partition' for output {output!r} is {types[PARTITION].simpleString()}, not a number.",
                remedy="Cast it to INT, or drop it: then Kafka's partitioner chooses by the key.",
            )
        expressions.append(f"CAST({PARTITION} AS INT) AS {PARTITION}")
    return df.selectExpr(*expressions)


def in_one_partition(messages: DataFrame) -> DataFrame:
    """The messages in one partition, in their original order, followed by a row whose ``_end`` is true.

    A Python worker cannot distinguish the end of its rows from the end of a JVM that failed, was cancelled or was
    killed: both end the stream. So the JVM marks the end with a row that its sort puts last. Because of the sort, all
    cores compute the transform completely before the first message is sent.
    """
    types = {field.name: field.dataType.simpleString() for field in messages.schema.fields}
    rows = messages.selectExpr("*", f"monotonically_increasing_id() AS {_ORDER}")
    nothing = [f"CAST(NULL AS {kind}) AS {name}" for name, kind in types.items()]
    end = messages.sparkSession.range(1).selectExpr(*nothing, f"{_LAST}L AS {_ORDER}")
    ordered = rows.unionAll(end).repartition(1).sortWithinPartitions(_ORDER)
    return ordered.selectExpr(*types, f"{_ORDER} = {_LAST}L AS {END}")


def _check_columns(types: dict[str, DataType], output: str, known: frozenset[str]) -> None:
    if VALUE not in types:
        raise OutputRowsError(
            f"The rows for output {output!r} have no column 'value'; they have {', '.join(map(repr, types))}.",
            remedy="Select the message in the transform, for example to_json(struct(*)) AS value.",
        )
    surplus = sorted(types.keys() - known)
    if surplus:
        raise OutputRowsError(
            f"The rows for output {output!r} have {', '.join(map(repr, surplus))}, which are not part of a message.",
            remedy="Select only value, and optionally key, headers and partition, in the transform.",
        )


def _bytes_expression(name: str, kind: DataType, output: str) -> str:
    if isinstance(kind, BinaryType):
        return name
    if isinstance(kind, StringType):
        return f"CAST({name} AS BINARY) AS {name}"
    if isinstance(kind, StructType | MapType | ArrayType):
        return f"CAST({json_text(name)} AS BINARY) AS {name}"
    raise OutputRowsError(
        f"The column {name!r} for output {output!r} is {kind.simpleString()}.",
        remedy="Cast it to STRING, or make it a struct that is written as JSON.",
    )


def _check_headers(kind: DataType, output: str) -> None:
    element = kind.elementType if isinstance(kind, ArrayType) else None
    if isinstance(element, StructType) and element.names == ["key", "value"]:
        key, value = (field.dataType for field in element.fields)
        if isinstance(key, StringType) and isinstance(value, BinaryType | StringType):
            return
    raise OutputRowsError(
        f"The column 'headers' for output {output!r} is {kind.simpleString()}.",
        remedy="Make it ARRAY<STRUCT<key: STRING, value: BINARY>>, as the log has it, or drop it.",
    )


FORMAT = "headrace_kafka"
# Among the folders of outputs, whose names have no plus.
_SENDERS = "+topics"


class KafkaDataSource(DataSource):
    """The data source that Spark registers; it is write-only. `KafkaWriter` sets its options."""

    @classmethod
    def name(cls) -> str:
        return FORMAT

    def writer(self, schema: StructType, overwrite: bool) -> KafkaSink:  # noqa: ARG002 - neither matters
        """Check that the topic exists, that the batch has no records of it, and that no replay sends it there again.

        Raises KafkaOutputError, OutputOptionsError, or a connection's errors.
        """
        options = self.options
        try:
            transaction = BatchTransaction(
                config=client_config(options.get("connection"), options.get("bootstrap_servers")),
                topic=options["topic"],
                name=options["transaction"],
                attempt=int(options["attempt"]),
                timeout_seconds=float(options["transaction_timeout_seconds"]),
                records=SentRecords(options["sent_folder"], options["sent_name"]),
                former=tuple(
                    FormerName(name, SentRecords(folder, options["sent_name"]))
                    for name, folder in json.loads(options.get("former", "[]"))
                ),
            )
            senders = TopicSenders(
                f"{options['sent_root']}/{_SENDERS}", options["place"], tuple(json.loads(options["present"]))
            )
            batch_time_ms = int(options["sent_name"].removesuffix(".json"))
            live_folders = [options.get("live_sent_folder"), *json.loads(options.get("other_live_folders", "[]"))]
            report = options["report"]
            read_topics = json.loads(options["read_topics"])
        except (KeyError, ValueError) as error:
            raise OutputOptionsError(
                f"An option of the {FORMAT} data source is missing or invalid: {error!r}."
            ) from None
        sent_to = topic_id(transaction.config, transaction.topic)
        if sent_to in read_topics:
            raise OwnTopicError(
                f"The batch has records of topic {transaction.topic!r} of this cluster, to which it is to be sent: the "
                "stream would receive what it sends, without end.",
                remedy="Send to another topic. (The input names the cluster by other servers or another connection.)",
            )
        if any(SentRecords(folder, options["sent_name"]).find(sent_to) for folder in live_folders if folder):
            raise OwnTopicError(
                f"The stream itself has sent the batch to topic {transaction.topic!r}, and the replay would send it "
                "there again.",
                remedy="Send the replay to another topic. (It names the cluster by other servers or another "
                "connection.)",
            )
        named = {former.name: former for former in transaction.former}
        for place in senders.former(sent_to):
            name = _transaction(options["stream"], place, batch_time_ms)
            folder = _sent_folder(options["sent_root"], place, transaction.topic)
            named.setdefault(name, FormerName(name, SentRecords(folder, options["sent_name"])))
        senders.note(sent_to)
        return KafkaSink(replace(transaction, former=tuple(named.values())), report)


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
        for sent_batch in reported:
            messages_sent["repeated" if sent_batch.before else "messages"] = sent_batch.sent.messages
            messages_sent["bytes"] = 0 if sent_batch.before else sent_batch.sent.bytes
        leave_counts(self._report, messages_sent)

    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Do nothing: the task has aborted its transaction, or the next attempt will."""

    def __repr__(self) -> str:
        return f"KafkaSink({self._transaction.topic!r})"


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

    def write(self, frame: DataFrame | None, batch: WrittenBatch) -> Counts:
        """Send the rows. Returns ``messages``, ``repeated`` and ``bytes`` (of keys and values, before compression).

        Raises OutputRowsError; within Spark KafkaOutputError, AttemptReplacedError, or a connection's errors.
        """
        if frame is None:
            return {"messages": 0, "repeated": 0, "bytes": 0}

        rows = in_one_partition(prepare_messages(frame, self._output.id))
        register_source(frame.sparkSession, KafkaDataSource)
        options = {**self._options(batch), **self._other_ids(batch)}

        def save(report: str) -> None:
            rows.write.format(FORMAT).options(**options, report=report).mode("append").save()

        return counted(save, batch, self._output.id)

    def _options(self, batch: WrittenBatch) -> dict[str, str]:
        output = self._output
        place = _place(output.step, batch)
        options = {
            "connection": output.connection,
            "bootstrap_servers": output.bootstrap_servers,
            "topic": output.topic,
            "stream": batch.stream.name,
            "place": place,
            "present": json.dumps(self._present(batch)),
            "transaction": _transaction(batch.stream.name, place, batch.batch_time_ms),
            "attempt": str(batch.attempt),
            "transaction_timeout_seconds": str(output.transaction_timeout_seconds),
            "sent_root": _sent_root(batch),
            "sent_folder": _sent_folder(_sent_root(batch), place, output.topic),
            "live_sent_folder": _sent_folder(_sent_root(batch), output.step, output.topic) if batch.target else None,
            "sent_name": f"{batch.batch_time_ms}.json",
            "read_topics": json.dumps(read_topic_ids(batch, output.topic)),
        }
        return {name: value for name, value in options.items() if value is not None}

    def _other_ids(self, batch: WrittenBatch) -> dict[str, str]:
        """Where the batch may have been sent to the topic by other ids of the output, and, of a replay, by the stream's
        own outputs."""
        places = [_place(step, batch) for step in batch.former_steps]
        root, topic = _sent_root(batch), self._output.topic
        former = [
            (_transaction(batch.stream.name, place, batch.batch_time_ms), _sent_folder(root, place, topic))
            for place in places
        ]
        live = [_sent_folder(root, step, topic) for step in batch.stream_steps]
        return {"former": json.dumps(former), "other_live_folders": json.dumps(live)}

    def _present(self, batch: WrittenBatch) -> list[str]:
        """The outputs that the definition has at the topic's name, this one too."""
        at_topic = {output.step for output in batch.stream.outputs if output.places[:1] and self._is_there(output)}
        return sorted(_place(step, batch) for step in {self._output.step, *at_topic})

    def _is_there(self, output: Output) -> bool:
        return output.kind == self._output.kind and output.places[0].name == self._output.topic


def read_topic_ids(batch: WrittenBatch, topic: str) -> list[str]:
    """The ids of the topics of this name of which the batch, or its window, has records: a definition may name the
    input's cluster by another connection. None in a test of the transform, whose batch has no manifest."""
    inputs = [source for source in batch.stream.kafka_inputs if source.matches(topic)]
    if not inputs or not batch.manifest_uri:
        return []
    # Not at the top: Spark's workers import this module, and need no ledger.
    from headrace.spark.attempts.batch_plan import load_manifests

    manifests = [Manifest.load(batch.manifest_uri), *load_manifests(batch.earlier)]
    partitions = [
        recorded.partition for manifest in manifests for source in inputs for recorded in manifest.ranges(source.id)
    ]
    return sorted({where.topic_id for where in partitions if where.topic == topic})


def _place(step: str, batch: WrittenBatch) -> str:
    # Ids of streams and outputs contain no ".", so these names are unique. By its first id an output that was renamed
    # finds what it has sent.
    return f"{step}.{batch.target}" if batch.target else step


def _transaction(stream_name: str, place: str, batch_time_ms: int) -> str:
    return f"headrace-{stream_name}.{place}-{batch_time_ms}"


def _sent_root(batch: WrittenBatch) -> str:
    return f"{batch.stream.folder_url}/sent"


def _sent_folder(root: str, place: str, topic: str) -> str:
    return f"{root}/{quote(place, safe='')}/{topic}"
