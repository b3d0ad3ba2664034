"""What each delivery mode promises: receivers killed while they read, then a host that loses its power.

Nothing here can cut the power of a host. Instead the bytes that were not synced are overwritten with zeros, as a file
system may leave them.
"""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any, Literal

import pytest
from pyspark.sql import SparkSession
from tests.integration.receiver.conftest import Rig
from tests.integration.receiver.launchers import ProcessLauncher

from headrace.batch.allocation import allocate
from headrace.ledger.events import VANISHED
from headrace.spark.attempts.batch_plan import origins_of
from headrace.spark.records.batch_frames import read_records
from headrace.stream_context import StreamContext

pytestmark = pytest.mark.slow

Delivery = Literal["exactly_once", "at_least_once", "at_most_once"]


@pytest.fixture
def rig(tmp_path: Path, kafka: str) -> Any:
    made = Rig(tmp_path, kafka)
    made.launcher = ProcessLauncher()
    yield made
    if made.thread is not None:
        made.end()


def begin(rig: Rig, delivery: Delivery, **options: Any) -> None:
    rig.create(partitions=1)
    rig.begin(rig.define().model_copy(update={"delivery": delivery}), **options)


def produce_and_wait(rig: Rig, until: int) -> None:
    before = rig.positions().get((rig.topic, 0), 0)
    rig.produce(until - before)
    rig.await_positions({(rig.topic, 0): until})


def kill_receiver(rig: Rig) -> None:
    process = rig.launcher.handles[-1].process
    process.kill()
    process.join(30)


def read(rig: Rig, spark: SparkSession) -> tuple[list[int], set[str]]:
    """The offsets of all batches as Spark reads them, and where from."""
    context = StreamContext(rig.stream, rig.ledger)
    while (batch_time_ms := rig.ledger.batches.next_unclaimed("air")) is not None:
        rig.eventually(lambda time_ms=batch_time_ms: rig.ledger.now_ms() >= time_ms)  # type: ignore[misc]
        allocate(context, batch_time_ms)
    times = [row.batch_time_ms for row in rig.ledger.batches.page("air", 1_000)]
    origins = tuple(origins_of(context, times).values())
    rows = read_records(spark, rig.stream.inputs[0], origins).select("offset").collect()
    return [row.offset for row in rows], {origin.source for origin in origins}


# As "exactly_once" does: integration/receiver/test_receiving.py.
@pytest.mark.parametrize("delivery", ["at_least_once", "at_most_once"])
def test_a_killed_receiver_loses_and_doubles_nothing(rig: Rig, spark: SparkSession, delivery: Delivery) -> None:
    begin(rig, delivery)
    for kills in range(1, 4):
        rig.produce(3_000, tag=f"kill-{kills}")
        rig.eventually(lambda: bool(rig.positions().get((rig.topic, 0))))
        kill_receiver(rig)
        rig.await_positions({(rig.topic, 0): 3_000 * kills})
    rig.end()
    offsets, sources = read(rig, spark)
    assert Counter(offsets) == dict.fromkeys(range(9_000), 1)
    assert sources == {"log"}
    assert rig.ledger.gaps.page("air") == []


def lose_power(rig: Rig, delivery: Delivery) -> None:
    """The receiver's host ends without a warning, with bytes in the log's last file that were not synced."""
    begin(rig, delivery, restart_seconds=600.0)
    for until in range(200, 2_001, 200):
        produce_and_wait(rig, until)
    kill_receiver(rig)
    (segment,) = (path for path in (rig.folder / "storage").rglob("*.wal"))
    length = segment.stat().st_size
    with segment.open("r+b") as file:
        file.seek(length // 2)
        file.write(bytes(length // 4))
        os.truncate(segment, 3 * length // 4)
    rig.end()
    rig.begin(rig.stream)
    produce_and_wait(rig, 2_500)
    rig.end()


def test_at_least_once_reads_again_what_a_power_failure_took(rig: Rig, spark: SparkSession) -> None:
    lose_power(rig, "at_least_once")
    offsets, sources = read(rig, spark)
    assert Counter(offsets) == dict.fromkeys(range(2_500), 1)
    assert "kafka" in sources
    assert rig.ledger.gaps.page("air") == []


def test_at_most_once_counts_what_a_power_failure_took_as_gaps(rig: Rig, spark: SparkSession) -> None:
    """Each lost offset is in one gap, and no record is doubled."""
    lose_power(rig, "at_most_once")
    offsets, sources = read(rig, spark)
    gaps = rig.ledger.gaps.page("air")
    lost = [offset for gap in gaps for offset in range(gap.from_offset, gap.until_offset)]
    assert len(lost) > 400
    assert Counter(offsets + lost) == dict.fromkeys(range(2_500), 1)
    assert {gap.reason for gap in gaps} == {VANISHED}
    assert sources == {"log"}
    assert read(rig, spark)[0] == offsets
    assert len(rig.ledger.gaps.page("air")) == len(gaps), "each is recorded once"
