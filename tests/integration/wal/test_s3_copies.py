"""A log on a real S3 server with local copies, and writes to it that hang."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.integration.wal.conftest import LosingProxy
from tests.unit.receiver.conftest import Setting
from tests.unit.receiver.waiting import eventually

from headrace.batch.allocation import allocate
from headrace.ledger import Ledger, ReceiverState
from headrace.stream import ConsoleOutput, KafkaInput, Limits, LocalCopies, Storage, Stream
from headrace.stream_context import StreamContext
from headrace.testing.fake_kafka import FakeKafka
from headrace.wal.recovery import scan_log
from headrace.wal.storage import open_storage

VALUES = [b"value %02d" % number for number in range(20)]


@pytest.fixture
def make_setting(proxy: LosingProxy, tmp_path: Path) -> Iterator[Callable[..., Setting]]:
    """A stream with its log on S3, whose receivers read a Kafka in memory."""
    opened: list[Ledger] = []

    def make(limits: Limits | None = None) -> Setting:
        stream = Stream(
            name="air",
            inputs=KafkaInput(bootstrap_servers="nowhere:9092", topics="flights"),
            outputs=ConsoleOutput(),
            batch_interval="1 s",
            block_interval="200 ms",
            storage=Storage(
                url=f"s3://bucket/{tmp_path.name}", local_copies=LocalCopies(folder=str(tmp_path / "copies"))
            ),
            ledger=f"sqlite:///{tmp_path}/ledger.db",
            limits=limits or Limits(),
        )
        ledger = Ledger.open(stream.ledger)
        opened.append(ledger)
        ledger.streams.register(
            stream.name,
            stream.to_json(),
            batch_interval_ms=stream.batch_interval_ms,
            block_interval_ms=stream.block_interval_ms,
        )
        job = ledger.jobs.acquire(stream.name, holder="test", lease_ms=600_000)
        made = Setting(stream, ledger, job, FakeKafka())
        made.storage = StreamContext(stream, ledger).storage
        made.topic(1)
        made.assign(0)
        return made

    yield make
    for ledger in opened:
        ledger.close()


READ = """
import json, sys
from headrace.batch.manifest import Manifest
from headrace.spark.sessions import classic_session
from headrace.spark.records.wal_source import LogBlocks
from headrace.wal.local_copies import CopySettings

spark = classic_session("copies", master="local[1]", conf={"spark.ui.enabled": "false"})
blocks = LogBlocks.of(map(Manifest.load, sys.argv[2:]), "records", CopySettings(1 << 30, sys.argv[1]))
print(json.dumps([bytes(row.value).decode() for row in blocks.frame(spark, 2).orderBy("offset").collect()]))
spark.stop()
"""


def receive(setting: Setting, proxy: LosingProxy) -> list[str]:
    """Receive all values in several blocks, and allocate them to batches. Returns the manifests' URIs."""
    with setting.running() as running:
        for number, value in enumerate(VALUES):
            setting.kafka.produce("flights", 0, value)
            if number % 5 == 4:
                eventually(lambda number=number: setting.positions() == [number + 1])  # type: ignore[misc]
        # The heartbeat after the last block brings the stats.
        eventually(lambda: setting.receiver().stats["records"] == len(VALUES))
        assert running.end().state is ReceiverState.STOPPED
    times = sorted(each.batch_time_ms for each in setting.ledger.blocks.unclaimed("air"))
    while setting.ledger.now_ms() < max(times):
        time.sleep(0.1)
    context = StreamContext(setting.stream, setting.ledger)
    manifests = [allocate(context, each).batch.manifest_uri for each in times]
    # The first allocation in a folder without a mark looks at the newest segments.
    proxy.requests.clear()
    return manifests


def spark_reads(manifests: list[str], folder: Path) -> tuple[list[bytes], str]:
    """The values that Spark reads of these batches, and what Spark's processes have written to stderr."""
    command = [sys.executable, "-c", READ, str(folder), *manifests]
    environment = {**os.environ, "PYSPARK_PYTHON": sys.executable}
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return [value.encode() for value in json.loads(done.stdout)], done.stderr


