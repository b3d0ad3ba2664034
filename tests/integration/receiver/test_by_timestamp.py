"""Batches by timestamp, from a real Kafka: who was down when does not matter."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Producer

from headrace.devstack.kafka import KafkaServer
from headrace.kafka.offsets import resolve
from headrace.runs.readiness import blocks_ready
from headrace.wal.reader import read_block
from headrace.wal.storage import open_storage

SECOND = 1_000


class Timed:
    """A rig whose records are told by their timestamps, in seconds after ``zero``: an hour ago."""

    def __init__(self, rig: Any) -> None:
        self.rig = rig
        self.zero = (int(time.time()) - 3600) * SECOND

    def produce(self, partition: int, *seconds: float) -> None:
        producer = Producer({"bootstrap.servers": self.rig.bootstrap})
        for each in seconds:
            at_ms = self.zero + int(each * SECOND)
            producer.produce(self.rig.topic, b"%g" % each, partition=partition, timestamp=at_ms)
        assert producer.flush(30) == 0

    @contextmanager
    def open_transaction(self, *seconds: float) -> Iterator[None]:
        """In partition 0; it is aborted in the end."""
        producer = Producer({"bootstrap.servers": self.rig.bootstrap, "transactional.id": self.rig.prefix})
        producer.init_transactions(30)
        producer.begin_transaction()
        for each in seconds:
            producer.produce(self.rig.topic, b"%g" % each, partition=0, timestamp=self.zero + int(each * SECOND))
        assert producer.flush(30) == 0
        yield
        producer.abort_transaction(30)

    def begin(self, *, max_rate: float | None = None, **source: Any) -> None:
        stream = self.rig.define(batch_by="timestamp", **source)
        limits = stream.limits.model_copy(update={"max_rate": max_rate})
        self.rig.begin(stream.model_copy(update={"limits": limits}))

    def await_positions(self, *offsets: int) -> None:
        self.rig.await_positions({(self.rig.topic, number): offset for number, offset in enumerate(offsets)})

    def batches(self) -> dict[float, list[tuple[int, float]]]:
        """By batch time: partition and timestamp of its records in order of offsets."""
        log = open_storage(self.rig.stream.folder_url).below("log")
        found: dict[float, list[tuple[int, int, float]]] = {}
        for each in self.rig.ledger.blocks.unclaimed("air", limit=100_000):
            for block in self.rig.ledger.allocations.blocks_of("air", each.batch_time_ms):
                rows = read_block(log, block.info.handle)[1].to_pylist()
                batch = found.setdefault((each.batch_time_ms - self.zero) / SECOND, [])
                batch += [(row["partition"], row["offset"], float(row["value"])) for row in rows]
        return {at: [(number, value) for number, _, value in sorted(rows)] for at, rows in found.items()}

    def ready(self, seconds: float) -> bool:
        at_ms = self.zero + int(seconds * SECOND)
        return blocks_ready(self.rig.ledger, "air", batch_time_ms=at_ms, grace_ms=0).ready

    def drained(self) -> list[int]:
        return [row.drained_ms for row in self.rig.ledger.positions.all("air")]


@pytest.fixture
def timed(rig: Any) -> Timed:
    rig.create(partitions=3)
    return Timed(rig)


def test_records_of_a_down_time_are_in_the_batches_of_their_time(timed: Timed) -> None:
    """Partition 1 is a little out of order, partition 2 idle for the most part."""
    timed.produce(0, *[0.25 * n for n in range(40)])
    timed.produce(1, 0.5, 1.5, 0.9, 2.1, 1.9, 9.0)
    timed.produce(2, 4.5)
    timed.begin()
    timed.await_positions(40, 6, 1)
    expected: dict[float, list[tuple[int, float]]] = {
        second + 1.0: [(0, second + part) for part in (0, 0.25, 0.5, 0.75)] for second in range(10)
    }
    expected[1] += [(1, 0.5)]
    expected[2] += [(1, 1.5), (1, 0.9)]
    expected[3] += [(1, 2.1), (1, 1.9)]
    expected[10] += [(1, 9.0)]
    expected[5] += [(2, 4.5)]
    assert timed.batches() == expected
    # Partition 2 has not passed these, but Kafka has nothing more of it.
    timed.rig.eventually(lambda: timed.ready(10) and timed.ready(60))
    timed.rig.end()


def test_a_restart_in_the_middle_changes_no_records_batch(timed: Timed) -> None:
    timed.produce(0, 0.1, 5.5)
    timed.begin()
    timed.await_positions(2, 0, 0)
    timed.rig.end()
    timed.produce(0, 3.3, 5.9, 6.1)
    timed.produce(1, 2.5)
    timed.begin()
    timed.await_positions(5, 1, 0)
    timed.rig.end()
    assert timed.batches() == {1: [(0, 0.1)], 6: [(0, 5.5), (0, 3.3), (0, 5.9)], 7: [(0, 6.1)], 3: [(1, 2.5)]}


def test_late_records_join_the_next_open_batch(timed: Timed) -> None:
    timed.produce(0, 1.5)
    timed.begin()
    timed.await_positions(1, 0, 0)
    timed.rig.ledger.allocations.seal("air", timed.zero + 4 * SECOND)
    timed.produce(0, 1.6, 2.6)
    timed.produce(1, 3.9, 8.5)
    timed.await_positions(3, 2, 0)
    timed.rig.eventually(lambda: timed.rig.stats().get("late_records") == 3)
    timed.rig.end()
    assert timed.batches() == {2: [(0, 1.5)], 5: [(0, 1.6), (0, 2.6), (1, 3.9)], 9: [(1, 8.5)]}


def test_a_batch_of_idle_partitions_is_ready_after_its_lateness(timed: Timed) -> None:
    timed.begin()
    timed.rig.eventually(lambda: len(timed.drained()) == 3 and min(timed.drained()) > 0)
    ledger, late_ms = timed.rig.ledger, []
    for _ in range(4):
        batch_time_ms = ledger.now_ms() // SECOND * SECOND
        timed.rig.eventually(
            lambda at=batch_time_ms: blocks_ready(ledger, "air", batch_time_ms=at, grace_ms=0).ready, 30
        )
        late_ms.append(ledger.now_ms() - batch_time_ms - timed.rig.stream.allowed_lateness_ms)
    timed.rig.end()
    assert min(late_ms) >= 0
    # The best of four, since other tests share the machine.
    assert min(late_ms) < 900


def test_a_read_uncommitted_input_is_drained_at_the_logs_end(timed: Timed) -> None:
    """And not where the open transaction begins, which is the end for committed readers."""
    with timed.open_transaction(0.1):
        timed.produce(0, *[0.2] * 599)
        timed.begin(max_rate=150, client={"isolation.level": "read_uncommitted"})
        seen: dict[int, int] = {}

        def is_drained() -> bool:
            for row in timed.rig.ledger.positions.all("air"):
                if row.partition.partition == 0:
                    seen[row.next_offset] = row.drained_ms
            return seen.get(600, 0) > 0

        timed.rig.eventually(is_drained, 60)
        assert {offset: drained_ms for offset, drained_ms in seen.items() if offset < 600 and drained_ms} == {}
        assert len(seen) > 3
    timed.rig.end()


def test_an_open_transaction_holds_back_records_behind_it(timed: Timed) -> None:
    """For committed readers: they are drained where it begins, and the rest comes with its end, late if need be."""
    with timed.open_transaction(0.1):
        timed.produce(0, 0.2, 0.3)
        timed.begin()
        timed.rig.eventually(lambda: len(timed.drained()) == 3 and min(timed.drained()) > 0)
        assert timed.batches() == {}
        # The lag counts to the log's end: nobody could see otherwise that three offsets wait.
        timed.rig.eventually(lambda: timed.rig.stats().get("total_lag") == 3)
        timed.rig.ledger.allocations.seal("air", timed.zero + 4 * SECOND)
    # With the marker of its end.
    timed.await_positions(4, 0, 0)
    timed.rig.end()
    assert timed.batches() == {5: [(0, 0.2), (0, 0.3)]}


@pytest.mark.parametrize(("level", "latest"), [("read_committed", 1), ("read_uncommitted", 3)])
def test_the_latest_offset_is_that_of_the_inputs_consumers(timed: Timed, level: str, latest: int) -> None:
    timed.produce(0, 0.1)
    stream = timed.rig.define(starting_offsets="latest", client={"isolation.level": level})
    with timed.open_transaction(0.2):
        timed.produce(0, 0.3)
        key = (timed.rig.topic, 0)
        assert resolve(timed.rig.admin, stream.inputs[0], [key]).offsets == {key: latest}


@pytest.mark.slow
def test_a_broker_that_is_gone_ends_the_claims(server_folder: Path, make_rig: Callable[[str], Any]) -> None:
    with KafkaServer(server_folder) as server:
        timed = Timed(make_rig(server.bootstrap_servers))
        timed.rig.create(partitions=2)
        timed.produce(0, 1.5)
        timed.begin()
        timed.await_positions(1, 0)
        timed.rig.eventually(lambda: min(timed.drained()) > 0)
        server.stop()
        ledger = timed.rig.ledger
        stopped_ms = ledger.now_ms()
        timed.rig.eventually(lambda: ledger.receivers.all("air")[0].heartbeat_ms > stopped_ms + 6_000)
        assert max(timed.drained()) <= stopped_ms
        batch_time_ms = ledger.now_ms() // SECOND * SECOND
        assert not blocks_ready(ledger, "air", batch_time_ms=batch_time_ms, grace_ms=0).ready
        server.start()
        timed.produce(1, 2.5)
        timed.rig.eventually(lambda: blocks_ready(ledger, "air", batch_time_ms=batch_time_ms, grace_ms=0).ready)
        timed.await_positions(1, 1)
        timed.rig.end()
    assert timed.batches() == {2: [(0, 1.5)], 3: [(1, 2.5)]}
