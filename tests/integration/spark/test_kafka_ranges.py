"""A batch's records in Spark, from the log and again from Kafka: the same rows, or an error that says what is gone."""

from __future__ import annotations

import dataclasses
import json
import urllib.request
import uuid
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from confluent_kafka import Producer
from confluent_kafka import TopicPartition as KafkaPartition
from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from tests.integration.spark.conftest import read_log

from headrace.batch.manifest import Manifest, ManifestBlock, ManifestError
from headrace.blocks import OffsetRange, ReceiverId, TopicPartition
from headrace.elasticsearch.counts import IndexingReport
from headrace.elasticsearch.dead_letters import OriginalRecord
from headrace.elasticsearch.options import KAFKA, LOG, IndexingOptions
from headrace.elasticsearch.target import Target
from headrace.kafka.client import consumer_config
from headrace.kafka.errors import RangesGoneError
from headrace.kafka.range_reader import KafkaRangeReader, RangeClients
from headrace.kafka.ranges import RecordedRange
from headrace.kafka.records import RecordChunk
from headrace.receiver.kafka_source import KafkaReceiver
from headrace.spark.attempts import shared_jobs
from headrace.spark.outputs.elasticsearch import write_documents
from headrace.spark.outputs.elasticsearch_sink import index_blocks
from headrace.spark.outputs.original_records import KafkaOriginalRecords, ManifestOriginalRecords
from headrace.spark.records.arrow_types import arrow_schema
from headrace.spark.records.kafka_ranges_source import KafkaBlocks, KafkaRangesDataSource
from headrace.spark.records.record_columns import RECORD_SCHEMA
from headrace.spark.records.wal_source import LogBlocks
from headrace.stream import ElasticsearchOutput, KafkaInput
from headrace.stream.settings import Limits
from headrace.wal.storage import open_storage
from headrace.wal.writer import WriteAheadLogWriter

PARTITIONS = 3
BATCH_TIME_MS = 1_700_000_010_000


class Received:
    """A topic with records, and a batch of all of them in a log."""

    def __init__(self, kafka: str, folder: Path) -> None:
        self.topic = f"ranges-{uuid.uuid4().hex[:12]}"
        self.admin = AdminClient({"bootstrap.servers": kafka})
        # The records are of the past: Kafka's own retention would take them in the middle of a test.
        new = NewTopic(self.topic, PARTITIONS, 1, config={"retention.ms": "-1"})
        self.admin.create_topics([new])[self.topic].result()
        self.source = KafkaInput(bootstrap_servers=kafka, topics=self.topic)
        self.folder = str(folder / "clicks")
        self.topic_id = str(RangeClients.of(self.source).questions().topic_ids([self.topic])[self.topic])
        self._produce(kafka)
        self.manifest = self._receive()

    def partition(self, number: int) -> TopicPartition:
        return TopicPartition(self.topic, self.topic_id, number)

    def write(self, manifest: Manifest) -> str:
        manifest.write(open_storage(self.folder), replace=True)
        return manifest.uri

    def expire(self, partition: int, before: int) -> None:
        where = KafkaPartition(self.topic, partition, before)
        self.admin.delete_records([where])[KafkaPartition(self.topic, partition)].result()

    def _produce(self, kafka: str) -> None:
        producer = Producer({"bootstrap.servers": kafka})
        for number in range(300):
            producer.produce(
                self.topic,
                None if number % 7 == 0 else b'{"n": %d}' % number,
                key=[None, b"", b"\x00\xff", b"key"][number % 4],
                partition=number % PARTITIONS,
                timestamp=1_700_000_000_000 + number,
                headers=[("trace", b"\x00"), ("none", None)] if number % 5 == 0 else None,
            )
        assert producer.flush(30) == 0

    def _receive(self) -> Manifest:
        receiver = KafkaReceiver(consumer_config(self.source, group="received", limits=Limits()))
        writer = WriteAheadLogWriter(open_storage(self.folder), "log", ReceiverId("clicks", "records", 0), 1)
        blocks: list[ManifestBlock] = []
        try:
            for number in range(PARTITIONS):
                receiver.assign(self.partition(number), 0)
            while set(receiver.partitions.values()) != {100}:
                for chunk in receiver.fetch(0.2, 50):
                    if isinstance(chunk, RecordChunk) and chunk.batch is not None:
                        last = writer.next_sequence - 1 if writer.next_sequence else None
                        written = writer.write(chunk.batch, chunk.ranges, cut_time_ms=0, last_accepted_sequence=last)
                        block = ManifestBlock(written.handle, chunk.records, written.payload_bytes, chunk.ranges)
                        blocks.append(block)
        finally:
            receiver.close()
        manifest = Manifest("clicks", BATCH_TIME_MS, 10_000, {"records": tuple(blocks)}, self.folder)
        assert manifest.records == 300
        self.write(manifest)
        return manifest


