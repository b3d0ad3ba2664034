"""An index for each record: batches into a real Elasticsearch, their repeats, letters, traces and replays."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession
from tests.integration.spark.micro_batch.conftest import Make, Records, run

from headrace.batch.places import PLACES, accept, place_of
from headrace.elasticsearch.dead_letter_index import LetterFilter
from headrace.elasticsearch.errors import TargetChangedError, TooManyIndicesError, UnsuitableTargetError
from headrace.elasticsearch.target import ConcreteIndex
from headrace.lineage import index_datasets
from headrace.stream import ElasticsearchOutput, JsonDecoder, KafkaInput, KeyIds, Stream
from headrace.stream.stream import replayed
from headrace.stream_context import StreamContext
from headrace.views.dead_letters import DeadLettersOf
from headrace.views.trace import trace_record
from headrace.views.trace_location import Coordinates

DAY_MS = 86_400_000
# 2026-11-23, a Monday, at 23:30 UTC.
MONDAY_MS = 1_795_476_600_000


class Family:
    """A test's indices: those whose names begin with its prefix."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.prefix = f"idx{uuid.uuid4().hex[:10]}"

    def output(self, index: str | dict[str, str], **fields: Any) -> ElasticsearchOutput:
        """``index`` without the prefix; "" at the beginning of a mapping's."""
        named = {topic: self.prefix + name for topic, name in index.items()} if isinstance(index, dict) else None
        letters = {"dead_letter_index": f"{self.prefix}-letters", "max_retry_seconds": 20}
        return ElasticsearchOutput(hosts=self.url, index=named or f"{self.prefix}{index}", **{**letters, **fields})

    def ask(self, method: str, path: str, body: Any = None) -> Any:
        request = urllib.request.Request(  # noqa: S310
            f"{self.url}/{path}",
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"content-type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as answer:  # noqa: S310
            return json.load(answer)

    def documents(self) -> dict[str, list[str]]:
        """The ids in each index, by its name without the prefix."""
        self.ask("POST", f"{self.prefix}*/_refresh")
        hits = self.ask("POST", f"{self.prefix}*/_search", {"size": 1000})["hits"]["hits"]
        found: dict[str, list[str]] = {}
        for hit in hits:
            found.setdefault(hit["_index"].removeprefix(self.prefix), []).append(hit["_id"])
        return {name: sorted(ids) for name, ids in sorted(found.items()) if name != "-letters"}

    def indices(self) -> list[str]:
        return sorted(self.ask("GET", f"{self.prefix}*/_settings?filter_path=*.settings.index.uuid"))

    def letters(self) -> list[dict[str, Any]]:
        self.ask("POST", f"{self.prefix}-letters/_refresh")
        hits = self.ask("POST", f"{self.prefix}-letters/_search", {"size": 1000})["hits"]["hits"]
        return [hit["_source"] for hit in hits]


@pytest.fixture
def family(elasticsearch: str) -> Iterator[Family]:
    one = Family(elasticsearch)
    yield one
    for name in one.indices():
        one.ask("DELETE", name)


Days = Callable[..., pa.RecordBatch]


@pytest.fixture
def days(make_records: Records) -> Days:
    """Records of the days after Monday with these numbers, at 23:30 UTC."""

    def make(*numbers: int, **fields: Any) -> pa.RecordBatch:
        values = [json.dumps({"day": day}).encode() for day in numbers]
        return make_records(values, timestamps=[MONDAY_MS + day * DAY_MS for day in numbers], **fields)

    return make


def changed(batch: Any, **fields: Any) -> Stream:
    """The stream with other fields of its output, registered as its next definition."""
    (output,) = batch.stream.outputs
    given = {name: getattr(output, name) for name in output.model_fields_set}
    stream: Stream = batch.stream.model_copy(update={"outputs": (type(output)(**{**given, **fields}),)})
    batch.ledger.streams.register(
        stream.name,
        stream.to_json(),
        batch_interval_ms=stream.batch_interval_ms,
        block_interval_ms=stream.block_interval_ms,
        outputs=stream.steps,
        ordered=stream.is_ordered,
    )
    return stream


def traced(batch: Any, stream: Stream, offset: int) -> list[tuple[str, str | None]]:
    """The outcomes of a record, and the index of its document."""
    found = trace_record(StreamContext(stream, batch.ledger), Coordinates("clicks", 0, offset, None))
    return [(each.outcome.value, each.document.index if each.document else None) for each in found.outputs]


def test_a_repeat_goes_to_the_same_days(
    spark: SparkSession, family: Family, make_batch_ledger: Make, days: Days
) -> None:
    """Without a transform the tasks read the log; in Berlin the days begin an hour earlier than in UTC."""
    output = family.output("-{timestamp:%Y.%m.%d}", index_zone="Europe/Berlin")
    batch = make_batch_ledger(outputs=output)
    batch.add(days(0, 1, 0))
    result, _ = run(spark, batch)
    expected = {"-2026.11.24": ["clicks+0+0", "clicks+0+2"], "-2026.11.25": ["clicks+0+1"]}
    assert family.documents() == expected
    counts = result.outputs["elasticsearch"]
    names = {f"{family.prefix}{name}": len(ids) for name, ids in expected.items()}
    assert (counts["created"], counts["by_index"]) == (3, names)
    assert [place["name"] for place in counts[PLACES]] == sorted(names)
    assert all(place["uuid"] for place in counts[PLACES])
    again = batch.run(spark, batch.begin(result.batch_time_ms, force=True)).outputs["elasticsearch"]
    assert (again["repeated"], again["created"]) == (3, 0)
    assert family.documents() == expected
    assert traced(batch, batch.stream, 1) == [("document", f"{family.prefix}-2026.11.25")]
    assert {name.name: number for name, number in index_datasets(output, counts, None).items()} == names


def test_a_week_is_found_over_a_changed_definition(
    spark: SparkSession, family: Family, make_batch_ledger: Make, days: Days
) -> None:
    batch = make_batch_ledger(outputs=family.output("-{timestamp:%Y.%m.%d}"))
    times = []
    for day in range(3):
        batch.add(days(day, first_offset=day))
        times.append(run(spark, batch)[0].batch_time_ms)
    monthly = changed(batch, index=f"{family.prefix}-{{timestamp:%Y-%m}}")
    for day in range(3, 7):
        batch.add(days(day, first_offset=day))
        run(spark, batch, stream=monthly)
    assert family.documents() == {
        "-2026-11": [f"clicks+0+{day}" for day in range(3, 7)],
        **{f"-2026.11.{23 + day}": [f"clicks+0+{day}"] for day in range(3)},
    }
    for day in range(7):
        index = f"-2026.11.{23 + day}" if day < 3 else "-2026-11"
        assert traced(batch, monthly, day) == [("document", f"{family.prefix}{index}")]
    # A day again, under the later definition: its first documents are named, and stay.
    lines: list[str] = []
    again = batch.run(spark, batch.begin(times[0], force=True), stream=monthly, report=lines.append)
    assert again.outputs["elasticsearch"]["created"] == 1
    (warning,) = [line for line in lines if "What they wrote there stays" in line]
    assert f"wrote to {family.prefix}-2026.11.23, or may have" in warning
    assert traced(batch, monthly, 0) == [("document", f"{family.prefix}-2026-11")]


def test_too_many_indices_leave_nothing_behind(
    spark: SparkSession, family: Family, make_batch_ledger: Make, make_records: Records
) -> None:
    """10,000 names in one batch: a clear error before anything is sent; with another name the batch is complete."""
    batch = make_batch_ledger(outputs=family.output("-{key}"))
    batch.add(make_records([b"{}"] * 10_000))
    with pytest.raises(
        TooManyIndicesError, match=r"more than 100 indices .*-key-0'.*Nothing of the batch was sent"
    ) as error:
        run(spark, batch)
    assert "max_indices" in str(error.value.remedy)
    assert family.indices() == []
    fewer = changed(batch, index=f"{family.prefix}-{{topic}}")
    time_ms = batch.ledger.batches.page(batch.stream.name)[0].batch_time_ms
    counts = batch.run(spark, batch.begin(time_ms), stream=fewer).outputs["elasticsearch"]
    assert (counts["created"], counts["by_index"]) == (10_000, {f"{family.prefix}-clicks": 10_000})


def test_rows_without_a_legal_name_are_dead_letters(
    spark: SparkSession, family: Family, make_batch_ledger: Make, make_records: Records, transforms: Any
) -> None:
    """By a column of a transform; the corrected definition indexes them, and withdraws their letters."""
    source = KafkaInput(
        bootstrap_servers="localhost:9092", topics="clicks", value_decoder=JsonDecoder(fields="shop STRING, n INT")
    )
    made = transforms("shops")
    batch = make_batch_ledger(inputs=source, outputs=family.output("-{shop}", dead_letter_limit={"share": 1}), **made)
    values = [{"shop": "a", "n": 1}, {"shop": "Big", "n": 2}, {"shop": None, "n": 3}, {"shop": "", "n": 4}]
    batch.add(make_records([*(json.dumps(value).encode() for value in values), b"junk"]))
    result, _ = run(spark, batch)
    assert family.documents() == {"-a": ["clicks+0+0"]}
    names = f"{family.prefix}-{{shop}}"
    assert sorted((letter["offset"], letter["reason"]["type"], letter["index"]) for letter in family.letters()) == [
        (1, "illegal_index", names),
        (2, "missing_index", names),
        (3, "missing_index", names),
        (4, "rejected", names),
    ]
    assert traced(batch, batch.stream, 1)[0][0] == "dead_letter"
    counts = batch.run(spark, batch.begin(result.batch_time_ms, force=True)).outputs["elasticsearch"]
    assert (counts["dead_lettered"], counts["repeated"], counts["letters_withdrawn"]) == (4, 1, 0)
    corrected = batch.stream.model_copy(update={"transform": f"{batch.stream.transform}_corrected"})
    attempt = batch.begin(result.batch_time_ms, force=True)
    counts = batch.run(spark, attempt, stream=corrected).outputs["elasticsearch"]
    assert (counts["created"], counts["dead_lettered"], counts["letters_withdrawn"]) == (3, 1, 3)
    assert family.documents() == {"-a": ["clicks+0+0"], "-big": ["clicks+0+1"], "-no": ["clicks+0+2", "clicks+0+3"]}
    assert [letter["offset"] for letter in family.letters()] == [4]
    # The transform gives the name, so all indices of the batch are asked.
    assert traced(batch, corrected, 3) == [("document", f"{family.prefix}-no")]


def test_each_topic_has_its_index_by_a_mapping(
    spark: SparkSession, family: Family, make_batch_ledger: Make, make_records: Records
) -> None:
    output = family.output({"clicks": "-c", "orders": "-o"})
    source = KafkaInput(bootstrap_servers="localhost:9092", topics=("clicks", "orders"))
    batch = make_batch_ledger(inputs=source, outputs=output)
    batch.add(make_records([b"{}"]))
    batch.add(make_records([b"{}"], topic="orders"))
    run(spark, batch)
    assert family.documents() == {"-c": ["clicks+0+0"], "-o": ["orders+0+0"]}


def test_a_header_names_the_index(spark: SparkSession, family: Family, make_batch_ledger: Make, days: Days) -> None:
    """Its bytes are no text here."""
    batch = make_batch_ledger(outputs=family.output("-{header.trace}", dead_letter_limit={"share": 1}))
    batch.add(days(0))
    result, _ = run(spark, batch)
    assert result.outputs["elasticsearch"]["dead_letter_reasons"] == {"missing_index": 1}
    assert family.letters()[0]["reason"]["text"] == "{header.trace} is not UTF-8"


def test_a_transform_that_keeps_headers_can_name_by_them(
    spark: SparkSession, family: Family, make_batch_ledger: Make, days: Days, transforms: Any
) -> None:
    """Spark gives the last header of the name, and times in the zone of its session."""
    source = KafkaInput(bootstrap_servers="localhost:9092", topics="clicks", value_decoder=JsonDecoder(fields="n INT"))
    output = family.output("-{header.tenant}-{timestamp:%d.%H}", dead_letter_limit={"share": 1})
    batch = make_batch_ledger(inputs=source, outputs=output, **transforms("with_headers"))
    tenants = [[("tenant", b"x"), ("tenant", b"a")], [("tenant", b"b")], [("other", b"c")]]
    headers = [[{"key": key, "value": value} for key, value in each] for each in tenants]
    records = days(0, 1, 0)
    column = records.schema.get_field_index("headers")
    records = records.set_column(
        column, records.schema.field(column), pa.array(headers, records.schema.field(column).type)
    )
    batch.add(records)
    before = spark.conf.get("spark.sql.session.timeZone")
    spark.conf.set("spark.sql.session.timeZone", "Asia/Tokyo")
    try:
        run(spark, batch)
    finally:
        spark.conf.set("spark.sql.session.timeZone", str(before))
    assert family.documents() == {"-a-23.23": ["clicks+0+0"], "-b-24.23": ["clicks+0+1"]}
    assert [letter["reason"]["text"] for letter in family.letters()] == ["{header.tenant} is null or empty"]


def test_deletions_find_the_index_of_their_topic(
    spark: SparkSession, family: Family, make_batch_ledger: Make, make_records: Records
) -> None:
    """The tombstone has the key of the document, and its topic; no tombstone is in the index of another topic."""
    batch = make_batch_ledger(outputs=family.output("-{topic}", document_ids=KeyIds()))
    batch.add(make_records([b"{}", b"{}"]))
    run(spark, batch)
    assert family.documents() == {"-clicks": ["key-0", "key-1"]}
    deleted = make_records([None], first_offset=2)
    batch.add(deleted.set_column(0, deleted.schema.field(0), pa.array([b"key-1"], pa.binary())))
    result, _ = run(spark, batch)
    assert result.outputs["elasticsearch"]["deleted"] == 1
    assert family.documents() == {"-clicks": ["key-0"]}


def test_a_replay_writes_another_family(
    spark: SparkSession, family: Family, make_batch_ledger: Make, days: Days
) -> None:
    batch = make_batch_ledger(outputs=family.output("-{timestamp:%Y.%m.%d}", dead_letter_index=None))
    batch.add(days(0, 1))
    result, _ = run(spark, batch)
    replay = replayed(batch.stream, {"elasticsearch": {"index": f"{family.prefix}-v2-{{timestamp:%Y.%m.%d}}"}})
    attempt = batch.ledger.replays.begin(
        batch.stream.name,
        result.batch_time_ms,
        target="v2",
        definition=replay.to_json(),
        outputs=("elasticsearch",),
        holder="test",
        way="submit",
        lease_ms=30_000,
    )
    counts = batch.run(spark, attempt, stream=replay).outputs["elasticsearch"]
    assert counts["created"] == 2
    assert list(family.documents()) == ["-2026.11.23", "-2026.11.24", "-v2-2026.11.23", "-v2-2026.11.24"]
    assert traced(batch, batch.stream, 1) == [
        ("document", f"{family.prefix}-2026.11.24"),
        ("document", f"{family.prefix}-v2-2026.11.24"),
    ]


def test_an_alias_that_moved_stops_the_batch_until_accepted(
    spark: SparkSession, family: Family, make_batch_ledger: Make, days: Days
) -> None:
    alias = f"{family.prefix}-2026.11.23"
    family.ask("PUT", f"{alias}-a", {"aliases": {alias: {}}})
    output = family.output("-{timestamp:%Y.%m.%d}", require_alias=True)
    batch = make_batch_ledger(outputs=output)
    batch.add(days(0))
    result, _ = run(spark, batch)
    assert family.documents() == {"-2026.11.23-a": ["clicks+0+0"]}
    assert traced(batch, batch.stream, 0) == [("document", f"{alias}-a")]
    family.ask("PUT", f"{alias}-b")
    moves = [{"remove": {"index": f"{alias}-a", "alias": alias}}, {"add": {"index": f"{alias}-b", "alias": alias}}]
    family.ask("POST", "_aliases", {"actions": moves})
    with pytest.raises(TargetChangedError, match="aliases accept clicks elasticsearch --index") as error:
        batch.run(spark, batch.begin(result.batch_time_ms, force=True))
    assert f"--index {alias}`" in str(error.value)
    accept(batch.ledger, "clicks", place_of(output.at(alias), ConcreteIndex(f"{alias}-b", None)), by="test")
    again = batch.run(spark, batch.begin(result.batch_time_ms, force=True)).outputs["elasticsearch"]
    assert again["created"] == 1
    batch.add(days(1, first_offset=1))
    with pytest.raises(UnsuitableTargetError, match="no alias has this name, and the output has require_alias=True"):
        run(spark, batch)


def test_two_names_of_one_index_are_refused(
    spark: SparkSession, family: Family, make_batch_ledger: Make, days: Days
) -> None:
    names = [f"{family.prefix}-2026.11.{day}" for day in (23, 24)]
    family.ask("PUT", f"{family.prefix}-both", {"aliases": {name: {} for name in names}})
    batch = make_batch_ledger(outputs=family.output("-{timestamp:%Y.%m.%d}"))
    batch.add(days(0, 1))
    with pytest.raises(UnsuitableTargetError, match="are names of one index"):
        run(spark, batch)
    assert family.documents() == {}


def test_a_deleted_day_is_made_anew_with_a_warning(
    spark: SparkSession, family: Family, make_batch_ledger: Make, days: Days
) -> None:
    batch = make_batch_ledger(outputs=family.output("-{timestamp:%Y.%m.%d}"))
    batch.add(days(0, 1))
    result, _ = run(spark, batch)
    family.ask("DELETE", f"{family.prefix}-2026.11.23")
    lines: list[str] = []
    again = batch.run(spark, batch.begin(result.batch_time_ms, force=True), report=lines.append)
    assert (again.outputs["elasticsearch"]["created"], again.outputs["elasticsearch"]["repeated"]) == (1, 1)
    assert any("-2026.11.23' of earlier batches was deleted since" in line for line in lines)


def test_no_index_is_created_where_that_is_refused(
    spark: SparkSession, family: Family, make_batch_ledger: Make, days: Days
) -> None:
    batch = make_batch_ledger(outputs=family.output("-{timestamp:%Y.%m.%d}", create_index=False))
    family.ask("PUT", f"{family.prefix}-2026.11.23")
    batch.add(days(0, 1))
    with pytest.raises(
        UnsuitableTargetError, match=r"no index '\S+-2026.11.24', and the output has create_index=False"
    ):
        run(spark, batch)
    assert family.documents() == {}
    family.ask("PUT", f"{family.prefix}-2026.11.24")
    time_ms = batch.ledger.batches.page(batch.stream.name)[0].batch_time_ms
    assert batch.run(spark, batch.begin(time_ms)).outputs["elasticsearch"]["created"] == 2


def test_letters_of_several_indices_are_replayed_there(
    spark: SparkSession, family: Family, make_batch_ledger: Make, days: Days
) -> None:
    indices = [f"{family.prefix}-2026.11.{day}" for day in (23, 24)]
    for index in indices:
        family.ask("PUT", index, {"mappings": {"dynamic": "strict"}})
    output = family.output("-{timestamp:%Y.%m.%d}", dead_letter_limit={"share": 1})
    batch = make_batch_ledger(outputs=output)
    batch.add(days(0, 1))
    run(spark, batch)
    assert sorted(letter["index"] for letter in family.letters()) == indices
    assert traced(batch, batch.stream, 1)[0][0] == "dead_letter"
    for index in indices:
        family.ask("PUT", f"{index}/_mapping", {"dynamic": True})
    letters = DeadLettersOf("clicks", output, max_retry_seconds=20)
    assert letters.plan(LetterFilter()).replayable == 2
    assert letters.replay(LetterFilter()).replayed == 2
    assert family.documents() == {"-2026.11.23": ["clicks+0+0"], "-2026.11.24": ["clicks+0+1"]}
