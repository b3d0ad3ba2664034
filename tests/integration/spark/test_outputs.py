"""Several outputs of one batch: each with its own transform, attempt, failure and record."""

from __future__ import annotations

import io
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from headrace.ledger import AttemptState, BatchState
from headrace.spark.attempts.failures import AttemptFailedError
from headrace.stream import ConsoleOutput, KafkaInput, ParquetOutput, SparkSettings, State, Stream, Utf8Decoder
from headrace.stream.stream import replayed

Records = Callable[..., pa.RecordBatch]
Make = Callable[..., Any]

TRANSFORMS = """
import os, time
from pyspark.sql import functions as F

def upper(lines):
    return lines.select(F.upper(F.col("value").cast("string")))

def lower(lines):
    return lines.select(F.lower("value"))

def fails(lines):
    def wrong(value):
        raise ValueError("this value is wrong")
    return lines.select(F.udf(wrong, "string")("value"))

def refuses(lines):
    raise KeyError("no such column")

def each_its_own(lines):
    return {"first": lines.select(F.lit("for the first")), "second": lines.select(F.lit("for the second"))}

def marked(lines):
    def mark(value):
        with open("{marks}", "a") as file:
            file.write(value + " ")
        return value
    return lines.select(F.udf(mark, "string")("value"))

def parameters(lines, batch):
    return lines.select(F.lit(str(batch.parameters["threshold"])), F.lit(batch.target)).limit(1)

def waits(lines):
    def wait(value):
        while not os.path.exists("{marks}"):
            time.sleep(0.1)
        return "waited"
    return lines.select(F.udf(wait, "string")("value"))

def count(lines, state):
    return lines.groupBy("value").count()

def counted(lines, state):
    return state
"""


@pytest.fixture
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A module of transforms; ``marks`` is where one of them leaves its marks."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    name = f"outputs_{uuid.uuid4().hex}"
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / f"{name}.py").write_text(TRANSFORMS.replace("{marks}", str(tmp_path / "marks")))
    yield name
    sys.modules.pop(name, None)


@pytest.fixture
def make(make_batch_ledger: Make, make_records: Records, tmp_path: Path, code: str) -> Make:
    """A stream whose outputs print, each with a transform of the module, with a batch of two lines."""

    def console(output_id: str, function: str, rows: int = 10) -> ConsoleOutput:
        return ConsoleOutput(id=output_id, transform=f"{code}:{function}", rows=rows)

    def made(*, lines: tuple[bytes, ...] = (b"To be", b"or not"), more: Any = None, **functions: str) -> Any:
        batch = make_batch_ledger(
            inputs=KafkaInput(
                id="lines", bootstrap_servers="localhost:9092", topics="clicks", value_decoder=Utf8Decoder()
            ),
            spark=SparkSettings(py_files=(str(tmp_path / "code"),)),
            **{
                "outputs": tuple(console(output_id, function) for output_id, function in functions.items()),
                **(more or {}),
            },
        )
        batch.add(make_records(list(lines)), input_id="lines")
        assert batch.allocate() == 10_000
        return batch

    return made


def run(spark: Any, batch: Any, *outputs: str, force: bool = False, **options: Any) -> tuple[Any, list[str]]:
    """Run some outputs of the batch, by default all; the result and the rows that were printed."""
    out = io.StringIO()
    attempt = batch.begin(10_000, outputs=outputs or None, force=force)
    result = batch.run(spark, attempt, out=out, **options)
    return result, printed(out)


def printed(out: io.StringIO) -> list[str]:
    return [line for line in out.getvalue().splitlines() if line and not line.startswith(("---", "Time: "))]


def state(batch: Any) -> BatchState:
    return batch.ledger.batches.get("clicks", 10_000).state  # type: ignore[no-any-return]


def recorded(batch: Any) -> dict[str, AttemptState]:
    return {row.output_id: row.state for row in batch.ledger.attempts.outputs("clicks", 10_000)}


def test_each_output_has_its_own_transform(spark: SparkSession, make: Make) -> None:
    result, rows = run(spark, make(first="upper", second="lower"))
    assert rows == ["TO BE", "OR NOT", "to be", "or not"]
    assert list(result.outputs) == ["first", "second"]
    assert result.state == "completed"


