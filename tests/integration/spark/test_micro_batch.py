"""A batch from a plain script: a classic session, the ledger, the log and real outputs."""

from __future__ import annotations

import io
import json
import re
import signal
import sys
import threading
import time
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]
from pyspark.sql import SparkSession

from headrace.batch.build_from_kafka import build_from_kafka
from headrace.batch.manifest import ManifestError
from headrace.blocks import TopicPartition
from headrace.elasticsearch.errors import TooManyDeadLettersError
from headrace.kafka.range_reader import RangeClients
from headrace.ledger import AttemptState, BatchState
from headrace.ledger.errors import AttemptFencedError
from headrace.monitoring.stream_status import last_error
from headrace.spark.attempt_run import BatchResult
from headrace.spark.batch_attempt import BatchAttempt
from headrace.spark.batch_command import main
from headrace.spark.failures import AttemptFailedError
from headrace.stream import (
    ColumnIds,
    ConsoleOutput,
    DeadLetterLimit,
    ElasticsearchOutput,
    JsonDecoder,
    KafkaInput,
    SparkSettings,
    Utf8Decoder,
    Window,
)
from headrace.stream_context import StreamContext

Records = Callable[..., pa.RecordBatch]
Make = Callable[..., Any]

TRANSFORMS = """
import time
from pyspark.sql import functions as F

def words(lines):
    return (lines.select(F.explode(F.split("value", " ")).alias("word")).groupBy("word").count().orderBy("word"))

def timed(records, batch):
    return records.select(F.lit(str(batch.batch_time)).alias("time"), F.lit(batch.attempt).alias("attempt")).limit(1)

def both(left, right):
    return left.select("value").union(right.select("value")).orderBy("value")

def left_alone(left, right):
    return left.select("value")

def fails(records):
    def wrong(value):
        raise ValueError("this value is wrong")
    return records.select(F.udf(wrong, "string")("value"))

def slow(records):
    def sleep(value):
        time.sleep(60)
        return value
    return records.select(F.udf(sleep, "binary")("value"))

def count(records):
    return records.agg(F.count("*").alias("n"))
"""


@pytest.fixture
def transforms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], dict[str, Any]]]:
    """The fields of a stream whose transform is one of the above."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    name = f"transforms_{uuid.uuid4().hex}"
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / f"{name}.py").write_text(TRANSFORMS)
    yield lambda function: {
        "transform": f"{name}:{function}",
        "spark": SparkSettings(py_files=(str(tmp_path / "code"),)),
    }
    sys.modules.pop(name, None)


def run(spark: Any, batch: Any, **options: Any) -> tuple[Any, str]:
    """Run the next batch; its result and what it printed."""
    time_ms = batch.allocate()
    out = io.StringIO()
    result = batch.run(spark, batch.begin(time_ms), out=out, **options)
    return result, out.getvalue()


def test_work_that_a_later_attempt_ended_is_fenced_and_not_failed(
    make_batch_ledger: Make, make_records: Records
) -> None:
    batch = make_batch_ledger(outputs=ConsoleOutput())
    batch.add(make_records([b"1"]))
    time_ms = batch.allocate()
    first = batch.begin(time_ms)

    def ended_session() -> SparkSession:
        batch.begin(time_ms)
        raise RuntimeError("[INVALID_HANDLE.SESSION_CLOSED] Session was closed.")

    with pytest.raises(AttemptFencedError):
        batch.run(ended_session, first)
    states = [attempt.state for attempt in batch.ledger.attempts.of_batch(batch.stream.name, time_ms)]
    assert states == [AttemptState.FENCED, AttemptState.RUNNING]


def test_an_unavailable_elasticsearch_is_reported_long_before_the_batch_fails(
    spark: SparkSession, make_batch_ledger: Make, make_records: Records, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the process that asks, which hears it from Spark's workers."""
    nowhere = ElasticsearchOutput(hosts="http://127.0.0.1:1", index="clicks", max_retry_seconds=12.0)
    batch = make_batch_ledger(outputs=nowhere)
    batch.add(make_records([b"{}"]))
    reported: list[tuple[float, str]] = []
    listed: list[str | None] = []
    renew = batch.ledger.attempts.renew

    def renewed(*given: Any, **options: Any) -> int:
        until_ms = renew(*given, **options)
        listed.append(last_error(batch.ledger, batch.ledger.batches.get("clicks", 10_000)))
        return until_ms

    monkeypatch.setattr(batch.ledger.attempts, "renew", renewed)
    with pytest.raises(AttemptFailedError, match="made no progress for 12 s"):
        run(spark, batch, report=lambda line: reported.append((time.monotonic(), line)))
    ended = time.monotonic()
    warned = [(at, line) for at, line in reported if line.startswith("warning: output elasticsearch: ")]
    assert "127.0.0.1" in warned[0][1]
    assert ended - warned[0][0] > 2
    assert any("127.0.0.1" in (error or "") for error in listed[:-1]), "the ledger knew before the end"


