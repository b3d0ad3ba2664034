"""The order of one write's requests, with tasks that run one after the other and an Elasticsearch that forgets.

Dead letters' records, where Kafka no longer has what the batch read.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from tests.support.fake_elasticsearch import FakeElasticsearch
from tests.support.indexing_options import indexing_options
from tests.support.records import make_block
from tests.unit.kafka.test_range_reader import Clicks, Questions

from headrace.batch.manifest import Manifest
from headrace.blocks import TopicPartition
from headrace.elasticsearch import target_watch
from headrace.elasticsearch.dead_letters import OriginalRecord
from headrace.elasticsearch.errors import (
    DocumentsUnaccountedError,
    ElasticsearchRefusedError,
    TargetChangedError,
)
from headrace.elasticsearch.options import IndexingOptions
from headrace.elasticsearch.target import ConcreteIndex, Target
from headrace.elasticsearch.target_watch import TargetWatch
from headrace.elasticsearch.transport import Cluster, NoAnswerError, Node
from headrace.kafka.errors import RangesGoneError
from headrace.kafka.range_reader import KafkaRangeReader, RangeClients
from headrace.kafka.ranges import RangeRun, RecordedRange
from headrace.spark.attempts import shared_jobs
from headrace.spark.outputs import elasticsearch_sink
from headrace.spark.outputs.elasticsearch_sink import IndexingTask, index_rows
from headrace.spark.outputs.held_deletions import MAX_KEPT_BYTES
from headrace.spark.outputs.original_records import KafkaOriginalRecords
from headrace.spark.records.kafka_ranges_source import KafkaBlocks
from headrace.stream import ElasticsearchOutput, KafkaInput, KeyIds
from headrace.stream.outputs import Tombstones
from headrace.wal.storage import open_storage

OUTPUT = ElasticsearchOutput(hosts="http://h:1", index="shop", document_ids=KeyIds())
OPTIONS = IndexingOptions.of(OUTPUT, Target.of(OUTPUT, "s"), batch_time_ms=1)


def known(name: str, uuid: str) -> IndexingOptions:
    """The options when earlier batches were written to this index."""
    return replace(OPTIONS, target=replace(OPTIONS.target, known=(ConcreteIndex(name, uuid),)))


@dataclass
class Tasks:
    """As much of a DataFrame as the write asks for: each of ``parts`` gives the rows of one task."""

    parts: list[Callable[[], pa.RecordBatch]]
    elasticsearch: FakeElasticsearch
    jobs: int = 0
    coalesced: list[int] = field(default_factory=list)
    sparkSession = None  # noqa: N815 - Spark's name
    columns: Sequence[str] = ("topic", "partition", "offset", "key", "value")

    def mapInArrow(self, run: Any, schema: str) -> Any:  # noqa: N802 - Spark's names
        self.jobs += 1
        results: list[pa.RecordBatch] = []
        for part in self.parts:
            results += run(iter([part()]))
            self._forget_deletions()
        return SimpleNamespace(toArrow=lambda: pa.Table.from_batches(results))

    def coalesce(self, tasks: int) -> Tasks:
        self.coalesced.append(tasks)
        return self

    def where(self, condition: str) -> Tasks:
        column = condition.removesuffix(" IS NOT NULL")
        return self._with(lambda rows: rows.filter(rows.column(column).is_valid()), self.columns)

    def select(self, *names: str) -> Tasks:
        return self._with(lambda rows: rows.select(list(names)), names)

    def _with(self, change: Callable[[pa.RecordBatch], pa.RecordBatch], columns: Sequence[str]) -> Tasks:
        return replace(self, parts=[lambda part=part: change(part()) for part in self.parts], columns=columns)

    def _forget_deletions(self) -> None:
        for documents in self.elasticsearch.indices.values():
            for key in [key for key, stored in documents.items() if stored.document is None]:
                del documents[key]


@pytest.fixture
def elasticsearch(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeElasticsearch]:
    fake = FakeElasticsearch()
    transport = SimpleNamespace(request=fake.request, close=lambda: None)
    for module in (elasticsearch_sink, target_watch):
        monkeypatch.setattr(module, "open_transport", lambda *_, **__: transport)
    monkeypatch.setattr("headrace.elasticsearch.transport.Cluster.of", lambda _: Cluster((Node("http", "fake", 9200),)))
    return fake


def records(values: list[bytes | None], first_offset: int) -> pa.RecordBatch:
    numbers = range(len(values))
    return pa.record_batch(
        {
            "topic": ["orders"] * len(values),
            "partition": pa.array([0] * len(values), pa.int32()),
            "offset": pa.array([first_offset + number for number in numbers], pa.int64()),
            "key": pa.array([b"%d" % number for number in numbers], pa.binary()),
            "value": pa.array(values, pa.binary()),
        }
    )


def documents(elasticsearch: FakeElasticsearch) -> dict[str, int]:
    """The versions of what is there."""
    indexed = elasticsearch.indices["shop"].items()
    return {key: stored.version for key, stored in indexed if stored.document is not None}


@pytest.mark.parametrize(("keys", "jobs"), [(5, 1), (MAX_KEPT_BYTES // 20, 2)], ids=["returned", "read again"])
def test_deletions_come_after_the_older_values_of_all_tasks(
    elasticsearch: FakeElasticsearch, keys: int, jobs: int
) -> None:
    # The first two keys are deleted for good in the first task, but the second key was written once more after that.
    deleted = lambda: records([None] * keys, 1_000_000)  # noqa: E731
    older = lambda: records([b"{}"] * keys, 0)  # noqa: E731
    newer = lambda: records([b"{}", b"{}"], 2_000_000).slice(1)  # noqa: E731
    tasks = Tasks([deleted, older, newer], elasticsearch)
    report = index_rows(tasks, OPTIONS)  # type: ignore[arg-type]
    assert documents(elasticsearch) == {"1": 2_000_001}
    counts = report.counts
    assert (counts.rows, counts.deleted, counts.superseded) == (2 * keys + 1, keys - 1, 1)
    assert (tasks.jobs, report.duplicates) == (jobs, 0)


def test_rows_with_a_ceiling_are_written_by_tasks_that_share_it(
    elasticsearch: FakeElasticsearch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There are no more of them than run at once."""
    monkeypatch.setattr("headrace.spark.sessions.parallelism", lambda _: 8)
    shares: list[float | None] = []
    transport = elasticsearch_sink.open_transport

    def opened(options: IndexingOptions, connections: int) -> Any:
        shares.append(options.max_requests_per_second)
        return transport(options, connections)

    monkeypatch.setattr(elasticsearch_sink, "open_transport", opened)
    tasks = Tasks([lambda: records([b"{}"], 0)], elasticsearch)
    for ceiling, coalesced in ((None, []), (4000.0, [8])):
        index_rows(tasks, replace(OPTIONS, max_requests_per_second=ceiling))  # type: ignore[arg-type]
        assert tasks.coalesced == coalesced
    assert shares == [None, 500]