def test_an_attempt_runs_its_outputs_and_its_batch_awaits_others(spark: SparkSession, make: Make) -> None:
    batch = make(first="upper", second="lower")
    reported: list[str] = []
    result, rows = run(spark, batch, "second", report=reported.append)
    assert rows == ["to be", "or not"]
    assert (list(result.outputs), result.state) == (["second"], "allocated")
    assert reported[-1].startswith("second done in "), reported
    assert recorded(batch) == {"second": AttemptState.COMPLETED}
    result, rows = run(spark, batch)
    assert rows == ["TO BE", "OR NOT"], "what is done is not done again"
    assert result.state == "completed"
    assert state(batch) is BatchState.COMPLETED


@pytest.mark.parametrize("failing", ["fails", "refuses"])
def test_an_output_that_fails_does_not_stop_the_others(spark: SparkSession, make: Make, failing: str) -> None:
    batch = make(first="upper", broken=failing, last="lower")
    out = io.StringIO()
    with pytest.raises(AttemptFailedError) as failed:
        batch.run(spark, batch.begin(10_000), out=out)
    assert printed(out) == ["TO BE", "OR NOT", "to be", "or not"]
    assert "broken: " in str(failed.value)
    assert "done: first, last" in str(failed.value)
    assert recorded(batch) == {
        "first": AttemptState.COMPLETED,
        "broken": AttemptState.FAILED,
        "last": AttemptState.COMPLETED,
    }
    assert state(batch) is BatchState.FAILED
    with pytest.raises(AttemptFailedError, match="The batch failed"):
        run(spark, batch)
    assert batch.ledger.attempts.of_batch("clicks", 10_000)[-1].outputs == ("broken",), "that one alone is run again"


def test_all_that_failed_are_named(spark: SparkSession, make: Make) -> None:
    batch = make(first="fails", second="refuses")
    first = r"first: ValueError: this value is wrong \(.*, line \d+\)"
    with pytest.raises(AttemptFailedError, match=f"{first}; second: KeyError"):
        run(spark, batch)
    error = batch.ledger.batches.get("clicks", 10_000).error
    assert error.startswith("first: ValueError: this value is wrong (")


def test_a_shared_transform_is_computed_once_and_then_released(
    spark: SparkSession, make: Make, code: str, tmp_path: Path
) -> None:
    folders = [tmp_path / name for name in ("first", "second")]
    outputs = [ParquetOutput(id=each.name, path=str(each), transform=f"{code}:marked") for each in folders]
    batch = make(more={"outputs": outputs})
    jsc: Any = spark.sparkContext._jsc
    # The session is shared, and other tests may have kept frames in it.
    before = set(jsc.getPersistentRDDs())
    run(spark, batch)
    for folder in folders:
        assert {row[0] for row in spark.read.parquet(str(folder / "batch_time=10000")).collect()} == {"To be", "or not"}
    assert sorted((tmp_path / "marks").read_text().split()) == ["To", "be", "not", "or"], "once, not twice"
    assert set(jsc.getPersistentRDDs()) <= before


def test_a_transform_may_return_a_frame_for_each_output(spark: SparkSession, make: Make) -> None:
    batch = make(first="each_its_own", second="each_its_own")
    assert run(spark, batch, "second")[1] == ["for the second"] * 2
    assert run(spark, batch, "first")[1] == ["for the first"] * 2


def test_parameters_reach_the_transform(spark: SparkSession, make: Make) -> None:
    batch = make(console="parameters", more={"parameters": {"threshold": 3}})
    assert run(spark, batch)[1] == ["('3', '')"]
    assert run(spark, batch, force=True, parameters={"threshold": 5})[1] == ["('5', '')"]


def test_each_batch_records_the_version_of_its_code(spark: SparkSession, make: Make, code: str) -> None:
    batch = make(first="upper", second="lower")
    result, _ = run(spark, batch)
    assert result.code_version.startswith(f"{code}:upper ")
    assert batch.ledger.batches.get("clicks", 10_000).code_version == result.code_version
    (attempt,) = batch.ledger.attempts.of_batch("clicks", 10_000)
    assert attempt.code_version == result.code_version


def test_outputs_of_one_batch_run_side_by_side(spark: SparkSession, make: Make, tmp_path: Path) -> None:
    batch = make(slow="waits", quick="upper")
    slow = batch.begin(10_000, outputs=["slow"])
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(batch.run(spark, slow, out=io.StringIO())))
    thread.start()
    try:
        result, rows = run(spark, batch, "quick")
        assert rows == ["TO BE", "OR NOT"]
        assert result.state == "running"
        assert thread.is_alive()
    finally:
        (tmp_path / "marks").write_text("go on")
        thread.join(60)
    assert results[0].state == "completed"
    assert state(batch) is BatchState.COMPLETED


