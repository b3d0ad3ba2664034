"""Over Spark Connect: what batches read and write, and the documentation's state, by clients of one server.

The server alone is meant to know the secrets of connections. The last test stops it, and looks for them in all that
the server and its clients have written.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from confluent_kafka import Consumer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic
from tests.integration.spark.application import JOBS, environment, until
from tests.integration.spark.conftest import SMALL_DATA, BatchLedger, records
from tests.integration.spark.connect_server import SECRET, ConnectServer
from tests.integration.spark.test_elasticsearch_sink import Index
from tests.integration.spark.test_foreach_batch_output import make_batch
from tests.integration.spark.test_kafka_ranges import Received

from headrace.batch.range_progress import RangeProgress
from headrace.batch.time_range import TimeRange
from headrace.ledger import AttemptState
from headrace.spark.outputs.writer import WrittenBatch
from headrace.stream import ConsoleOutput, KafkaInput, KafkaOutput, ParquetOutput, SparkSettings, Stream
from headrace.stream.stream import replayed

__all__ = ["make_batch"]

pytestmark = pytest.mark.slow

PAGE = Path(__file__).parents[3] / "docs" / "state.md"
PASSWORD = "hunter2"


@pytest.fixture(scope="module")
def elasticsearch_connection(elasticsearch: str) -> dict[str, str]:
    """The environment with a connection to Elasticsearch. The server takes any name and password."""
    host, _, port = elasticsearch.removeprefix("http://").partition(":")
    fields = {"conn_type": "elasticsearch", "host": host, "port": int(port), "login": "me", "password": PASSWORD}
    return {"AIRFLOW_CONN_SECRET_ES": json.dumps(fields)}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The server's folder, and those of the tests so far."""
    return [tmp_path_factory.mktemp("server")]


@pytest.fixture(autouse=True)
def _folder(folders: list[Path], tmp_path: Path) -> None:
    folders.append(tmp_path)


@pytest.fixture(scope="module")
def kafka_connection(kafka: str) -> dict[str, str]:
    # Without SASL the broker asks for no password, but the clients are given it.
    fields = {"conn_type": "kafka", "host": kafka, "login": "me", "password": PASSWORD}
    return {"AIRFLOW_CONN_SECRET_KAFKA": json.dumps(fields)}


@pytest.fixture(scope="module")
def server(
    kafka_connection: dict[str, str], elasticsearch_connection: dict[str, str], folders: list[Path]
) -> Iterator[ConnectServer]:
    """The tests' server, with the connections and a log of Spark's events."""
    folder = folders[0]
    stream = Stream(
        name="s",
        inputs=KafkaInput(bootstrap_servers="127.0.0.1:1", topics="t"),
        outputs=ConsoleOutput(),
        batch_interval="10 s",
        storage=str(folder / "storage"),
        ledger=f"sqlite:///{folder}/ledger.db",
        spark=SparkSettings(
            master="local[2]",
            conf={
                **SMALL_DATA,
                "spark.ui.enabled": "false",
                "spark.eventLog.enabled": "true",
                "spark.eventLog.dir": f"file://{folder}",
                "spark.eventLog.compress": "false",
            },
        ),
    )
    connections = {**kafka_connection, **elasticsearch_connection}
    with ConnectServer(stream.to_json(), folder, **connections) as running:
        yield running


READ_AGAIN = """
import json, sys
from headrace.spark.records.kafka_ranges_source import KafkaBlocks, KafkaRangesDataSource
from headrace.spark.connect_sessions import connect_session
from headrace.batch.manifest import Manifest
from headrace.spark.records.record_columns import RECORD_SCHEMA
from headrace.spark.records.wal_source import LogBlocks
from headrace.stream import KafkaInput

url, token, manifest, source = sys.argv[1:]
spark = connect_session(url, token)
spark.dataSource.register(KafkaRangesDataSource)
options = {"manifests": json.dumps([manifest]), "input": "records"}
log = LogBlocks.of([Manifest.load(manifest)], "records").frame(spark, 2)
again = spark.read.format("kafka_ranges").options(**options, stream=source).load()
again.explain(True)
print(json.dumps([again.count(), log.exceptAll(again).count(), again.exceptAll(log).count()]))
blocks = KafkaBlocks.of([Manifest.load(manifest)], KafkaInput.model_validate_json(source))
class Task:
    def among(self, tasks):
        return self

    def run(self, numbers):
        return blocks.read(numbers)
ddl = ", ".join(f"`{field.name}` {field.dataType.simpleString()}" for field in RECORD_SCHEMA)
places = lambda table: sorted(zip(*(table.column(name).to_pylist() for name in ("partition", "offset", "value"))))
by_tasks = blocks.run(spark, 2, Task(), ddl)
print(json.dumps([by_tasks.num_rows, places(by_tasks) == places(log.toArrow())]))
spark.stop()
"""


