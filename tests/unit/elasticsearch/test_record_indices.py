"""The index of each row: names that rows fill in, and rows that get none."""

from __future__ import annotations

import sys
from datetime import date, datetime
from typing import Any

import pyarrow as pa
import pytest
from tests.support.fake_elasticsearch import FakeElasticsearch
from tests.support.indexing_options import indexing_options
from tests.unit.elasticsearch.conftest import ImpatientClock, MakeRows

from headrace.elasticsearch.bulk_bodies import prepare_rows
from headrace.elasticsearch.errors import DuplicateIdsError, UnsuitableRowsError
from headrace.elasticsearch.indexer import Indexer
from headrace.elasticsearch.options import IndexingOptions
from headrace.elasticsearch.record_indices import distinct_names, row_names

HEADERS = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))


def options_of(index: Any, **fields: Any) -> IndexingOptions:
    return indexing_options(index=index, **fields)


def names_of(batch: pa.RecordBatch, index: Any, **fields: Any) -> list[str | None]:
    """The name of each row, with the reason's type and text in brackets if it has none."""
    found = row_names(batch, options_of(index, **fields))
    return [
        found.names[code] if code >= 0 else f"[{found.rejected[row].type}: {found.rejected[row].text}]"
        for row, code in enumerate(found.codes.tolist())
    ]


def one(column: str, *values: Any, kind: Any = None) -> pa.RecordBatch:
    return pa.record_batch({column: pa.array(values, kind)})


def test_a_topic_is_filled_in() -> None:
    rows = one("topic", "a", "b", "a")
    assert names_of(rows, "x-{topic}-y") == ["x-a-y", "x-b-y", "x-a-y"]
    assert names_of(one("topic", "a", "b").slice(1), "{topic}") == ["b"]


def test_a_mapping_gives_each_topic_its_index() -> None:
    rows = pa.record_batch({"topic": ["a", "b", "c"], "tenant": ["t", "", "t"]})
    found = names_of(rows, {"a": "x", "b": "{tenant}-y"})
    assert found == [
        "x",
        "[missing_index: {tenant} is null or empty]",
        "[missing_index: the output names no index for topic 'c']",
    ]


def test_topics_that_take_turns_keep_their_rows() -> None:
    rows = pa.record_batch({"topic": ["b", "a", None, "b", "a", "b"], "n": [0, 1, 2, 3, None, 5]})
    found = names_of(rows, {"a": "x-{n}", "b": "y-{n}-{topic}"})
    assert [each for each in found if each[0] != "["] == ["y-0-b", "x-1", "y-3-b", "y-5-b"]
    assert [found[2], found[4]] == [f"[missing_index: {{{part}}} is null or empty]" for part in ("topic", "n")]


def test_names_are_made_for_the_topics_of_the_rows_only() -> None:
    options = options_of({str(number): f"x-{number}" for number in range(100)})
    rows, calls = one("topic", "7", "7"), list[str]()
    sys.setprofile(lambda _, event, __: calls.append(event))
    try:
        found = row_names(rows, options)
    finally:
        sys.setprofile(None)
    assert (found.names, found.codes.tolist()) == (["x-7"], [0, 0])
    assert calls.count("c_call") + calls.count("call") < 10 * 100, "not some for each topic of the mapping"


@pytest.mark.parametrize(
    ("zone", "name"),
    [("UTC", "l-2026.03.28-23"), ("Europe/Berlin", "l-2026.03.29-00"), ("Asia/Kathmandu", "l-2026.03.29-05")],
)
def test_a_time_is_written_in_the_zone(zone: str, name: str) -> None:
    at = pa.array([datetime(2026, 3, 28, 23, 59, 59), None], pa.timestamp("us", "UTC"))
    rows = pa.record_batch({"timestamp": at})
    found = names_of(rows, "l-{timestamp:%Y.%m.%d-%H}", index_zone=zone)
    assert found == [name, "[missing_index: {timestamp:%Y.%m.%d-%H} is null or empty]"]


def test_an_hour_that_summer_time_repeats_has_one_name() -> None:
    """02:30 comes twice in Berlin on 2026-10-25, and once is missing on 2026-03-29."""
    at = [datetime(2026, 10, 25, 0, 30), datetime(2026, 10, 25, 1, 30), datetime(2026, 3, 29, 1, 0)]
    rows = one("timestamp", *at, kind=pa.timestamp("ms", "UTC"))
    assert names_of(rows, "{timestamp:%d.%H}", index_zone="Europe/Berlin") == ["25.02", "25.02", "29.03"]


@pytest.mark.parametrize("unit", ["s", "ms", "us", "ns"])
def test_times_of_every_unit_before_and_after_1970_are_exact(unit: str) -> None:
    rows = one("at", datetime(1969, 12, 31, 23, 59, 59), datetime(1970, 1, 1), kind=pa.timestamp(unit, "UTC"))
    assert names_of(rows, "{at:%Y-%m-%d-%j}") == ["1969-12-31-365", "1970-01-01-001"]


