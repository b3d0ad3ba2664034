from __future__ import annotations

import asyncio
import json

import pytest
from airflow.sdk.exceptions import AirflowNotFoundException
from airflow.triggers.base import BaseEventTrigger

from headrace.ledger.errors import LedgerUnavailableError, SchemaError
from headrace.ledger.receiving.tables import UnclaimedTime, WaitingTimes
from headrace.triggers.records_received import Due, RecordsReceivedTrigger, due

LIMITS = {"min_records": 100, "max_delay_ms": 30_000, "interval_ms": 1000}


def waiting(**records: int) -> list[UnclaimedTime]:
    """Unclaimed times by their seconds: waiting(s5=3) is 3 records in the batch time 5000."""
    return [UnclaimedTime(int(name[1:]) * 1000, 1, count, 10 * count) for name, count in records.items()]


def until(now_ms: int, times: list[UnclaimedTime]) -> WaitingTimes | None:
    """What the ledger tells of them."""
    ended = [time for time in times if time.batch_time_ms <= now_ms]
    if not ended:
        return None
    records = sum(time.records for time in ended)
    return WaitingTimes(ended[0].batch_time_ms, ended[-1].batch_time_ms, len(ended), records)


class TestDue:
    def test_nothing_waits(self):
        assert due(None, 10_000, **LIMITS) is None

    def test_enough_records_in_intervals_that_have_ended(self):
        assert due(until(6000, waiting(s5=60, s6=40)), 6000, **LIMITS) == Due(6000, 2, 100, "min_records")
        assert due(until(6000, waiting(s5=60, s6=39)), 6000, **LIMITS) is None

    def test_an_interval_that_has_not_ended_does_not_count(self):
        assert due(until(5999, waiting(s5=60, s6=40)), 5999, **LIMITS) is None

    def test_the_oldest_record_waits_since_its_intervals_start(self):
        """It has waited since then at most."""
        assert due(until(33_999, waiting(s5=1, s6=1)), 33_999, **LIMITS) is None
        assert due(until(34_000, waiting(s5=1, s6=1)), 34_000, **LIMITS) == Due(6000, 2, 2, "max_delay")

    def test_a_delay_shorter_than_the_interval_waits_for_its_end(self):
        limits = {**LIMITS, "max_delay_ms": 100}
        assert due(until(4999, waiting(s5=1)), 4999, **limits) is None
        assert due(until(5000, waiting(s5=1)), 5000, **limits) == Due(5000, 1, 1, "max_delay")


class FakeLedger:
    """The questions that the trigger asks."""

    def __init__(self) -> None:
        self.now, self.unclaimed_times = 0, []
        self.blocks = self

    def unclaimed(self, stream):
        return self.unclaimed_times

    def waiting(self, stream, until_ms):
        return until(until_ms, self.unclaimed(stream))

    def now_ms(self):
        return self.now

    def close(self):
        pass


class Store:
    """What Airflow keeps for an asset."""

    def __init__(self) -> None:
        self.kept: dict[str, object] = {}

    async def aget(self, key):
        return json.loads(self.kept[key]) if key in self.kept else None

    async def aset(self, key, value):
        self.kept[key] = json.dumps(value)


def trigger(**options) -> RecordsReceivedTrigger:
    return RecordsReceivedTrigger(
        ledger="sqlite:////nowhere/ledger.db", stream="flights", poll_interval=0.01, **LIMITS, **options
    )


@pytest.fixture
def ledger() -> FakeLedger:
    return FakeLedger()


