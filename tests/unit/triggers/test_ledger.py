from __future__ import annotations

import asyncio
import json
import threading
from types import SimpleNamespace

import pytest
from airflow.sdk.execution_time.task_runner import RuntimeTaskInstance
from airflow.triggers.base import TriggerEvent

from headrace.hooks.ledger import register
from headrace.ledger import Ledger
from headrace.ledger.errors import LedgerUnavailableError
from headrace.runs.receiver_job import ATTACHED, ATTACHED_TASK
from headrace.stream import ConsoleOutput, KafkaInput, Stream
from headrace.triggers.ledger import (
    BlocksReadyTrigger,
    ReceiverJobTrigger,
    ReceiversReceivingTrigger,
    StreamWantedTrigger,
)


@pytest.fixture
def stream(tmp_path) -> Stream:
    return Stream(
        name="flights",
        inputs=KafkaInput(bootstrap_servers="localhost:9", topics="flights"),
        outputs=ConsoleOutput(),
        batch_interval="10 s",
        storage=str(tmp_path / "storage"),
        ledger=f"sqlite:///{tmp_path}/ledger.db",
        spark={"master": "local[2]"},
    )


@pytest.fixture
def ledger(stream):
    with Ledger.open(stream.ledger) as opened:
        register(opened, stream)
        yield opened


async def first_event(trigger) -> TriggerEvent:
    async for event in trigger.run():
        return event
    raise AssertionError("the trigger ended without an event")


def triggers(stream) -> list:
    common = {"ledger": stream.ledger, "stream": stream.name, "poll_interval": 0.02}
    return [
        ReceiverJobTrigger(**common, epoch=1),
        StreamWantedTrigger(**common),
        ReceiversReceivingTrigger(**common, max_silence_ms=1000),
        BlocksReadyTrigger(**common, batch_time_ms=10_000, grace_ms=0),
    ]


def test_every_trigger_survives_the_database_it_is_kept_in(stream):
    from airflow.sdk._shared.module_loading import import_string

    for trigger in triggers(stream):
        path, arguments = trigger.serialize()
        again = import_string(path)(**json.loads(json.dumps(arguments)))
        assert again.serialize() == trigger.serialize()


def test_a_stopped_job_fires(stream, ledger):
    lease = ledger.jobs.acquire("flights", holder="test", lease_ms=10_000)

    async def scenario():
        waiting = asyncio.create_task(first_event(triggers(stream)[0]))
        await asyncio.sleep(0.1)
        assert not waiting.done()
        await asyncio.to_thread(ledger.jobs.release, lease)
        return await asyncio.wait_for(waiting, 10)

    assert asyncio.run(scenario()).payload == {"outcome": "stopped", "epoch": 1}


def test_a_job_stopped_before_anybody_waited_fires_at_once(stream, ledger):
    lease = ledger.jobs.acquire("flights", holder="test", lease_ms=10_000)
    ledger.jobs.release(lease)
    trigger = ReceiverJobTrigger(ledger=stream.ledger, stream="flights", epoch=1, poll_interval=3_600)
    event = asyncio.run(asyncio.wait_for(first_event(trigger), 30))
    assert event.payload == {"outcome": "stopped", "epoch": 1}


def test_a_new_triggerer_goes_on_where_the_last_one_was(stream, ledger):
    lease = ledger.jobs.acquire("flights", holder="test", lease_ms=10_000)

    async def scenario():
        first = asyncio.create_task(first_event(triggers(stream)[0]))
        await asyncio.sleep(0.1)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        await asyncio.to_thread(ledger.jobs.release, lease, "failed", "no broker")
        return await asyncio.wait_for(first_event(triggers(stream)[0]), 10)

    assert asyncio.run(scenario()).payload["outcome"] == "failed"


def test_a_person_who_ends_the_deferred_task_stops_the_job(stream, ledger):
    ledger.jobs.acquire("flights", holder="test", lease_ms=10_000)
    asyncio.run(triggers(stream)[0].on_kill())
    assert "by a person" in ledger.jobs.current("flights").stop_reason