def test_a_replay_runs_without_changing_the_batch(spark: SparkSession, make: Make, code: str) -> None:
    batch = make(first="upper", second="lower", more={"parameters": {"threshold": 3}})
    run(spark, batch)
    before = batch.ledger.batches.get("clicks", 10_000)
    definition = replayed(batch.stream, {"first": {}}, transform=f"{code}:parameters")
    attempt = batch.ledger.replays.begin(
        "clicks",
        10_000,
        target="fixed",
        definition=definition.to_json(),
        outputs=["first"],
        holder="test",
        way="submit",
        lease_ms=30_000,
    )
    out, reported = io.StringIO(), list[str]()
    stream = Stream.from_json(attempt.definition)
    result = batch.run(spark, attempt, stream=stream, out=out, report=reported.append)
    assert printed(out) == ["('3', 'fixed')"]
    assert (result.target, list(result.outputs)) == ("fixed", ["first"])
    assert reported[-1].startswith("replayed into fixed")
    after = batch.ledger.batches.get("clicks", 10_000)
    # The batch's result file holds its replays, so the replay's beginning and end count as changes of it.
    assert after.change == before.change + 2
    assert replace(after, change=before.change) == before
    (replay,) = batch.ledger.replays.between("clicks", "fixed", 0, 20_000)
    assert (replay.state, replay.code_version) == (BatchState.COMPLETED, result.code_version)


STATE = State(update="m:count", fields="value STRING, count BIGINT", keys="value")


def test_the_state_comes_first_and_its_table_reaches_the_outputs(spark: SparkSession, make: Make, code: str) -> None:
    declared = STATE.model_copy(update={"update": f"{code}:count"})
    batch = make(lines=(b"a", b"b", b"a"), table="counted", lines_too="upper", more={"state": declared})
    result, rows = run(spark, batch)
    assert list(result.outputs) == ["state", "table", "lines_too"]
    assert sorted(rows[:2]) == ["('a', 2)", "('b', 1)"]
    assert result.outputs["state"]["rows"] == 2


def test_only_outputs_that_take_the_state_fail_without_it(spark: SparkSession, make: Make, code: str) -> None:
    declared = STATE.model_copy(update={"update": f"{code}:refuses"})
    batch = make(table="counted", plain="upper", more={"state": declared})
    with pytest.raises(AttemptFailedError, match=r"state: KeyError.*; table: .*update failed.*; done: plain"):
        run(spark, batch)
    assert recorded(batch)["plain"] is AttemptState.COMPLETED


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_outputs_processes_share_the_warm_application(
    receiver_application: Callable[..., Any], tmp_path: Path, code: str
) -> None:
    """As mapped tasks of Airflow run them: neither ends the other's session, jobs or report."""
    application = receiver_application(
        outputs=(
            ConsoleOutput(id="slow", transform=f"{code}:waits"),
            ConsoleOutput(id="quick", transform=f"{code}:upper"),
        ),
        spark=SparkSettings(master="local[3]", py_files=(str(tmp_path / "code"),)),
    )
    application.running_job(application.start_job())
    application.produce("To be", "or not")
    time_ms = application.allocate_next()
    batches = application.ledger.batches
    slow = application.start(application.batch_command(time_ms, "--outputs", "slow", "--json"), "slow")

    def attempts() -> dict[tuple[str, ...], AttemptState]:
        return {row.outputs: row.state for row in application.ledger.attempts.of_batch("clicks", time_ms)}

    application.until("the slow output's attempt", lambda: attempts().get(("slow",)))
    quick = application.run_batch(time_ms, "--outputs", "quick")
    assert quick.returncode == 0, quick.stderr
    assert "TO BE" in quick.stdout
    assert "quick done in" in quick.stderr
    assert attempts() == {("slow",): AttemptState.RUNNING, ("quick",): AttemptState.COMPLETED}
    assert slow.poll() is None, application.log("slow")
    (tmp_path / "marks").write_text("go on")
    assert slow.wait(120) == 0, application.log("slow")
    assert '"state":"completed"' in application.log("slow")
    assert batches.get("clicks", time_ms).state is BatchState.COMPLETED
