"""What a stream leaves beside its log is written byte by byte as it was, and a ledger is rebuilt of what is frozen."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.support.records import TOPIC_ID
from tests.unit.pins.freezing import STORED, every_stored, stored

from headrace.batch.allocation import allocate
from headrace.batch.checkpoint import checkpoint_now
from headrace.batch.manifest import Manifest
from headrace.batch.recover import recover
from headrace.blocks import BlockInfo, ReceiverId, TopicPartition
from headrace.clock import ManualClock
from headrace.kafka.ranges import RecordedRange
from headrace.ledger import Ledger
from headrace.ledger.receiving.tables import ReceiverLease
from headrace.spark.outputs.kafka_transaction import Sent, SentRecords
from headrace.spark.state.version import StoredFile, Version
from headrace.stream import Stream
from headrace.stream_context import StreamContext
from headrace.stream_folder import MARK_PATH
from headrace.wal.log_storage import LogStorage
from headrace.wal.reader import read_block
from headrace.wal.recovery import scan_log
from headrace.wal.scan import ScannedFrame
from headrace.wal.storage import open_storage

START_MS = 1_700_000_000_000
FIRST, SECOND, THIRD = (START_MS + number * 10_000 for number in (1, 2, 3))
PARTITION = TopicPartition("clicks", TOPIC_ID, 0)
DEFINITION = json.dumps(
    {
        "name": "shop",
        "inputs": [{"kind": "kafka", "id": "clicks", "bootstrap_servers": "127.0.0.1:1", "topics": ["clicks"]}],
        "outputs": [{"kind": "console", "id": "screen"}, {"kind": "console", "id": "rest"}],
        "batch_interval": "10 s",
        "storage": "/data",
        "ledger": "sqlite:////data/ledger.db",
    }
)
RUN: dict[str, Any] = {"holder": "a test", "way": "connect", "lease_ms": 60_000}


class Life:
    """A stream with the frozen log: one batch completes and is replayed, one is abandoned, one fails."""

    def __init__(self, ledger: Ledger, folder: LogStorage, clock: ManualClock) -> None:
        self.ledger, self.clock = ledger, clock
        self.context = StreamContext(Stream.from_json(DEFINITION), ledger, storage=folder, clock=clock)
        ledger.streams.register("shop", DEFINITION, batch_interval_ms=10_000, block_interval_ms=200)
        self.job = ledger.jobs.acquire("shop", holder="a test", lease_ms=3_600_000)
        # The log is there before the ledger has accepted its blocks: the folder is this ledger's all the same.
        self.context.storage.mark.leave()
        ledger.topics.observe(self.job, "clicks", [("clicks", TOPIC_ID, 1)])
        ledger.positions.ensure_all(self.job, "clicks", {PARTITION: 10})
        ledger.positions.assign(self.job, "clicks", {PARTITION: 0})
        self.blocks = list(scan_log(folder.below("log")))
        self.run_batch(FIRST, self.blocks[:2])
        ledger.positions.advance(self.start_receiver(), PARTITION, 15, 20, gap="retention")
        self.run_batch(SECOND, self.blocks[2:3])
        ledger.batches.abandon("shop", SECOND, "never mind")
        self.run_batch(THIRD, self.blocks[3:])
        self.replay(FIRST)
        ledger.runs.assign("shop", "manual")
        checkpoint_now(self.context, THIRD)

    def start_receiver(self) -> ReceiverLease:
        scheduled = self.ledger.receivers.schedule(self.job, ReceiverId("shop", "clicks", 0))
        self.lease = self.ledger.receivers.register(scheduled, host="here", lease_ms=3_600_000)
        return self.lease

    def run_batch(self, batch_time_ms: int, blocks: list[ScannedFrame]) -> None:
        """Add the blocks, run the batch of them: the first one completes and is checkpointed."""
        for block in blocks:
            header = block.header
            if header.sequence == 0 and header.epoch == 1:
                self.start_receiver()
            self.ledger.blocks.add(
                self.lease,
                BlockInfo(
                    receiver=header.receiver,
                    epoch=header.epoch,
                    sequence=header.sequence,
                    cut_time_ms=header.cut_time_ms,
                    handle=block.handle,
                    ranges=header.ranges,
                    records=header.records,
                    payload_bytes=block.payload.size,
                    event_time_ms=header.event_time_ms,
                ),
            )
        self.clock.advance(batch_time_ms - self.clock.now_ms() + 1_000)
        allocate(self.context, batch_time_ms)
        attempts = self.ledger.attempts
        attempt = attempts.begin("shop", batch_time_ms, **RUN)
        attempts.record_output(attempt, "screen", {"rows": 4}, code_version="v1")
        if batch_time_ms == FIRST:
            attempts.record_output(attempt, "rest", {"rows": 4})
            attempts.complete(attempt, code_version="v1")
            checkpoint_now(self.context, batch_time_ms)
        else:
            attempts.fail(attempt, "its disk is full")

    def replay(self, batch_time_ms: int) -> None:
        replay: dict[str, Any] = {
            "target": "march",
            "definition": json.dumps({"outputs": [{"id": "again"}]}),
            "outputs": ["again"],
        }
        attempt = self.ledger.replays.begin("shop", batch_time_ms, **replay, **RUN)
        self.ledger.attempts.record_output(attempt, "again", {"rows": 3})
        self.ledger.attempts.complete(attempt)


@pytest.fixture
def folder(tmp_path: Path) -> LogStorage:
    """A stream's folder with the frozen log in it."""
    shutil.copytree(STORED / "shop" / "log", tmp_path / "shop" / "log")
    return open_storage(str(tmp_path / "shop"))