@pytest.fixture
def received(kafka: str, tmp_path: Path) -> Received:
    return Received(kafka, tmp_path)


def from_kafka(spark: SparkSession, source: KafkaInput, *manifests: str, **options: Any) -> DataFrame:
    spark.dataSource.register(KafkaRangesDataSource)
    given = {"manifests": json.dumps(manifests), "input": "records", "stream": source.model_dump_json(), **options}
    return spark.read.format("kafka_ranges").options(**given).load()


def rows(frame: DataFrame) -> list[Any]:
    return sorted(frame.collect(), key=lambda row: (row.topic, row.partition, row.offset))


def test_kafka_gives_the_rows_of_the_log(spark: SparkSession, received: Received) -> None:
    again = from_kafka(spark, received.source, received.manifest.uri, numPartitions=3)
    assert again.schema == RECORD_SCHEMA
    assert rows(again) == rows(read_log(spark, received.manifest.uri))
    assert len(rows(again)) == 300


def read_blocks(blocks: KafkaBlocks) -> pa.Table:
    numbers = pa.record_batch([pa.array(range(blocks.numbers))], ["id"])
    return pa.Table.from_batches(blocks.read(iter([numbers])), arrow_schema(RECORD_SCHEMA))


def test_blocks_from_kafka_are_the_records_of_the_log(
    spark: SparkSession, received: Received, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.spark.records.kafka_ranges_source.MIN_TASK_RECORDS", 120)
    blocks = KafkaBlocks.of([received.manifest], received.source)
    assert (blocks.records, blocks.weight, blocks.numbers, blocks.is_small) == (300, 300, 1, False)
    by_place = [("topic", "ascending"), ("partition", "ascending"), ("offset", "ascending")]
    log = read_log(spark, received.manifest.uri).toArrow().sort_by(by_place)
    assert read_blocks(blocks).sort_by(by_place).equals(log)


def test_the_batches_of_a_task_are_read_with_one_consumer(received: Received, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[KafkaRangeReader] = []
    closed: list[KafkaRangeReader] = []

    class Counted(KafkaRangeReader):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            opened.append(self)

        def close(self) -> None:
            super().close()
            closed.append(self)

    monkeypatch.setattr("headrace.spark.records.kafka_ranges_source.KafkaRangeReader", Counted)
    of_blocks = [
        KafkaBlocks.of([dataclasses.replace(received.manifest, inputs={"records": (one,)})], received.source)
        for one in received.manifest.inputs["records"]
    ]
    assert len(of_blocks) > 2
    with shared_jobs._sharing():
        found = sum(read_blocks(blocks).num_rows for blocks in of_blocks)
        assert (found, len(opened), closed) == (300, 1, [])
    assert closed == opened
    # Alone, each has its own.
    assert sum(read_blocks(blocks).num_rows for blocks in of_blocks) == 300
    assert len(opened) == len(closed) == 1 + len(of_blocks)


def test_a_tasks_next_batch_after_an_error_has_another_consumer(
    received: Received, monkeypatch: pytest.MonkeyPatch
) -> None:
    received.expire(0, 50)
    good = {"records": tuple(b for b in received.manifest.inputs["records"] if b.ranges[0].partition.partition == 2)}
    gone, left = (
        KafkaBlocks.of([dataclasses.replace(received.manifest, inputs=inputs)], received.source)
        for inputs in (received.manifest.inputs, good)
    )
    read: list[str] = []
    monkeypatch.setattr(KafkaRangeReader, "read", lambda self, runs: read.append("began") or iter(()))
    with shared_jobs._sharing():
        with pytest.raises(RangesGoneError, match=r"-0 \[0, 50\)"):
            read_blocks(gone)
        assert not read, "nothing is read, and so nothing written, of a batch of which Kafka has only a part"
        monkeypatch.undo()
        assert read_blocks(left).num_rows == left.records


def test_a_batch_from_kafka_is_indexed_by_tasks_that_read_it(
    received: Received, spark: SparkSession, elasticsearch: str, tmp_path: Path
) -> None:
    output = ElasticsearchOutput(hosts=(elasticsearch,), index=received.topic, refresh=True)
    reports: list[IndexingReport] = []
    for number, blocks in enumerate(
        (LogBlocks.of([received.manifest], "records"), KafkaBlocks.of([received.manifest], received.source))
    ):
        options = IndexingOptions.of(
            output,
            Target.of(output, "clicks"),
            batch_time_ms=BATCH_TIME_MS,
            report=f"file://{tmp_path}/report-{number}.json",
            manifests=[(KAFKA if number else LOG, received.manifest.uri)],
            inputs=[received.source],
            written_before=bool(number),
        )
        reports.append(index_blocks(lambda task, of, schema: of.run(spark, 2, task, schema), options, blocks))
    first, again = (report.counts for report in reports)
    assert (first.rows, again.rows) == (300, 300)
    assert again.repeated == first.indexed > 0, "the documents have the same ids and versions"


def test_several_batches_are_one_scan_and_an_overlap_is_refused(spark: SparkSession, received: Received) -> None:
    blocks = received.manifest.inputs["records"]
    assert len(blocks) > 1
    uris = [
        received.write(dataclasses.replace(received.manifest, batch_time_ms=10_000 * place, inputs={"records": (one,)}))
        for place, one in enumerate(blocks, 1)
    ]
    assert rows(from_kafka(spark, received.source, *uris)) == rows(read_log(spark, received.manifest.uri))
    with pytest.raises(PySparkException, match="overlap"):
        from_kafka(spark, received.source, received.manifest.uri, uris[0]).count()


def test_a_read_without_offset_ranges_does_not_connect_to_kafka(spark: SparkSession, tmp_path: Path) -> None:
    nowhere = KafkaInput(bootstrap_servers="127.0.0.1:1", topics="clicks")
    empty = Manifest("clicks", BATCH_TIME_MS, 10_000, {"records": ()}, f"{tmp_path}/clicks")
    empty.write(open_storage(empty.folder_url))
    assert from_kafka(spark, nowhere, empty.uri).collect() == []
    assert from_kafka(spark, nowhere).collect() == []


def test_a_batch_built_from_kafka_has_no_blocks_in_the_log(spark: SparkSession, received: Received) -> None:
    built = {"records": (RecordedRange(received.partition(0), 10, 30, None),)}
    uri = received.write(dataclasses.replace(received.manifest, inputs={"records": ()}, built=built))
    found = rows(from_kafka(spark, received.source, uri))
    assert [(row.partition, row.offset) for row in found] == [(0, offset) for offset in range(10, 30)]
    with pytest.raises(ManifestError, match="its records are in no log"):
        read_log(spark, uri).count()


def test_where_retention_took_ranges_nothing_is_written(
    spark: SparkSession, received: Received, tmp_path: Path
) -> None:
    received.expire(0, 50)
    received.expire(2, 100)
    with pytest.raises(PySparkException, match="RangesGoneError") as reported:
        from_kafka(spark, received.source, received.manifest.uri).write.parquet(f"{tmp_path}/out")
    assert f"{received.topic}-0 [0, 50)" in str(reported.value)
    assert f"{received.topic}-2 [0, 100)" in str(reported.value)
    assert not list(tmp_path.glob("out/**/*.parquet"))


def test_another_number_of_records_fails_the_batch(spark: SparkSession, received: Received) -> None:
    first, *others = received.manifest.inputs["records"]
    taken = first.ranges[0]
    wrong = OffsetRange(taken.partition, taken.from_offset, taken.until_offset, taken.records - 1)
    blocks = (dataclasses.replace(first, ranges=(wrong, *first.ranges[1:])), *others)
    uri = received.write(dataclasses.replace(received.manifest, inputs={"records": blocks}))
    with pytest.raises(PySparkException, match="RecordsDifferError"):
        from_kafka(spark, received.source, uri).count()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stream": ""}, "needs the option.s. stream"),
        ({"stream": "{}"}, "KafkaInput cannot be used as it is defined"),
        ({"stream": '{"connection": "nobody", "topics": ["t"]}'}, "'nobody' is not known"),
        ({"numPartitions": "none"}, "numPartitions"),
        ({"stallSeconds": "soon"}, "stallSeconds"),
    ],
)
def test_wrong_options_are_refused_with_their_names(spark: SparkSession, options: dict[str, str], message: str) -> None:
    source = KafkaInput(bootstrap_servers="127.0.0.1:1", topics="clicks")
    with pytest.raises(PySparkException, match=message):
        from_kafka(spark, source, **options).count()