@pytest.mark.parametrize(("tombstones", "names"), [("ignore", ["a"]), ("dead_letter", ["a", "gone"])])
def test_ignored_records_without_a_value_name_no_index(
    elasticsearch: FakeElasticsearch, tombstones: Tombstones, names: list[str]
) -> None:
    output = ElasticsearchOutput(hosts="http://h:1", index="{tenant}", tombstones=tombstones)
    options = IndexingOptions.of(output, Target.of(output, "s"), batch_time_ms=1)
    rows = records([b"{}", None], 0).append_column("index_0", pa.array(["a", "gone"]))
    settled: list[str] = []

    def settle(options: IndexingOptions, names: Sequence[str]) -> IndexingOptions:
        settled.extend(names)
        return elasticsearch_sink.at_names(options, names)

    tasks = Tasks([lambda: rows], elasticsearch, columns=rows.schema.names)
    report = index_rows(tasks, options, settle)  # type: ignore[arg-type]
    assert settled == names
    assert (report.counts.created, report.counts.ignored_tombstones) == (1, 2 - len(names))


def test_rows_that_delete_only_at_first_reading_fail_the_batch(elasticsearch: FakeElasticsearch) -> None:
    keys = MAX_KEPT_BYTES // 20
    readings = iter([records([None] * keys, 0), records([b"{}"] * keys, 0)])
    with pytest.raises(DocumentsUnaccountedError, match=f"found {keys} rows without a document.* and 0 when"):
        index_rows(Tasks([lambda: next(readings)], elasticsearch), OPTIONS)  # type: ignore[arg-type]


