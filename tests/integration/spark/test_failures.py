"""Batches that fail, are run again, out of order, or beside an old attempt: what a real Elasticsearch then holds."""

from __future__ import annotations

import io
import json
import random
import subprocess
import sys
import threading
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from headrace.elasticsearch.errors import UnsuitableTargetError
from headrace.elasticsearch.options import IndexingOptions
from headrace.elasticsearch.target import Target
from headrace.elasticsearch.target_watch import TargetWatch
from headrace.ledger import AttemptState, BatchState
from headrace.ledger.errors import AttemptFencedError
from headrace.spark.attempts.failures import AttemptFailedError
from headrace.spark.outputs.elasticsearch_sink import IndexingTask
from headrace.stream import ColumnIds, ElasticsearchOutput, KafkaInput, SparkSettings, Utf8Decoder

Make = Callable[..., Any]
Records = Callable[..., pa.RecordBatch]

CODE = """
import os
import time
from pyspark.sql import functions as F

FOLDER = {folder!r}


def unlucky(records, batch):
    # Fails in a task of its own for as long as somebody wants it to.
    def mapped(offset):
        if os.path.exists(FOLDER + "/unlucky") and offset % 7 == 3:
            raise ValueError("unlucky")
        return offset * 10
    return records.select("topic", "partition", "offset", "incarnation", F.udf(mapped, "long")("offset").alias("n"))


def waiting(records, batch):
    # The first attempt stops in the middle of its rows until it is let go.
    number = batch.attempt
    def mapped(offset):
        while number == 1 and offset >= 30 and not os.path.exists(FOLDER + "/go"):
            open(FOLDER + "/waits", "w").close()
            time.sleep(0.05)
        return offset * 10
    return records.select("topic", "partition", "offset", "incarnation", F.udf(mapped, "long")("offset").alias("n"))


def words(lines):
    return lines.select(F.explode(F.split("value", " ")).alias("word")).groupBy("word").count()
"""


