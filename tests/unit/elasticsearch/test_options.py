from __future__ import annotations

from typing import Any

import pytest
from pyspark.serializers import CPickleSerializer

from headrace.elasticsearch.options import (
    KAFKA,
    LOG,
    DocumentIdKind,
    IndexingOptions,
    TombstonePolicy,
    VersionSource,
    WriteMethod,
)
from headrace.elasticsearch.target import Owner, Target
from headrace.stream import ColumnIds, DeadLetterLimit, ElasticsearchOutput, KafkaInput, KeyIds, RecordIds

INPUT = KafkaInput(bootstrap_servers="k:9092", topics="clicks")


def options_of(*, manifests: Any = (), **fields: Any) -> IndexingOptions:
    output = ElasticsearchOutput(hosts="http://a:9200", index="clicks", **fields)
    return IndexingOptions.of(
        output, Target.of(output, "shop"), batch_time_ms=10_000, manifests=manifests, inputs=[INPUT]
    )


def test_every_setting_of_an_output_about_writing_is_an_option() -> None:
    changed: dict[str, Any] = {
        "dead_letter_index": "other",
        "tombstones": "ignore",
        "truncates": "ignore",
        "max_indices": 7,
        "create_index": False,
        "require_alias": True,
        "write_method": "index",
        "bulk_bytes": 1000,
        "bulk_actions": 7,
        "requests_in_flight": 3,
        "request_timeout_seconds": 1.5,
        "max_retry_seconds": 2.5,
        "max_throttled_seconds": 20.5,
        "max_requests_per_second": 3.5,
        "max_bytes_per_second": 70_000,
        "error_kinds": {"some_exception": "document"},
        "refresh": True,
    }
    of_definition = {
        "kind",
        "id",
        "renamed_from",
        "transform",
        "window",
        "connection",
        "hosts",
        "index",
        "index_zone",
        "document_ids",
    }
    assert set(ElasticsearchOutput.model_fields) - of_definition - {"dead_letter_limit", "dead_letter_topic"} == set(
        changed
    )
    options = options_of(**changed, id="mine", dead_letter_limit=DeadLetterLimit())
    target = options.target
    of_target = {"dead_letter_index", "require_alias"}
    assert {name: getattr(target if name in of_target else options, name) for name in changed} == changed
    assert (options.hosts, options.batch_time_ms) == (("http://a:9200",), 10_000)
    assert (target.name, target.owner) == ("clicks", Owner("shop", "mine"))


@pytest.mark.parametrize(
    ("document_ids", "kind", "id_columns", "id_batch_time", "version"),
    [
        (RecordIds(), DocumentIdKind.RECORD, (), False, None),
        (RecordIds(rows="line"), DocumentIdKind.RECORD, ("id_0",), False, None),
        (KeyIds(), DocumentIdKind.KEY, (), False, VersionSource.OFFSET),
        (KeyIds(version_from="changed"), DocumentIdKind.KEY, (), False, VersionSource.COLUMN),
        (ColumnIds(columns=("a", "b")), DocumentIdKind.COLUMNS, ("id_0", "id_1"), True, None),
        (
            ColumnIds(columns=("a",), with_batch_time=False),
            DocumentIdKind.COLUMNS,
            ("id_0",),
            False,
            VersionSource.BATCH_TIME,
        ),
    ],
)
def test_id_rules_become_the_columns_of_the_prepared_rows(
    document_ids: Any, kind: DocumentIdKind, id_columns: Any, id_batch_time: bool, version: VersionSource | None
) -> None:
    options = options_of(document_ids=document_ids)
    assert (options.document_id, options.id_columns) == (kind, id_columns)
    assert (options.id_batch_time, options.version) == (id_batch_time, version)


def test_defaults_follow_the_kind_of_id() -> None:
    by_record, by_key = options_of(), options_of(document_ids=KeyIds())
    by_columns = options_of(document_ids=ColumnIds(columns=("a",), with_batch_time=False))
    assert (by_record.write_method, by_record.tombstones) == (WriteMethod.CREATE, TombstonePolicy.DEAD_LETTER)
    assert (by_key.write_method, by_key.tombstones) == (WriteMethod.CREATE, TombstonePolicy.DELETE)
    assert (by_columns.write_method, by_columns.tombstones) == (WriteMethod.INDEX, TombstonePolicy.DEAD_LETTER)
    assert by_record.target.dead_letter_index == "clicks-dead-letters"


def test_options_are_the_same_after_the_way_through_spark() -> None:
    options = options_of(document_ids=KeyIds(version_from="v"), manifests=[(KAFKA, "file:///m/0.json")])
    assert CPickleSerializer().loads(CPickleSerializer().dumps(options)) == options
    assert [KafkaInput.model_validate(source) for source in options.inputs] == [INPUT]


def test_inputs_are_passed_on_only_if_records_are_read_in_kafka() -> None:
    assert options_of(manifests=[(LOG, "file:///m/1.json")]).inputs == ()
    assert len(options_of(manifests=[(KAFKA, "file:///m/1.json")]).inputs) == 1


def test_sparks_tries_of_a_task_wait_less_than_twice_as_long(make_options: Any) -> None:
    """The waits of all of Spark's tries are added up."""
    options = make_options(max_retry_seconds=30)
    tries = [options.for_task(2, earlier) for earlier in range(8)]
    assert (tries[0].max_retry_seconds, tries[0].max_throttled_seconds) == (30, 300)
    assert sum(attempt.max_retry_seconds for attempt in tries) < 60
    assert sum(attempt.max_throttled_seconds for attempt in tries) < 600
    assert [attempt.written_before for attempt in tries[:2]] == [False, True]
    assert {attempt.task for attempt in tries} == {2}
    assert make_options(written_before=True).for_task(0, 0).written_before


def test_the_tasks_of_a_write_share_its_ceiling_equally(make_options: Any) -> None:
    options = make_options(max_requests_per_second=10, max_bytes_per_second=800_000)
    one = options.for_task(3, 0, tasks=8)
    assert (one.max_requests_per_second, one.max_bytes_per_second) == (1.25, 100_000)
    assert (options.for_task(0, 0).max_requests_per_second, options.has_ceiling) == (10, True)
    assert not make_options().for_task(0, 0, tasks=8).has_ceiling


@pytest.mark.parametrize(
    ("ceiling", "bulk_bytes"),
    [
        ({}, 5_000_000),
        ({"max_requests_per_second": 1}, 5_000_000),
        ({"max_bytes_per_second": 1_000_000}, 250_000),
        ({"max_bytes_per_second": 1_000_000, "max_requests_per_second": 100}, 250_000),
        ({"max_bytes_per_second": 1_000_000, "max_requests_per_second": 1}, 1_000_000),
        ({"max_bytes_per_second": 100_000_000}, 5_000_000),
        ({"max_bytes_per_second": 1}, 1),
    ],
)
def test_a_request_has_the_bytes_that_its_time_allows(make_options: Any, ceiling: Any, bulk_bytes: int) -> None:
    assert make_options(bulk_bytes=5_000_000, **ceiling).for_task(0, 0, tasks=4).bulk_bytes == bulk_bytes
