"""The sink from DataFrames into a real Elasticsearch, in a classic session; over Spark Connect: `test_over_connect`."""

from __future__ import annotations

import base64
import json
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark import TaskContext
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.types import StructType
from tests.integration.spark.conftest import read_log

from headrace.batch.manifest import Manifest
from headrace.connections import ConnectionNotFoundError
from headrace.elasticsearch.errors import DocumentsUnaccountedError, UnsuitableRowsError, UnsuitableTargetError
from headrace.elasticsearch.options import LOG, DocumentIdKind, IndexingOptions
from headrace.elasticsearch.target import Target
from headrace.spark.outputs.documents import prepare_documents
from headrace.spark.outputs.elasticsearch import write_documents
from headrace.spark.outputs.elasticsearch_sink import index_blocks, index_rows
from headrace.spark.outputs.held_deletions import MAX_KEPT_BYTES
from headrace.spark.records.record_columns import RECORD_SCHEMA, record_mark
from headrace.spark.records.wal_source import LogBlocks
from headrace.stream import ColumnIds, ElasticsearchOutput, KeyIds

Records = Callable[..., pa.RecordBatch]

AN_HOUR = 3_600_000


class Index:
    """One test's index: an output that writes to it, and what is in it."""

    def __init__(self, url: str, folder: Path) -> None:
        self.url = url
        self.name = f"spark-{uuid.uuid4().hex[:12]}"
        self._folder = folder

    def output(self, **fields: Any) -> ElasticsearchOutput:
        return ElasticsearchOutput(hosts=(self.url,), index=self.name, max_retry_seconds=20, **fields)

    def write(self, df: DataFrame, *, manifest: str | None = None, batch_time_ms: int = AN_HOUR, **fields: Any) -> Any:
        report = f"file://{self._folder}/reports/{uuid.uuid4().hex}.json"
        output = self.output(**fields)
        options = IndexingOptions.of(
            output,
            Target.of(output, "clicks"),
            batch_time_ms=batch_time_ms,
            report=report,
            manifests=[(LOG, manifest)] if manifest else [],
        )
        return write_documents(df, output, options).counts

    def documents(self, suffix: str = "") -> dict[str, Any]:
        return {hit["_id"]: hit["_source"] for hit in self._hits(suffix)}

    def letters(self) -> dict[str, Any]:
        """The dead letters by what their ids say of the row, behind the stream, the output and the index."""
        ours = f"clicks/elasticsearch/{self.name}/"
        return {id_.removeprefix(ours): letter for id_, letter in self.documents("-dead-letters").items()}

    def state(self) -> dict[str, tuple[int, int]]:
        """(version, sequence number) by id: both stay when nothing is written."""
        return {hit["_id"]: (hit["_version"], hit["_seq_no"]) for hit in self._hits("")}

    def ask(self, method: str, path: str, body: Any = None) -> Any:
        request = urllib.request.Request(  # noqa: S310
            f"{self.url}{path}",
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"content-type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=30) as answer:  # noqa: S310
            return json.load(answer)

    def _hits(self, suffix: str) -> list[Any]:
        self.ask("POST", f"/{self.name}{suffix}/_refresh")
        query = {"size": 10_000, "version": True, "seq_no_primary_term": True}
        hits: list[Any] = self.ask("POST", f"/{self.name}{suffix}/_search", query)["hits"]["hits"]
        return hits


@pytest.fixture
def index(elasticsearch: str, tmp_path: Path) -> Iterator[Index]:
    one = Index(elasticsearch, tmp_path)
    yield one
    for name in one.ask("GET", f"/{one.name}*/_settings?filter_path=*.settings.index.provided_name"):
        one.ask("DELETE", f"/{name}")


@pytest.fixture
def records(spark: SparkSession, written_log: Any, make_records: Records) -> Callable[..., tuple[DataFrame, str]]:
    """A batch of the log with these values, as a DataFrame, and its manifest."""

    def read(*values: bytes | None) -> tuple[DataFrame, str]:
        half = len(values) // 2 or 1
        written_log.add(make_records(list(values[:half])))
        if values[half:]:
            written_log.add(make_records(list(values[half:]), first_offset=half))
        manifest = written_log.manifest()
        return read_log(spark, manifest), manifest

    return read


def test_records_become_documents_once_however_often_written(index: Index, records: Any) -> None:
    df, _ = records(*(json.dumps({"n": n}).encode() for n in range(500)))
    first = index.write(df)
    before = index.state()
    second = index.write(df)
    assert (first.rows, first.created, second.repeated, second.indexed) == (500, 500, 500, 0)
    assert index.documents()["clicks+0+499"] == {"n": 499}
    assert index.state() == before


def test_dead_letters_have_all_fields(index: Index, records: Any) -> None:
    df, _ = records(b'{"n": 1}', b"junk", None, b'{"n": "\xff"}')
    for _ in range(2):
        counts = index.write(df)
        assert (counts.dead_lettered, counts.rows) == (3, 4)
    letters = index.letters()
    assert set(letters) == {"clicks+0+1", "clicks+0+2", "clicks+0+3"}
    junk = letters["clicks+0+1"]
    assert (junk["stream"], junk["batch_time"], junk["value_text"]) == ("clicks", AN_HOUR, "junk")
    assert base64.b64decode(junk["key"]) == b"key-1"
    assert junk["headers"] == [{"key": "trace", "value": base64.b64encode(b"\x00\xff").decode()}]
    assert counts.dead_letter_reasons == {"malformed_document": 2, "tombstone": 1}


def test_a_transformed_rows_dead_letter_has_the_logs_record(index: Index, records: Any) -> None:
    index.ask("PUT", f"/{index.name}", {"mappings": {"properties": {"word": {"type": "long"}}}})
    df, manifest = records(b"one", b"2", b"three")
    words = df.selectExpr("topic", "partition", "offset", "incarnation", "upper(cast(value as string)) AS word")
    counts = index.write(words, manifest=manifest)
    assert (counts.created, counts.dead_lettered) == (1, 2)
    assert index.documents() == {"clicks+0+1": {"word": "2"}}
    letter = index.letters()["clicks+0+2"]
    assert letter["document_text"] == '{"word":"THREE"}'
    assert base64.b64decode(letter["value"]) == b"three"
    assert base64.b64decode(letter["key"]) == b"key-2"


def test_rows_that_a_transform_rejects_are_dead_letters(index: Index, records: Any) -> None:
    df, _ = records(b'{"n": 1}', b'{"n": 2}')
    marked = df.selectExpr("*", "CASE WHEN offset = 1 THEN 'odd' END AS rejected_because")
    counts = index.write(marked)
    assert (counts.created, counts.dead_lettered) == (1, 1)
    assert index.letters()["clicks+0+1"]["reason"] == {"type": "rejected", "text": "odd"}


def test_keys_hold_their_latest_value(spark: SparkSession, index: Index) -> None:
    newer = rows(spark, "('a', 9, '{\"n\":9}'), ('b', 8, NULL)")
    older = rows(spark, "('a', 5, '{\"n\":5}'), ('b', 4, '{\"n\":4}')")
    assert (counts := index.write(newer, document_ids=KeyIds())).created == 1
    assert counts.deleted == 1
    assert index.write(older, document_ids=KeyIds()).superseded == 2
    assert index.write(newer, document_ids=KeyIds()).repeated == 2
    assert index.documents() == {"a": {"n": 9}}


@pytest.mark.parametrize("way", ["blocks", "blocks read again", "rows", "rows read again"])
def test_a_deleted_key_does_not_come_back_by_a_slower_task(
    spark: SparkSession, index: Index, written_log: Any, make_records: Records, way: str
) -> None:
    """The first task has the deletions. The second gets older values of the keys when Elasticsearch has forgotten
    them."""
    index.ask("PUT", f"/{index.name}", {"settings": {"index.gc_deletes": "0s", "number_of_shards": 1}})
    keys = MAX_KEPT_BYTES // 50 if "again" in way else 50
    newer, older = make_records([None] * keys, first_offset=1_000_000), make_records([b"{}"] * keys)
    last = make_records([b'{"last": true}'], first_offset=keys)
    for block in (newer.set_column(0, "key", older.column("key")), last, older):
        written_log.add(block)
    blocks = LogBlocks.of([Manifest.load(written_log.manifest())], "records")
    output = index.output(document_ids=KeyIds(), requests_in_flight=1, bulk_actions=1000)
    options = IndexingOptions.of(output, Target.of(output, "clicks"), batch_time_ms=AN_HOUR)
    records = 2 * keys + 1
    numbers = spark.range(0, keys + 1, 1, 1).union(spark.range(keys + 1, records, 1, 1))
    waiting = numbers.mapInArrow(second_task_waits(index, f"key-{keys}"), "id BIGINT")
    if "blocks" in way:
        report = index_blocks(over(waiting), options, blocks)
    else:
        report = index_rows(prepare_documents(waiting.mapInArrow(blocks.read, RECORD_SCHEMA), output), options)
    counts = report.counts
    assert (counts.rows, counts.created, counts.deleted, report.duplicates) == (records, keys + 1, keys, 0)
    assert index.documents() == {f"key-{keys}": {"last": True}}
    again = index_blocks(over(blocks.numbered(spark, 2)), options, blocks).counts
    # A deletion that Elasticsearch has not forgotten yet is a repeated one.
    assert (again.rows, again.repeated + again.deleted) == (records, 1 + keys)
    assert index.documents() == {f"key-{keys}": {"last": True}}


def second_task_waits(index: Index, last: str) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """Let the second task begin when the document of this id, the first task's last one, is in the index, and when
    Elasticsearch has forgotten a deletion that came after it."""
    documents = f"{index.url}/{index.name}/_doc"

    def status(method: str, path: str) -> int:
        request = urllib.request.Request(  # noqa: S310
            f"{documents}/{path}", method=method, data=b"{}" if method == "PUT" else None,
            headers={"content-type": "application/json"},
        )  # fmt: skip
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:  # noqa: S310
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code

    def wait(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        if TaskContext.get().partitionId() == 1:
            until = time.monotonic() + 60
            while status("GET", last) != 200 and time.monotonic() < until:
                time.sleep(0.05)
            status("DELETE", "probe?version=9&version_type=external")
            while status("PUT", "probe?version=5&version_type=external") == 409 and time.monotonic() < until:
                time.sleep(0.05)
            status("DELETE", "probe?version=9&version_type=external")
        yield from batches

    return wait


def test_a_named_version_may_be_any_column(spark: SparkSession, index: Index) -> None:
    by_time = KeyIds(version_from="changed")
    df = rows(spark, "('a', 9, '{\"n\":9}'), ('a', 1, '{\"n\":1}')").selectExpr(
        "*", "timestamp_millis(CASE offset WHEN 9 THEN 1000 ELSE 2000 END) AS changed"
    )
    index.write(df.where("offset = 1"), document_ids=by_time)
    assert index.write(df, document_ids=by_time).superseded == 1
    assert index.documents() == {"a": {"n": 1}}


def test_aggregates_are_documents_of_their_batch(spark: SparkSession, index: Index) -> None:
    counted = rows(spark, "('a', 1, 'x'), ('a', 2, 'y'), ('b', 3, 'z')").groupBy("topic", "key").count()
    df = counted.selectExpr("topic", "cast(key as string) AS user", "count")
    ids = ColumnIds(columns=("topic", "user"))
    for _ in range(2):
        counts = index.write(df, document_ids=ids)
    assert (counts.repeated, counts.indexed) == (2, 0)
    index.write(df, document_ids=ids, batch_time_ms=2 * AN_HOUR)
    documents = index.documents()
    assert documents[f"t+a+{AN_HOUR}"] == {"topic": "t", "user": "a", "count": 2}
    assert len(documents) == 4


def test_named_columns_without_a_batch_time_hold_the_last_write(spark: SparkSession, index: Index) -> None:
    ids = ColumnIds(columns=("id",), with_batch_time=False)
    index.write(spark.sql("SELECT 1 AS id, 'old' AS state"), document_ids=ids)
    assert index.write(spark.sql("SELECT 1 AS id, 'new' AS state"), document_ids=ids).updated == 1
    assert index.documents() == {"1": {"id": 1, "state": "new"}}


def test_a_decoded_value_is_the_document(spark: SparkSession, index: Index) -> None:
    df = rows(spark, "('a', 1, '{\"n\":1}'), ('b', 2, NULL)").selectExpr(
        "topic", "partition", "offset", "key", "from_json(cast(value as string), 'n INT') AS value"
    )
    counts = index.write(df)
    assert counts.dead_letter_reasons == {"tombstone": 1}
    assert index.documents() == {"t+0+1": {"n": 1}}


def test_the_records_columns_stay_out_of_its_document(spark: SparkSession, index: Index) -> None:
    incarnation = F.lit(1).alias("incarnation", metadata=record_mark("incarnation"))
    df = rows(spark, "('a', 1, 'x')").select("*", incarnation, F.lit("u").alias("user")).drop("value")
    prepared = prepare_documents(df, index.output())
    assert prepared.columns == ["topic", "partition", "offset", "incarnation", "document"]
    assert [row.document for row in prepared.collect()] == ['{"user":"u"}']


def test_a_value_with_columns_beside_it_is_not_guessed_at(spark: SparkSession, index: Index) -> None:
    df = rows(spark, "('a', 1, 'x')").selectExpr("*", "'u' AS user")
    with pytest.raises(UnsuitableRowsError, match="not clear what the document is"):
        prepare_documents(df, index.output())


def test_no_rows_are_reported_as_none(spark: SparkSession, index: Index, tmp_path: Path) -> None:
    index.ask("PUT", f"/{index.name}")
    counts = index.write(rows(spark, "('a', 1, 'x')").where("offset > 5"))
    assert (counts.rows, counts.requests) == (0, 0)


@pytest.mark.parametrize(
    ("fields", "error", "says"),
    [
        (
            {"document_id": DocumentIdKind.COLUMNS, "id_columns": ("missing",)},
            UnsuitableRowsError,
            "no column 'missing'",
        ),
        ({"connection": "nowhere", "hosts": ()}, ConnectionNotFoundError, "'nowhere' is not known"),
    ],
)
def test_impossible_options_are_refused_before_the_first_row(
    spark: SparkSession, index: Index, fields: dict[str, Any], error: type[Exception], says: str
) -> None:
    output = index.output()
    options = IndexingOptions.of(output, Target.of(output, "clicks"), batch_time_ms=AN_HOUR)
    with pytest.raises(error, match=says):
        index_rows(rows(spark, "('a', 1, '{}')"), replace(options, **fields))


def test_an_alias_that_rolls_over_is_refused(spark: SparkSession, index: Index) -> None:
    index.ask("PUT", f"/{index.name}-000001", {"aliases": {index.name: {"is_write_index": True}}})
    with pytest.raises(UnsuitableTargetError, match="rolls over"):
        index.write(rows(spark, "('a', 1, '{}')"))


def test_a_failed_write_says_what_to_do(spark: SparkSession, index: Index) -> None:
    index.ask("PUT", f"/{index.name}")
    index.ask("POST", f"/{index.name}/_close")
    with pytest.raises(PySparkException, match="Open the index"):
        index.write(rows(spark, "('a', 1, '{}')"))


def test_blocks_are_indexed_as_the_records_that_spark_would_read(
    spark: SparkSession, index: Index, written_log: Any, make_records: Records
) -> None:
    """The same documents and dead letters, however the records get to the sink."""
    values = [b'{"n": %d}' % n if n % 5 else b"junk" for n in range(50)]
    for first in range(0, 50, 10):
        written_log.add(make_records(values[first : first + 10], first_offset=first))
    manifest = written_log.manifest()
    read = index.write(read_log(spark, manifest))
    documents, letters = index.documents(), index.letters()
    for name in (index.name, f"{index.name}-dead-letters"):
        index.ask("DELETE", f"/{name}")
    output = index.output()
    options = IndexingOptions.of(output, Target.of(output, "clicks"), batch_time_ms=AN_HOUR)
    blocks = LogBlocks.of([Manifest.load(manifest)], "records")
    report = index_blocks(over(spark.range(0, 50, 1, 3)), options, blocks)
    assert (report.counts.rows, report.counts.created, report.counts.dead_lettered) == (50, 40, 10)
    assert (report.counts.created, report.counts.dead_lettered) == (read.created, read.dead_lettered)
    assert (index.documents(), index.letters()) == (documents, letters)
    assert index_blocks(over(blocks.numbered(spark, 3)), options, blocks).counts.repeated == 40
    with pytest.raises(DocumentsUnaccountedError, match="read 30 records, the blocks of the batch have 50"):
        index_blocks(over(spark.range(0, 30)), options, blocks)


def over(numbers: DataFrame) -> Callable[[Any, LogBlocks, str], pa.Table]:
    """Run a task for the records with these numbers."""
    return lambda task, _blocks, schema: numbers.mapInArrow(task.run, schema).toArrow()


def rows(spark: SparkSession, values: str) -> DataFrame:
    """(key, offset, value) records of topic "t", partition 0, in two Spark partitions."""
    found = spark.sql(
        "SELECT 't' AS topic, 0 AS partition, CAST(offset AS BIGINT) AS offset, CAST(key AS BINARY) AS key, "
        f"CAST(value AS BINARY) AS value FROM VALUES {values} AS t(key, offset, value)"
    )
    return found.to(StructType([RECORD_SCHEMA[name] for name in found.columns])).repartition(2)