def test_a_batch_that_fails_while_read_leaves_no_live_consumer(
    elasticsearch: FakeElasticsearch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No consumer of its task still reads the batch."""
    clicks = Clicks()
    clicks.kafka.produce("clicks", 0, *[b"{}"] * 8)
    reader = partial(KafkaRangeReader, consumer_factory=clicks.kafka.consumer, questions=Questions(clicks.kafka))
    monkeypatch.setattr("headrace.spark.records.kafka_ranges_source.KafkaRangeReader", reader)
    clients = RangeClients.of(KafkaInput(bootstrap_servers="nowhere:1", topics="clicks"))
    output = ElasticsearchOutput(hosts="http://h:1", index="shop")
    options = replace(
        IndexingOptions.of(output, Target.of(output, "s"), batch_time_ms=1, report="memory:///report"),
        # The first request is sent before the batch is read to its end.
        bulk_actions=1,
        max_retry_seconds=0,
    )
    tasks = [
        IndexingTask(options, 1, KafkaBlocks("records", ((clicks.run(0, begin, (begin + 4, 4)),),), clients))
        for begin in (0, 4)
    ]
    elasticsearch.standing_fault = lambda actions: NoAnswerError("reset") if actions[0].id == "clicks+0+0" else None
    done: list[pa.RecordBatch] = []
    gc.disable()
    try:
        batches = iter([(place, task, 1) for place, task in enumerate(tasks)])
        shared_jobs._run_batches(batches, shared_jobs._Outcomes(), done.append)
    finally:
        gc.enable()
    first, second = (batch.to_pylist()[0]["error"] for batch in done)
    assert "ElasticsearchUnavailableError" in first
    assert second is None


PARTITION = TopicPartition("clicks", "id-1", 0, 1)


class Compacted:
    """Kafka with every offset below 10 but 3; one record a batch."""

    def __init__(self, _: Any) -> None:
        pass

    def read(self, runs: list[RangeRun]) -> Generator[pa.RecordBatch, None, None]:
        kept = [offset for offset in range(runs[0].from_offset, min(10, runs[0].until_offset)) if offset != 3]
        for offset in kept[:1]:
            yield make_block([b"%d" % offset], from_offset=offset)[0]

    def close(self) -> None:
        pass


def test_a_record_that_compaction_removed_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.kafka.range_reader.KafkaRangeReader", Compacted)
    folder = f"{tmp_path}/shop"
    ranges = (RecordedRange(PARTITION, 0, 20, None),)
    manifest = Manifest("shop", 10_000, 10_000, {"clicks": ()}, folder, {"clicks": ranges})
    manifest.write(open_storage(folder))
    records: Any = {"clicks": None}
    with KafkaOriginalRecords(manifest.uri, records) as kafka:
        assert kafka.fetch("clicks", 0, 2, 1) == OriginalRecord(None, b"2", timestamp_ms=1_700_000_000_000)
        for gone in (3, 15):
            with pytest.raises(RangesGoneError, match=f"offset {gone} of clicks-0"):
                kafka.fetch("clicks", 0, gone, 1)
        assert kafka.fetch("clicks", 0, 20, 1) is None, "another batch's"


def test_no_document_is_sent_where_the_former_alias_is_gone(elasticsearch: FakeElasticsearch) -> None:
    """The former alias is that of earlier batches."""
    tasks = Tasks([lambda: records([b"{}"], 0)], elasticsearch)
    with pytest.raises(TargetChangedError, match="It was an alias of 'shop-1'"):
        index_rows(tasks, known("shop-1", "u1"))  # type: ignore[arg-type]
    assert (tasks.jobs, elasticsearch.indices) == (0, {})


def test_all_names_that_have_changed_are_in_one_error(elasticsearch: FakeElasticsearch) -> None:
    """Else each try would name one more."""
    options = indexing_options(index="shop-{topic}", hosts=["http://h:1"], dead_letter_index="letters")
    names = ["shop-a", "shop-b", "shop-c"]
    targets = [options.target.at(name, known=(ConcreteIndex(f"{name}-1", "u"),)) for name in names]
    with pytest.raises(TargetChangedError, match=r"'shop-a' any more.* too: 'shop-b', 'shop-c'.*--index shop-a"):
        TargetWatch(options.with_targets(targets)).check_before()


def test_a_write_through_an_alias_has_the_server_refuse_an_index(elasticsearch: FakeElasticsearch) -> None:
    """The alias is deleted when the tasks begin."""
    elasticsearch.descriptions["shop"] = {"shop-1": {"aliases": {"shop": {}}, "settings": {"index": {"uuid": "u1"}}}}

    def late() -> pa.RecordBatch:
        del elasticsearch.descriptions["shop"]
        return records([b"{}"], 0)

    with pytest.raises(ElasticsearchRefusedError, match="is not an alias"):
        index_rows(Tasks([late], elasticsearch), known("shop-1", "u1"))  # type: ignore[arg-type]
    assert elasticsearch.indices == {}


def test_only_a_new_place_costs_a_request_more(elasticsearch: FakeElasticsearch) -> None:
    rows = Tasks([lambda: records([b"{}"] * 3, 0)], elasticsearch)
    report = index_rows(rows, OPTIONS)  # type: ignore[arg-type]
    assert report.target.concrete == ConcreteIndex("shop", "uuid of shop")
    first = len(elasticsearch.requests)
    again = Tasks([lambda: records([b"{}"] * 3, 3)], elasticsearch)
    index_rows(again, known("shop", "uuid of shop"))  # type: ignore[arg-type]
    asked = [("GET", "/"), ("GET", "/shop"), ("POST", "/shop/_bulk"), ("GET", "/shop")]
    assert elasticsearch.requests[first:] == asked
    assert first == len(asked) + 1
