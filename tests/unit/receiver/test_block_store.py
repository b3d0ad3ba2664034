"""What is stored: the ledger's answers, events of what Kafka has lost, and copies of blocks."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.unit.receiver.conftest import Setting
from tests.unit.receiver.waiting import eventually

from headrace.blocks import BlockHandle, TopicPartition
from headrace.clock import ManualClock
from headrace.ledger import EventKind, ReceiverState
from headrace.ledger.errors import LedgerUnavailableError, PartitionNotAssignedError, PositionConflictError
from headrace.ledger.states import PartitionState
from headrace.receiver.block_store import BlockStore, StoreCounts
from headrace.receiver.supervisor import ReceiverSupervisor
from headrace.stream import LocalCopies, Storage, Stream
from headrace.wal.local_copies import BlockCopies, CopySettings
from headrace.wal.reader import read_blocks
from headrace.wal.recovery import scan_log

PARTITION = TopicPartition("flights", "topic-id", 0)


def make_store(next_offsets: dict[TopicPartition, int], *, position: int) -> BlockStore:
    """A store whose ledger has ``position`` for the partition and refuses to advance it from another."""

    def refuse(*_: object, **__: object) -> None:
        raise PositionConflictError(PARTITION, expected=position, got=5)

    ledger = SimpleNamespace(positions=SimpleNamespace(advance=refuse))
    unused: Any = None
    context: Any = SimpleNamespace(ledger=ledger, clock=ManualClock(0), storage=SimpleNamespace(url=""))
    return BlockStore(
        context,
        unused,
        writer=unused,
        source=unused,
        pausing=unused,
        counts=StoreCounts(),
        next_offsets=next_offsets,
        wait=lambda _: None,
        not_to_store=lambda _: (),
        beat=lambda: False,
    )


def test_an_advance_whose_first_answer_was_lost_counts_as_done() -> None:
    next_offsets = {PARTITION: 5}
    make_store(next_offsets, position=10).advance(PARTITION, 5, 10, None)
    assert next_offsets == {PARTITION: 10}


@pytest.mark.parametrize("position", [7, 12], ids=["within the advance", "after it"])
def test_an_advance_that_another_position_refuses_is_an_error(position: int) -> None:
    next_offsets = {PARTITION: 5}
    with pytest.raises(PositionConflictError):
        make_store(next_offsets, position=position).advance(PARTITION, 5, 10, None)
    assert next_offsets == {PARTITION: 5}


@pytest.fixture
def begin(make_stream: Callable[..., Any], make_setting: Callable[..., Any]) -> Callable[[str], Any]:
    """Ten records of a topic's one partition, received by a receiver that has ended."""

    def received(policy: str) -> Any:
        setting = make_setting(make_stream(on_lost_offsets=policy))
        setting.topic(1)
        setting.assign(0)
        setting.kafka.produce("flights", 0, *[b"old"] * 10)
        with setting.running():
            eventually(lambda: setting.positions() == [10])
        return setting

    return received


def reused(setting: Any) -> list[tuple[str, int, int, int]]:
    events = setting.events(EventKind.OFFSETS_REUSED)
    return [(e["topic"], e["partition"], e["from_offset"], e["until_offset"]) for e in events]


@pytest.mark.parametrize("policy", ["fail", "reset"])
def test_offsets_that_are_given_to_other_records_are_an_event(begin: Callable[[str], Any], policy: str) -> None:
    setting = begin(policy)

    def reported(epoch: int) -> int | None:
        (row,) = setting.ledger.receivers.all("air")
        return row.stats.get("lost_offsets") if row.epoch == epoch else None

    with setting.kafka.lock:
        del setting.kafka.logs["flights", 0].entries[5:]
    (before,) = setting.ledger.receivers.all("air")
    for number in (1, 2):
        # The second finds the same, and need not say so again.
        with setting.running():
            eventually(lambda epoch=before.epoch + number: reported(epoch) == 5)  # type: ignore[misc]
            if policy == "fail":
                eventually(lambda: setting.ledger.positions.all("air")[0].state is PartitionState.FAILED)
        setting.ledger.positions.set_state(setting.job, "records", setting.partitions, PartitionState.ACTIVE)
    assert reused(setting) == [("flights", 0, 5, 10)]
    setting.kafka.produce("flights", 0, *[b"new"] * 7)
    with setting.running():
        eventually(lambda: setting.positions() == [12])
    assert [value for _, _, value in setting.stored()] == [*[b"old"] * 10, *[b"new"] * 2]
    assert setting.ledger.gaps.page("air") == []
    assert reused(setting) == [("flights", 0, 5, 10)]


