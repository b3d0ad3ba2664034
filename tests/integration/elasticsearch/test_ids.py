"""Rule 7 on a real server: ids and versions through all that can happen to topics, indices, batches and attempts."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any, ClassVar

import pyarrow as pa
import pytest

from headrace.elasticsearch.errors import ElasticsearchRefusedError, UnsuitableRowsError, UnsuitableTargetError
from headrace.elasticsearch.indexer import Indexer
from headrace.elasticsearch.transport import Response, Transport
from headrace.ledger.receiving.tables import TopicRow
from headrace.receiver.partitioning import check_key_versions
from headrace.receiver.receiver import KeyVersionsError
from headrace.spark.outputs.elasticsearch_sink import check_unshared
from headrace.stream import ElasticsearchOutput, KafkaInput, KeyIds, Stream


def records(
    *rows: tuple[int, int, bytes, Any], incarnation: int = 1, version: list[int] | None = None
) -> pa.RecordBatch:
    """Records as (partition, offset, key, document)."""
    columns: dict[str, Any] = {
        "topic": ["t"] * len(rows),
        "partition": pa.array([row[0] for row in rows], pa.int32()),
        "offset": pa.array([row[1] for row in rows], pa.int64()),
        "key": pa.array([row[2] for row in rows], pa.binary()),
        "value": pa.array([None if row[3] is None else json.dumps(row[3]).encode() for row in rows], pa.binary()),
        "incarnation": pa.array([incarnation] * len(rows), pa.int32()),
    }
    if version is not None:
        columns["version"] = pa.array(version, pa.int64())
    return pa.record_batch(columns)


def topic(*, partitions: int = 1, topic_id: str = "first") -> TopicRow:
    """The topic "t" as the ledger has it, which had one partition when it was first seen."""
    return TopicRow("s", "kafka", "t", topic_id, 1, partitions, 1, True, True, 0, 0)


def by_keys(real: Any, ids: KeyIds) -> Stream:
    return Stream(
        name="s",
        inputs=KafkaInput(bootstrap_servers="localhost:9", topics="t"),
        outputs=ElasticsearchOutput(hosts=real.url, index=real.name, document_ids=ids, transform="m:f"),
        batch_interval="10 s",
        storage="/nowhere",
        ledger="sqlite:////nowhere/ledger.db",
    )


KEYS = {"document_id": "key"}
BY_CHANGE = {"document_id": "key", "version": "version"}


class TestPartitionGrowthWithKeyIds:
    """A key moves to a new partition, where offsets begin at 0."""

    old = records((0, 500, b"k", {"n": "old"}), version=[500])
    new = records((1, 3, b"k", {"n": "new"}), version=[501])

    def test_a_new_partitions_offset_would_lose_the_newer_value(self, real: Any) -> None:
        real.index(self.old, **KEYS)
        assert real.index(self.new, **KEYS).superseded == 1
        assert real.documents() == {"k": {"n": "old"}}

    def test_a_stream_by_offset_versions_stops_before_such_a_record(self, real: Any) -> None:
        with pytest.raises(KeyVersionsError, match="has grown from 1 to 2 partitions"):
            check_key_versions(by_keys(real, KeyIds()), [topic(partitions=2)])
        check_key_versions(by_keys(real, KeyIds(version_from="changed")), [topic(partitions=2)])

    @pytest.mark.parametrize("order", ["as they came", "backwards"])
    def test_a_version_that_grows_with_the_key_is_right_in_any_order(self, real: Any, order: str) -> None:
        batches = [self.old, self.new] if order == "as they came" else [self.new, self.old]
        for batch in [*batches, *batches]:
            real.index(batch, **BY_CHANGE)
        assert real.documents() == {"k": {"n": "new"}}


class TestATopicCreatedAgain:
    """Its offsets begin at 0 again, and so would its ids."""

    first = records((0, 0, b"k", {"n": "first"}), (0, 1, b"l", {"n": "l"}), version=[10, 11])
    second = records((0, 0, b"k", {"n": "second"}), incarnation=2, version=[20])

    def test_record_ids_carry_the_incarnation(self, real: Any) -> None:
        for batch in (self.first, self.second, self.first, self.second):
            real.index(batch)
        assert real.documents() == {"t+0+0": {"n": "first"}, "t+0+1": {"n": "l"}, "t+0+0+2": {"n": "second"}}

    def test_key_ids_stop_the_stream_and_the_batch(self, real: Any) -> None:
        real.index(self.first, **KEYS)
        with pytest.raises(UnsuitableRowsError, match="deleted and created again"):
            real.index(self.second, **KEYS)
        with pytest.raises(KeyVersionsError, match="was created again"):
            check_key_versions(by_keys(real, KeyIds()), [topic(), topic(topic_id="second")])
        assert real.documents()["k"] == {"n": "first"}

    def test_key_ids_with_a_version_of_their_own_go_on(self, real: Any) -> None:
        real.index(self.first, **BY_CHANGE)
        assert real.index(self.second, **BY_CHANGE).updated == 1
        assert real.index(self.first, **BY_CHANGE).superseded == 1
        assert real.documents() == {"k": {"n": "second"}, "l": {"n": "l"}}

    def test_dead_letters_of_both_are_kept_apart(self, real: Any) -> None:
        junk = records((0, 7, b"k", None))
        real.index(junk)
        real.index(records((0, 7, b"k", None), incarnation=2))
        assert set(real.documents(f"{real.name}-dead-letters")) == {f"{real.name}/t+0+7", f"{real.name}/t+0+7+2"}


def test_a_replay_after_a_rollover_is_refused(real: Any) -> None:
    """What the refusal of rollover aliases is for: the id is unique within an index, not behind the alias."""
    real.ask("PUT", f"/{real.name}-000001", {"aliases": {real.name: {"is_write_index": True}}})
    real.ask("PUT", f"/{real.name}/_doc/t+0+0", {"n": 1})
    real.ask("POST", f"/{real.name}/_rollover", {})
    real.ask("PUT", f"/{real.name}/_doc/t+0+0", {"n": 1})
    real.ask("POST", f"/{real.name}/_refresh")
    assert real.ask("GET", f"/{real.name}/_count")["count"] == 2
    with pytest.raises(UnsuitableTargetError, match=r"rolls over|2 indices"):
        real.concrete()
    # Also by the answer to the first document, if the alias came after that question.
    with pytest.raises(ElasticsearchRefusedError, match=r"rolls over|2 indices"):
        real.index(records((0, 1, b"k", {"n": 2})))


class TestSupersededAndRepeated:
    """A 409 from another source position counts as superseded, from the same as repeated."""

    def test_by_key(self, real: Any) -> None:
        real.index(records((0, 5, b"k", {"n": 5})), **KEYS)
        again = real.index(records((0, 5, b"k", {"n": 5}), (0, 4, b"k", {"n": 4})), **KEYS)
        assert (again.repeated, again.superseded, again.indexed) == (1, 1, 0)

    def test_a_value_that_was_deleted_since(self, real: Any) -> None:
        real.index(records((0, 5, b"k", {"n": 5})), **KEYS)
        tombstone = records((0, 6, b"k", None))
        assert real.index(tombstone, **KEYS).deleted == 1
        assert real.index(tombstone, **KEYS).repeated == 1
        assert real.index(records((0, 5, b"k", {"n": 5})), **KEYS).superseded == 1
        assert real.documents() == {}

    def test_several_values_of_a_key_in_one_batch(self, real: Any) -> None:
        batch = records(*((0, offset, b"k", {"n": offset}) for offset in range(50)), (0, 50, b"l", None))
        counts = real.index(batch, **KEYS, bulk_actions=7, requests_in_flight=4)
        assert real.documents() == {"k": {"n": 49}}
        assert counts.indexed + counts.superseded == 50
        again = real.index(batch, **KEYS)
        assert (again.indexed, again.superseded, again.repeated) == (0, 49, 2)
        assert real.versions()["k"][0] == 49


class TestAggregatesOutOfOrder:
    """Two batches of sums by word, run again, the older one after the newer."""

    sums: ClassVar = {10_000: {"a": 1, "b": 2}, 20_000: {"a": 3}}

    def run(self, real: Any, batch_time_ms: int, **options: Any) -> Any:
        groups = self.sums[batch_time_ms]
        documents = [json.dumps({"word": word, "count": count}) for word, count in groups.items()]
        batch = pa.record_batch({"word": list(groups), "document": documents})
        by_word = {"document_id": "columns", "id_columns": ["word"], "batch_time_ms": batch_time_ms}
        return real.index(batch, **by_word, **options)

    @pytest.mark.parametrize("order", [(10_000, 20_000), (20_000, 10_000), (20_000, 10_000, 10_000, 20_000, 10_000)])
    def test_with_the_batch_time_each_has_its_own(self, real: Any, order: tuple[int, ...]) -> None:
        for batch_time_ms in order:
            self.run(real, batch_time_ms, id_batch_time=True)
        counts = {id_: document["count"] for id_, document in real.documents().items()}
        assert counts == {"a+10000": 1, "b+10000": 2, "a+20000": 3}

    @pytest.mark.parametrize("order", [(10_000, 20_000), (20_000, 10_000), (20_000, 10_000, 10_000, 20_000, 10_000)])
    def test_without_it_the_newest_batch_stays(self, real: Any, order: tuple[int, ...]) -> None:
        for batch_time_ms in order:
            self.run(real, batch_time_ms)
        assert {id_: document["count"] for id_, document in real.documents().items()} == {"a": 3, "b": 2}
        assert self.run(real, 10_000).superseded == 1

    def test_a_batch_that_is_run_again_replaces_its_own(self, real: Any) -> None:
        self.run(real, 20_000)
        assert self.run(real, 20_000).updated == 1

    def test_documents_from_before_versions_are_replaced(self, real: Any) -> None:
        real.ask("PUT", f"/{real.name}/_doc/a", {"word": "a", "count": 0})
        assert self.run(real, 10_000).updated == 1
        assert real.documents()["a"]["count"] == 1


class Slow:
    """A transport whose bulk requests wait, one after another, until they are let through."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self.waiting = threading.Semaphore(0)
        self.through = threading.Semaphore(0)

    def request(self, method: str, path: str, body: bytes | None = None) -> Response:
        if "_bulk" in path:
            self.waiting.release()
            assert self.through.acquire(timeout=60)
        return self._transport.request(method, path, body)

    def close(self) -> None:
        pass