def test_a_batch_is_read_from_kafka_again(
    server: ConnectServer, kafka: str, kafka_connection: dict[str, str], tmp_path: Path
) -> None:
    received = Received(kafka, tmp_path)
    source = KafkaInput(connection="secret_kafka", topics=received.topic)
    client = server.run(READ_AGAIN, received.manifest.uri, source.model_dump_json(), **kafka_connection)
    by_source, by_tasks = (json.loads(line) for line in client.stdout.splitlines()[-2:])
    assert by_source == [300, 0, 0]
    assert by_tasks == [300, True]


REGISTER_AT_ONCE = """
import sys
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from pyspark.sql.datasource import DataSource
from headrace.spark.connect_sessions import connect_session
from headrace.spark.sessions import register_source

THREADS = 32
spark = connect_session(*sys.argv[1:])
ready = Barrier(THREADS)

def register(source):
    ready.wait()
    register_source(spark, source)

with ThreadPoolExecutor(THREADS) as pool:
    for number in range(5):
        source = type("Source", (DataSource,), {"name": classmethod(lambda cls, number=number: f"at_once_{number}")})
        list(pool.map(register, [source] * THREADS))
print("registered")
"""


def test_threads_of_one_session_register_a_data_source_at_once(server: ConnectServer) -> None:
    assert server.run(REGISTER_AT_ONCE).stdout.splitlines()[-1] == "registered"


HOUSE = """
from headrace.errors import Failure, HeadraceError

class TargetBusyError(HeadraceError):
    pass

class RefusedError(HeadraceError):
    failure = Failure.CODE

def busy(batches):
    for batch in batches:
        raise TargetBusyError("the target is away")
    yield from ()

def wrapped(batches):
    try:
        yield from busy(batches)
    except TargetBusyError as error:
        raise ValueError("not put") from error

def refused(batches):
    for batch in batches:
        raise RefusedError("no such target")
    yield from ()
"""
FAIL = """
import sys
from headrace.spark.attempts.failures import failure_of, first_cause
from headrace.spark.connect_sessions import connect_session
from pyspark import cloudpickle

url, token, folder = sys.argv[1:]
spark = connect_session(url, token)
sys.path.insert(0, folder)
import house
# The workers get the functions by value. This process forgets the extension's classes.
cloudpickle.register_pickle_by_value(house)
functions = (house.busy, house.wrapped, house.refused)
del sys.modules["house"]
sys.path.remove(folder)
for function in functions:
    try:
        spark.range(1).mapInArrow(function, "id LONG").collect()
    except Exception as error:
        print(failure_of(error).value, first_cause(error))
"""


def test_an_extension_errors_class_in_a_task_counts_over_connect(server: ConnectServer, tmp_path: Path) -> None:
    (tmp_path / "house.py").write_text(HOUSE)
    busy, wrapped, refused = server.run(FAIL, str(tmp_path)).stdout.splitlines()[-3:]
    assert busy == "passing house.TargetBusyError: the target is away"
    assert wrapped.startswith("passing ValueError: not put")
    assert refused == "code house.RefusedError: no such target"


WRITE = """
import io, json, sys
from headrace.spark.attempts.failures import first_cause
from headrace.spark.outputs.writer import (writer_of)
from headrace.spark.outputs.writer import (WrittenBatch)
from headrace.spark.connect_sessions import connect_session
from headrace.spark.records.transforms import BatchContext
from headrace.stream import Stream

url, token, definition = sys.argv[1:]
stream = Stream.from_json(definition)
spark = connect_session(url, token)
frame = spark.range(0, 1000, 1, 3).selectExpr("id", "CAST(id AS STRING) AS value", "timestamp_millis(id) AS at")
T = 1_700_000_010_000
for output in stream.outputs:
    rows = frame.select("value") if output.kind == "kafka" else frame
    for attempt in (1, 2):
        context = BatchContext.of(stream.name, T, 10_000, attempt)
        batch = WrittenBatch(stream, context, T, attempt, "", False, "", io.StringIO(), lambda _: None)
        try:
            counts = writer_of(output).write(rows, batch)
        except Exception as error:
            counts = str(error).splitlines()[0]
        print(json.dumps(counts))
spark.stop()
"""