@pytest.mark.parametrize("policy", ["fail", "reset"])
def test_a_log_cut_and_regrown_without_a_receiver_is_an_event(begin: Callable[[str], Any], policy: str) -> None:
    setting = begin(policy)
    setting.kafka.elect("flights", 0, high=5)
    setting.kafka.produce("flights", 0, *[b"new"] * 7)
    if policy == "fail":
        with setting.running():
            eventually(lambda: setting.ledger.positions.all("air")[0].state is PartitionState.FAILED)
        assert reused(setting) == [("flights", 0, 5, 10)]
        # As the next receiver job does.
        setting.ledger.positions.set_state(setting.job, "records", setting.partitions, PartitionState.ACTIVE)
    with setting.running():
        eventually(lambda: setting.positions() == [12])
    assert reused(setting) == [("flights", 0, 5, 10)]
    assert [value for _, _, value in setting.stored()] == [*[b"old"] * 10, *[b"new"] * 2]
    assert setting.ledger.gaps.page("air") == []


def test_a_partition_taken_by_force_is_reported_by_its_new_owner(
    begin: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    setting = begin("reset")
    setting.kafka.elect("flights", 0, high=5)
    setting.kafka.produce("flights", 0, *[b"new"] * 7)
    asked: list[Any] = []

    def forget(lease: Any, partition: Any) -> None:
        asked.append(partition)
        raise PartitionNotAssignedError(lease.receiver_id, partition, 1)

    monkeypatch.setattr(setting.ledger.positions, "forget_epoch_end", forget)
    with setting.running() as running:
        eventually(lambda: setting.positions() == [12])
    assert asked == setting.partitions
    assert running.report.state is ReceiverState.STOPPED


def test_a_topic_that_was_created_again_had_nothing_taken_back(
    make_stream: Callable[..., Any], make_setting: Callable[..., Any]
) -> None:
    setting = make_setting(make_stream(on_lost_offsets="reset"))
    setting.topic(1)
    setting.assign(0)
    setting.kafka.produce("flights", 0, *[b"old"] * 10)
    with setting.running():
        eventually(lambda: setting.positions() == [10])
        with setting.kafka.lock:
            setting.kafka.create("flights", 1)
    with setting.running():
        eventually(lambda: bool(setting.ledger.receivers.all("air")[0].stats.get("troubled")))
    assert setting.events(EventKind.OFFSETS_REUSED) == []


def lost(setting: Any) -> bool:
    (row,) = setting.ledger.receivers.all("air")
    return bool(row.stats.get("lost_offsets") == 10)


def test_a_gap_of_a_partition_taken_by_force_is_the_next_owners(
    begin: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    setting = begin("reset")
    setting.kafka.produce("flights", 0, *[b"new"] * 20)
    setting.kafka.expire("flights", 0, 20)
    asked: list[Any] = []

    def advance(lease: Any, partition: Any, *_: object, **__: object) -> None:
        asked.append(partition)
        raise PartitionNotAssignedError(lease.receiver_id, partition, 1)

    monkeypatch.setattr(setting.ledger.positions, "advance", advance)
    monkeypatch.setattr(
        setting.ledger.blocks, "add_all", lambda lease, infos, _: advance(lease, infos[0].ranges[0].partition)
    )
    with setting.running() as running:
        eventually(lambda: lost(setting) and bool(asked))
    assert running.report.state is ReceiverState.STOPPED


def test_offsets_a_new_topic_lacks_are_no_gap_of_the_old_one(
    begin: Callable[[str], Any],
) -> None:
    """It may begin with later offsets: a copy of a topic keeps them, and its first records may be too old."""
    setting = begin("reset")
    with setting.kafka.lock:
        setting.kafka.create("flights", 1)
        setting.kafka.produce("flights", 0, *[b"new"] * 30)
        setting.kafka.expire("flights", 0, 20)
    with setting.running():
        eventually(lambda: lost(setting))
    assert setting.ledger.gaps.page("air") == []
    assert [row.next_offset for row in setting.ledger.positions.all("air")] == [10]


@pytest.fixture
def setting(make_stream: Callable[..., Stream], make_setting: Callable[[Stream], Setting], tmp_path: Path) -> Setting:
    """A receiver whose log is in an object store, with copies below ``tmp_path``."""
    storage = Storage(
        url=f"memory://bucket/{secrets.token_hex(8)}", local_copies=LocalCopies(folder=str(tmp_path / "copies"))
    )
    made = make_setting(make_stream().model_copy(update={"storage": storage}))
    made.topic(1)
    made.assign(0)
    return made


def handles(setting: Setting) -> list[BlockHandle]:
    """The handles of all blocks that the ledger has accepted."""
    blocks = setting.ledger.allocations.blocks_of
    return [
        block.info.handle
        for unclaimed in setting.ledger.blocks.unclaimed("air")
        for block in blocks("air", unclaimed.batch_time_ms)
    ]


def copies_of(setting: Setting) -> BlockCopies:
    """The copies, as a batch's task opens them."""
    settings = CopySettings.of(setting.stream.storage)
    assert settings is not None
    return BlockCopies(f"{setting.stream.folder_url}/log", settings)


def test_each_stored_block_is_copied_and_read_from_the_copy(setting: Setting) -> None:
    with setting.running() as running:
        for number in range(3):
            setting.kafka.produce("flights", 0, b"%d" % number)
            eventually(lambda number=number: setting.positions() == [number + 1])  # type: ignore[misc]
        eventually(lambda: setting.receiver().stats.get("copied_blocks") == 3)
        assert running.end().state is ReceiverState.STOPPED
    copies, stored = copies_of(setting), handles(setting)
    read = read_blocks(setting.storage.below("log"), stored, copies)
    assert [block.batch.column("value")[0].as_py() for block in read] == [b"0", b"1", b"2"]
    assert (copies.counts.hits, copies.counts.misses) == (3, 0)
    stats = setting.receiver().stats
    assert (stats["copied_bytes"], stats["copy_failures"]) == (sum(handle.length for handle in stored), 0)


def test_a_block_that_the_ledger_has_not_accepted_is_not_copied(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.receiver.block_store.LEDGER_TIMEOUT_SECONDS", 0.0)

    def add(*_: Any) -> Any:
        raise LedgerUnavailableError("There is no connection.")

    monkeypatch.setattr(type(setting.ledger.blocks), "add_all", add)
    setting.kafka.produce("flights", 0, b"a")
    assert "did not answer" in (setting.start().join().error or "")
    assert len(setting.storage.paths("log")) == 1
    assert not copies_of(setting).folder.exists()


def test_a_block_is_stored_also_if_it_cannot_be_copied(setting: Setting, tmp_path: Path) -> None:
    (tmp_path / "copies").write_text("a file where the folder should be")
    setting.kafka.produce("flights", 0, b"a")
    with setting.running() as running:
        eventually(lambda: setting.positions() == [1])
        eventually(lambda: setting.receiver().stats.get("copy_failures") == 1)
        assert running.end().state is ReceiverState.STOPPED
    assert setting.stored() == [(0, 0, b"a")]


def test_a_stream_without_the_setting_has_no_copies(setting: Setting, tmp_path: Path) -> None:
    storage = Storage(url=setting.stream.storage.url)
    setting.stream = setting.stream.model_copy(update={"storage": storage})
    setting.kafka.produce("flights", 0, b"a")
    with setting.running() as running:
        eventually(lambda: setting.positions() == [1])
        eventually(lambda: setting.receiver().stats.get("blocks") == 1)
        assert running.end().state is ReceiverState.STOPPED
    assert setting.receiver().stats["copied_blocks"] == 0
    assert not (tmp_path / "copies").exists()


class Gate:
    """A storage whose appends wait while ``open`` is not set; ``appends`` counts them."""

    def __init__(self, storage: Any, shared: SimpleNamespace | None = None) -> None:
        self._storage = storage
        self.shared = shared or SimpleNamespace(open=threading.Event(), appends=0)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._storage, name)

    def below(self, path: str) -> Gate:
        return Gate(self._storage.below(path), self.shared)

    def create_segment(self, path: str) -> Any:
        file = self._storage.create_segment(path)

        def append(parts: Any, *, sync: bool = True) -> None:
            self.shared.appends += 1
            assert self.shared.open.wait(60)
            file.append(parts, sync=sync)

        return SimpleNamespace(append=append, close=file.close)


@pytest.fixture
def many(make_stream: Callable[..., Stream], make_setting: Callable[[Stream], Setting]) -> Any:
    """A receiver of two partitions; `wait_for` lets so many blocks wait behind the first one."""
    made: Any = make_setting(make_stream())
    made.topic(2)
    made.assign(0, 0)
    made.gate = Gate(made.storage)

    def wait_for(running: Any, blocks: int) -> None:
        store = made.supervisors[-1]._generator
        for number in range(blocks + 1):
            made.kafka.produce("flights", number % 2, b"%d" % number)
            eventually(lambda number=number: store.queued[0] == number + 1 and not store._filling)  # type: ignore[misc]
            eventually(lambda: made.gate.shared.appends > 0)

    made.wait_for = wait_for
    return made


@pytest.fixture
def supervised(many: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    many.supervisors = []
    run = ReceiverSupervisor.run

    def noted(supervisor: ReceiverSupervisor, stop: threading.Event) -> Any:
        many.supervisors.append(supervisor)
        return run(supervisor, stop)

    monkeypatch.setattr(ReceiverSupervisor, "run", noted)
    return many


def sequences(setting: Any) -> list[tuple[int, int, bool | None]]:
    """Each frame's sequence, that of its write's first frame, and whether the log proves it accepted."""
    settled = scan_log(setting.storage.below("log")).settled()
    return [(each.frame.header.sequence, each.frame.header.first_sequence, each.accepted) for each in settled]


def test_all_blocks_that_wait_are_one_write_and_one_transaction(
    supervised: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    transactions: list[int] = []
    plain = type(supervised.ledger.blocks).add_all

    def add_all(blocks: Any, lease: Any, infos: Any, ends: Any) -> Any:
        transactions.append(len(infos))
        return plain(blocks, lease, infos, ends)

    monkeypatch.setattr(type(supervised.ledger.blocks), "add_all", add_all)
    with supervised.running(storage=supervised.gate) as running:
        eventually(lambda: bool(supervised.supervisors))
        supervised.wait_for(running, 5)
        supervised.gate.shared.open.set()
        eventually(lambda: supervised.positions() == [3, 3])
        assert running.end().state is ReceiverState.STOPPED
    assert transactions == [1, 5]
    assert sequences(supervised) == [(0, 0, True), *((sequence, 1, True) for sequence in range(1, 6))]
    assert [value for *_, value in supervised.stored()] == [b"0", b"2", b"4", b"1", b"3", b"5"]
    # One for each write, and the end of the segment.
    assert supervised.gate.shared.appends == 3
    assert supervised.receiver().received_blocks == 6


def test_a_write_with_an_error_for_its_commit_is_stored_once(supervised: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The COMMIT was done; the ledger returns the first results at the second try."""
    answers: list[bool] = []
    plain = type(supervised.ledger.blocks).add_all

    def add_all(blocks: Any, lease: Any, infos: Any, ends: Any) -> Any:
        added = plain(blocks, lease, infos, ends)
        answers.append(all(each.duplicate for each in added))
        if len(answers) == 2:
            raise LedgerUnavailableError("The connection broke before the answer came.")
        return added

    monkeypatch.setattr(type(supervised.ledger.blocks), "add_all", add_all)
    with supervised.running(storage=supervised.gate) as running:
        eventually(lambda: bool(supervised.supervisors))
        supervised.wait_for(running, 4)
        supervised.gate.shared.open.set()
        eventually(lambda: len(answers) == 3)
        assert running.end().state is ReceiverState.STOPPED
    assert answers == [False, False, True]
    assert [value for *_, value in supervised.stored()] == [b"0", b"2", b"4", b"1", b"3"]
    assert supervised.receiver().received_blocks == 5


def test_an_unanswered_write_is_read_from_the_ledgers_positions(
    supervised: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether the COMMIT was done or not; the log does not deny what may have been accepted."""
    monkeypatch.setattr("headrace.receiver.block_store.LEDGER_TIMEOUT_SECONDS", 0.0)
    plain = type(supervised.ledger.blocks).add_all
    fault = SimpleNamespace(done=True)

    def add_all(blocks: Any, lease: Any, infos: Any, ends: Any) -> Any:
        if fault.done is None or len(infos) == 1:
            return plain(blocks, lease, infos, ends)
        if fault.done:
            plain(blocks, lease, infos, ends)
        raise LedgerUnavailableError("The connection broke before the answer came.")

    monkeypatch.setattr(type(supervised.ledger.blocks), "add_all", add_all)
    expected: list[bytes] = []
    for done in (True, False):
        fault.done = done
        supervised.gate = Gate(supervised.storage)
        running = supervised.start(storage=supervised.gate)
        eventually(lambda: bool(supervised.supervisors))
        supervised.wait_for(running, 3)
        supervised.gate.shared.open.set()
        assert "did not answer" in (running.join().error or "")
        supervised.supervisors.clear()
        expected += [b"0", b"1", b"2", b"3"]
    assert supervised.positions() == [3, 2]
    fault.done = None
    with supervised.running():
        eventually(lambda: supervised.positions() == [4, 4])
    assert sorted(value for *_, value in supervised.stored()) == sorted(expected)
    first, second = sequences(supervised)[:4], sequences(supervised)[4:8]
    assert first == second == [(0, 0, True), (1, 1, None), (2, 1, None), (3, 1, None)]


def test_a_partition_taken_by_force_leaves_the_others_of_a_write(
    supervised: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = type(supervised.ledger.blocks).add_all

    def add_all(blocks: Any, lease: Any, infos: Any, ends: Any) -> Any:
        mine = supervised.partitions[1]
        if any(r.partition == mine for info in infos for r in info.ranges):
            raise PartitionNotAssignedError(lease.receiver_id, mine, 1)
        return plain(blocks, lease, infos, ends)

    monkeypatch.setattr(type(supervised.ledger.blocks), "add_all", add_all)
    with supervised.running(storage=supervised.gate) as running:
        eventually(lambda: bool(supervised.supervisors))
        supervised.wait_for(running, 4)
        supervised.gate.shared.open.set()
        eventually(lambda: supervised.positions()[0] == 3)
        assert running.end().state is ReceiverState.STOPPED
    assert supervised.positions() == [3, 0]
    # The refused write stays an intent; what was left of it is a write of its own.
    assert sequences(supervised) == [
        (0, 0, True), *((sequence, 1, False) for sequence in range(1, 5)), (5, 5, True), (6, 5, True)
    ]  # fmt: skip
    assert [value for *_, value in supervised.stored()] == [b"0", b"2", b"4"]
