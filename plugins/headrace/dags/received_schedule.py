"""The schedule of a batch DAG whose batches are started by received records (``Stream.trigger``)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from airflow.sdk import Asset, AssetOrTimeSchedule, AssetWatcher

from headrace.stream.model import StreamDefinitionError
from headrace.timetables.micro_batch import MicroBatchTimetable
from headrace.triggers.records_received import RecordsReceivedTrigger

if TYPE_CHECKING:
    from headrace.stream import Stream


def received_schedule(stream: Stream, *, poll_interval: float | None = None) -> AssetOrTimeSchedule:
    """The ``schedule`` of the stream's batch DAG, which needs ``max_active_runs=1``.

    A trigger in Airflow's triggerer polls the ledger and emits an asset event when a batch is due; Airflow then creates
    a run without a logical date. The timetable starts no runs by itself: it allows backfills of the DAG, and runs
    triggered for a batch time.

    :param poll_interval: seconds between two polls of the ledger; by default ``[headrace] poll_interval``.

    Raises:
        StreamDefinitionError: the stream declares no trigger.
    """
    if stream.trigger is None:
        raise StreamDefinitionError(
            f"Stream {stream.name!r} declares no trigger, so its batches are started by the clock.",
            remedy="Give it trigger={'min_records': …, 'max_delay': …}.",
        )
    trigger = RecordsReceivedTrigger(
        ledger=stream.ledger,
        stream=stream.name,
        min_records=stream.trigger.min_records,
        max_delay_ms=stream.trigger.max_delay_ms,
        interval_ms=stream.batch_interval_ms,
        poll_interval=poll_interval,
    )
    asset = Asset(
        uri=f"headrace://{stream.name}/received",
        group="headrace",
        watchers=[AssetWatcher(name=f"{stream.name} received", trigger=trigger)],
    )
    timetable: Any = MicroBatchTimetable(stream.batch_interval, automatic=False)
    return AssetOrTimeSchedule(assets=[asset], timetable=timetable)