def text(data: bytes) -> list[str]:
    """The document's fields, and its checksum, a line each."""
    document, _, checksum = data.decode().partition("\n")
    return [*json.dumps(json.loads(document), indent=1).splitlines(), checksum]


def test_manifests_results_and_checkpoints(folder: LogStorage, tmp_path: Path) -> None:
    clock = ManualClock(START_MS)
    with Ledger.open(f"sqlite:///{tmp_path}/ledger.db", clock=clock) as ledger:
        Life(ledger, folder, clock)
    paths = [path for path in folder.paths() if not path.startswith("log/") and path != MARK_PATH]
    for path in paths:
        data = folder.read(path)
        assert text(data) == text(stored(f"shop/{path}", data)), path
    frozen_files = (file for file in (STORED / "shop").rglob("*.json"))
    assert sorted(paths) == sorted(str(file.relative_to(STORED / "shop")) for file in frozen_files)


@pytest.mark.parametrize("kept", every_stored(), ids=lambda kept: kept.name)
def test_a_ledger_is_rebuilt_of_stored_files(kept: Path, tmp_path: Path) -> None:
    shutil.copytree(kept / "shop", tmp_path / "shop")
    folder = open_storage(str(tmp_path / "shop"))
    with Ledger.open(f"sqlite:///{tmp_path}/new.db", clock=ManualClock(THIRD + 3_600_000)) as ledger:
        recover("shop", ledger, folder, force=True)
        batches = ledger.batches.page("shop")
        assert [batch.state for batch in batches] == ["failed", "abandoned", "completed"]
        first, third = (ledger.attempts.recorded("shop", [time_ms])[time_ms] for time_ms in (FIRST, THIRD))
        assert {output: each.counts for output, each in first.items()} == {"screen": {"rows": 4}, "rest": {"rows": 4}}
        assert list(third) == ["screen"]
        (replay,) = ledger.results.replays_of("shop", [FIRST])[FIRST]
        assert (replay.target, replay.state, replay.recorded) == ("march", "completed", {"again": {"rows": 3}})
        gaps = [(gap.from_offset, gap.until_offset, gap.reason) for gap in ledger.gaps.page("shop")]
        assert gaps == [(20, 23, "batch abandoned: never mind"), (15, 20, "retention")]
        assert [(row.partition, row.next_offset) for row in ledger.positions.all("shop")] == [(PARTITION, 25)]
        assert ledger.runs.find("shop", "manual") == THIRD
        manifest = Manifest.load(f"{folder.url}/manifests/{FIRST}.json", sha256=batches[-1].manifest_sha256)
    read = [read_block(folder.below("log"), handle)[1] for handle, _, _ in manifest.blocks("clicks")]
    assert [batch.column("value").to_pylist() for batch in read] == [[b"{}", None, "é".encode()], [b"\x00\xff"]]


def test_the_manifest_of_a_batch_that_was_built_from_kafka() -> None:
    ranges = (RecordedRange(PARTITION, 5, 9, None), RecordedRange(TopicPartition("clicks", "id-2", 1, 2), 0, 1, None))
    manifest = Manifest("shop", FIRST, 10_000, {"clicks": ()}, "/data/shop", built={"clicks": ranges})
    assert text(manifest.to_bytes()) == text(stored("built_manifest.json", manifest.to_bytes()))
    for kept in every_stored():
        assert Manifest.from_bytes((kept / "built_manifest.json").read_bytes(), manifest.uri) == manifest
    assert manifest.path == "manifests/1700000010000-built-a0f7ef2bcdcddb04.json"


def test_a_version_of_the_state() -> None:
    old, new = StoredFile("data/1-1-aa.parquet", 3, 1_000), StoredFile("data/2-1-bb.parquet", 1, 500)
    fields = [{"name": "k", "type": "string", "nullable": True, "metadata": {}}]
    version = Version(
        stream="shop", batch_time_ms=SECOND, attempt=2, based_on=(FIRST, 1), first_ms=FIRST, since_ms=FIRST, chain=2,
        rows=3, keys=("k",), schema={"type": "struct", "fields": fields}, changes=(new,), table=(old, new),
    )  # fmt: skip
    assert text(version.to_bytes()) == text(stored("state_version.json", version.to_bytes()))
    for kept in every_stored():
        assert Version.from_bytes((kept / "state_version.json").read_bytes(), "here") == version
    assert version.name.path == "versions/1700000020000-2-1700000010000.json"


def test_the_record_of_a_batch_sent_to_kafka(tmp_path: Path) -> None:
    sent, records = Sent(TOPIC_ID, 2, 7, 1_000), SentRecords(str(tmp_path), f"{FIRST}.json")
    records.write(sent)
    file = tmp_path / TOPIC_ID / f"{FIRST}.json"
    assert file.read_bytes() == stored("sent_record.json", file.read_bytes())
    for kept in every_stored():
        shutil.copy(kept / "sent_record.json", file)
        assert records.find(TOPIC_ID) == sent