class OldAttempt:
    """An attempt that writes beside the one that took its place, a request at a time."""

    def __init__(self, real: Any, batch: pa.RecordBatch, **options: Any) -> None:
        self._slow = Slow(real.transport)
        self.counts: list[Any] = []
        self._indexer = Indexer(self._slow, real.options(bulk_actions=10, requests_in_flight=1, **options))
        self._thread = threading.Thread(target=lambda: self.counts.append(self._indexer.index([batch])))
        self._thread.start()

    def let_through(self, requests: int) -> None:
        """Let so many requests be carried out, and the next one wait."""
        for _ in range(requests):
            assert self._slow.waiting.acquire(timeout=60)
            self._slow.through.release()
        assert self._slow.waiting.acquire(timeout=60)

    def end(self) -> Any:
        for _ in range(1000):
            self._slow.through.release()
        self._thread.join(60)
        (counts,) = self.counts
        return counts


@pytest.fixture
def old_attempt(real: Any) -> Iterator[Any]:
    made: list[OldAttempt] = []

    def make(batch: pa.RecordBatch, **options: Any) -> OldAttempt:
        made.append(OldAttempt(real, batch, **options))
        return made[-1]

    yield make
    for attempt in made:
        attempt._thread.join(60)


class TestAnOldAttemptStillWritingWhileTheNewOneRuns:
    batch = records(*((0, n, b"key-%d" % (n % 40), {"n": n}) for n in range(100)))

    def test_records_are_there_once_and_counted_once(self, real: Any, old_attempt: Any) -> None:
        old = old_attempt(self.batch)
        old.let_through(3)
        new = real.index(self.batch, bulk_actions=10)
        assert (new.repeated, new.created) == (30, 70)
        before = real.versions()
        assert old.end().repeated == 70
        assert real.versions() == before
        assert len(real.documents()) == 100

    def test_keys_hold_their_latest_values(self, real: Any, old_attempt: Any) -> None:
        old = old_attempt(self.batch, **KEYS)
        old.let_through(5)
        real.index(self.batch, **KEYS, bulk_actions=10)
        before = real.versions()
        late = old.end()
        assert (late.superseded + late.repeated, late.dead_lettered) == (50, 0)
        assert real.versions() == before
        assert {document["n"] for document in real.documents().values()} == set(range(60, 100))

    def test_a_later_batchs_values_stay_when_an_older_one_runs_again(self, real: Any, old_attempt: Any) -> None:
        columns = {"document_id": "columns", "id_columns": ["word"]}
        words = [f"w{n}" for n in range(50)]

        def sums(count: int) -> pa.RecordBatch:
            return pa.record_batch({"word": words, "document": [json.dumps({"count": count})] * len(words)})

        old = old_attempt(sums(1), **columns, batch_time_ms=10000)
        old.let_through(2)
        real.index(sums(1), **columns, batch_time_ms=10000)
        real.index(sums(2), **columns, batch_time_ms=20000)
        assert old.end().superseded == 30
        assert {document["count"] for document in real.documents().values()} == {2}

    def test_dead_letters_are_there_once(self, real: Any, old_attempt: Any) -> None:
        batch = records(*((0, n, b"k", None if n % 10 == 0 else {"n": n}) for n in range(100)))
        old = old_attempt(batch)
        old.let_through(2)
        assert real.index(batch).dead_lettered == 10
        assert old.end().dead_lettered == 10
        assert len(real.documents(f"{real.name}-dead-letters")) == 10


def test_another_output_into_the_index_by_an_alias_is_refused(real: Any) -> None:
    other = ElasticsearchOutput(id="other", hosts=real.url.replace("127.0.0.1", "localhost"), index=f"{real.name}-too")
    away = ElasticsearchOutput(id="away", hosts="http://127.0.0.1:1", index=real.name)
    check_unshared(real.options(), [away, other])
    real.ask("PUT", f"/{real.name}")
    check_unshared(real.options(), [away, other])
    real.ask("PUT", f"/{real.name}/_alias/{other.index}")
    with pytest.raises(UnsuitableTargetError, match=f"Output other writes into the same index, '{real.name}'"):
        check_unshared(real.options(), [away, other])
