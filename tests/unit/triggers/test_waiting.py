"""`[headrace] poll_interval` and `[operators] default_deferrable` hold for everything that waits."""

from __future__ import annotations

from datetime import timedelta

import pytest

from headrace.dags.factories import received_schedule
from headrace.operators.kafka_receiver import KafkaReceiverOperator
from headrace.operators.micro_batch import MicroBatchOperator
from headrace.operators.replay_batch import ReplayBatchOperator
from headrace.operators.wal_spark_submit import WalSparkSubmitOperator
from headrace.sensors.blocks_ready import BlocksReadySensor
from headrace.sensors.kafka_receiver import KafkaReceiverSensor
from headrace.stream import ConsoleOutput, KafkaInput, Stream
from headrace.triggers.ledger import (
    BlocksReadyTrigger,
    FirstReceiverTrigger,
    LedgerTrigger,
    LedgerWatcher,
    PollIntervalError,
    ReceiverJobTrigger,
    ReceiversReceivingTrigger,
    StreamWantedTrigger,
    TurnTrigger,
    in_triggerer,
    poll_seconds,
)
from headrace.triggers.records_received import RecordsReceivedTrigger
from headrace.triggers.repair_due import RepairDueTrigger

LEDGER = {"ledger": "sqlite:////nowhere/ledger.db", "stream": "flights"}
TRIGGERS = {
    BlocksReadyTrigger: ({"batch_time_ms": 0, "grace_ms": 0}, 0.2),
    FirstReceiverTrigger: ({"interval_ms": 1, "until_ms": 0}, 1.0),
    ReceiverJobTrigger: ({"epoch": 1}, 1.0),
    ReceiversReceivingTrigger: ({"max_silence_ms": 1}, 1.0),
    RecordsReceivedTrigger: ({"min_records": 1, "max_delay_ms": 1, "interval_ms": 1}, 1.0),
    RepairDueTrigger: ({"retry_for_ms": 1}, 5.0),
    StreamWantedTrigger: ({}, 1.0),
    TurnTrigger: ({"batch_time_ms": 0, "until_ms": 0, "unclaimed": True}, 1.0),
}
SENSORS = {BlocksReadySensor: 0.2, KafkaReceiverSensor: 1.0}
BATCH_OPERATORS = {
    WalSparkSubmitOperator: {},
    MicroBatchOperator: {},
    ReplayBatchOperator: {"target": "v2", "step": "console"},
}


@pytest.fixture
def stream(tmp_path) -> Stream:
    return Stream(
        name="flights",
        inputs=KafkaInput(bootstrap_servers="localhost:9", topics="flights"),
        outputs=ConsoleOutput(),
        batch_interval="10 s",
        trigger={"min_records": 10, "max_delay": "1 min"},
        storage=str(tmp_path / "storage"),
        ledger=f"sqlite:///{tmp_path}/ledger.db",
        spark={"master": "local[2]"},
    )


@pytest.fixture
def poll_interval(monkeypatch):
    monkeypatch.setenv("AIRFLOW__HEADRACE__POLL_INTERVAL", "7.5")


def batch_operator(kind, stream, **options):
    more = {"replay": stream} if kind is ReplayBatchOperator else {}
    return kind(task_id="batch", stream=stream, **BATCH_OPERATORS[kind], **more, **options)


def test_every_trigger_is_here():
    kinds = {*LedgerTrigger.__subclasses__(), *LedgerWatcher.__subclasses__()} - {LedgerWatcher}
    assert {kind for kind in kinds if kind.__module__.startswith("headrace.")} == TRIGGERS.keys()


@pytest.mark.parametrize("kind", TRIGGERS)
def test_a_trigger_looks_as_often_as_the_setting_says(kind, monkeypatch):
    """Without a setting each kind of trigger has a pause of its own."""
    parameters, seconds = TRIGGERS[kind]
    assert kind(**LEDGER, **parameters).poll_interval == seconds
    monkeypatch.setenv("AIRFLOW__HEADRACE__POLL_INTERVAL", "7.5")
    assert kind(**LEDGER, **parameters).poll_interval == 7.5
    assert kind(**LEDGER, **parameters, poll_interval=3.0).poll_interval == 3.0


@pytest.mark.parametrize("kind", SENSORS)
def test_a_sensor_that_pokes_does_too(kind, stream, monkeypatch):
    assert kind(task_id="wait", stream=stream).poke_interval == SENSORS[kind]
    monkeypatch.setenv("AIRFLOW__HEADRACE__POLL_INTERVAL", "7.5")
    assert kind(task_id="wait", stream=stream).poke_interval == 7.5
    assert kind(task_id="wait", stream=stream, trigger_poll_interval=2.0).poke_interval == 2.0
    assert kind(task_id="wait", stream=stream, poke_interval=5.0).poke_interval == 5.0
    # A look is a new start of the task then.
    assert kind(task_id="wait", stream=stream, mode="reschedule").poke_interval == 60.0


@pytest.mark.parametrize("kind", BATCH_OPERATORS)
def test_a_batch_that_waits_for_its_turn_does_too(kind, stream, monkeypatch):
    assert batch_operator(kind, stream).slot_poll == timedelta(seconds=5)
    monkeypatch.setenv("AIRFLOW__HEADRACE__POLL_INTERVAL", "7.5")
    assert batch_operator(kind, stream).slot_poll == timedelta(seconds=7.5)
    assert batch_operator(kind, stream, slot_poll=timedelta(seconds=1)).slot_poll == timedelta(seconds=1)


def test_the_schedule_by_what_was_received_does_too(stream, poll_interval):
    (watcher,) = received_schedule(stream).asset_condition.objects[0].watchers
    trigger = watcher.trigger
    assert (trigger["kwargs"] if isinstance(trigger, dict) else trigger.serialize()[1])["poll_interval"] == 7.5


def test_a_receivers_operator_hands_it_to_its_triggers(poll_interval):
    assert poll_seconds(None, otherwise=0.5) == 7.5
    assert ReceiverJobTrigger(**LEDGER, epoch=1, poll_interval=None).poll_interval == 7.5


@pytest.mark.parametrize("setting", ["often", "0", "-1", "inf", "nan"])
def test_a_setting_that_is_no_time_is_refused(setting, monkeypatch):
    monkeypatch.setenv("AIRFLOW__HEADRACE__POLL_INTERVAL", setting)
    with pytest.raises(PollIntervalError, match=rf"'{setting}'.*AIRFLOW__HEADRACE__POLL_INTERVAL"):
        poll_seconds()


@pytest.mark.parametrize("setting", [None, "True", "False"])
def test_whether_to_wait_deferred_is_airflows_setting(setting, stream, monkeypatch):
    monkeypatch.delenv("AIRFLOW__OPERATORS__DEFAULT_DEFERRABLE", raising=False)
    if setting is not None:
        monkeypatch.setenv("AIRFLOW__OPERATORS__DEFAULT_DEFERRABLE", setting)
    expected = setting == "True"
    waiting = [
        *(kind(task_id="wait", stream=stream) for kind in (*SENSORS, KafkaReceiverOperator)),
        *(batch_operator(kind, stream) for kind in BATCH_OPERATORS),
    ]
    assert [task.deferrable for task in waiting] == [expected] * len(waiting)
    assert in_triggerer(not expected) is not expected
