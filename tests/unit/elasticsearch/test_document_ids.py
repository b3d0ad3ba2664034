from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
import pytest

from headrace.elasticsearch.document_ids import identify
from headrace.elasticsearch.errors import UnsuitableRowsError


def test_a_records_id_is_its_topic_partition_and_offset(make_options: Any, make_rows: Any) -> None:
    rows = make_rows([b"{}", b"{}"], offsets=[7, 8])
    assert identify(rows, make_options()).ids.to_pylist() == ["t+0+7", "t+0+8"]


def test_from_the_second_incarnation_on_the_id_ends_with_it(make_options: Any, make_rows: Any) -> None:
    rows = make_rows([b"{}"] * 2, offsets=[7, 7], incarnations=[1, 2])
    assert identify(rows, make_options()).ids.to_pylist() == ["t+0+7", "t+0+7+2"]


def test_a_row_of_an_unknown_incarnation_is_refused(make_options: Any, make_rows: Any) -> None:
    rows = make_rows([b"{}"] * 2, offsets=[7, 8], incarnations=[1, None])
    with pytest.raises(UnsuitableRowsError, match=r"no 'incarnation'.*\['t', 0, 8\]"):
        identify(rows, make_options())


def test_named_columns_distinguish_the_rows_of_one_record(make_options: Any, make_rows: Any) -> None:
    rows = make_rows([b"{}"] * 4, offsets=[7, 7, 7, 8], incarnations=[1, 1, 2, 1], line=pa.array([0, 1, 1, None]))
    ids = identify(rows, make_options(id_columns=["line"])).ids.to_pylist()
    assert ids == ["t+0+7~0", "t+0+7~1", "t+0+7+2~1", "t+0+8~"]


def test_the_values_of_several_row_columns_cannot_be_confused(make_options: Any, make_rows: Any) -> None:
    rows = make_rows([b"{}"] * 2, offsets=[7, 7], a=["x+y", "x"], b=["z", "y+z"])
    ids = identify(rows, make_options(id_columns=["a", "b"])).ids.to_pylist()
    assert ids == ["t+0+7~x%2By+z", "t+0+7~x+y%2Bz"]


def test_a_records_id_with_a_long_row_is_rejected_alone(make_options: Any, make_rows: Any) -> None:
    rows = make_rows([b"{}"] * 2, line=["x" * 600, "y"])
    assert {row: each.type for row, each in identify(rows, make_options(id_columns=["line"])).rejected.items()} == {
        0: "id_too_long"
    }


def test_dictionary_encoded_topics_are_taken(make_options: Any, make_rows: Any) -> None:
    rows = make_rows([b"{}"])
    rows = rows.set_column(0, "topic", rows.column(0).dictionary_encode())
    assert identify(rows, make_options()).ids.to_pylist() == ["t+0+0"]


def test_a_row_without_coordinates_is_refused(make_options: Any, make_rows: Any) -> None:
    with pytest.raises(UnsuitableRowsError, match="offset"):
        identify(make_rows([b"{}"], offsets=[None]), make_options())


def test_a_key_is_versioned_by_its_offset(make_options: Any, make_rows: Any) -> None:
    identities = identify(
        make_rows([b"{}", b"{}"], keys=[b"a", "é".encode()], offsets=[3, 4]), make_options(document_id="key")
    )
    assert identities.ids.to_pylist() == ["a", "é"]
    assert identities.versions.to_pylist() == [3, 4]
    assert identities.rejected == {}


def test_unusable_keys_are_rejected_one_by_one(make_options: Any, make_rows: Any) -> None:
    keys = [b"ok", None, b"", b"k" * 513, b"k" * 512, b"\xff\xfe", "é".encode() * 257]
    identities = identify(make_rows([b"{}"] * 7, keys=keys), make_options(document_id="key"))
    assert {row: reason.type for row, reason in identities.rejected.items()} == {
        1: "missing_id",
        2: "missing_id",
        3: "id_too_long",
        5: "id_not_utf8",
        6: "id_too_long",
    }