@pytest.fixture
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], dict[str, Any]]]:
    """The fields of a stream with one of these transforms."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    name = f"failures_{uuid.uuid4().hex}"
    (tmp_path / f"{name}.py").write_text(CODE.format(folder=str(tmp_path)))
    yield lambda function: {
        "transform": f"{name}:{function}",
        "spark": SparkSettings(py_files=(str(tmp_path / f"{name}.py"),)),
    }
    sys.modules.pop(name, None)


class Index:
    """An index of a test's own."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.name = f"failures-{uuid.uuid4().hex[:12]}"

    def output(self, **fields: Any) -> ElasticsearchOutput:
        return ElasticsearchOutput(hosts=self.url, index=self.name, **{"max_retry_seconds": 20, **fields})

    def hits(self) -> list[Any]:
        self.ask("POST", f"/{self.name}/_refresh")
        query = {"size": 10_000, "version": True, "seq_no_primary_term": True}
        found: list[Any] = self.ask("POST", f"/{self.name}/_search", query)["hits"]["hits"]
        return found

    def documents(self) -> dict[str, Any]:
        return {hit["_id"]: hit["_source"] for hit in self.hits()}

    def ask(self, method: str, path: str, body: Any = None) -> Any:
        request = urllib.request.Request(  # noqa: S310
            f"{self.url}{path}",
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"content-type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=30) as answer:  # noqa: S310
            return json.load(answer)


@pytest.fixture
def index(elasticsearch: str) -> Iterator[Index]:
    one = Index(elasticsearch)
    yield one
    for name in one.ask("GET", f"/{one.name}*/_settings?filter_path=*.settings.index.provided_name"):
        one.ask("DELETE", f"/{name}")


class Runs:
    """Batches of a stream, run in the shared session."""

    def __init__(self, spark: SparkSession, batch: Any, records: Records) -> None:
        self._spark = spark
        self._batch = batch
        self._records = records
        self._next_offset = 0
        self.ledger = batch.ledger

    def allocate(self, *blocks: list[bytes]) -> int:
        """A batch of these blocks of values; its time."""
        for values in blocks:
            self._batch.add(self._records(values, first_offset=self._next_offset))
            self._next_offset += len(values)
        time_ms: int = self._batch.allocate()
        return time_ms

    def run(self, time_ms: int) -> Any:
        return self.attempt(self._batch.begin(time_ms, force=True))

    def attempt(self, attempt: Any) -> Any:
        return self._batch.run(self._spark, attempt, out=io.StringIO())

    def state(self, time_ms: int) -> BatchState:
        state: BatchState = self.ledger.batches.get("clicks", time_ms).state
        return state


@pytest.fixture
def make(spark: SparkSession, make_batch_ledger: Make, make_records: Records, code: Any) -> Callable[..., Runs]:
    """Builds the batches of a stream with one of the transforms; takes the fields of a Stream."""
    return lambda function, **fields: Runs(spark, make_batch_ledger(**code(function), **fields), make_records)


class Crash(BaseException):
    """The process is gone."""


def _crash(*_: Any, **__: Any) -> None:
    raise Crash


@pytest.mark.slow
def test_multiple_failures_with_map(index: Index, make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In tasks, at the index, after the write and before it is recorded, at the batch's end: at random, seeded."""
    chance = random.Random(5)
    runs = make("unlucky", outputs=index.output(bulk_actions=5, max_retry_seconds=0.5))
    index.ask("PUT", f"/{index.name}")

    def unlucky_task(time_ms: int) -> None:
        (tmp_path / "unlucky").touch()
        with pytest.raises(AttemptFailedError, match="unlucky"):
            runs.run(time_ms)
        (tmp_path / "unlucky").unlink()

    def blocked_index(time_ms: int) -> None:
        index.ask("PUT", f"/{index.name}/_settings", {"index.blocks.write": True})
        with pytest.raises(AttemptFailedError, match="made no progress"):
            runs.run(time_ms)
        index.ask("PUT", f"/{index.name}/_settings", {"index.blocks.write": None})

    def crashed_at(step: str) -> Callable[[int], None]:
        def crash(time_ms: int) -> None:
            with monkeypatch.context() as crashing:
                crashing.setattr(type(runs.ledger.attempts), step, _crash)
                with pytest.raises((Crash, AttemptFailedError)):
                    runs.run(time_ms)

        return crash

    failures = [unlucky_task, blocked_index, crashed_at("record_output"), crashed_at("complete")]
    records = 0
    for _ in range(2):
        blocks = [[b"{}"] * chance.randrange(20, 50) for _ in range(2)]
        records += sum(map(len, blocks))
        time_ms = runs.allocate(*blocks)
        for failure in chance.sample(failures, 3):
            failure(time_ms)
        runs.run(time_ms)
        assert runs.state(time_ms) is BatchState.COMPLETED
    hits = index.hits()
    assert {hit["_id"]: hit["_source"]["n"] for hit in hits} == {
        f"clicks+0+{offset}": offset * 10 for offset in range(records)
    }
    assert {hit["_version"] for hit in hits} == {1}


@pytest.mark.slow
def test_an_old_attempt_that_still_writes_changes_nothing(index: Index, make: Make, tmp_path: Path) -> None:
    """It writes beside the new attempt, and cannot report success."""
    runs = make("waiting", outputs=index.output(bulk_actions=5))
    time_ms = runs.allocate([b"{}"] * 60)
    # Its lease is long, so that it notices nothing before its end.
    old = runs.ledger.attempts.begin("clicks", time_ms, holder="old", way="submit", lease_ms=600_000)
    ended: list[BaseException] = []

    def run_old() -> None:
        try:
            runs.attempt(old)
        except BaseException as error:
            ended.append(error)

    thread = threading.Thread(target=run_old)
    thread.start()
    while thread.is_alive() and not (tmp_path / "waits").exists():
        thread.join(0.1)
    assert runs.run(time_ms).attempt == 2
    before = {hit["_id"]: (hit["_version"], hit["_seq_no"]) for hit in index.hits()}
    assert len(before) == 60
    (tmp_path / "go").touch()
    thread.join(240)
    assert isinstance(ended[0], AttemptFencedError)
    assert {hit["_id"]: (hit["_version"], hit["_seq_no"]) for hit in index.hits()} == before
    states = [row.state for row in runs.ledger.attempts.of_batch("clicks", time_ms)]
    assert states == [AttemptState.FENCED, AttemptState.COMPLETED]
    assert runs.state(time_ms) is BatchState.COMPLETED


@pytest.mark.parametrize("with_batch_time", [True, False])
def test_aggregate_batches_run_again_out_of_order_change_nothing(
    index: Index, make: Make, with_batch_time: bool
) -> None:
    lines = KafkaInput(bootstrap_servers="localhost:9", topics="clicks", value_decoder=Utf8Decoder())
    ids = ColumnIds(columns=("word",), with_batch_time=with_batch_time)
    runs = make("words", inputs=lines, outputs=index.output(document_ids=ids))
    first = runs.allocate([b"a b a"])
    second = runs.allocate([b"a c"])
    for time_ms in (first, second):
        runs.run(time_ms)
    before = index.documents()
    found = sorted((id_, document["count"]) for id_, document in before.items())
    if with_batch_time:
        assert found == [(f"a+{first}", 2), (f"a+{second}", 1), (f"b+{first}", 1), (f"c+{second}", 1)]
    else:
        assert found == [("a", 1), ("b", 1), ("c", 1)]
    for time_ms in (second, first):
        runs.run(time_ms)
    assert index.documents() == before


def test_an_index_created_again_during_a_write_fails_the_batch(index: Index, tmp_path: Path) -> None:
    """Elasticsearch makes a deleted index again at the next write, without what it held."""
    report = f"file://{tmp_path}/report.json"
    output = index.output()
    options = IndexingOptions.of(output, Target.of(output, "clicks"), batch_time_ms=0, report=report)
    columns = {"topic": ["t"] * 2, "partition": [0] * 2, "offset": [0, 1], "value": [b"{}"] * 2}
    rows = pa.record_batch(columns)
    index.ask("PUT", f"/{index.name}")
    task, watch = IndexingTask(options, seed=1), TargetWatch(options)
    watch.check_before()
    list(task.run(iter([rows.slice(0, 1)])))
    index.ask("DELETE", f"/{index.name}")
    list(task.run(iter([rows.slice(1, 1)])))
    with pytest.raises(UnsuitableTargetError, match="was deleted and created again"):
        watch.check_after()
    assert set(index.documents()) == {"t+0+1"}
    watch.check_before()
    list(task.run(iter([rows])))
    (now,) = watch.check_after()
    assert now.concrete is not None
    assert now.concrete.name == index.name
    assert set(index.documents()) == {"t+0+0", "t+0+1"}


ENCRYPTED = """
import json, sys
from pyspark import StorageLevel
from headrace.spark.sessions import classic_session
from headrace.batch.manifest import Manifest
from headrace.spark.records.wal_source import LogBlocks

conf = {"spark.io.encryption.enabled": "true", "spark.ui.enabled": "false", "spark.sql.shuffle.partitions": "2"}
spark = classic_session("encrypted", master="local[1]", conf=conf)
frame = LogBlocks.of([Manifest.load(sys.argv[1])], "records").frame(spark, 2)
kept = frame.persist(StorageLevel.DISK_ONLY)
counted = {row.partition: row["count"] for row in kept.groupBy("partition").count().collect()}
again = sorted(bytes(row.value).decode() for row in kept.collect())
print(json.dumps([counted, again, sorted(bytes(row.value).decode() for row in frame.unpersist().collect())]))
spark.stop()
"""


@pytest.mark.slow
def test_records_kept_encrypted_are_those_read_from_the_log(written_log: Any, make_records: Records) -> None:
    """What Spark keeps and shuffles is encrypted by ``spark.io.encryption.enabled``; the log is read as ever."""
    values = [b"value %03d" % number for number in range(200)]
    written_log.add(make_records(values[:100]))
    written_log.add(make_records(values[100:], first_offset=100))
    command = [sys.executable, "-c", ENCRYPTED, written_log.manifest()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    expected = [value.decode() for value in values]
    assert json.loads(done.stdout) == [{"0": 200}, expected, expected]