def test_a_trigger_that_is_behind_stops_no_later_job(stream, ledger):
    """Its triggerer hung while another one saw the job's end, and the task has started the next job."""
    first = ledger.jobs.acquire("flights", holder="test", lease_ms=10_000)
    trigger = triggers(stream)[0]
    ledger.jobs.release(first, "stopped")
    ledger.jobs.acquire("flights", holder="test", lease_ms=10_000)
    asyncio.run(trigger.on_kill())
    assert ledger.jobs.current("flights").stop_requested_at_ms is None


@pytest.mark.parametrize(("state", "stops"), [("deferred", False), ("success", True), (None, True)])
def test_a_triggerer_whose_triggers_were_taken_stops_nothing(stream, ledger, monkeypatch, state, stops):
    """Airflow cancels the trigger there as if a person had ended the task."""

    def states(*, dag_id, task_ids, run_ids):
        assert (dag_id, task_ids, run_ids) == ("flights_receiver", ["receive"], ["run"])
        return {} if state is None else {"run": {"receive": state}}

    monkeypatch.setattr(RuntimeTaskInstance, "get_task_states", states)
    ledger.jobs.acquire("flights", holder="test", lease_ms=10_000)
    trigger = triggers(stream)[0]
    trigger._task_instance = SimpleNamespace(dag_id="flights_receiver", task_id="receive", run_id="run")
    asyncio.run(trigger.on_kill())
    assert (ledger.jobs.current("flights").stop_requested_at_ms is not None) is stops


@pytest.mark.parametrize("attached", ["flights_receiver", "flights_in"])
def test_deleting_a_dags_former_id_stops_no_job_of_the_new_one(stream, ledger, monkeypatch, attached, capsys):
    stops = attached == "flights_receiver"
    monkeypatch.setattr(RuntimeTaskInstance, "get_task_states", lambda **_: {})
    ledger.jobs.acquire("flights", holder="test", lease_ms=10_000)
    waiting = {"dag_id": attached, "run_id": "run", "task_id": "receive", "try_number": 1, "max_tries": 5}
    ledger.jobs.note("flights", 1, {ATTACHED: f"airflow:{attached}/run/receive/1", ATTACHED_TASK: waiting})
    trigger = triggers(stream)[0]
    trigger._task_instance = SimpleNamespace(dag_id="flights_receiver", task_id="receive", run_id="run")
    asyncio.run(trigger.on_kill())
    assert (ledger.jobs.current("flights").stop_requested_at_ms is not None) is stops
    assert (f"airflow:{attached}/run/receive/1 has attached to it" in capsys.readouterr().out) is not stops


def test_a_stop_longer_than_a_second_is_requested_all_the_same(stream, ledger, monkeypatch):
    """Airflow cancels the trigger again, about each second, until it has ended."""
    asked, answer = threading.Event(), threading.Event()

    def states(**_):
        asked.set()
        assert answer.wait(60)
        return {}

    async def cancelled_twice():
        killing = asyncio.ensure_future(trigger.on_kill())
        await asyncio.to_thread(asked.wait, 60)
        for _ in range(2):
            killing.cancel("__airflow_user_action__")
            await asyncio.sleep(0)
        answer.set()
        await asyncio.wait([killing])

    monkeypatch.setattr(RuntimeTaskInstance, "get_task_states", states)
    ledger.jobs.acquire("flights", holder="test", lease_ms=10_000)
    trigger = triggers(stream)[0]
    trigger._task_instance = SimpleNamespace(dag_id="flights_receiver", task_id="receive", run_id="run")
    asyncio.run(cancelled_twice())
    assert ledger.jobs.current("flights").stop_requested_at_ms is not None


def test_a_triggerer_that_goes_down_stops_nothing(stream, ledger):
    ledger.jobs.acquire("flights", holder="test", lease_ms=10_000)
    asyncio.run(triggers(stream)[0].cleanup())
    assert ledger.jobs.current("flights").stop_requested_at_ms is None


