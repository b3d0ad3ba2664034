"""A DAG of your own beside a stream: every hour, check that `flights` is received, and say what the hour's batches did.

`KafkaReceiverSensor` waits until the receiver job is alive, its receivers run, and no partition is stopped by an error.
If that does not come within five minutes, the run fails, and its log says what is missing: let your alerts watch it.
The stream is given by its name and its ledger: an import of flights.py would make that file's DAGs a second time.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from airflow.sdk import dag, task
from deployment import LEDGER

from headrace.sensors.kafka_receiver import KafkaReceiverSensor

STREAM = "flights"
HOUR_MS = 3_600_000


@dag(schedule="@hourly", start_date=datetime(2026, 1, 1, tzinfo=UTC), catchup=False)
def flights_watch() -> None:
    """Waits until the stream is received, then reports."""

    @task
    def report(dag_run: Any = None) -> dict[str, int]:
        """The number of the batches in each state, of the hour before the run, and of their records."""
        from headrace.hooks.ledger import LedgerHook

        until_ms = int(dag_run.run_after.timestamp() * 1000)
        numbers = {"records": 0, "late_records": 0}
        with LedgerHook(LEDGER).opened() as ledger:
            for batch in ledger.batches.page(STREAM, 1_000, before_ms=until_ms):
                if batch.batch_time_ms >= until_ms - HOUR_MS:
                    numbers[batch.state.value] = numbers.get(batch.state.value, 0) + 1
                    numbers["records"] += batch.records
                    numbers["late_records"] += batch.late_records
        print(f"{STREAM} in the hour before {dag_run.run_after}: {numbers}")
        return numbers

    is_received = KafkaReceiverSensor(task_id="is_received", stream=STREAM, ledger=LEDGER, timeout=300)
    is_received >> report()


flights_watch()
