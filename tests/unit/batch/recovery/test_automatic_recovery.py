"""`Stream.recover`: a lost ledger is rebuilt by the task that finds it lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tests.unit.batch.life import LEASE_MS, NAME, Life

from headrace.batch.found_files import FolderContents, read_folder
from headrace.batch.recover import (
    LostLedgerError,
    MayStillRunError,
    RecoveryRefusedError,
    recover,
    recover_if_lost,
    refuse_if_lost,
)
from headrace.blocks import TopicPartition
from headrace.errors import Failure
from headrace.ledger import EventKind, Ledger, PartitionState
from headrace.receiver.tracker import PATH, write_sign
from headrace.stream import KafkaInput
from headrace.stream_context import StreamContext


@pytest.fixture
def automatic(live: Callable[..., Life]) -> Callable[..., Life]:
    def make(seed: int, **options: Any) -> Life:
        life = live(seed, recover="automatic", **options)
        life.checkpoint()
        return life

    return make


class Waits:
    """Waits on the stream's clock; ``meanwhile`` is called after each wait."""

    def __init__(self, life: Life, meanwhile: Callable[[], object] = lambda: None) -> None:
        self.life = life
        self.meanwhile = meanwhile
        self.seconds: list[float] = []

    def __call__(self, seconds: float) -> None:
        self.seconds.append(seconds)
        self.life.clock.advance(int(seconds * 1000))
        self.meanwhile()


def test_a_ledger_is_rebuilt_once_its_processes_must_have_ended(automatic: Callable[..., Life], new_url: str) -> None:
    life = automatic(7)
    wait, told = Waits(life), []
    with Ledger.open(new_url, clock=life.clock) as ledger:
        context = life.context_in(ledger)
        done = recover_if_lost(context, wait=wait, progress=told.append)
        assert done is not None
        assert 0 < sum(wait.seconds) <= LEASE_MS / 1000 + 1
        assert any("may still run; waiting 3600 s" in line for line in told)
        before, after = (
            {row.batch_time_ms: row.records for row in each.batches.page(NAME, 1000)} for each in (life.ledger, ledger)
        )
        assert after == before and sum(after.values()) > 0
        assert len(ledger.events.latest(NAME, [EventKind.LEDGER_REBUILT], limit=9)) == 1
        assert recover_if_lost(context, wait=wait) is None, "it is not lost any more"
        assert len(ledger.events.latest(NAME, [EventKind.LEDGER_REBUILT], limit=9)) == 1