def refuse() -> SparkSession:
    raise AssertionError("this batch needs no Spark")


def test_records_are_printed_and_the_batch_completes(
    spark: SparkSession, make_batch_ledger: Make, make_records: Records
) -> None:
    batch = make_batch_ledger(outputs=ConsoleOutput(rows=1))
    batch.add(make_records([b"one", b"two"]))
    reported: list[str] = []
    result, printed = run(spark, batch, report=reported.append)
    assert "Time: 10000 ms (1970-01-01T00:00:10Z)" in printed
    assert printed.splitlines()[3].startswith("('key-0', 'one', 'clicks', 0, 0, ")
    assert printed.splitlines()[4] == "..."
    assert (result.records, result.blocks, result.attempt) == (2, 1, 1)
    row = batch.ledger.batches.get("clicks", 10_000)
    assert row.state is BatchState.COMPLETED
    (output,) = batch.ledger.attempts.outputs("clicks", 10_000)
    assert (output.output_id, output.counts["printed"]) == ("console", 1)
    assert reported[0] == "2 records in 1 blocks"


def test_word_count_as_in_sparks_quick_example(
    spark: SparkSession, make_batch_ledger: Make, make_records: Records, transforms: Any
) -> None:
    lines = KafkaInput(id="lines", bootstrap_servers="localhost:9092", topics="clicks", value_decoder=Utf8Decoder())
    batch = make_batch_ledger(inputs=lines, **transforms("words"))
    batch.add(make_records([b"to be or", b"not to be"]), input_id="lines")
    _, printed = run(spark, batch)
    assert printed.splitlines()[3:7] == ["('be', 2)", "('not', 1)", "('or', 1)", "('to', 2)"]


def test_a_transform_gets_its_batchs_time_and_attempt(
    spark: SparkSession, make_batch_ledger: Make, make_records: Records, transforms: Any
) -> None:
    batch = make_batch_ledger(**transforms("timed"))
    batch.add(make_records([b"x"]))
    _, printed = run(spark, batch)
    assert printed.splitlines()[3] == "('1970-01-01 00:00:10+00:00', 1)"


def test_several_inputs_reach_the_transform_by_name(
    spark: SparkSession, make_batch_ledger: Make, make_records: Records, transforms: Any
) -> None:
    inputs = tuple(KafkaInput(id=name, bootstrap_servers="localhost:9092", topics=name) for name in ("left", "right"))
    batch = make_batch_ledger(inputs=inputs, **transforms("both"))
    batch.add(make_records([b"l"], topic="left"), input_id="left")
    batch.add(make_records([b"r"], topic="right"), input_id="right")
    _, printed = run(spark, batch)
    assert printed.splitlines()[3:5] == ["l", "r"]


def test_an_input_that_nobody_uses_and_nobody_writes_to_is_no_error(
    spark: SparkSession, make_batch_ledger: Make, make_records: Records, transforms: Any
) -> None:
    inputs = [KafkaInput(id=name, bootstrap_servers="h:1", topics=name) for name in ("left", "right")]
    batch = make_batch_ledger(inputs=inputs, **transforms("left_alone"))
    batch.add(make_records([b"l"], topic="left"), input_id="left")
    result, printed = run(spark, batch)
    assert (result.records, printed.splitlines()[3]) == (1, "l")


def test_an_empty_batch_prints_its_header_without_spark(make_batch_ledger: Make) -> None:
    batch = make_batch_ledger()
    result, printed = run(refuse, batch)
    assert printed.splitlines()[1] == "Time: 10000 ms (1970-01-01T00:00:10Z)"
    assert result.records == 0
    assert batch.ledger.batches.get("clicks", 10_000).state is BatchState.COMPLETED


