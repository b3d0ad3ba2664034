"""Change events in an index: keys that are structs, events of no row, and an index that follows a table."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.change_events import changes_of, event, postgres
from tests.support.fake_elasticsearch import FakeElasticsearch, parse_bulk
from tests.support.indexing_options import indexing_options

from headrace.elasticsearch.bulk_bodies import prepare_rows
from headrace.elasticsearch.document_ids import identify
from headrace.elasticsearch.indexer import Indexer
from headrace.elasticsearch.options import IndexingOptions, TombstonePolicy, TruncatePolicy
from headrace.elasticsearch.truncate import delete_ids
from headrace.spark.outputs.held_deletions import HeldDeletions, only_deletions
from headrace.spark.records.events.change_events import ChangeEvents

KEY = pa.struct([("id", pa.int32())])
ROW = pa.struct([("id", pa.int32()), ("name", pa.string())])


def options_of(version: str | None = "version", truncates: str = "dead_letter", **fields: Any) -> IndexingOptions:
    return indexing_options(document_id="key", version=version, truncates=TruncatePolicy(truncates), **fields)


def keys(kind: pa.DataType, *given: Any) -> pa.RecordBatch:
    number = len(given)
    return pa.record_batch(
        {
            "key": pa.array(given, kind),
            "version": pa.array(range(number), pa.int64()),
            "document": pa.array(["{}"] * number),
        }
    )


class TestKeys:
    def test_a_key_of_one_field_is_its_text(self) -> None:
        ids = identify(keys(KEY, {"id": 7}, {"id": None}, None), options_of())
        assert ids.ids.to_pylist() == ["7", None, None]
        assert {row: reason.type for row, reason in ids.rejected.items()} == {1: "missing_id", 2: "missing_id"}

    def test_several_fields_are_joined_as_columns_are(self) -> None:
        kind = pa.struct([("b", pa.string()), ("a", pa.string())])
        ids = identify(keys(kind, {"b": "x+y", "a": "z"}, {"b": "x", "a": "y+z"}, {"b": "%", "a": ""}), options_of())
        assert ids.ids.to_pylist() == ["x%2By+z", "x+y%2Bz", "%25+"]

    def test_a_key_with_bytes_that_are_no_text_is_refused(self) -> None:
        kind = pa.struct([("a", pa.binary()), ("n", pa.int32())])
        ids = identify(keys(kind, {"a": b"\xff", "n": 1}, {"a": b"a", "n": 1}), options_of())
        assert ids.rejected[0].type == "id_not_utf8"
        assert ids.ids[1].as_py() == "a+1"


def rows_of(*rows: tuple[Any, Any, int | None, Any]) -> pa.RecordBatch:
    """Rows of a key, an operation, a position and a document."""
    made = list(zip(*rows, strict=True))
    return pa.record_batch(
        {
            "topic": pa.array(["orders"] * len(rows)),
            "partition": pa.array([0] * len(rows), pa.int32()),
            "offset": pa.array(range(len(rows)), pa.int64()),
            "key": pa.array([None if key is None else {"id": key} for key in made[0]], KEY),
            "operation": pa.array(made[1], pa.string()),
            "version": pa.array(made[2], pa.int64()),
            "document": pa.array([None if each is None else json.dumps(each) for each in made[3]], pa.string()),
        }
    )


class TestEventsOfNoRow:
    def test_they_are_ignored_and_counted(self) -> None:
        rows = rows_of(
            (None, "heartbeat", None, None),
            (7, "schema_change", None, None),
            (7, "m", 5, None),
            (7, "d", 6, None),
            (7, None, None, None),
            (8, "c", 7, {"id": 8}),
        )
        preparation = prepare_rows(rows, options_of())
        assert (preparation.ignored_events, preparation.ignored_tombstones, preparation.rejected) == (3, 1, {})
        assert preparation.prepared is not None
        lines = [preparation.prepared.row(line) for line in range(len(preparation.prepared))]
        assert lines == [3, 5]

    def test_what_a_transform_has_rejected_is_a_letter_only(self) -> None:
        rows = rows_of((None, "heartbeat", None, None), (None, "t", 9, None), (8, "c", 7, {"id": 8}))
        rows = rows.append_column("rejected_because", pa.array(["no id", "no id", None]))
        preparation = prepare_rows(rows, options_of(truncates="apply"))
        assert sorted(preparation.rejected) == [0, 1]
        assert (preparation.ignored_events, preparation.truncates) == (0, ())

    def test_a_tombstone_counts_where_the_offset_is_its_version(self) -> None:
        preparation = prepare_rows(rows_of((7, "d", 6, None), (7, None, None, None)), options_of(None))
        assert preparation.prepared is not None
        assert [action.version for action in parse_bulk(preparation.prepared.body([0, 1]))] == [0, 1]

    def test_a_tombstone_of_another_decoder_needs_its_version(self) -> None:
        rows = rows_of((7, None, None, None)).drop_columns(["operation"])
        assert prepare_rows(rows, options_of()).rejected[0].type == "missing_version"

    def test_a_row_without_a_position_is_no_document_by_position(self) -> None:
        rows = rows_of((7, "c", None, {"id": 7}), (8, "d", None, None))
        rejected = prepare_rows(rows, options_of()).rejected
        assert [reason.type for reason in rejected.values()] == ["missing_version"] * 2

    @pytest.mark.parametrize(
        ("truncates", "position", "expected"),
        [
            ("dead_letter", 9, ({0: "truncate"}, 0, ())),
            ("ignore", 9, ({}, 1, ())),
            ("ignore", None, ({}, 1, ())),
            ("apply", 9, ({}, 0, (9,))),
            ("apply", None, ({0: "missing_version"}, 0, ())),
        ],
    )
    def test_a_truncate_is_what_the_output_says(self, truncates: str, position: int | None, expected: Any) -> None:
        preparation = prepare_rows(rows_of((None, "t", position, None)), options_of(truncates=truncates))
        types = {row: reason.type for row, reason in preparation.rejected.items()}
        assert (types, preparation.ignored_events, preparation.truncates) == expected
        assert preparation.prepared is None

    @pytest.mark.parametrize("tombstones", [TombstonePolicy.IGNORE, TombstonePolicy.DEAD_LETTER])
    @pytest.mark.parametrize(
        ("truncates", "position", "expected"),
        [("dead_letter", 9, "truncate"), ("apply", None, "missing_version")],
    )
    def test_a_refused_truncate_is_a_letter_beside_tombstones(
        self, tombstones: TombstonePolicy, truncates: str, position: int | None, expected: str
    ) -> None:
        rows = rows_of((None, "t", position, None), (7, "d", 6, None))
        preparation = prepare_rows(rows, options_of(truncates=truncates, tombstones=tombstones))
        assert preparation.rejected[0].type == expected
        assert preparation.ignored_tombstones + len(preparation.rejected) == 2

    def test_the_counts_have_an_outcome_for_each(self) -> None:
        elasticsearch = FakeElasticsearch()
        rows = rows_of((None, "t", 9, None), (None, "t", 5, None), (7, "heartbeat", None, None), (8, "c", 7, {"id": 8}))
        counts = Indexer(elasticsearch, options_of(truncates="apply")).index([rows])
        assert (counts.rows, counts.truncates, counts.truncated_below, counts.ignored_events) == (4, 2, 9, 1)
        assert counts.to_dict()["ignored_events"] == 1

    def test_rows_from_before_an_earlier_truncate_are_superseded(self) -> None:
        elasticsearch, options = FakeElasticsearch(), options_of(truncates="apply", truncated_below=9)
        rows = rows_of((1, "c", 8, {"id": 1}), (2, "c", 9, {"id": 2}), (3, "d", 8, None))
        counts = Indexer(elasticsearch, options).index([rows])
        assert (counts.created, counts.superseded, counts.deleted) == (1, 2, 0)
        assert elasticsearch.documents("clicks") == {"2": {"id": 2}}

    def test_older_documents_are_deleted_and_newer_ones_stay(self) -> None:
        elasticsearch, options = FakeElasticsearch(), options_of(truncates="apply")
        Indexer(elasticsearch, options).index([rows_of((1, "c", 5, {"id": 1}), (2, "c", 12, {"id": 2}))])
        assert [delete_ids(elasticsearch, options, ["1", "2"], 9) for _ in range(2)] == [1, 0]
        assert elasticsearch.documents("clicks") == {"2": {"id": 2}}


class Table:
    """A table with the change events that Debezium sends of it, in the order of commits."""

    def __init__(self) -> None:
        self.rows: dict[int, str] = {}
        self.events: list[tuple[int | None, Any]] = []
        self._lsn = 100

    def do(self, step: tuple[str, int, int, str]) -> None:
        what, key, other, name = step
        if what == "write":
            op, before = ("u", self._row(key)) if key in self.rows else ("c", None)
            self.rows[key] = name
            self._send(key, op, before, self._row(key))
        elif what == "delete" and key in self.rows:
            self._delete(key)
        elif what == "change_key" and key in self.rows and other not in self.rows:
            name = self.rows[key]
            self._delete(key)
            self.rows[other] = name
            self._send(other, "c", None, self._row(other))
        elif what == "snapshot":
            self._lsn += 8
            for each in sorted(self.rows):
                self._send(each, "r", None, self._row(each), step=0)
        elif what == "truncate":
            self.rows = {}
            self._send(None, "t", None, None)

    def _row(self, key: int) -> dict[str, Any]:
        return {"id": key, "name": self.rows[key]}

    def _delete(self, key: int) -> None:
        before = self._row(key)
        del self.rows[key]
        self._send(key, "d", before, None)
        self.events.append((key, None))

    def _send(self, key: int | None, op: str, before: Any, after: Any, *, step: int = 8) -> None:
        self._lsn += step
        self.events.append((key, event(op, before, after, postgres(self._lsn))))


def batch_of(events: Sequence[tuple[int, int, int | None, Any]], version: str | None) -> pa.RecordBatch:
    """The rows of records: their partition, offset, key and event."""
    texts = [None if value is None else json.dumps(value).encode() for *_, value in events]
    decoded, refused = ChangeEvents(changes_of(ROW)).decode(pa.array(texts, pa.binary()))
    assert not refused
    value, op, position, *_ = decoded.flatten()
    documents = [None if row is None else json.dumps(row) for row in value.to_pylist()]
    named = [None if key is None else json.dumps({"id": key}).encode() for *_, key, _ in events]
    decoded_keys, refused = ChangeEvents(KEY).decode(pa.array(named, pa.binary()))
    assert not refused
    columns = {
        "topic": pa.array(["orders"] * len(events)),
        "partition": pa.array([partition for partition, *_ in events], pa.int32()),
        "offset": pa.array([offset for _, offset, *_ in events], pa.int64()),
        "key": decoded_keys,
        "operation": op,
        "document": pa.array(documents, pa.string()),
        **({} if version is None else {"version": position}),
    }
    return pa.record_batch(columns)


def write(elasticsearch: FakeElasticsearch, options: IndexingOptions, tasks: Iterable[pa.RecordBatch]) -> int:
    """Write a batch as its tasks and its process do: rows, then deletions, then truncates. Returns the version below
    which truncates have left no document."""
    batches, held = list(tasks), HeldDeletions()
    counts = Indexer(elasticsearch, options).index(held.rest_of(batches))
    counts.add(Indexer(elasticsearch, options).index(only_deletions(batches)))
    assert not counts.dead_lettered
    if counts.truncates:
        below = counts.truncated_below
        older = [id_ for id_, version in elasticsearch.versions("clicks").items() if version < below]
        delete_ids(elasticsearch, options, older, below)
    return max(counts.truncated_below, options.truncated_below)


STEP = st.tuples(
    st.sampled_from(["write", "write", "write", "delete", "change_key", "snapshot", "truncate"]),
    st.integers(0, 4),
    st.integers(0, 4),
    st.text("ab", max_size=2),
)


@pytest.mark.parametrize("version", [None, "version"])
@given(steps=st.lists(STEP, max_size=25), data=st.data())
@settings(max_examples=100, deadline=None)
def test_an_index_follows_a_table(version: str | None, steps: list[Any], data: st.DataObject) -> None:
    """By the position a key may be on any partition, which may be far behind another."""
    table = Table()
    for step in steps:
        # Versions by offset know nothing of the time of a truncate.
        if version is not None or step[0] != "truncate":
            table.do(step)
    partitions: list[list[Any]] = [[], [], []]
    for key, value in table.events:
        number = data.draw(st.integers(0, 2)) if version else (key or 0) % 3
        partitions[number].append((number, len(partitions[number]), key, value))
    elasticsearch, options = FakeElasticsearch(), options_of(version, "apply" if version else "dead_letter")
    batches = []
    while any(partitions):
        tasks = []
        for events in partitions:
            taken = data.draw(st.integers(0, len(events)))
            if taken:
                tasks.append(batch_of(events[:taken], version))
                del events[:taken]
        batches.append(tasks)
    again = data.draw(st.integers(0, 2))
    for tasks in [*batches, *batches[len(batches) - again :]]:
        options = replace(options, truncated_below=write(elasticsearch, options, tasks))
    expected = {str(key): {"id": key, "name": name} for key, name in table.rows.items()}
    assert elasticsearch.documents("clicks") == expected