def test_the_wait_for_the_processes_is_on_the_streams_clock(
    automatic: Callable[..., Life], new_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    life = automatic(7)
    wait = Waits(life)
    monkeypatch.setattr(life.clock, "wait", lambda _event, seconds: wait(seconds))
    with Ledger.open(new_url, clock=life.clock) as ledger:
        assert recover_if_lost(life.context_in(ledger)) is not None
    assert wait.seconds != []


def test_without_a_checkpoint_the_tasks_own_definition_is_used(live: Callable[..., Life], new_url: str) -> None:
    life = live(4, steps=0, recover="automatic")
    for _ in range(20):
        life.store()
    with Ledger.open(new_url, clock=life.clock) as ledger:
        assert recover_if_lost(life.context_in(ledger), wait=Waits(life)) is not None
        assert ledger.streams.get(NAME).definition == life.stream.to_json()


def test_a_new_stream_has_nothing_to_recover(automatic: Callable[..., Life], new_url: str) -> None:
    life = automatic(3)
    assert recover_if_lost(life.context, wait=Waits(life)) is None
    other = life.stream.model_copy(update={"name": "another"})
    with Ledger.open(new_url, clock=life.clock) as ledger:
        assert recover_if_lost(StreamContext(other, ledger, clock=life.clock), wait=Waits(life)) is None


def test_a_task_that_comes_second_finds_the_ledger_rebuilt(automatic: Callable[..., Life], new_url: str) -> None:
    life = automatic(5)
    with Ledger.open(new_url, clock=life.clock) as ledger:
        folder = life.storage.below(NAME)
        wait = Waits(life, lambda: recover(NAME, ledger, folder, definition=life.stream, force=True))
        assert recover_if_lost(life.context_in(ledger), wait=wait) is None
        assert len(wait.seconds) == 1


def test_a_folder_to_which_a_process_still_writes_is_left_alone(automatic: Callable[..., Life], new_url: str) -> None:
    life = automatic(6)
    with Ledger.open(new_url, clock=life.clock) as ledger:

        def go_on() -> None:
            for _ in range(10):
                life.store(add=False)

        wait = Waits(life, go_on)
        with pytest.raises(RecoveryRefusedError, match="it has another ledger"):
            recover_if_lost(life.context_in(ledger), wait=wait)
        assert ledger.streams.all() == []
        assert len(wait.seconds) == 3


def test_a_folder_whose_job_receives_nothing_is_left_alone(automatic: Callable[..., Life], new_url: str) -> None:
    life = automatic(6)
    life.clock.advance(LEASE_MS * 2)

    def renew() -> None:
        write_sign(life.storage.below(NAME), life.job, life.clock.now_ms())

    renew()
    with Ledger.open(new_url, clock=life.clock) as ledger:
        with pytest.raises(RecoveryRefusedError, match="it has another ledger"):
            recover_if_lost(life.context_in(ledger), wait=Waits(life, renew))
        assert ledger.streams.all() == []


def test_the_lease_in_a_jobs_sign_counts_without_a_checkpoint(live: Callable[..., Life], new_url: str) -> None:
    life = live(4, steps=0, recover="automatic")
    for _ in range(20):
        life.store()
    life.clock.advance(LEASE_MS * 2)
    write_sign(life.storage.below(NAME), life.job, life.clock.now_ms())
    wait = Waits(life)
    with Ledger.open(new_url, clock=life.clock) as ledger:
        assert recover_if_lost(life.context_in(ledger), wait=wait) is not None
    assert wait.seconds == [pytest.approx(LEASE_MS / 1000, abs=0.01)]


@pytest.mark.parametrize("content", [b"{", b"[]", b'{"written_ms": 1}', b'{"written_ms": "soon", "lease_ms": 1}'])
def test_a_damaged_sign_of_a_job_does_not_prevent_the_recovery(
    automatic: Callable[..., Life], new_url: str, content: bytes
) -> None:
    life = automatic(6)
    life.storage.below(NAME).write_atomically(PATH, content)
    with Ledger.open(new_url, clock=life.clock) as ledger:
        done = recover_if_lost(life.context_in(ledger), wait=Waits(life))
    assert done is not None
    assert any("unknown when the receiver job last ran" in notice for notice in done.notices), done.notices


def test_a_process_that_writes_during_the_reading_is_noticed(
    automatic: Callable[..., Life], new_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reading takes longer than the lease, and the process began a new segment after the files were listed."""
    life = automatic(6)

    def read_slowly(*arguments: Any, **options: Any) -> FolderContents:
        contents = read_folder(*arguments, **options)
        life.clock.advance(LEASE_MS)
        return contents

    monkeypatch.setattr("headrace.batch.recover.read_folder", read_slowly)
    with Ledger.open(new_url, clock=life.clock) as ledger:
        with pytest.raises(MayStillRunError):
            recover(NAME, ledger, life.storage.below(NAME), definition=life.stream)
        assert ledger.streams.all() == []


CLUSTER = {"bootstrap_servers": "127.0.0.1:2", "topics": ("clicks", "taps")}
TOPICS = {"bootstrap_servers": "127.0.0.1:1", "topics": ("clicks",)}
PATTERN = {"bootstrap_servers": "127.0.0.1:1", "topic_pattern": "c.*"}
INPUT = {"id": "sales", "bootstrap_servers": "127.0.0.1:1", "topics": ("clicks", "taps")}


@pytest.mark.parametrize(
    ("changed", "why", "checkpointed"),
    [
        (CLUSTER, "was received from Kafka, `127.0.0.1:1`", True),
        *((TOPICS, "records of topic 'taps'", each) for each in (True, False)),
        *((PATTERN, "records of topic 'taps'", each) for each in (True, False)),
        *((INPUT, "for input 'clicks'", each) for each in (True, False)),
    ],
)
def test_a_folder_that_tells_of_another_stream_is_refused(
    live: Callable[..., Life], new_url: str, changed: dict[str, Any], why: str, checkpointed: bool
) -> None:
    life = live(8, steps=0, recover="automatic")
    for _ in range(40):
        life.store()
    if checkpointed:
        life.checkpoint()
    kept = [source for source in life.stream.inputs if source.id == "orders"]
    life.stream = life.stream.model_copy(update={"inputs": (KafkaInput(**{"id": "clicks", **changed}), *kept)})
    with Ledger.open(new_url, clock=life.clock) as ledger:
        with pytest.raises(RecoveryRefusedError, match=why):
            recover_if_lost(life.context_in(ledger), wait=Waits(life))
        assert ledger.streams.all() == []


@pytest.mark.parametrize("state", [PartitionState.ENDED, PartitionState.ACTIVE])
def test_an_input_that_was_removed_long_ago_prevents_no_recovery(
    live: Callable[..., Life], new_url: str, state: PartitionState
) -> None:
    life = live(8, steps=30, recover="automatic")
    (topic,) = life.ledger.topics.observe(life.job, "removed", [("past", "past-1", 1)])
    past = TopicPartition("past", "past-1", 0, topic.incarnation)
    life.ledger.positions.ensure_all(life.job, "removed", {past: 7})
    life.ledger.positions.set_state(life.job, "removed", [past], state)
    life.checkpoint()
    with Ledger.open(new_url, clock=life.clock) as ledger:
        if state is PartitionState.ACTIVE:
            with pytest.raises(RecoveryRefusedError, match="received for input 'removed'"):
                recover_if_lost(life.context_in(ledger), wait=Waits(life))
            return
        recover_if_lost(life.context_in(ledger), wait=Waits(life))
        (row,) = ledger.positions.all(NAME, "removed")
        assert (row.next_offset, row.state) == (7, PartitionState.ENDED)


@pytest.mark.parametrize("state", [PartitionState.ENDED, PartitionState.ACTIVE])
def test_segments_of_a_removed_input_prevent_no_recovery(
    live: Callable[..., Life], new_url: str, state: PartitionState
) -> None:
    life = live(8, steps=0, recover="automatic")
    for _ in range(40):
        life.store()
    removed = life.ledger.positions.all(NAME, "orders")
    life.ledger.positions.set_state(life.job, "orders", [row.partition for row in removed], state)
    life.checkpoint()
    kept = tuple(source for source in life.stream.inputs if source.id != "orders")
    life.stream = life.stream.model_copy(update={"inputs": kept})
    with Ledger.open(new_url, clock=life.clock) as ledger:
        if state is PartitionState.ACTIVE:
            with pytest.raises(RecoveryRefusedError, match="received for input 'orders'"):
                recover_if_lost(life.context_in(ledger), wait=Waits(life))
            return
        assert recover_if_lost(life.context_in(ledger), wait=Waits(life)) is not None
        there = {row.partition: row.next_offset for row in ledger.positions.all(NAME, "orders")}
        assert there == {row.partition: row.next_offset for row in removed}


def test_the_checkpoint_of_another_stream_is_refused(automatic: Callable[..., Life], new_url: str) -> None:
    life = automatic(9)
    other = life.stream.model_copy(update={"name": "another"})
    with Ledger.open(new_url, clock=life.clock) as ledger:
        context = StreamContext(other, ledger, storage=life.storage.below(NAME), clock=life.clock)
        with pytest.raises(RecoveryRefusedError, match="holds the data of stream 'shop', not of 'another'"):
            recover_if_lost(context, wait=Waits(life))


@pytest.mark.parametrize(("how", "failure"), [("manual", Failure.FINAL), ("automatic", Failure.PASSING)])
def test_batches_wait_for_an_automatic_recovery_only(
    live: Callable[..., Life], new_url: str, how: str, failure: Failure
) -> None:
    life = live(4, steps=30, recover=how)
    with Ledger.open(new_url, clock=life.clock) as ledger:
        with pytest.raises(LostLedgerError) as refused:
            refuse_if_lost(life.context_in(ledger))
        assert refused.value.failure is failure
        assert ("headrace streams recover" in str(refused.value)) is (how == "manual")
