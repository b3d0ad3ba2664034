"""The ledger is lost while Kafka's log is truncated and grows again: the leader epochs are in the manifests."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from headrace.batch.recover import recover
from headrace.ledger import Ledger
from headrace.ledger.states import EventKind
from headrace.stream import ConsoleOutput, KafkaInput, Limits, Stream
from headrace.testing.fake_kafka import FakeKafka
from headrace.testing.stream_on_clock import StreamOnClock
from headrace.wal.storage import open_storage


@pytest.mark.parametrize("left", ["manifests", "log", "both and an older checkpoint"])
def test_a_truncation_while_the_ledger_was_lost_is_noticed(tmp_path: Path, left: str) -> None:
    kafka = FakeKafka()
    kafka.create("orders", 1)

    def stream(ledger: str) -> Stream:
        return Stream(
            name="shop",
            inputs=KafkaInput(bootstrap_servers="nowhere:1", topics="orders", on_lost_offsets="reset"),
            outputs=ConsoleOutput(),
            batch_interval="10 s",
            checkpoint_interval="1 h",
            limits=Limits(segment_interval="10 s", seal_grace="2 s"),
            storage=str(tmp_path / "storage"),
            ledger=f"sqlite:///{tmp_path}/{ledger}.db",
        )

    def produce(number: int) -> None:
        for _ in range(number):
            kafka.produce("orders", 0, b"1")

    records = 0
    with StreamOnClock(stream("lost"), kafka) as running:
        for _ in range(1 if left == "manifests" else 2):
            produce(10)
            running.receive()
            if left != "log":
                running.advance(10)
                records += sum(len(batch.records) for batch in running.run_due())
        now_ms, clock = running.clock.now_ms(), running.clock
    folder = open_storage(stream("lost").folder_url)
    if "checkpoint" not in left:
        shutil.rmtree(tmp_path / "storage/shop/checkpoints", ignore_errors=True)
    if left == "manifests":
        shutil.rmtree(tmp_path / "storage/shop/log")
    read = kafka.logs["orders", 0].high
    kafka.elect("orders", 0, read - 5)
    produce(15)
    clock.advance(200_000)
    with Ledger.open(stream("new").ledger, clock=clock) as ledger:
        recover("shop", ledger, folder, definition=stream("new"))
        (position,) = ledger.positions.all("shop")
        assert (position.next_offset, position.leader_epoch, position.epoch_end_offset) == (read, 0, read)
    with StreamOnClock(stream("new"), kafka, start_ms=now_ms + 201_000) as running:
        running.receive()
        for _ in range(2):
            running.advance(10)
            records += sum(len(batch.records) for batch in running.run_due())
        (event,) = running.ledger.events.latest("shop", [EventKind.OFFSETS_REUSED])
        assert (event.payload["from_offset"], event.payload["until_offset"]) == (read - 5, read)
    # All that Kafka has from the position on, and what was received before.
    assert records == read + 10