def test_dead_letters_find_the_same_record_in_kafka_and_the_log(received: Received) -> None:
    log = ManifestOriginalRecords(received.manifest.uri)
    clients = KafkaOriginalRecords.clients_of([received.source])
    with KafkaOriginalRecords(received.manifest.uri, clients) as again:
        for partition, offset in [(0, 0), (0, 1), (0, 99), (2, 50), (0, 5), (1, 7)]:
            record = again.fetch(received.topic, partition, offset, 1)
            assert isinstance(record, OriginalRecord)
            assert record == log.fetch(received.topic, partition, offset, 1)
        assert again.fetch(received.topic, 0, 100, 1) is None
        assert again.fetch(received.topic, 0, 0, 2) is None
        assert again.fetch("another", 0, 0, 1) is None


def test_a_dead_letter_of_a_replayed_batch_has_its_record(
    spark: SparkSession, received: Received, elasticsearch: str, tmp_path: Path
) -> None:
    frame = from_kafka(spark, received.source, received.manifest.uri)
    changed = frame.where("offset < 10 AND value IS NOT NULL").selectExpr(
        "topic", "partition", "offset", "if(offset = 3, 'no number', cast(offset AS STRING)) AS n"
    )
    output = ElasticsearchOutput(hosts=(elasticsearch,), index=received.topic, refresh=True)
    settings = {"mappings": {"properties": {"n": {"type": "long"}}}}
    ask(elasticsearch, "PUT", received.topic, settings)
    # Neither is the log there any more.
    for segment in Path(f"{received.folder}/log").rglob("*.wal"):
        segment.unlink()
    options = IndexingOptions.of(
        output,
        Target.of(output, "clicks"),
        batch_time_ms=BATCH_TIME_MS,
        report=f"file://{tmp_path}/report.json",
        manifests=[(KAFKA, received.manifest.uri)],
        inputs=[received.source],
    )
    report = write_documents(changed, output, options)
    rejected = changed.where("offset = 3").count()
    assert report.counts.dead_lettered == rejected > 0
    ask(elasticsearch, "POST", f"{received.topic}-dead-letters/_refresh")
    hits = ask(elasticsearch, "GET", f"{received.topic}-dead-letters/_search?size=100")["hits"]["hits"]
    assert len(hits) == rejected
    for hit in hits:
        number = 3 * PARTITIONS + hit["_source"]["partition"]
        assert hit["_source"]["value_text"] == f'{{"n": {number}}}'


def ask(url: str, method: str, path: str, body: Any = None) -> Any:
    request = urllib.request.Request(  # noqa: S310
        f"{url}/{path}",
        method=method,
        data=None if body is None else json.dumps(body).encode(),
        headers={"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=30) as answer:  # noqa: S310
        return json.load(answer)
