"""A batch from a plain script: a classic session, the ledger, the log and the console."""

from __future__ import annotations

import io
import re
import uuid
from typing import Any

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]
from pyspark.sql import SparkSession
from tests.integration.spark.micro_batch.conftest import Make, Records, refuse, run

from headrace.batch.build_from_kafka import build_from_kafka
from headrace.blocks import TopicPartition
from headrace.kafka.range_reader import RangeClients
from headrace.ledger import BatchState
from headrace.stream import (
    ConsoleOutput,
    KafkaInput,
    Utf8Decoder,
    Window,
)
from headrace.stream_context import StreamContext


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


@pytest.mark.parametrize("unused", [0, 2], ids=["without records", "with records"])
def test_an_unused_input_is_no_error(
    spark: SparkSession, make_batch_ledger: Make, make_records: Records, transforms: Any, unused: int
) -> None:
    inputs = [KafkaInput(id=name, bootstrap_servers="h:1", topics=name) for name in ("left", "right")]
    batch = make_batch_ledger(inputs=inputs, **transforms("left_alone"))
    batch.add(make_records([b"l"], topic="left"), input_id="left")
    if unused:
        batch.add(make_records([b"r"] * unused, topic="right"), input_id="right")
    result, printed = run(spark, batch)
    assert (result.records, printed.splitlines()[3:]) == (1 + unused, ["l", ""])


def test_an_empty_batch_prints_its_header_without_spark(make_batch_ledger: Make) -> None:
    batch = make_batch_ledger()
    result, printed = run(refuse, batch)
    assert printed.splitlines()[1] == "Time: 10000 ms (1970-01-01T00:00:10Z)"
    assert result.records == 0
    assert batch.ledger.batches.get("clicks", 10_000).state is BatchState.COMPLETED


def test_an_empty_batch_runs_if_its_transform_can_make_rows(
    spark: SparkSession, make_batch_ledger: Make, transforms: Any
) -> None:
    _, printed = run(spark, make_batch_ledger(**transforms("count")))
    assert printed.splitlines()[3] == "0"


def test_jobs_are_named_by_batch_and_output(
    spark: SparkSession, make_batch_ledger: Make, make_records: Records
) -> None:
    """And the thread that runs the batch keeps its own names."""
    context: Any = spark.sparkContext
    batch = make_batch_ledger()
    batch.add(make_records([b"x"]))
    context.setLocalProperty("spark.jobGroup.id", "of the caller")
    try:
        run(spark, batch)
        assert context.getLocalProperty("spark.jobGroup.id") == "of the caller"
    finally:
        context.setLocalProperty("spark.jobGroup.id", None)
    jobs = context.statusTracker().getJobIdsForGroup("headrace/clicks/10000/1/console")
    described = {context._jsc.sc().statusStore().job(job).description().get() for job in jobs}
    assert described == {"clicks: batch 1970-01-01T00:00:10Z, output console, attempt 1"}


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
