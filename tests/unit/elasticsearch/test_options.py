from __future__ import annotations

from typing import Any

import pytest

from headrace.elasticsearch.errors import IndexingOptionsError
from headrace.elasticsearch.options import DocumentIdKind, IndexingOptions, TombstonePolicy, WriteMethod

HERE = {"hosts": "http://a:9200, http://b:9200", "index": "clicks"}


def test_strings_become_what_they_mean() -> None:
    options = IndexingOptions.from_strings(
        {
            **HERE,
            "Document_Id": "columns",
            "ID_COLUMNS": "a, b",
            "bulk_bytes": "1000",
            "refresh": "true",
            "max_retry_seconds": "0.5",
            "batch_time": "1700000000000",
            "id_batch_time": "TRUE",
        }
    )
    assert options.hosts == ("http://a:9200", "http://b:9200")
    assert options.document_id is DocumentIdKind.COLUMNS
    assert options.id_columns == ("a", "b")
    assert (options.bulk_bytes, options.refresh, options.max_retry_seconds) == (1000, True, 0.5)
    assert options.batch_time == 1_700_000_000_000


def test_defaults_follow_the_kind_of_id() -> None:
    by_record = IndexingOptions.from_strings(HERE)
    by_key = IndexingOptions.from_strings({**HERE, "document_id": "key"})
    by_columns = IndexingOptions.from_strings({**HERE, "document_id": "columns", "id_columns": "a"})
    assert (by_record.method, by_record.tombstone_policy) == (WriteMethod.CREATE, TombstonePolicy.DEAD_LETTER)
    assert (by_key.method, by_key.tombstone_policy) == (WriteMethod.CREATE, TombstonePolicy.DELETE)
    assert (by_columns.method, by_columns.tombstone_policy) == (WriteMethod.INDEX, TombstonePolicy.DEAD_LETTER)
    assert by_record.dead_letters == "clicks-dead-letters"


def test_the_path_of_save_names_the_index() -> None:
    assert IndexingOptions.from_strings({"hosts": "http://a:9200", "path": "clicks"}).index == "clicks"


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"index": "clicks"}, "'connection'"),
        ({**HERE, "connection": "es"}, "either"),
        ({"hosts": "http://a:9200"}, "'index' is missing"),
        ({**HERE, "bulk_byte": "5"}, "is 'bulk_bytes' meant"),
        ({**HERE, "bulk_bytes": "many"}, "'bulk_bytes'"),
        ({**HERE, "requests_in_flight": "0"}, "'requests_in_flight'"),
        ({**HERE, "document_id": "random"}, "'document_id'"),
        ({**HERE, "document_id": "columns"}, "'id_columns'"),
        ({**HERE, "document_id": "key", "id_columns": "a"}, "'id_columns'"),
        ({**HERE, "document_id": "columns", "id_columns": "a", "id_batch_time": "true"}, "'batch_time'"),
        ({**HERE, "document_id": "columns", "id_columns": "a", "write_method": "create"}, "write_method=create"),
        ({**HERE, "version_from": "v"}, "'version_from'"),
        ({**HERE, "tombstones": "delete"}, "tombstones=delete"),
        ({**HERE, "index": "Clicks"}, "'index'"),
        ({**HERE, "index": "a,b"}, "'index'"),
        ({**HERE, "index": "logs-*"}, "'index'"),
        ({**HERE, "index": "_all"}, "'index'"),
        ({**HERE, "dead_letter_index": "clicks"}, "differ"),
        ({**HERE, "originals": "kafka", "manifest": "/m/1.json"}, "needs 'manifest' and 'inputs'"),
        ({**HERE, "originals": "kafka", "inputs": "[]"}, "needs 'manifest' and 'inputs'"),
        ({**HERE, "originals": "memory"}, "'originals'"),
        ({**HERE, "manifest": "/m/2.json", "earlier": '{"kafka": ["/m/1.json"]}'}, "need 'inputs'"),
        ({**HERE, "earlier": "/m/1.json"}, "'earlier'"),
    ],
)
def test_nonsense_is_refused_with_its_reason(given: dict[str, str], says: str) -> None:
    with pytest.raises(IndexingOptionsError, match=says):
        IndexingOptions.from_strings(given)


@pytest.mark.parametrize(
    "given",
    [
        {**HERE, "password": "hunter2"},
        {**HERE, "api_key": "hunter2"},
        {"index": "clicks", "hosts": "http://user:hunter2@a:9200"},
        {**HERE, "bulk_bytes": "hunter2"},
    ],
)
def test_an_error_never_repeats_a_value(given: dict[str, str]) -> None:
    with pytest.raises(IndexingOptionsError) as caught:
        IndexingOptions.from_strings(given)
    assert "hunter2" not in str(caught.value)
    assert caught.value.__cause__ is None


def test_all_of_sparks_tries_of_a_task_wait_less_than_twice_as_long(make_options: Any) -> None:
    options = make_options(max_retry_seconds="30")
    tries = [options.for_task(2, earlier) for earlier in range(8)]
    assert tries[0].max_retry_seconds == 30
    assert sum(each.max_retry_seconds for each in tries) < 60
    assert [each.written_before for each in tries[:2]] == [False, True]
    assert {each.task for each in tries} == {2}
    assert make_options(written_before="true").for_task(0, 0).written_before
