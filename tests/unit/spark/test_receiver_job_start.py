"""What a receiver job looks at before it starts Spark."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.kafka import admin_questions
from headrace.ledger import Ledger
from headrace.spark.receiver_driver import ReceiverJob, StorageNotUsableError
from headrace.stream import ConsoleOutput, KafkaInput, Stream


def make(tmp_path: Path, storage: str) -> Stream:
    return Stream(
        name="shop",
        inputs=KafkaInput(bootstrap_servers="127.0.0.1:1", topics="clicks"),
        outputs=ConsoleOutput(),
        batch_interval="10 s",
        storage=storage,
        ledger=f"sqlite:///{tmp_path}/ledger.db",
    )


def test_a_storage_that_cannot_be_written_to_ends_the_job_at_once_with_its_path(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    stream = make(tmp_path, f"{tmp_path}/file/shop")
    with Ledger.open(stream.ledger) as ledger:
        ledger.streams.register("shop", stream.to_json(), batch_interval_ms=10_000, block_interval_ms=200)
        with pytest.raises(StorageNotUsableError):
            ReceiverJob(stream, ledger, revision=1, holder="test").run()
        job = ledger.jobs.current("shop")
    assert job is not None
    assert job.state.value == "failed"
    assert f"{tmp_path}/file" in (job.error or "")


def test_a_kafka_that_is_away_is_in_the_jobs_log_and_the_ledger_while_spark_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(admin_questions, "_HOPE_SECONDS", 0.2)
    stream = make(tmp_path, str(tmp_path / "storage"))
    with Ledger.open(stream.ledger) as ledger:
        ledger.streams.register("shop", stream.to_json(), batch_interval_ms=10_000, block_interval_ms=200)
        lease = ledger.jobs.acquire("shop", holder="test", lease_ms=60_000)
        ReceiverJob(stream, ledger, revision=1, holder="test")._look_at_inputs(lease)
        job = ledger.jobs.current("shop")
    assert job is not None
    (trouble,) = job.attributes["troubles"]
    assert trouble.startswith("input records: 127.0.0.1:1: Kafka at 127.0.0.1:1 cannot be asked")
    assert trouble in caplog.text