def test_parquet_kafka_and_foreach_batch_outputs_are_written(
    server: ConnectServer,
    kafka: str,
    kafka_admin: AdminClient,
    make_batch: Callable[..., WrittenBatch],
    tmp_path: Path,
) -> None:
    """The caller gets the counts, and the function runs with the caller."""
    topic = f"enriched-{uuid.uuid4().hex}"
    kafka_admin.create_topics([NewTopic(topic, 1, 1)])[topic].result()
    functions = make_batch().stream.outputs
    files = ParquetOutput(path=str(tmp_path / "files"))
    stream = make_batch(files, KafkaOutput(connection="secret_kafka", topic=topic), *functions).stream
    client = server.run(WRITE, stream.to_json())
    counts = [json.loads(line) for line in client.stdout.splitlines()]
    assert [each["rows"] for each in counts[:2]] == [1000, 1000]
    assert counts[2:4] == [
        {"messages": 1000, "repeated": 0, "bytes": 2890},
        {"messages": 0, "repeated": 1000, "bytes": 0},
    ]
    assert counts[4] == counts[5] == {"total": 999_000, "undecodable": {}}
    assert "ZeroDivisionError" in counts[6]
    assert sorted(pd.read_parquet(tmp_path / "files")["id"]) == list(range(1000))
    assert first_message(kafka, topic) == b"0"
    assert not list((tmp_path / "storage" / stream.name / "reports").iterdir())


def first_message(kafka: str, topic: str) -> bytes | None:
    consumer = Consumer({"bootstrap.servers": kafka, "group.id": "tests", "isolation.level": "read_committed"})
    consumer.assign([TopicPartition(topic, 0, 0)])
    deadline = time.monotonic() + 30
    while (message := consumer.poll(1)) is None or message.error() is not None:
        assert time.monotonic() < deadline
    consumer.close()
    return bytes(message.value())


INDEX = """
import json, sys
from pyspark.sql.types import StructType
from headrace.elasticsearch.target import Target
from headrace.elasticsearch.options import IndexingOptions
from headrace.spark.outputs.elasticsearch import write_documents
from headrace.spark.records.record_columns import RECORD_SCHEMA
from headrace.spark.connect_sessions import connect_session
from headrace.stream import ElasticsearchOutput

url, token, index, report = sys.argv[1:]
spark = connect_session(url, token)
df = spark.range(1000).selectExpr(
    "'t' AS topic", "0 AS partition", "id AS offset", "cast(cast(id as string) as binary) AS key",
    "cast(CASE WHEN id = 7 THEN 'junk' ELSE concat('{\\"n\\":', id, '}') END AS binary) AS value")
df = df.to(StructType([RECORD_SCHEMA[name] for name in df.columns]))
output = ElasticsearchOutput(connection="secret_es", index=index, max_requests_per_second=10)
for attempt in (1, 2):
    options = IndexingOptions.of(output, Target.of(output, "s"), batch_time_ms=0, report=f"{report}-{attempt}.json")
    print(json.dumps(write_documents(df, output, options).counts.to_dict()))
spark.stop()
"""


def test_documents_are_indexed_once(
    server: ConnectServer, elasticsearch: str, elasticsearch_connection: dict[str, str], tmp_path: Path
) -> None:
    index = Index(elasticsearch, tmp_path)
    client = server.run(INDEX, index.name, f"{tmp_path}/reports/r", **elasticsearch_connection)
    first, second = (json.loads(line) for line in client.stdout.splitlines())
    assert (first["created"], first["dead_lettered"]) == (999, 1)
    assert first["ceiling_seconds"] > 0
    assert (second["repeated"], second["dead_lettered"], second["indexed"]) == (999, 1, 0)