def test_a_ledger_that_is_away_for_a_while_fails_no_task(stream, ledger):
    class Flaky(BlocksReadyTrigger):
        looks = 0

        def poll(self, ledger):
            self.looks += 1
            if self.looks < 3:
                raise LedgerUnavailableError("The ledger's database failed: connection refused.")
            return super().poll(ledger)

    trigger = Flaky(ledger=stream.ledger, stream="flights", batch_time_ms=10_000, grace_ms=0, poll_interval=0.01)
    event = asyncio.run(asyncio.wait_for(first_event(trigger), 10))
    assert event.payload["complete"] is True
    assert trigger.looks == 3


def test_a_ledger_that_is_back_is_polled_within_five_seconds(stream, ledger, monkeypatch):
    """However long it was away: a batch that waits for its blocks goes on then."""

    class Away(BlocksReadyTrigger):
        def poll(self, ledger):
            if len(pauses) < 12:
                raise LedgerUnavailableError("The ledger's database failed: connection refused.")
            return super().poll(ledger)

    async def sleep(seconds):
        pauses.append(seconds)

    pauses: list[float] = []
    monkeypatch.setattr("headrace.triggers.ledger.asyncio.sleep", sleep)
    trigger = Away(ledger=stream.ledger, stream="flights", batch_time_ms=10_000, grace_ms=0, poll_interval=0.2)
    asyncio.run(first_event(trigger))
    assert pauses[:4] == [0.2, 0.4, 0.8, 1.6]
    assert pauses[-1] == max(pauses) == 5.0


def test_a_ledger_is_opened_by_its_changed_password(stream, ledger, monkeypatch):
    opened, used = [], []

    async def aget_conn(hook, *, create):
        opened.append(Ledger.open(stream.ledger))
        return opened[-1]

    class OldPassword(BlocksReadyTrigger):
        def poll(self, ledger):
            used.append(ledger)
            if ledger is opened[0]:
                raise LedgerUnavailableError("The ledger's database failed: password authentication failed.")
            return super().poll(ledger)

    monkeypatch.setattr("headrace.triggers.ledger.LedgerHook.aget_conn", aget_conn)
    trigger = OldPassword(ledger=stream.ledger, stream="flights", batch_time_ms=10_000, grace_ms=0, poll_interval=0.01)
    asyncio.run(asyncio.wait_for(first_event(trigger), 10))
    assert used == opened
    assert len(opened) == 2


def test_a_ledger_that_was_deleted_is_not_waited_for(stream, ledger, tmp_path):
    """If the tasks of all runs waited for its file, none would rebuild it."""
    ledger.jobs.acquire("flights", holder="test", lease_ms=600_000)

    class Deleting(ReceiverJobTrigger):
        polls = 0

        def poll(self, ledger):
            self.polls += 1
            if self.polls == 2:
                for path in tmp_path.glob("ledger.db*"):
                    path.unlink()
            return super().poll(ledger)

    trigger = Deleting(ledger=stream.ledger, stream="flights", epoch=1, poll_interval=0.01)
    # The task goes on, and finds that its ledger is lost.
    asyncio.run(asyncio.wait_for(first_event(trigger), 60))
    assert trigger.polls == 3
    assert ledger.rebuild.is_new("flights")


def test_the_trigger_warns_of_a_definition_not_adopted(stream, ledger, capsys):
    """The trigger is the receiver sensor's, and the job has not adopted the definition."""
    ledger.jobs.acquire("flights", holder="test", lease_ms=10_000, attributes={"revision": 1})
    register(ledger, stream.model_copy(update={"batch_by": "timestamp"}))
    trigger = triggers(stream)[2]
    for _ in range(2):
        trigger.poll(ledger)
    reported = capsys.readouterr().out
    assert reported.count("still receives by revision 1 of the definition") == 1
    assert "headrace streams stop flights" in reported
