"""A receiver whose disk is really full: a tmpfs of some megabytes, in a mount namespace of the test's own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

DISK_BYTES = 24 << 20
RECEIVING = r"""
import json, os, sys, threading, time
from pathlib import Path
from headrace.blocks import ReceiverId, TopicPartition
from headrace.receiver import pausing
from headrace.ledger import EventKind, Ledger
from headrace.receiver.pausing import room_for
from headrace.receiver.kafka_source import KafkaReceiver
from headrace.receiver.supervisor import ReceiverClients
from headrace.receiver.supervisor import receive
from headrace.stream import ConsoleOutput, KafkaInput, Limits, Stream
from headrace.stream_context import StreamContext
from headrace.testing.fake_kafka import FakeEndOffsets, FakeKafka, FakeTopicIds
from headrace.wal.reader import read_block
from headrace.wal.storage import open_storage

disk, outside = map(Path, sys.argv[1:])
kafka = FakeKafka()
stream = Stream(
    name="air", inputs=KafkaInput(bootstrap_servers="nowhere:9092", topics="flights"), outputs=ConsoleOutput(),
    batch_interval="1 s", block_interval="20 ms", storage=str(disk / "storage"),
    ledger=f"sqlite:///{outside}/ledger.db", limits=Limits(segment_bytes=2_000_000, max_block_bytes=400_000),
)
ledger = Ledger.open(stream.ledger)
ledger.streams.register("air", stream.to_json(), batch_interval_ms=1_000, block_interval_ms=20)
job = ledger.jobs.acquire("air", holder="test", lease_ms=600_000)
topic_id = kafka.create("flights", 1)
(row,) = ledger.topics.observe(job, "records", [("flights", topic_id, 1)])
partition = TopicPartition("flights", topic_id, 0, row.incarnation)
ledger.positions.ensure_all(job, "records", {partition: 0})
ledger.positions.assign(job, "records", {partition: 0})

def eventually(what, condition, seconds=60):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, what
        time.sleep(0.02)

def position():
    return ledger.positions.all("air")[0].next_offset

def receiver():
    rows = ledger.receivers.all("air")
    return rows[0] if rows else None

# Some do not stop in time: a disk that others fill as well.
space_of = pausing.space_of
in_time = False
pausing.space_of = lambda url: space_of(url) if in_time else None

def clients(context, source):
    consumer = KafkaReceiver({}, consumer_factory=kafka.consumer)
    return ReceiverClients(consumer, FakeTopicIds(kafka), FakeEndOffsets(kafka))

def run():
    return receive(
        StreamContext(stream, ledger),
        ledger.receivers.schedule(job, ReceiverId("air", "records", 0)),
        clients=clients,
    )

report = []
thread = threading.Thread(target=lambda: report.append(run()), daemon=True)
produced = 0

def produce(records):
    global produced
    kafka.produce("flights", 0, *[os.urandom(10_000) for _ in range(records)])
    produced += records

def fill(leave):
    free = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
    with open(disk / "ballast", "ab") as ballast:
        ballast.write(bytes(max(0, free - leave)))

thread.start()
produce(100)
eventually("the first records", lambda: position() == 100)
for leave in (0, 150_000):
    # Neither nothing, nor a part of a block and no more, ends it.
    fill(leave)
    produce(200)
    eventually("a pause", lambda: (receiver().paused_reason or "").count("disk is full"))
    assert not room_for(open_storage(stream.folder_url).url, 4 << 20)
    stuck, beat, lease = position(), receiver().heartbeat_ms, receiver().lease_until_ms
    files = sorted(os.listdir(disk))
    eventually("heartbeats", lambda: receiver().heartbeat_ms > beat + 3_000)
    assert receiver().lease_until_ms >= lease + 3_000 and receiver().epoch == 1 and not report
    assert position() == stuck < produced
    assert sorted(os.listdir(disk)) == files, "the question for room leaves nothing"
    (disk / "ballast").unlink()
    eventually("to go on", lambda: position() == produced)
    eventually("to say so", lambda: receiver().paused_reason is None)
in_time = True
fill(1_000_000)
eventually("a pause in time", lambda: "nearly full" in (receiver().paused_reason or ""))
produce(50)
beat = receiver().heartbeat_ms
eventually("heartbeats", lambda: receiver().heartbeat_ms > beat + 2_000)
assert position() == produced - 50, "nothing is fetched"
(disk / "ballast").unlink()
eventually("to go on", lambda: position() == produced)
eventually("to say so", lambda: receiver().paused_reason is None)
ledger.jobs.request_stop("air", "the end")
thread.join(30)
log = open_storage(stream.folder_url).below("log")
offsets = [
    offset
    for each in ledger.blocks.unclaimed("air", limit=10_000)
    for block in ledger.allocations.blocks_of("air", each.batch_time_ms)
    for offset in read_block(log, block.info.handle)[1].column("offset").to_pylist()
]
assert offsets == list(range(produced)), "each record once"
kinds = [EventKind.RECEIVING_PAUSED, EventKind.RECEIVING_RESUMED]
events = [event.payload.get("cause", "resumed") for event in ledger.events.page("air", kinds=kinds)]
print(json.dumps({"state": report[0].state.value, "events": events, "records": report[0].records}))
"""


def run_mounted(script: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a script of Python with two arguments, a small disk of its own and a folder outside of it."""
    disk = folder / "disk"
    disk.mkdir()
    mount = f"mount -t tmpfs -o size={DISK_BYTES} tmpfs {disk} && exec {sys.executable} - {disk} {folder}"
    flags = ["-m"] if os.geteuid() == 0 else ["-Urm"]
    return subprocess.run(
        ["unshare", *flags, "sh", "-c", mount], input=script, capture_output=True, text=True, timeout=300, check=False
    )


@pytest.fixture(autouse=True)
def _mounts(tmp_path_factory: pytest.TempPathFactory) -> None:
    if shutil.which("unshare") is None:
        pytest.skip("there is no unshare(1) to mount a small disk with")
    tried = run_mounted("import sys; assert len(sys.argv) == 3", tmp_path_factory.mktemp("try"))
    if tried.returncode:
        pytest.skip(f"no small disk can be mounted here, as root or in a user namespace: {tried.stderr.strip()[-300:]}")


def test_receiving_stops_visibly_on_a_full_disk_and_then_resumes(tmp_path: Path) -> None:
    done = run_mounted(RECEIVING, tmp_path)
    assert done.returncode == 0, done.stderr
    reported = json.loads(done.stdout.splitlines()[-1])
    assert reported["state"] == "stopped"
    assert reported["records"] == 550
    assert reported["events"] == ["disk_full", "resumed"] * 2 + ["disk_low", "resumed"]
