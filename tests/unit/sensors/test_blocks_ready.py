from __future__ import annotations

from datetime import timedelta

import pytest
from airflow.providers.standard.operators.empty import EmptyOperator
from airflow.sdk import DAG
from airflow.sdk.exceptions import AirflowFailException, DownstreamTasksSkipped, TaskDeferred
from tests.unit.runs.readiness.conftest import Job, T
from tests.unit.sensors.conftest import context

from headrace.runs.readiness import InputsNotReceivedError
from headrace.sensors.blocks_ready import BlocksReadySensor
from headrace.timetables.micro_batch import from_ms
from headrace.triggers.ledger import BlocksReadyTrigger, FirstReceiverTrigger, NoReceiverError


class TestBlocksReadySensor:
    def test_what_is_there_is_found_without_deferring(self, stream, ledger):
        Job(ledger, 2).run(sealed=T)
        sensor = BlocksReadySensor(task_id="await", stream=stream)
        assert sensor.execute(context(from_ms(T - 10_000))) is None

    def test_what_is_not_there_is_waited_for_in_the_triggerer(self, stream, ledger):
        Job(ledger, 2).run(sealed=T - 1)
        sensor = BlocksReadySensor(task_id="await", stream=stream, grace=timedelta(seconds=3), timeout=60)
        with pytest.raises(TaskDeferred) as deferred:
            sensor.execute(context(from_ms(T - 10_000)))
        trigger = deferred.value.trigger
        assert isinstance(trigger, BlocksReadyTrigger)
        assert trigger.parameters == {"batch_time_ms": T, "grace_ms": 3000, "waiting_since_ms": T}
        assert deferred.value.timeout == timedelta(seconds=60)

    def test_why_a_batch_waits_is_logged_once_in_a_while(self, stream, ledger, capsys):
        Job(ledger, 2).run(sealed=T - 1)
        trigger = BlocksReadyTrigger.of(stream, T)
        assert trigger.poll(ledger) is None
        assert trigger.poll(ledger) is None
        assert capsys.readouterr().out.count("waiting for flights/records/0, flights/records/1") == 1

    def test_the_grace_is_the_streams(self, stream):
        assert BlocksReadyTrigger.of(stream, T).parameters["grace_ms"] == 10_000

    def test_a_run_that_asks_for_what_is_not_there_is_refused(self, stream, ledger):
        """It is refused before anything runs."""
        asking = context(from_ms(T - 10_000))
        asking["dag_run"].conf = {"outputs": ["elsewhere"]}
        with pytest.raises(AirflowFailException, match=r"no output 'elsewhere'\. Its outputs are console"):
            BlocksReadySensor(task_id="await", stream=stream).execute(asking)

    def test_the_end_of_the_wait_is_logged(self, stream, ledger, capsys):
        sensor = BlocksReadySensor(task_id="await", stream=stream)
        sensor.fired({}, {"reason": "flights/records/1 had not stored", "complete": False})
        assert (
            "The batch does not wait any longer for its blocks: flights/records/1 had not stored"
            in capsys.readouterr().out
        )

    def test_the_sensor_fails_for_good_but_not_by_timestamp(self, stream, ledger):
        """By timestamp it is tried again."""
        event = {"reason": "the batch's records are not known", "complete": True, "failed": True}
        with pytest.raises(AirflowFailException, match="The batch's records are not known"):
            BlocksReadySensor(task_id="await", stream=stream).fired({}, event)
        timed = stream.model_copy(update={"batch_by": "timestamp"})
        with pytest.raises(InputsNotReceivedError):
            BlocksReadySensor(task_id="await", stream=timed).fired({}, event)

    def test_a_sensor_that_does_not_defer_fails_as_well(self, stream, ledger, clock):
        sensor = BlocksReadySensor(task_id="await", stream=stream, deferrable=False)
        asking = context(from_ms(T))
        clock.advance(10_000)
        assert sensor.poke(asking) is False
        clock.advance(60_000)
        with pytest.raises(AirflowFailException, match="has no receiver job yet"):
            sensor.poke(asking)

    def test_a_sensor_that_is_rescheduled_waits_from_its_first_look(self, stream, ledger, clock):
        asking = context(from_ms(T))
        asking["ti"].get_first_reschedule_date = lambda _context: None
        clock.advance(10_000)

        def look() -> bool:
            """In a process of its own."""
            return BlocksReadySensor(task_id="await", stream=stream, deferrable=False, mode="reschedule").poke(asking)

        assert look() is False
        asking["ti"].get_first_reschedule_date = lambda _context: from_ms(T + 10_000)
        clock.advance(59_000)
        assert look() is False
        clock.advance(1_000)
        with pytest.raises(AirflowFailException, match="has no receiver job yet"):
            look()


