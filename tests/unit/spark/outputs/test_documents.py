from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from pyspark.sql.types import IntegerType, StringType, StructField, StructType

from headrace.batch.manifest import Manifest, ManifestBlock
from headrace.blocks import BlockHandle, OffsetRange, TopicPartition
from headrace.kafka.ranges import RecordedRange
from headrace.spark.outputs import documents
from headrace.spark.outputs.documents import (
    FOUND_INCARNATION,
    BatchIncarnations,
    Range,
    lacks_incarnation,
)
from headrace.spark.records.record_columns import RECORD_SCHEMA, record_mark
from headrace.stream import ColumnIds, ConsoleOutput, ElasticsearchOutput, KeyIds, RecordIds


def of(topic: str, incarnation: int, start: int, until: int, partition: int = 0) -> Range:
    return TopicPartition(topic, f"id-{incarnation}", partition, incarnation), start, until


def test_a_topic_of_one_incarnation_is_known_by_its_name() -> None:
    known = BatchIncarnations([of("a", 1, 0, 5), of("a", 1, 5, 9, partition=1), of("b", 3, 0, 5), of("c", 1, 0, 5)])
    assert known.expression() == "CASE WHEN topic IN ('a', 'c') THEN 1 WHEN topic IN ('b') THEN 3 END"
    assert (known.ambiguous, known.numbers) == ([], [1, 3])


def test_of_two_incarnations_the_offsets_decide() -> None:
    known = BatchIncarnations([of("a", 1, 90, 95), of("a", 1, 95, 99), of("a", 2, 0, 5), of("a", 2, 95, 99, 1)])
    assert known.ambiguous == []
    assert known.expression() == (
        "CASE WHEN topic = 'a' AND partition = 0 AND offset >= 90 AND offset < 99 THEN 1 "
        "WHEN topic = 'a' AND partition = 0 AND offset >= 0 AND offset < 5 THEN 2 "
        "WHEN topic = 'a' AND partition = 1 AND offset >= 95 AND offset < 99 THEN 2 END"
    )


@pytest.mark.parametrize("again", [(0, 4), (4, 5), (0, 9), (1, 2)])
def test_offsets_that_stand_for_two_records_are_ambiguous(again: tuple[int, int]) -> None:
    assert BatchIncarnations([of("a", 1, 0, 5), of("b", 1, 0, 5), of("a", 2, *again)]).ambiguous == ["a"]


def test_an_ambiguous_incarnation_is_unknown_if_no_id_needs_it() -> None:
    """Such as of two clusters' topics of one name: a dead letter would get the other cluster's record."""
    known = BatchIncarnations([of("a", 1, 0, 5), of("a", 2, 0, 5), of("b", 1, 0, 5)])
    by_column = ElasticsearchOutput(hosts="http://h:1", index="i", document_ids=ColumnIds(columns=("n",)))
    assert documents._incarnation(known, by_column) == (
        f"CASE WHEN topic IN ('a') THEN 0 ELSE COALESCE({known.expression()}, 1) END"
    )


def test_a_batch_without_ranges_knows_no_row() -> None:
    assert BatchIncarnations([]).expression() == "CAST(NULL AS INT)"


def test_all_inputs_of_all_manifests_count() -> None:
    where = TopicPartition("a", "id", 0, 1)
    block = ManifestBlock(BlockHandle("s", 0, 1), 1, 1, (OffsetRange(where, 0, 5, 5),))
    again = RecordedRange(TopicPartition("a", "other", 0, 2), 0, 3, None)
    manifests = [
        Manifest("s", 10_000, 10_000, {"east": (block,)}, "/folder"),
        Manifest("s", 20_000, 10_000, {}, "/folder", {"west": (again,)}),
    ]
    known = BatchIncarnations.of(manifests)
    assert (known.ambiguous, known.numbers) == (["a"], [1, 2])


@pytest.mark.parametrize(
    ("names", "lacks"),
    [
        (("topic", "partition", "offset", "value"), True),
        (("topic", "partition", "offset", "incarnation"), False),
        (("topic", "value"), False),
    ],
)
def test_only_rows_of_records_lack_an_incarnation(names: tuple[str, ...], lacks: bool) -> None:
    assert lacks_incarnation(StructType([RECORD_SCHEMA[name] for name in names])) is lacks


def test_a_column_named_incarnation_is_not_the_records() -> None:
    """A transform has named the column so."""
    own = [RECORD_SCHEMA[name] for name in ("topic", "partition", "offset")]
    assert lacks_incarnation(StructType([*own, StructField("incarnation", IntegerType())]))
    assert not lacks_incarnation(StructType([*own, StructField(FOUND_INCARNATION, IntegerType())]))


def test_only_ids_by_source_position_need_one() -> None:
    def output(ids: RecordIds | KeyIds | ColumnIds) -> ElasticsearchOutput:
        return ElasticsearchOutput(hosts="http://h:9200", index="i", document_ids=ids)

    assert output(RecordIds()).needs_incarnation
    assert output(KeyIds()).needs_incarnation
    assert not output(KeyIds(version_from="at")).needs_incarnation
    assert not output(ColumnIds(columns=("a",))).needs_incarnation
    assert not ConsoleOutput().needs_incarnation


def document_of(ids: Any, *more: StructField) -> str:
    own = [RECORD_SCHEMA[name] for name in ("key", "topic", "partition", "offset")]
    output = ElasticsearchOutput(hosts="http://h:9200", index="i", document_ids=ids)
    rows: Any = SimpleNamespace(schema=StructType([*own, StructField("name", StringType()), *more]), sparkSession=None)
    return documents._Rows(rows, output).document_expression()


def marked(name: str) -> StructField:
    return StructField(name, StringType(), metadata=record_mark(name))


def test_a_change_event_of_no_row_is_no_document_of_columns() -> None:
    """The struct of the transform's columns is never null: a deletion would write {"op": "d"}."""
    of_rows = "op IN ('c', 'r', 'u')"
    assert document_of(KeyIds(), marked("op")).startswith(f"CASE WHEN op IS NULL OR {of_rows} THEN to_json(struct(")
    # Where the source is kept, a tombstone is told from a flattened row without an operation.
    both = document_of(KeyIds(), marked("op"), marked("source"))
    assert both.startswith(f"CASE WHEN (op IS NULL AND source IS NOT NULL) OR {of_rows} THEN to_json(struct(")
    assert both.endswith(") END AS document")
    for others in (document_of(RecordIds(), marked("op")), document_of(KeyIds(), StructField("op", StringType()))):
        assert others.startswith("to_json(struct(")