def log_reads(proxy: LosingProxy) -> list[bytes]:
    return [line for line in proxy.requests if b".wal" in line and not line.startswith(b"PUT ")]


@pytest.mark.slow
def test_a_batch_reads_copies_and_the_log_where_they_are_damaged(
    make_setting: Callable[..., Setting], proxy: LosingProxy, tmp_path: Path
) -> None:
    setting = make_setting()
    manifests = receive(setting, proxy)
    copies = sorted((tmp_path / "copies").rglob("*.frame"))
    row = setting.receiver()
    assert len(copies) == row.stats["copied_blocks"] == row.stats["blocks"] >= 4
    assert (row.stats["copied_bytes"], row.stats["copy_failures"]) == (sum(each.stat().st_size for each in copies), 0)

    values, errors = spark_reads(manifests, tmp_path / "copies")
    assert values == VALUES
    assert log_reads(proxy) == []
    assert f"{len(copies)} blocks ({row.stats['copied_bytes']} bytes) read from local copies" in errors

    copies[0].unlink()
    copies[1].write_bytes(copies[1].read_bytes()[:-30] + bytes(30))
    values, errors = spark_reads(manifests, tmp_path / "copies")
    assert values == VALUES
    assert len({line.split()[1].partition(b"?")[0] for line in log_reads(proxy)}) == 2
    assert "from the log 1 without a copy, 1 with an invalid one" in errors
    assert f"{copies[1]} is not valid and is deleted" in errors
    assert not copies[1].exists()


def test_a_hanging_write_times_out_and_its_block_is_stored_once(
    make_setting: Callable[..., Setting], proxy: LosingProxy, tmp_path: Path
) -> None:
    """The first PUT does not reach the server; the second is stored, but its answer does not come."""
    setting = make_setting(Limits(store_timeout="2 s"))
    puts: list[bytes] = []

    def is_put(number: int) -> Callable[[bytes], bool]:
        def look(line: bytes) -> bool:
            if b".wal" not in line:
                return False
            if line not in puts:
                puts.append(line)
            return puts.index(line) == number

        return look

    proxy.holds, proxy.mutes = is_put(0), is_put(1)
    setting.kafka.produce("flights", 0, b"x")
    began = time.monotonic()
    with setting.running() as running:
        eventually(lambda: setting.positions() == [1])
        assert 4 <= time.monotonic() - began < 15
        eventually(lambda: setting.receiver().stats.get("store_failures") == 2)
        eventually(lambda: setting.receiver().stats["copied_blocks"] == 1)
        assert running.end().state is ReceiverState.STOPPED
    assert len(puts) == 3, "each try has a segment of its own"
    assert setting.stored() == [(0, 0, b"x")]
    log = open_storage(f"{setting.stream.folder_url}/log")
    assert len(log.paths()) == 2, "the second try's object is there"
    accepted = lambda path: [block.info for block in setting.ledger.blocks.of_segment("air", path)]  # noqa: E731
    scan = scan_log(log, accepted=accepted)
    assert [(each.frame.header.sequence, each.accepted) for each in scan.settled()] == [(2, None)]
    assert [len(tail.ranges) for tail in scan.torn_tails] == [1]
    assert not scan.damage


def test_a_silent_store_ends_the_receiver_with_the_error(
    make_setting: Callable[..., Setting], proxy: LosingProxy
) -> None:
    setting = make_setting(Limits(store_timeout="500 ms"))
    proxy.holds = lambda line: b".wal" in line
    setting.kafka.produce("flights", 0, b"x")
    report = setting.start().join()
    assert report.state is ReceiverState.FAILED
    assert "could not be stored in 4 tries" in (report.error or "")
    assert "no answer in 0.5 s" in (report.error or "")
    proxy.holds = lambda line: False
    with setting.running():
        eventually(lambda: setting.positions() == [1])
    assert setting.stored() == [(0, 0, b"x")]
