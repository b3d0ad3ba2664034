from __future__ import annotations

import pytest
from airflow.sdk.exceptions import TaskDeferred
from tests.unit.runs.readiness.conftest import Job, fail
from tests.unit.sensors.conftest import context

from headrace.sensors.kafka_receiver import KafkaReceiverSensor


class TestKafkaReceiverSensor:
    def test_a_stream_that_receives(self, stream, ledger):
        Job(ledger, 2).run()
        sensor = KafkaReceiverSensor(task_id="receiving", stream=stream)
        assert sensor.execute(context()) is None

    def test_a_stream_with_a_failed_partition_is_waited_for_and_its_error_logged(self, stream, ledger, capsys):
        fail(ledger, Job(ledger, 2).run(), "the topic was deleted")
        sensor = KafkaReceiverSensor(task_id="receiving", stream=stream)
        with pytest.raises(TaskDeferred):
            sensor.execute(context())
        assert "flights-0 at offset 0: the topic was deleted" in capsys.readouterr().out

    def test_without_deferring_it_pokes(self, stream, ledger):
        sensor = KafkaReceiverSensor(task_id="receiving", stream=stream, deferrable=False)
        assert sensor.poke(context()) is False
        Job(ledger, 2).run()
        assert sensor.poke(context()) is True
