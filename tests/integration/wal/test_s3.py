"""The log on a real S3 server: conditional creates, answers lost after the object was stored, and many objects."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from tests.integration.wal.conftest import LosingProxy
from tests.support.records import make_block

from headrace.batch.allocation import allocate
from headrace.blocks import BlockInfo, ReceiverId
from headrace.checks.connecting import check_storage
from headrace.ledger import Ledger
from headrace.stream import ConsoleOutput, KafkaInput, Stream
from headrace.stream_context import StreamContext
from headrace.wal.errors import StoredFileExistsError, WriteFailedError
from headrace.wal.reader import read_blocks
from headrace.wal.recovery import scan_log
from headrace.wal.storage import open_storage
from headrace.wal.writer import WriteAheadLogWriter

RECEIVER = ReceiverId("flights", "records", 0)


def test_the_log_and_an_allocation_live_on_it(proxy: LosingProxy, tmp_path: Path) -> None:
    stream = Stream(
        name="flights",
        inputs=KafkaInput(bootstrap_servers="localhost:9", topics="flights"),
        outputs=ConsoleOutput(),
        batch_interval="1 s",
        storage=f"s3://bucket/{tmp_path.name}",
        ledger=f"sqlite:///{tmp_path}/ledger.db",
    )
    assert check_storage(stream).error is None
    storage = open_storage(stream.storage.url)
    assert storage.paths() == [], "the check left nothing"
    with Ledger.open(stream.ledger) as ledger:
        ledger.streams.register(
            "flights",
            stream.to_json(),
            batch_interval_ms=stream.batch_interval_ms,
            block_interval_ms=stream.block_interval_ms,
        )
        job = ledger.jobs.acquire("flights", holder="test", lease_ms=60_000)
        lease = ledger.receivers.register(ledger.receivers.schedule(job, RECEIVER), host="test", lease_ms=60_000)
        writer = WriteAheadLogWriter(storage, "flights/log", RECEIVER, lease.epoch)
        offset = 0
        handles = []
        for number in range(3):
            batch, ranges = make_block([b"%d" % number], from_offset=offset)
            partition = ranges[0].partition
            if number == 0:
                ledger.topics.observe(job, "records", [(partition.topic, partition.topic_id, 1)])
                ledger.positions.ensure_all(job, "records", {partition: 0})
                ledger.positions.assign(job, "records", {partition: 0})
            offset = ranges[0].until_offset
            now_ms = ledger.now_ms()
            written = writer.write(
                batch, ranges, cut_time_ms=now_ms, last_accepted_sequence=number - 1 if number else None
            )
            info = BlockInfo(
                RECEIVER, lease.epoch, written.sequence, now_ms, written.handle, ranges, 1, written.payload_bytes
            )
            time_ms = ledger.blocks.add(lease, info).batch_time_ms
            handles.append(written.handle)
        while ledger.now_ms() < time_ms:
            time.sleep(0.05)
        coalescing = stream.model_copy(update={"coalesce": True})
        # Its earlier blocks may be of an earlier batch time.
        batch_row = allocate(StreamContext(coalescing, ledger), time_ms, takes_over=True).batch
        assert batch_row.blocks == 3
        assert storage.exists(batch_row.manifest_uri.removeprefix(f"{stream.storage.url}/"))
    values = [block.batch.column("value").to_pylist() for block in read_blocks(storage.below("flights/log"), handles)]
    assert values == [[b"0"], [b"1"], [b"2"]]
    assert len(storage.paths("flights/log")) == 3


def test_an_object_is_created_once_also_where_the_answer_is_lost(proxy: LosingProxy, tmp_path: Path) -> None:
    storage = open_storage(f"s3://bucket/{tmp_path.name}")
    proxy.loses = lambda line: not proxy.lost and b"manifest" in line
    storage.write_atomically("manifest", b"first", exclusive=True)
    assert len(proxy.lost) == 1, "the driver has tried again, and found its own object"
    with pytest.raises(StoredFileExistsError):
        storage.write_atomically("manifest", b"other", exclusive=True)
    assert storage.read("manifest") == b"first"


def test_a_block_without_answers_is_undecided_and_written_anew(proxy: LosingProxy, tmp_path: Path) -> None:
    storage = open_storage(f"s3://bucket/{tmp_path.name}")
    writer = WriteAheadLogWriter(storage, "log", RECEIVER, 1)
    first, ranges = make_block([b"x"])
    writer.write(first, ranges, cut_time_ms=0, last_accepted_sequence=None)
    second, ranges = make_block([b"y"], from_offset=1)
    proxy.loses = lambda line: True
    with pytest.raises(WriteFailedError):
        writer.write(second, ranges, cut_time_ms=0, last_accepted_sequence=0)
    proxy.loses = lambda line: False
    writer.write(second, ranges, cut_time_ms=0, last_accepted_sequence=0)
    writer.close(2)
    scan = scan_log(storage.below("log"))
    assert [(s.frame.header.sequence, s.accepted) for s in scan.settled()] == [(0, True), (2, None)]
    assert [tail.ranges for tail in scan.torn_tails] == [ranges], "the object is there, and no ledger relies on it"


def test_a_replaced_writer_does_not_overwrite_its_rival(proxy: LosingProxy, tmp_path: Path) -> None:
    storage = open_storage(f"s3://bucket/{tmp_path.name}")
    refused = 0
    for number in range(2):
        try:
            storage.write_atomically("log/segment", b"%d" % number, exclusive=True)
        except StoredFileExistsError:
            refused += 1
    assert (refused, storage.read("log/segment")) == (1, b"0")


def test_lists_go_over_many_pages(server_port: int, proxy: LosingProxy, tmp_path: Path) -> None:
    """A page of S3 has 1,000 keys."""
    from moto.backends import get_backend

    backend = get_backend("s3")["123456789012"]["aws"]
    for number in range(2_500):
        backend.put_object("bucket", f"{tmp_path.name}/log/{number:06}", b"x")
    storage = open_storage(f"s3://bucket/{tmp_path.name}")
    assert storage.paths("log") == [f"log/{number:06}" for number in range(2_500)]