def test_offsets_of_a_topic_created_again_are_no_versions(make_options: Any, make_rows: Any) -> None:
    """Such offsets are refused as versions."""
    rows = make_rows([b"{}"], keys=[b"a"], incarnations=[2])
    with pytest.raises(UnsuitableRowsError, match="version_from"):
        identify(rows, make_options(document_id="key"))
    named = rows.append_column("version", pa.array([9]))
    assert identify(named, make_options(document_id="key", version="version")).versions.to_pylist() == [9]


def test_versions_are_checked(make_options: Any, make_rows: Any) -> None:
    rows = make_rows([b"{}"] * 3, keys=[b"a"] * 3, version=pa.array([0, None, -1]))
    rejected = identify(rows, make_options(document_id="key", version="version")).rejected
    assert {row: reason.type for row, reason in rejected.items()} == {1: "missing_version", 2: "negative_version"}


def test_a_time_is_a_version_in_microseconds(make_options: Any, make_rows: Any) -> None:
    at = datetime(2026, 1, 1, tzinfo=UTC)
    rows = make_rows([b"{}"], keys=[b"a"], version=pa.array([at], pa.timestamp("ms", "Europe/Berlin")))
    versions = identify(rows, make_options(document_id="key", version="version")).versions
    assert versions.to_pylist() == [int(at.timestamp() * 1_000_000)]


def test_a_text_column_is_refused_as_version(make_options: Any, make_rows: Any) -> None:
    rows = make_rows([b"{}"], keys=[b"a"], version=pa.array(["1"]))
    with pytest.raises(UnsuitableRowsError, match="'version'"):
        identify(rows, make_options(document_id="key", version="version"))


def test_different_values_of_several_columns_give_different_ids(make_options: Any) -> None:
    rows = pa.record_batch({"a": ["x+y", "x", "%2B"], "b": ["z", "y+z", "z"], "document": ["{}"] * 3})
    ids = identify(rows, make_options(document_id="columns", id_columns=["a", "b"])).ids.to_pylist()
    assert ids == ["x%2By+z", "x+y%2Bz", "%252B+z"]


def test_the_value_of_a_single_column_is_the_id_unchanged(make_options: Any) -> None:
    rows = pa.record_batch({"a": pa.array([42, None]), "document": ["{}"] * 2})
    identities = identify(rows, make_options(document_id="columns", id_columns=["a"]))
    assert identities.ids.to_pylist() == ["42", None]
    assert identities.rejected[1].type == "missing_id"


def test_an_aggregates_id_ends_with_its_batch_time(make_options: Any) -> None:
    rows = pa.record_batch({"a": ["x"], "document": ["{}"]})
    options = make_options(document_id="columns", id_columns=["a"], id_batch_time=True, batch_time_ms=1700)
    assert identify(rows, options).ids.to_pylist() == ["x+1700"]


def test_a_time_in_an_id_does_not_depend_on_the_time_zone(make_options: Any) -> None:
    at = datetime(2026, 1, 1, 12, tzinfo=UTC)
    options = make_options(document_id="columns", id_columns=["a"])
    ids = {
        identify(pa.record_batch({"a": pa.array([at], pa.timestamp("us", zone)), "document": ["{}"]}), options)
        .ids[0]
        .as_py()
        for zone in ("UTC", "Asia/Tokyo", "America/New_York")
    }
    assert ids == {"2026-01-01 12:00:00.000000"}


def test_a_struct_column_is_refused_as_id(make_options: Any) -> None:
    rows = pa.record_batch({"a": pa.array([{"x": 1}]), "document": ["{}"]})
    with pytest.raises(UnsuitableRowsError, match="fields"):
        identify(rows, make_options(document_id="columns", id_columns=["a"]))


def test_an_id_that_recurs_in_batches_is_versioned_by_them(make_options: Any) -> None:
    rows = pa.record_batch({"g": ["x", "y"]})
    by_columns = {"document_id": "columns", "id_columns": ["g"], "batch_time_ms": 1700000010000}

    def versions(**options: Any) -> Any:
        found = identify(rows, make_options(**by_columns, **options)).versions
        return None if found is None else found.to_pylist()

    assert versions() == [1_700_000_010_000] * 2
    assert versions(id_batch_time=True) is None