class TestTheBeginningOfARun:
    """The stream's first receiver, then the batch that the run takes."""

    def test_a_scheduled_run_waits_for_the_first_receiver(self, stream, ledger, clock, capsys):
        """It makes no empty batches."""
        sensor = BlocksReadySensor(task_id="await", stream=stream)
        with pytest.raises(TaskDeferred) as deferred:
            sensor.execute(context(from_ms(T - 10_000)))
        trigger = deferred.value.trigger
        assert isinstance(trigger, FirstReceiverTrigger)
        assert "has no receiver job yet" in capsys.readouterr().out
        # Two intervals later it begins, and a third has to end with it: what is before that is empty.
        clock.advance(20_500)
        job = Job(ledger, 2).run()
        assert trigger.poll(ledger) is None
        clock.advance(10_000)
        began = trigger.poll(ledger)
        for lease in job.leases:
            ledger.receivers.heartbeat(lease, sealed_through_ms=T + 30_000)
        assert sensor.receiver_began(context(from_ms(T - 10_000)), began) is None
        assert ledger.runs.find("flights", "run") == T + 30_000

    def test_it_waits_no_longer_than_it_may_and_then_says_why(self, stream, ledger, clock):
        sensor = BlocksReadySensor(task_id="await", stream=stream)
        with pytest.raises(TaskDeferred) as deferred:
            sensor.execute(context(from_ms(T - 10_000)))
        lease = ledger.jobs.acquire("flights", holder="test", lease_ms=30_000)
        ledger.jobs.release(lease, "failed", "no such master")
        clock.advance(300_000)
        event = deferred.value.trigger.poll(ledger)
        with pytest.raises(NoReceiverError, match="ended before its receivers began: no such master"):
            sensor.receiver_began(context(from_ms(T - 10_000)), event)

    @pytest.mark.parametrize("run", [{"run_type": "manual"}, {"run_type": "backfill"}])
    def test_a_requested_run_does_not_wait_for_the_first_receiver(self, stream, ledger, run):
        sensor = BlocksReadySensor(task_id="await", stream=stream)
        assert sensor.execute(context(from_ms(T - 20_000), **run)) is None

    def test_a_run_whose_time_was_taken_over_skips_its_other_tasks(self, stream, ledger, clock, capsys):
        Job(ledger, 2).run(sealed=T)
        with DAG("flights_batches", schedule=None):
            sensor = BlocksReadySensor(task_id="await", stream=stream)
            sensor >> EmptyOperator(task_id="allocate") >> EmptyOperator(task_id="cleanup").as_teardown()
        ledger.allocations.seal("flights", T)
        late = context(from_ms(T - 20_000))
        with pytest.raises(DownstreamTasksSkipped) as skipped:
            sensor.execute(late)
        assert set(skipped.value.tasks) == {"allocate", "cleanup"}
        assert "Nothing to run: an earlier run has taken this batch time over" in capsys.readouterr().out
        assert "an earlier run has taken" in late["ti"].xcoms["nothing_to_run"]

    def test_exact_times_before_the_first_receiver_are_no_batches(self, stream, ledger, clock):
        exact = stream.model_copy(update={"coalesce": False})
        clock.advance(500)
        Job(ledger, 2).run(sealed=T)
        clock.advance(10_000)
        sensor = BlocksReadySensor(task_id="await", stream=exact)
        with pytest.raises(DownstreamTasksSkipped):
            sensor.execute(context(from_ms(T - 10_000)))
        with pytest.raises(TaskDeferred):
            sensor.execute(context(from_ms(T)))

    def test_a_restarted_receiver_is_not_the_streams_beginning(self, stream, ledger, clock):
        exact = stream.model_copy(update={"coalesce": False})
        job = Job(ledger, 1)
        clock.advance(30_500)
        scheduled = ledger.receivers.schedule(job.lease, job.leases[0].receiver_id)
        job.leases = [ledger.receivers.register(scheduled, host="h", lease_ms=20_000)]
        job.run(sealed=T + 30_000)
        sensor = BlocksReadySensor(task_id="await", stream=exact)
        assert sensor.execute(context(from_ms(T + 10_000))) is None, "its time has ended before the restart"

    def test_without_deferring_it_waits_in_its_slot(self, stream, ledger, clock, monkeypatch):
        sensor = BlocksReadySensor(task_id="await", stream=stream, deferrable=False)
        monkeypatch.setattr("headrace.triggers.ledger.time.sleep", lambda _: clock.advance(100_000))
        with pytest.raises(NoReceiverError):
            sensor.execute(context(from_ms(T - 10_000)))