def test_records_name_their_indices(
    server: ConnectServer, elasticsearch: str, elasticsearch_connection: dict[str, str], tmp_path: Path
) -> None:
    """The names are read by a job before, and each task gets the targets."""
    index = Index(elasticsearch, tmp_path)
    client = server.run(INDEX, f"{index.name}-{{topic}}", f"{tmp_path}/reports/r", **elasticsearch_connection)
    first, second = (json.loads(line) for line in client.stdout.splitlines())
    assert (first["by_index"], first["dead_lettered"]) == ({f"{index.name}-t": 999}, 1)
    assert (second["by_index"], second["repeated"]) == ({f"{index.name}-t": 0}, 999)
    assert len(index.documents("-t")) == 999


SINGLE = """
import json, sys
from headrace.ledger import Ledger
from headrace.spark.attempts.attempt import run_attempt
from headrace.spark.attempts.batch_attempt import BatchAttempt
from headrace.spark.connect_sessions import connect_session
from headrace.stream import Stream
from headrace.stream_context import StreamContext

url, token, definition, *times = sys.argv[1:]
stream = Stream.from_json(definition)
spark = connect_session(url, token)
with Ledger.open(stream.ledger) as ledger:
    for time_ms in map(int, times):
        claim = ledger.attempts.begin(stream.name, time_ms, holder="single", way="connect", lease_ms=60_000)
        run_attempt(BatchAttempt(StreamContext(stream, ledger), claim, lambda: spark, partitions=2))
spark.stop()
"""
BATCHES, RECORDS = 40, 20


class Range:
    """Batches of a stream that one command replays into another index, in tries."""

    def __init__(self, server: ConnectServer, elasticsearch: str, folder: Path, batch: BatchLedger) -> None:
        self.server, self.batch = server, batch
        self.index = Index(elasticsearch, folder)
        for number in range(BATCHES):
            values = [b'{"number":%d}' % each for each in range(number * RECORDS, (number + 1) * RECORDS)]
            batch.add(records(values, first_offset=number * RECORDS))
            batch.allocate()
        self.times = [row.batch_time_ms for row in batch.ledger.batches.page("clicks", BATCHES, oldest_first=True)]
        server.serve(batch.ledger, batch.job)
        self._batches = TimeRange(0, self.times[-1], "run")

    def progress(self) -> RangeProgress:
        return RangeProgress.of(
            self.batch.ledger, "clicks", self._batches, ["elasticsearch"], target="v2", ordered=False
        )

    def start(self, try_number: int, log: Path, *, way: str) -> subprocess.Popen[bytes]:
        """The command of a try, at the first batch that is left."""
        replay = replayed(self.batch.stream, {"elasticsearch": {"index": self.index.name}})
        at_ms = self.progress().left[0].batch_time_ms
        first = self.batch.ledger.replays.begin(
            "clicks", at_ms, target="v2", definition=replay.to_json(), outputs=["elasticsearch"], holder="task",
            way=way, lease_ms=30_000, attributes={**self._batches.attributes, "try_number": try_number},
        )  # fmt: skip
        command = [sys.executable, str(JOBS / "micro_batch.py"), "--ledger", self.batch.stream.ledger]
        command += ["--stream", "clicks", "--batch-time", str(at_ms), "--attempt", str(first.number), "--way", way]
        with log.open("wb") as file:
            environ = environment(HEADRACE_SECRET_KEY=SECRET)
            return subprocess.Popen(command, stdout=file, stderr=file, env=environ)


def digest(index: Index) -> str:
    """A hash over all documents of an index, with their ids."""
    index.ask("POST", f"/{index.name}/_refresh")
    hits = index.ask("POST", f"/{index.name}/_search", {"size": 10_000})["hits"]["hits"]
    documents = sorted((hit["_id"], hit["_source"]) for hit in hits)
    assert len(documents) == BATCHES * RECORDS
    return hashlib.sha256(json.dumps(documents, sort_keys=True).encode()).hexdigest()


