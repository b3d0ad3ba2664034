"""A batch by the `submit` way: the operator runs the real spark-submit, which starts an application for the batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tests.unit.operators.conftest import Task

from headrace.ledger import AttemptState, BatchState
from headrace.operators.wal_spark_submit import BatchTaskError, WalSparkSubmitOperator
from headrace.stream import KafkaInput, SparkSettings, Utf8Decoder
from headrace.timetables.micro_batch import from_ms

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

TRANSFORM = """
from pyspark.sql import SparkSession, functions as F

def transform(lines):
    application = lines.sparkSession.sparkContext
    assert application.getConf().get("spark.app.answer") == "42", "the stream's conf did not reach the application"
    return lines.select(F.upper("value").alias("value"), F.lit(application.master).alias("master"))

def fails(lines):
    raise ValueError("this transform is wrong")
"""


def test_the_operator_submits_a_batch_and_reports_its_failure(
    make_batch_ledger: Callable[..., Any],
    make_records: Callable[..., Any],
    tmp_path: Any,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("AIRFLOW__HEADRACE__SECRET_KEY", "k" * 32)
    code = tmp_path / "submitted_transform.py"
    code.write_text(TRANSFORM)
    fields = {
        "inputs": KafkaInput(bootstrap_servers="localhost:9", topics="clicks", value_decoder=Utf8Decoder()),
        "spark": SparkSettings(
            master="local[2]", run_batches="submit", py_files=(str(code),), conf={"spark.app.answer": "42"}
        ),
    }
    batch = make_batch_ledger(transform="submitted_transform:transform", **fields)
    batch.add(make_records([b"first", b"second"]))
    time_ms = batch.allocate()
    run = Task(from_ms(time_ms - 10_000))

    wrong = batch.stream.model_copy(update={"transform": "submitted_transform:fails"})
    with pytest.raises(BatchTaskError, match="this transform is wrong"):
        WalSparkSubmitOperator(task_id="generate", stream=wrong).execute(run.context)
    assert batch.ledger.batches.get("clicks", time_ms).state is BatchState.FAILED

    WalSparkSubmitOperator(task_id="generate", stream=batch.stream).execute(run.again(try_number=2).context)
    assert batch.ledger.batches.get("clicks", time_ms).state is BatchState.COMPLETED
    failed, completed = batch.ledger.attempts.of_batch("clicks", time_ms)
    assert (failed.state, completed.state) == (AttemptState.FAILED, AttemptState.COMPLETED)
    assert completed.way == "submit"
    out, err = capfd.readouterr()
    assert "('FIRST', 'local[2]')" in out + err