def test_an_empty_batch_runs_if_a_transform_can_make_rows_without_records(
    spark: SparkSession, make_batch_ledger: Make, transforms: Any
) -> None:
    _, printed = run(spark, make_batch_ledger(**transforms("count")))
    assert printed.splitlines()[3] == "0"


def test_jobs_are_named_by_batch_and_output(
    spark: SparkSession, make_batch_ledger: Make, make_records: Records
) -> None:
    batch = make_batch_ledger()
    batch.add(make_records([b"x"]))
    run(spark, batch)
    assert spark.sparkContext.statusTracker().getJobIdsForGroup("headrace/clicks/10000/1/console")


def test_a_failing_transform_fails_the_batch_with_its_reason(
    spark: SparkSession, make_batch_ledger: Make, make_records: Records, transforms: Any
) -> None:
    batch = make_batch_ledger(**transforms("fails"))
    batch.add(make_records([b"x"]))
    with pytest.raises(AttemptFailedError, match="ValueError: this value is wrong"):
        run(spark, batch)
    row = batch.ledger.batches.get("clicks", 10_000)
    assert (row.state, row.error) == (BatchState.FAILED, "ValueError: this value is wrong")


def test_a_fenced_attempt_cancels_its_own_spark_jobs_and_no_others(
    spark: SparkSession, make_batch_ledger: Make, make_records: Records, transforms: Any
) -> None:
    batch = make_batch_ledger(**transforms("slow"))
    batch.add(make_records([b"x"]))
    time_ms = batch.allocate()
    first = batch.ledger.attempts.begin("clicks", time_ms, holder="first", way="submit", lease_ms=1_500)
    failures: list[BaseException] = []

    def attempt() -> None:
        try:
            batch.run(spark, first, out=io.StringIO())
        except BaseException as error:
            failures.append(error)

    tracker = spark.sparkContext.statusTracker()
    others: list[int] = []

    def other() -> None:
        spark.sparkContext.setJobGroup("somebody else's", "")
        others.append(spark.sparkContext.parallelize([5], 1).map(_sleep).sum())

    threads = [threading.Thread(target=target) for target in (attempt, other)]
    for thread in threads:
        thread.start()
    deadline = threading.Event()
    for _ in range(200):
        if len(tracker.getActiveJobsIds()) >= 2:
            break
        deadline.wait(0.1)
    batch.begin(time_ms)
    for thread in threads:
        thread.join(40)
    assert isinstance(failures[0], AttemptFencedError)
    assert others == [5]
    assert not tracker.getActiveJobsIds()
    states = [row.state for row in batch.ledger.attempts.of_batch("clicks", time_ms)]
    assert states == [AttemptState.FENCED, AttemptState.RUNNING]


def _sleep(seconds: int) -> int:
    import time

    time.sleep(seconds)
    return seconds


@pytest.fixture
def command() -> Iterator[Callable[..., int]]:
    """Runs the batch's command in this process."""
    before = signal.getsignal(signal.SIGTERM)

    def run_command(batch: Any, time_ms: int, *more: str) -> int:
        return main(
            ["--ledger", batch.stream.ledger, "--stream", "clicks", "--batch-time", str(time_ms), "--json", *more]
        )

    yield run_command
    signal.signal(signal.SIGTERM, before)


