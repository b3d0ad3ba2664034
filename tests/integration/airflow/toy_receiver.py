"""A receiver job without Kafka and Spark: a block every 200 ms until it is told to stop."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from headrace.blocks import BlockInfo, ReceiverId, TopicPartition
from headrace.ledger import Ledger
from headrace.stream import Stream
from headrace.wal.storage import open_storage
from headrace.wal.writer import WriteAheadLogWriter

# Airflow starts this file.
sys.path.append(str(Path(__file__).parents[3]))
from tests.support.records import TOPIC_ID, make_block

RECORDS = 5
LEASE_MS = 3000

parser = argparse.ArgumentParser()
parser.add_argument("--ledger", required=True)
parser.add_argument("--stream", required=True)
parser.add_argument("--revision", type=int)
parser.add_argument("--holder", required=True)
arguments = parser.parse_args()

with Ledger.open(arguments.ledger) as ledger:
    stream = Stream.from_json(ledger.streams.get(arguments.stream).definition)
    job = ledger.jobs.acquire(stream.name, holder=arguments.holder, lease_ms=LEASE_MS)
    receiver = ReceiverId(stream.name, "records", 0)
    partition = TopicPartition("flights", TOPIC_ID, 0)
    ledger.topics.observe(job, "records", [("flights", TOPIC_ID, 1)])
    ledger.positions.ensure_all(job, "records", {partition: 0})
    ledger.positions.assign(job, "records", {partition: 0})
    lease = ledger.receivers.register(ledger.receivers.schedule(job, receiver), host="here", lease_ms=LEASE_MS)
    orders = ledger.receivers.heartbeat(lease, sealed_through_ms=0)
    position = orders.assigned[partition].next_offset
    writer = WriteAheadLogWriter(open_storage(stream.storage.url), f"{stream.name}/log", receiver, lease.epoch)
    ledger.jobs.update(job, state="running", attributes={"ui_url": "http://127.0.0.1:4040"})
    print("receiving", flush=True)
    while not ledger.jobs.renew(job).stop_requested:
        cut_ms = ledger.now_ms()
        block, ranges = make_block([b"{}"] * RECORDS, from_offset=position)
        written = writer.write(block, ranges, cut_time_ms=cut_ms, last_accepted_sequence=None)
        info = BlockInfo(
            receiver, lease.epoch, written.sequence, cut_ms, written.handle, ranges, RECORDS, written.payload_bytes
        )
        ledger.blocks.add(lease, info)
        position += RECORDS
        ledger.receivers.heartbeat(lease, sealed_through_ms=cut_ms)
        time.sleep(0.2)
    ledger.receivers.release(lease)
    ledger.jobs.release(job)
    print("drained", flush=True)