class TestLook:
    def test_it_fires_once_for_what_waits(self, ledger):
        asked = trigger()
        ledger.now, ledger.unclaimed_times = 6000, waiting(s5=60, s6=40)
        assert asked.poll(ledger) == {
            "stream": "flights", "reason": "min_records", "records": 100, "batch_times": 2, "through_ms": 6000,
        }  # fmt: skip
        assert asked.poll(ledger) is None

    def test_later_records_wait_for_the_claim_of_the_first(self, ledger):
        asked = trigger()
        ledger.now, ledger.unclaimed_times = 6000, waiting(s5=60, s6=40)
        assert asked.poll(ledger)
        ledger.now, ledger.unclaimed_times = 9000, waiting(s5=60, s6=40, s7=100, s8=100)
        assert asked.poll(ledger) is None
        ledger.unclaimed_times = waiting(s7=100, s8=100)
        assert asked.poll(ledger)["through_ms"] == 8000

    def test_a_lost_event_is_repeated_after_a_while(self, ledger):
        asked = trigger(repeat_after_ms=60_000)
        ledger.now, ledger.unclaimed_times = 6000, waiting(s5=100)
        assert asked.poll(ledger)
        ledger.now = 65_999
        assert asked.poll(ledger) is None
        ledger.now = 66_000
        assert asked.poll(ledger)["through_ms"] == 5000
        assert asked.poll(ledger) is None

    def test_a_clock_that_was_ahead_does_not_silence_it(self, ledger):
        asked = trigger()
        ledger.now, ledger.unclaimed_times = 900_000_000, waiting(s5=100)
        assert asked.poll(ledger) is not None
        ledger.now = 9000
        assert asked.poll(ledger)["through_ms"] == 5000


class TestRun:
    @pytest.fixture
    def opened(self, ledger, monkeypatch):
        async def aget_conn(hook, *, create):
            return ledger

        monkeypatch.setattr("headrace.triggers.ledger.LedgerHook.aget_conn", aget_conn)
        return ledger

    @staticmethod
    async def events(asked, count):
        found = []
        async for event in asked.run():
            found.append(event.payload["through_ms"])
            if len(found) == count:
                return found
        raise AssertionError("a watcher never ends")

    def test_it_goes_on_after_an_event(self, opened):
        opened.now, opened.unclaimed_times = 9000, waiting(s5=100)
        looks = iter([waiting(s5=100), waiting(s5=100), waiting(s7=100)])
        opened.unclaimed = lambda stream: next(looks)
        assert asyncio.run(asyncio.wait_for(self.events(trigger(), 2), 10)) == [5000, 7000]

    def test_a_new_triggerer_knows_what_the_last_one_fired_for(self, opened):
        store = Store()
        opened.now, opened.unclaimed_times = 9000, waiting(s5=100)

        async def scenario():
            first, second = trigger(), trigger()
            first.asset_state_store = second.asset_state_store = store
            assert await self.events(first, 1) == [5000]
            again = asyncio.create_task(self.events(second, 1))
            await asyncio.sleep(0.1)
            assert not again.done()
            opened.unclaimed_times = waiting(s7=100)
            return await asyncio.wait_for(again, 10)

        assert asyncio.run(scenario()) == [7000]

    @pytest.mark.parametrize(
        "error",
        [
            LedgerUnavailableError("no answer"),
            SchemaError("another version"),
            # Airflow would restart a watcher that ends, over and over.
            AirflowNotFoundException("The conn_id `ledger` isn't defined"),
        ],
    )
    def test_a_ledger_that_cannot_be_read_is_waited_for(self, opened, monkeypatch, error):
        monkeypatch.setattr("headrace.triggers.ledger.RETRY_SECONDS", 0.01)
        opened.now, failures = 9000, [error, error]

        def unclaimed(stream):
            if failures:
                raise failures.pop()
            return waiting(s5=100)

        opened.unclaimed = unclaimed
        assert asyncio.run(asyncio.wait_for(self.events(trigger(), 1), 10)) == [5000]

    def test_an_asset_state_store_that_fails_costs_no_event(self, opened):
        class Broken:
            async def aget(self, key):
                raise RuntimeError("no API server")

            async def aset(self, key, value):
                raise RuntimeError("no API server")

        opened.now, opened.unclaimed_times = 9000, waiting(s5=100)
        asked = trigger()
        asked.asset_state_store = Broken()
        assert asyncio.run(asyncio.wait_for(self.events(asked, 1), 10)) == [5000]


def test_airflow_takes_it_for_an_asset_watcher_and_keeps_it():
    kept = trigger()
    assert isinstance(kept, BaseEventTrigger)
    path, arguments = kept.serialize()
    assert path == "headrace.triggers.records_received.RecordsReceivedTrigger"
    assert RecordsReceivedTrigger(**json.loads(json.dumps(arguments))).serialize() == kept.serialize()