def test_a_day_and_a_time_without_a_zone_are_taken_as_they_are() -> None:
    rows = pa.record_batch(
        {
            "day": pa.array([date(2027, 1, 1)]),
            "local": pa.array([datetime(2027, 1, 1, 0, 30)], pa.timestamp("us")),
        }
    )
    assert names_of(rows, "{day:%G-w%V}-{local:%Y.%H}", index_zone="America/New_York") == ["2026-w53-2027.00"]


def test_a_time_beyond_the_calendar_is_a_dead_letter() -> None:
    rows = one("at", 253_402_300_800, -62_135_596_801, 0, kind=pa.int64()).column(0).cast(pa.timestamp("s", "UTC"))
    found = names_of(pa.record_batch({"at": rows}), "{at:%Y}")
    assert found == ["[missing_index: {at:%Y} is a time outside the years 1 to 9999]"] * 2 + ["1970"]


def test_a_record_without_a_time_is_a_dead_letter() -> None:
    """Kafka says -1 for it, which is no day of 1969."""
    rows = one("timestamp", -1, 0, kind=pa.int64()).column(0).cast(pa.timestamp("ms", "UTC"))
    for unit in ("ms", "us", "ns"):
        found = names_of(pa.record_batch({"timestamp": rows.cast(pa.timestamp(unit, "UTC"))}), "{timestamp:%Y}")
        assert found == ["[missing_index: {timestamp:%Y} is not known to Kafka]", "1970"]


def test_the_last_header_of_the_name_is_filled_in() -> None:
    headers = [
        [{"key": "tenant", "value": b"a"}, {"key": "x", "value": b"b"}, {"key": "tenant", "value": b"c"}],
        [{"key": "x", "value": b"b"}],
        [],
        None,
        [{"key": "tenant", "value": b""}],
        [{"key": "tenant", "value": b"\xff"}],
        [{"key": "tenant", "value": b"d"}],
    ]
    missing = "[missing_index: {header.tenant} is null or empty]"
    expected = ["c-o", missing, missing, missing, missing, "[missing_index: {header.tenant} is not UTF-8]", "d-o"]
    rows = one("headers", *headers, kind=HEADERS)
    assert names_of(rows, "{header.tenant}-o") == expected
    assert names_of(rows.slice(5), "{header.tenant}-o") == expected[5:]


def test_an_illegal_name_is_a_dead_letter_and_not_changed() -> None:
    rows = one("tenant", "Shop", "a b", "ok", "..", "x" * 300, ".kibana", "-a")
    found = names_of(rows, "{tenant}")
    assert found[0] == "[illegal_index: 'Shop' is no name for an index: it has capital letters]"
    assert [each.partition(": it ")[2] for each in found[1:2]] == ["has blanks]"]
    assert found[2] == "ok"
    assert [each[:16] for each in found[3:]] == ["[illegal_index: "] * 4
    assert len(found[4]) < 300
    assert "begins with a dot" in found[5]
    assert names_of(one("tenant", "kibana"), ".{tenant}") == [".kibana"]


def test_a_dot_of_one_topics_name_allows_none_to_others() -> None:
    rows = pa.record_batch({"topic": ["audit", "orders", "orders"], "tenant": ["x", ".audit", ".security-7"]})
    found = names_of(rows, {"audit": ".audit", "orders": "{tenant}"})
    assert found == [
        ".audit",
        "[illegal_index: '.audit' begins with a dot, as the indices of the server do]",
        "[illegal_index: '.security-7' begins with a dot, as the indices of the server do]",
    ]


def test_the_index_of_dead_letters_is_no_index_of_a_row() -> None:
    rows = one("tenant", "clicks-dead-letters")
    found = names_of(rows, "{tenant}", letters_names=frozenset({"clicks-dead-letters"}))
    assert found == ["[illegal_index: 'clicks-dead-letters' is the index of dead letters]"]


@pytest.mark.parametrize(
    ("index", "kind"), [("{x}", pa.float64()), ("{x}", pa.timestamp("us")), ("{x:%Y}", pa.string())]
)
def test_a_column_of_a_wrong_type_fails_the_batch(index: str, kind: Any) -> None:
    with pytest.raises(UnsuitableRowsError, match="of type"):
        names_of(one("x", None, kind=kind), index)
    with pytest.raises(UnsuitableRowsError, match="no column 'x'"):
        names_of(one("y", "a"), index)


def test_numbers_and_bytes_are_texts() -> None:
    rows = pa.record_batch({"n": pa.array([7]), "b": pa.array([b"k"])})
    assert names_of(rows, "{n}-{b}") == ["7-k"]


def test_rejected_rows_have_no_name_and_need_no_column() -> None:
    rows = pa.record_batch({"rejected_because": pa.array(["why"])})
    assert names_of_codes(rows) == [-1]
    mixed = pa.record_batch({"rejected_because": pa.array(["why", None]), "tenant": [None, "a"]})
    assert names_of_codes(mixed) == [-1, 0]


