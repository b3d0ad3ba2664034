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

    def test_a_stream_with_a_failed_partition_is_waited_for(self, stream, ledger, capsys):
        """The error of the partition is logged."""
        fail(ledger, Job(ledger, 2).run(), "the topic was deleted")
        sensor = KafkaReceiverSensor(task_id="receiving", stream=stream)
        with pytest.raises(TaskDeferred):
            sensor.execute(context())
        assert "flights-0 at offset 0: the topic was deleted" in capsys.readouterr().out

    def test_a_stream_of_another_file_is_given_by_name_and_ledger(self, stream, ledger):
        sensor = KafkaReceiverSensor(task_id="receiving", stream=stream.name, ledger=stream.ledger, deferrable=False)
        assert sensor.poke(context()) is False
        Job(ledger, 2).run()
        assert sensor.poke(context()) is True
        waiting = KafkaReceiverSensor(task_id="receiving", stream=stream.name, ledger=stream.ledger)
        assert waiting.execute(context()) is None

    def test_a_deferred_sensor_by_name_waits_for_the_receivers(self, stream, ledger):
        sensor = KafkaReceiverSensor(task_id="receiving", stream=stream.name, ledger=stream.ledger)
        with pytest.raises(TaskDeferred) as deferred:
            sensor.execute(context())
        _, arguments = deferred.value.trigger.serialize()
        named = {"stream": stream.name, "ledger": stream.ledger}
        assert named.items() <= arguments.items()

    def test_a_stream_that_is_not_there_yet_is_waited_for(self, stream, ledger, capsys):
        sensor = KafkaReceiverSensor(task_id="receiving", stream="flihgts", ledger=stream.ledger)
        with pytest.raises(TaskDeferred) as deferred:
            sensor.execute(context())
        assert "knows no stream 'flihgts'" in capsys.readouterr().out
        assert deferred.value.trigger.poll(ledger) is None
        assert (
            KafkaReceiverSensor(task_id="receiving", stream="flihgts", ledger=stream.ledger, deferrable=False).poke(
                context()
            )
            is False
        )

    def test_a_stream_that_appears_while_it_waits_is_found(self, stream, ledger):
        named = KafkaReceiverSensor(task_id="receiving", stream="later", ledger=stream.ledger)
        with pytest.raises(TaskDeferred) as deferred:
            named.execute(context())
        trigger = deferred.value.trigger
        assert trigger.poll(ledger) is None
        trigger.stream = stream.name
        Job(ledger, 2).run()
        assert trigger.poll(ledger) is not None

    @pytest.mark.parametrize("deferrable", [True, False])
    def test_a_ledger_not_there_yet_is_waited_for_and_not_made(self, tmp_path, deferrable):
        file = tmp_path / "later" / "ledger.db"
        sensor = KafkaReceiverSensor(
            task_id="receiving", stream="flights", ledger=f"sqlite:///{file}", deferrable=deferrable
        )
        if deferrable:
            with pytest.raises(TaskDeferred) as deferred:
                sensor.execute(context())
            assert deferred.value.trigger.CREATE is False
        else:
            assert sensor.poke(context()) is False
        assert not file.parent.exists()

    def test_a_name_needs_a_ledger_and_a_stream_has_its_own(self, stream):
        for given in ({"stream": "flights"}, {"stream": stream, "ledger": stream.ledger}):
            with pytest.raises(ValueError, match="give `ledger` with the name of a stream"):
                KafkaReceiverSensor(task_id="receiving", **given)

    def test_without_deferring_it_pokes(self, stream, ledger):
        sensor = KafkaReceiverSensor(task_id="receiving", stream=stream, deferrable=False)
        assert sensor.poke(context()) is False
        Job(ledger, 2).run()
        assert sensor.poke(context()) is True
