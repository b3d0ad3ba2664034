"""Attempts that fail, and attempts that a later one ended."""

from __future__ import annotations

import io
import re
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from tests.integration.spark.micro_batch.conftest import Make, Records, refuse, run

from headrace.batch.manifest import ManifestError
from headrace.elasticsearch.errors import ElasticsearchUnavailableError
from headrace.ledger import AttemptState, BatchState
from headrace.ledger.errors import AttemptFencedError
from headrace.spark.attempts.failures import AttemptFailedError
from headrace.stream import (
    ConsoleOutput,
    ElasticsearchOutput,
)
from headrace.views.batches import last_error


def test_work_ended_by_a_later_attempt_is_fenced_and_not_failed(make_batch_ledger: Make, make_records: Records) -> None:
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


def test_elasticsearch_away_is_reported_long_before_the_failure(
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
    with pytest.raises(ElasticsearchUnavailableError, match="made no progress for 12 s"):
        run(spark, batch, report=lambda line: reported.append((time.monotonic(), line)))
    ended = time.monotonic()
    warned = [(at, line) for at, line in reported if line.startswith("warning: output elasticsearch: ")]
    assert "127.0.0.1" in warned[0][1]
    assert ended - warned[0][0] > 2
    assert any("127.0.0.1" in (error or "") for error in listed[:-1]), "the ledger knew before the end"


def test_a_failing_transform_fails_the_batch_with_its_reason(
    spark: SparkSession, make_batch_ledger: Make, make_records: Records, transforms: Any
) -> None:
    batch = make_batch_ledger(**transforms("fails"))
    batch.add(make_records([b"x"]))
    with pytest.raises(AttemptFailedError, match="ValueError: this value is wrong"):
        run(spark, batch)
    row = batch.ledger.batches.get("clicks", 10_000)
    assert row.state is BatchState.FAILED
    assert re.fullmatch(r"ValueError: this value is wrong \(.*/transforms_\w+\.py, line \d+\)", row.error or "")


def test_a_fenced_attempt_cancels_only_its_own_spark_jobs(
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


def test_a_manifest_other_than_the_allocated_fails_the_attempt(make_batch_ledger: Make, make_records: Records) -> None:
    batch = make_batch_ledger()
    batch.add(make_records([b"x"]))
    time_ms = batch.allocate()
    (manifest,) = (Path(batch.stream.folder_url) / "manifests").iterdir()
    manifest.write_bytes(manifest.read_bytes() + b" ")
    with pytest.raises(ManifestError, match="is not the one"):
        batch.run(refuse, batch.begin(time_ms))
    assert batch.ledger.batches.get("clicks", time_ms).state is BatchState.FAILED