def names_of_codes(rows: pa.RecordBatch) -> list[int]:
    codes: list[int] = row_names(rows, options_of("{tenant}")).codes.tolist()
    return codes


def test_distinct_names_are_bounded_and_all_rows_are_taken() -> None:
    batches = iter([one("topic", *map(str, range(first, first + 10))) for first in (0, 5, 100)])
    assert len(distinct_names(batches, options_of("{topic}"), 12)) == 12
    assert next(batches, None) is None


@pytest.mark.parametrize(("tombstones", "names"), [("ignore", ["a"]), ("dead_letter", ["a", "gone"])])
def test_an_ignored_record_without_a_value_needs_no_index(
    tombstones: str, names: list[str], make_rows: MakeRows
) -> None:
    """An index that is missing, and may not be created, fails the batch."""
    rows = make_rows([{}, None], tenant=pa.array(["a", "gone"]))
    options = options_of("{tenant}", create_index=False, tombstones=tombstones)
    assert distinct_names([rows], options, 10) == names
    preparation = prepare_rows(rows, at(options, *names))
    assert (len(preparation.prepared or ()), preparation.ignored_tombstones) == (1, 2 - len(names))


def at(options: IndexingOptions, *names: str) -> IndexingOptions:
    return options.with_targets(map(options.target.at, names))


@pytest.fixture
def tenants(make_rows: MakeRows) -> pa.RecordBatch:
    return make_rows([{"n": n} for n in range(6)], tenant=pa.array(["a", "b", "a", None, "B", "b"]))


def test_documents_and_letters_go_to_the_index_of_their_row(
    tenants: pa.RecordBatch, elasticsearch: FakeElasticsearch, clock: ImpatientClock
) -> None:
    options = at(options_of("{tenant}", dead_letter_index="letters"), "a", "b")
    counts = Indexer(elasticsearch, options, clock=clock).index([tenants])
    assert (counts.created, counts.dead_lettered, counts.by_index) == (4, 2, {"a": 2, "b": 2})
    assert {name: sorted(elasticsearch.indices[name]) for name in "ab"} == {
        "a": ["t+0+0", "t+0+2"],
        "b": ["t+0+1", "t+0+5"],
    }
    letters = {id_: stored.document for id_, stored in elasticsearch.indices["letters"].items()}
    assert {letter["reason"]["type"] for letter in letters.values()} == {"missing_index", "illegal_index"}
    assert {(letter["index"], letter["index_names"]) for letter in letters.values()} == {("{tenant}", "{tenant}")}
    again = Indexer(elasticsearch, options, clock=clock).index([tenants])
    assert (again.repeated, again.created, again.by_index) == (4, 0, {"a": 0, "b": 0})


def test_one_request_has_the_lines_of_one_index(tenants: pa.RecordBatch) -> None:
    options = at(options_of("{tenant}", bulk_actions=2), "a", "b")
    prepared = prepare_rows(tenants, options).prepared
    assert prepared is not None
    requests = [[prepared.row(line) for line in lines] for lines in prepared.requests(options)]
    assert requests == [[0, 2], [1, 5]]
    body = prepared.body(next(iter(prepared.requests(options))))
    assert body.count(b"\n") == 4


def test_a_refused_document_has_a_letter_of_its_index(
    tenants: pa.RecordBatch, elasticsearch: FakeElasticsearch, clock: ImpatientClock
) -> None:
    def fault(action: Any) -> Any:
        return (400, "document_parsing_exception", "no") if action.id == "t+0+5" else None

    elasticsearch.item_fault = fault
    options = at(options_of("{tenant}", dead_letter_index="letters", stream_name="s", output_id="o"), "a", "b")
    Indexer(elasticsearch, options, clock=clock).index([tenants])
    assert elasticsearch.indices["letters"]["s/o/b/t+0+5"].document["index"] == "b"


def test_one_id_in_two_indices_is_two_documents(
    make_rows: MakeRows, elasticsearch: FakeElasticsearch, clock: ImpatientClock
) -> None:
    options = at(options_of("{tenant}"), "a", "b")
    twice = make_rows([{}, {}], offsets=[0, 0], tenant=pa.array(["a", "b"]))
    indexer = Indexer(elasticsearch, options, clock=clock)
    assert indexer.index([twice]).created == 2
    assert len(set(indexer.digests().tolist())) == 2
    same = make_rows([{}, {}], offsets=[0, 0], tenant=pa.array(["a", "a"]))
    with pytest.raises(DuplicateIdsError):
        Indexer(elasticsearch, options, clock=clock).index([same])


def test_a_name_that_was_not_read_before_fails_the_batch(
    tenants: pa.RecordBatch, elasticsearch: FakeElasticsearch, clock: ImpatientClock
) -> None:
    with pytest.raises(UnsuitableRowsError, match="index 'b', which no row of the batch had"):
        Indexer(elasticsearch, at(options_of("{tenant}"), "a"), clock=clock).index([tenants])
    assert "b" not in elasticsearch.indices