@pytest.mark.timeout(900)
def test_a_killed_range_goes_on_to_the_single_batches_documents(
    server: ConnectServer, elasticsearch: str, make_batch_ledger: Callable[..., BatchLedger], tmp_path: Path
) -> None:
    single = Index(elasticsearch, tmp_path)
    batch = make_batch_ledger(outputs=single.output())
    day = Range(server, elasticsearch, tmp_path, batch)
    server.run(SINGLE, batch.stream.to_json(), *map(str, day.times), seconds=600)
    killed = day.start(1, tmp_path / "first.log", way="connect")
    until("some batches", lambda: killed.poll() is not None or len(day.progress().completed) >= 10, 600)
    killed.kill()
    assert killed.wait() == -signal.SIGKILL, (tmp_path / "first.log").read_text()
    done = [row.batch_time_ms for row in day.progress().completed]
    assert 10 <= len(done) < BATCHES
    # In an application of its own: its batches share jobs too.
    second = day.start(2, tmp_path / "second.log", way="submit")
    assert second.wait(600) == 0, (tmp_path / "second.log").read_text()
    assert f"all {BATCHES} batches are done" in (tmp_path / "second.log").read_text()
    assert not day.progress().left
    attempts = {at_ms: [r for r in batch.ledger.attempts.of_batch("clicks", at_ms) if r.target] for at_ms in day.times}
    assert {len(attempts[at_ms]) for at_ms in done} == {1}, "what was done is not done again"
    assert all(rows[-1].state is AttemptState.COMPLETED for rows in attempts.values())
    assert digest(day.index) == digest(single)


STATE = """
import json, sys
from headrace.spark.outputs.writer import (WrittenBatch)
from headrace.spark.connect_sessions import connect_session
from headrace.spark.state.updating import state_frames
from headrace.spark.state.updating import update_state
from headrace.spark.records.transforms import BatchContext, apply_transform, load_transform
from headrace.stream import Stream

url, token, definition = sys.argv[1:]
stream = Stream.from_json(definition)
spark = connect_session(url, token)
for number, lines in enumerate((["a b", "a"], [], ["b b", "c"])):
    time_ms = 1_700_000_000_000 + number * 10_000
    context = BatchContext.of(stream.name, time_ms, 10_000, 1)
    batch = WrittenBatch(stream, context, time_ms, 1, "", False, "", sys.stdout, lambda line: None)
    inputs = {"lines": spark.createDataFrame([(line,) for line in lines], "value STRING")}
    counts = update_state(spark, stream, inputs, batch)
    frames = state_frames(spark, stream, time_ms)
    more = {"state": frames.state, "changes": frames.changes}
    written = apply_transform(load_transform(stream), inputs, ["elasticsearch"], context, more=more)
    rows = {row["word"]: row["count"] for row in written["elasticsearch"].collect()}
    print(json.dumps([counts, {row["word"]: row["count"] for row in frames.state.collect()}, rows]))
spark.stop()
"""


def test_the_documentations_example_of_a_state_runs(server: ConnectServer, tmp_path: Path) -> None:
    functions, dag = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)[:2]
    (tmp_path / "running_count_functions.py").write_text(functions)
    (tmp_path / "running_count.py").write_text(dag.replace("/var/lib/headrace", str(tmp_path)))
    namespace: dict[str, Any] = {"__file__": str(tmp_path / "running_count.py"), "__name__": "running_count"}
    exec(compile((tmp_path / "running_count.py").read_text(), "running_count.py", "exec"), namespace)  # noqa: S102
    client = server.run(STATE, namespace["stream"].to_json(), seconds=240)
    batches = [json.loads(line) for line in client.stdout.splitlines()]
    assert [counts["rows"] for counts, _, _ in batches] == [2, 2, 3]
    assert [state for _, state, _ in batches] == [{"a": 2, "b": 1}, {"a": 2, "b": 1}, {"a": 2, "b": 3, "c": 1}]
    assert [written for _, _, written in batches] == [{"a": 2, "b": 1}, {}, {"b": 3, "c": 1}]


def test_no_plan_and_no_log_has_a_secret_of_a_connection(server: ConnectServer, folders: list[Path]) -> None:
    """In all that the tests above have left, with the server's log of events, which has every plan."""
    server.stop()
    written = server.printed
    for path in (path for folder in folders for path in folder.rglob("*")):
        written += path.read_text(errors="replace") if path.is_file() else ""
    assert "SparkListenerSQLExecutionStart" in written
    for secret in (PASSWORD, base64.b64encode(f"me:{PASSWORD}".encode()).decode()):
        assert secret not in written