def test_the_command_runs_only_the_given_outputs(
    command: Callable[..., int], make_batch_ledger: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    batch = make_batch_ledger(outputs=(ConsoleOutput(id="first"), ConsoleOutput(id="second")))
    time_ms = batch.allocate()
    assert command(batch, time_ms, "--outputs", "second") == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (list(result["outputs"]), result["state"]) == (["second"], "allocated")
    assert command(batch, time_ms) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (list(result["outputs"]), result["state"]) == (["first"], "completed")
    assert command(batch, time_ms, "--outputs", "second") == 0, "done before is done"
    assert command(batch, time_ms, "--outputs", "third") == 1
    assert "no output 'third'" in capsys.readouterr().err


def test_the_command_refuses_parameters_before_it_takes_the_batch(
    command: Callable[..., int], make_batch_ledger: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    batch = make_batch_ledger(parameters={"threshold": 3})
    time_ms = batch.allocate()
    for given in ('{"limit": 1}', "[]", "{"):
        assert command(batch, time_ms, "--parameters", given) == 1
    assert "has no parameter limit, but threshold" in capsys.readouterr().err
    assert not batch.ledger.attempts.of_batch("clicks", time_ms)
    assert command(batch, time_ms, "--parameters", '{"threshold": 1}') == 0
    (attempt,) = batch.ledger.attempts.of_batch("clicks", time_ms)
    assert attempt.attributes["parameters"] == {"threshold": 1}


def test_an_attempt_that_the_caller_began_has_the_parameters_of_its_row(
    command: Callable[..., int], make_batch_ledger: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = make_batch_ledger(parameters={"threshold": 3, "limit": 1})
    given: list[dict[str, Any]] = []

    def noted(attempt: BatchAttempt) -> BatchResult:
        given.append(dict(attempt.parameters))
        return BatchResult("clicks", time_ms, 1, records=0, blocks=0, seconds=0.0)

    monkeypatch.setattr("headrace.spark.batch_command.run_attempt", noted)
    time_ms = batch.allocate()
    attempt = batch.ledger.attempts.begin(
        "clicks", time_ms, holder="test", way="submit", lease_ms=30_000, attributes={"parameters": {"threshold": 5}}
    )
    with pytest.raises(SystemExit):
        command(batch, time_ms, "--attempt", str(attempt.number), "--parameters", "{}")
    assert command(batch, time_ms, "--attempt", str(attempt.number)) == 0
    assert given == [{"threshold": 5, "limit": 1}]


def test_a_manifest_that_is_not_the_allocated_one_fails_the_attempt(
    make_batch_ledger: Make, make_records: Records
) -> None:
    batch = make_batch_ledger()
    batch.add(make_records([b"x"]))
    time_ms = batch.allocate()
    (manifest,) = (Path(batch.stream.folder_url) / "manifests").iterdir()
    manifest.write_bytes(manifest.read_bytes() + b" ")
    with pytest.raises(ManifestError, match="is not the one"):
        batch.run(refuse, batch.begin(time_ms))
    assert batch.ledger.batches.get("clicks", time_ms).state is BatchState.FAILED


def test_a_batch_that_only_kafka_has_is_read_from_there(
    spark: SparkSession, kafka: str, make_batch_ledger: Make, make_records: Records
) -> None:
    """Also in a window, and there beside one that the log has."""
    topic = f"clicks-{uuid.uuid4().hex}"
    admin = AdminClient({"bootstrap.servers": kafka})
    admin.create_topics([NewTopic(topic, 1, 1)])[topic].result()
    source = KafkaInput(bootstrap_servers=kafka, topics=topic, value_decoder=Utf8Decoder())
    outputs = (ConsoleOutput(), ConsoleOutput(id="window", window=Window(length="20 s")))
    batch = make_batch_ledger(inputs=source, outputs=outputs)
    zero_ms = batch.ledger.streams.get("clicks").zero_time_ms
    producer = Producer({"bootstrap.servers": kafka})
    for number, time_ms in enumerate((zero_ms - 25_000, zero_ms - 15_000)):
        producer.produce(topic, value=f"record {number}", timestamp=time_ms)
    assert producer.flush(30) == 0
    topic_id = str(RangeClients.of(source).questions().topic_ids([topic])[topic])
    batch.begin_partition(TopicPartition(topic, topic_id, 0), 2)
    reported: list[str] = []
    printed: list[list[str]] = []
    for time_ms in (zero_ms - 20_000, zero_ms - 10_000):
        # A stream with windows builds none; one that got its window afterwards has them all the same.
        before = batch.stream.model_copy(update={"outputs": (ConsoleOutput(),)})
        build_from_kafka(StreamContext(before, batch.ledger), time_ms)
        out = io.StringIO()
        result = batch.run(spark, batch.begin(time_ms), out=out, report=reported.append)
        assert result.source == "kafka"
        printed.append(re.findall(r"record \d", out.getvalue()))
    assert printed == [["record 0"] * 2, ["record 1", "record 0", "record 1"]]
    line = next(line for line in reported if "window of 2" in line)
    assert line.startswith("1 records, read from Kafka, as the log does not have them; output window has a window")
    assert line.endswith("2 batches, 2 of them from Kafka")

    batch.add(make_records([b"record 2"]))
    result, out_of_both = run(spark, batch, report=reported.append)
    assert result.source == "log"
    first, *windowed = re.findall(r"record \d", out_of_both)
    assert (first, sorted(windowed)) == ("record 2", ["record 1", "record 2"])
    assert any(line.endswith("2 batches, 1 of them from Kafka") for line in reported)


def test_the_thirtieth_batch_of_a_window_does_what_the_tenth_did(
    spark: SparkSession, make_batch_ledger: Make, make_records: Records, transforms: Any
) -> None:
    """No batch refers to another's frames: there is no lineage that grows, and nothing to cut off."""
    fields = transforms("count")
    output = ConsoleOutput(window=Window(length="50 s"), transform=fields.pop("transform"))
    batch = make_batch_ledger(outputs=output, **fields)
    tracker: Any = spark.sparkContext.statusTracker()
    work: dict[int, Any] = {}
    for number in range(30):
        batch.add(make_records([b"x"], first_offset=number))
        _, printed = run(spark, batch)
        jobs = tracker.getJobIdsForGroup(f"headrace/clicks/{(number + 1) * 10_000}/1/console")
        stages = [stage for job in jobs for stage in tracker.getJobInfo(job).stageIds]
        work[number] = (printed.splitlines()[3], len(jobs), len(stages))
    assert work[9] == work[29]
    assert work[29][0] == "5"


def documents(url: str, index: str) -> dict[str, Any]:
    urllib.request.urlopen(f"{url}/{index}/_refresh", data=b"").read()  # noqa: S310
    with urllib.request.urlopen(f"{url}/{index}/_search?size=100") as answer:  # noqa: S310
        return {hit["_id"]: hit["_source"] for hit in json.load(answer)["hits"]["hits"]}


def test_documents_reach_elasticsearch_and_what_does_not_decode_its_dead_letters(
    spark: SparkSession, elasticsearch: str, make_batch_ledger: Make, make_records: Records
) -> None:
    index = f"clicks-{uuid.uuid4().hex}"
    batch = make_batch_ledger(
        inputs=KafkaInput(
            bootstrap_servers="localhost:9092", topics="clicks", value_decoder=JsonDecoder(fields="id INT")
        ),
        outputs=(ElasticsearchOutput(hosts=elasticsearch, index=index), ConsoleOutput()),
    )
    batch.add(make_records([b'{"id": 1, "more": true}', b'{"id": "one"}', b"\xff\xfe"]))
    result, printed = run(spark, batch)
    assert documents(elasticsearch, index) == {"clicks+0+0": {"id": 1, "more": True}}, "the value's own bytes"
    letters = documents(elasticsearch, f"{index}-dead-letters")
    ours = f"{batch.stream.name}/elasticsearch/{index}"
    assert set(letters) == {f"{ours}/clicks+0+1", f"{ours}/clicks+0+2"}
    assert {letter["value"] for letter in letters.values()} == {"eyJpZCI6ICJvbmUifQ==", "//4="}
    reasons = [letter["reason"] for letter in letters.values()]
    assert {reason["type"] for reason in reasons} == {"rejected"}
    assert all("value" in reason["text"] for reason in reasons)
    counts = result.outputs["elasticsearch"]
    assert (counts["rows"], counts["indexed"], counts["dead_lettered"], counts["undecodable"]) == (3, 1, 2, 2)
    assert "Row(id=1)" in printed
    assert not list((Path(batch.stream.folder_url) / "reports").glob("*")), "reports are read and gone"


def test_too_many_dead_letters_fail_the_batch_are_kept_and_leave_when_their_rows_are_indexed(
    spark: SparkSession, elasticsearch: str, make_batch_ledger: Make, make_records: Records
) -> None:
    """Twelve that the mapping refuses and six that do not decode: the limit is over both, and over all tasks."""
    index = f"clicks-{uuid.uuid4().hex}"
    letters = f"{index}-dead-letters"
    limit = DeadLetterLimit(tolerated=15)
    output = ElasticsearchOutput(hosts=elasticsearch, index=index, dead_letter_limit=limit)
    decoder = JsonDecoder(fields="id STRING")
    source = KafkaInput(bootstrap_servers="localhost:9092", topics="clicks", value_decoder=decoder)
    batch = make_batch_ledger(inputs=source, outputs=output)
    make_index(elasticsearch, index, "long")
    for first in (0, 11):
        values = [b'{"id": "x"}'] * 6 + [b'{"id": "1"}'] * 2 + [b"junk"] * 3
        batch.add(make_records(values, first_offset=first))
    with pytest.raises(
        TooManyDeadLettersError, match=r"22 rows .* 18 are dead letters, more than the 50% of dead_letter_limit"
    ):
        run(spark, batch, partitions=2)
    time_ms = batch.ledger.batches.page(batch.stream.name)[0].batch_time_ms
    assert batch.ledger.batches.get(batch.stream.name, time_ms).state is not BatchState.COMPLETED
    assert len(documents(elasticsearch, letters)) == 18
    raised = output.model_copy(update={"dead_letter_limit": DeadLetterLimit(share=1)})
    stream = batch.stream.model_copy(update={"outputs": (raised,)})
    counts = batch.run(spark, batch.begin(time_ms), stream=stream).outputs["elasticsearch"]
    assert (counts["dead_lettered"], counts["repeated"], counts["letters_withdrawn"]) == (18, 4, 0)
    assert len(documents(elasticsearch, letters)) == 18
    make_index(elasticsearch, index, "keyword")
    counts = batch.run(spark, batch.begin(time_ms, force=True)).outputs["elasticsearch"]
    assert (counts["dead_lettered"], counts["indexed"], counts["letters_withdrawn"]) == (6, 16, 12)
    left = documents(elasticsearch, letters).values()
    assert {letter["value_text"] for letter in left} == {"junk"}
    assert len(left) == 6


def make_index(elasticsearch: str, index: str, id_type: str) -> None:
    """Make the index anew, with its field id of this type."""
    for method, body in (("DELETE", None), ("PUT", {"mappings": {"properties": {"id": {"type": id_type}}}})):
        request = urllib.request.Request(  # noqa: S310
            f"{elasticsearch}/{index}{'?ignore_unavailable=true' if body is None else ''}",
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"content-type": "application/json"},
        )
        urllib.request.urlopen(request, timeout=30).close()  # noqa: S310


def test_the_same_batch_again_changes_nothing(
    spark: SparkSession, elasticsearch: str, make_batch_ledger: Make, make_records: Records
) -> None:
    index = f"clicks-{uuid.uuid4().hex}"
    batch = make_batch_ledger(outputs=ElasticsearchOutput(hosts=elasticsearch, index=index))
    batch.add(make_records([b'{"id": 1}', b'{"id": 2}']))
    run(spark, batch)
    before = documents(elasticsearch, index)
    again = batch.run(spark, batch.begin(10_000, force=True))
    counts = again.outputs["elasticsearch"]
    assert (again.attempt, counts["indexed"], counts["repeated"]) == (2, 0, 2)
    assert documents(elasticsearch, index) == before


def test_an_aggregate_goes_to_column_ids(
    spark: SparkSession, elasticsearch: str, make_batch_ledger: Make, make_records: Records, transforms: Any
) -> None:
    index = f"words-{uuid.uuid4().hex}"
    lines = KafkaInput(id="lines", bootstrap_servers="localhost:9092", topics="clicks", value_decoder=Utf8Decoder())
    output = ElasticsearchOutput(hosts=elasticsearch, index=index, document_ids=ColumnIds(columns=("word",)))
    batch = make_batch_ledger(inputs=lines, outputs=output, **transforms("words"))
    batch.add(make_records([b"a b a", b"\xff"]), input_id="lines")
    result, _ = run(spark, batch)
    found = documents(elasticsearch, index)
    assert sorted((document["word"], document["count"]) for document in found.values()) == [("a", 2), ("b", 1)]
    letter = f"{batch.stream.name}/elasticsearch/{index}/clicks+0+1"
    assert set(documents(elasticsearch, f"{index}-dead-letters")) == {letter}
    assert result.outputs["elasticsearch"]["dead_lettered"] == 1
