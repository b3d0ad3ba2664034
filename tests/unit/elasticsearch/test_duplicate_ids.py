"""Rows of one batch with the same id: found within a task's rows, and over all tasks by digests."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from headrace.elasticsearch.document_ids import identify
from headrace.elasticsearch.duplicate_ids import DuplicateIdCheck, repeated_digests
from headrace.elasticsearch.errors import DuplicateIdsError
from headrace.elasticsearch.indexer import Indexer
from headrace.testing.fake_elasticsearch import FakeElasticsearch

SEED = 0xFFFF_FFFF_FFFF_FFFF


def check(options: Any, *batches: Any, seed: int = SEED) -> np.ndarray[Any, Any]:
    checked = DuplicateIdCheck(options, seed)
    for batch in batches:
        checked.take(batch, identify(batch, options))
    return checked.digests()


@pytest.mark.parametrize(
    ("options", "rows", "remedy"),
    [
        ({}, {"offsets": [3, 3]}, r"'t\+0\+3'.*RecordIds\(rows="),
        ({"write_method": "index"}, {"offsets": [3, 3]}, r"'t\+0\+3'.*RecordIds\(rows="),
        ({"id_columns": ["line"]}, {"offsets": [3, 3], "line": pa.array([7, 7])}, r"'t\+0\+3~7'"),
        ({"document_id": "key"}, {"offsets": [3, 3], "keys": [b"k", b"k"]}, r"'k'.*version_from"),
        ({"document_id": "columns", "id_columns": ["g"]}, {"g": ["x", "x"]}, r"'x'.*dropDuplicates"),
    ],
)
def test_rows_with_one_id_are_refused_before_they_are_sent(
    make_options: Any, make_rows: Any, options: dict[str, str], rows: dict[str, Any], remedy: str
) -> None:
    elasticsearch = FakeElasticsearch()
    batch = make_rows([{"n": 1}, {"n": 2}], **rows)
    with pytest.raises(DuplicateIdsError, match=remedy):
        Indexer(elasticsearch, make_options(**options)).index([batch])
    assert not elasticsearch.bulks


@pytest.mark.parametrize(
    ("options", "rows"),
    [
        ({}, {"offsets": [3, 3], "incarnations": [1, 2]}),
        ({"id_columns": ["line"]}, {"offsets": [3, 3], "line": pa.array([7, 8])}),
        # Later values of a key, and records of one time.
        ({"document_id": "key"}, {"offsets": [3, 4], "keys": [b"k", b"k"]}),
        ({"document_id": "key", "version_from": "v"}, {"offsets": [3, 4], "keys": [b"k", b"k"], "v": pa.array([5, 5])}),
        # Dead letters without an id.
        ({"document_id": "key"}, {"offsets": [3, 4], "keys": [None, None]}),
    ],
)
def test_rows_of_one_id_with_different_versions_are_allowed(
    make_options: Any, make_rows: Any, options: dict[str, str], rows: dict[str, Any]
) -> None:
    digests = check(make_options(**options), make_rows([b"{}", b"{}"], **rows))
    assert repeated_digests([digests]) == 0


def test_two_rows_of_one_record_with_one_key_are_refused_whatever_their_versions(
    make_options: Any, make_rows: Any
) -> None:
    options = make_options(document_id="key", version_from="v")
    with pytest.raises(DuplicateIdsError):
        check(options, make_rows([b"{}", b"{}"], offsets=[3, 3], keys=[b"k", b"k"], v=pa.array([5, 5])))


def test_two_rejected_rows_of_one_record_are_refused_too(make_options: Any, make_rows: Any) -> None:
    """Their dead letters have the record's id, and one may be in another task."""
    with pytest.raises(DuplicateIdsError, match="RecordIds"):
        check(make_options(), make_rows([b"{}", b"{}"], offsets=[3, 3], rejected_because=["odd", "odd"]))


def test_duplicate_ids_of_other_tasks_are_found_by_their_digests(make_options: Any, make_rows: Any) -> None:
    options = make_options()
    tasks = [check(options, make_rows([b"{}"] * 3, offsets=offsets)) for offsets in ([1, 2, 3], [4, 5, 6], [7, 3, 1])]
    assert repeated_digests(tasks) == 2
    assert repeated_digests(tasks[:2]) == 0
    assert repeated_digests([]) == 0
    assert repeated_digests([check(options)]) == 0


def test_digests_depend_on_the_ids_and_on_the_writes_seed(make_options: Any, make_rows: Any) -> None:
    """However the rows are cut, and others with another seed; ids that are alike in most places have different ones."""
    options = make_options(document_id="columns", id_columns=["g"])
    texts = [str(number) for number in range(20_000)]
    texts += [hashlib.sha256(text.encode()).hexdigest() for text in texts] + ["é" * n for n in range(1, 257)]
    rows = pa.record_batch({"g": texts, "document": ["{}"] * len(texts)})
    whole = check(options, rows)
    assert len(np.unique(whole)) == len(texts)
    assert check(options, rows.slice(0, 777), rows.slice(777)).tolist() == whole.tolist()
    assert not np.isin(check(options, rows, seed=1), whole).any()
