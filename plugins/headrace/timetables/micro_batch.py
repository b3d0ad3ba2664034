"""The timetable of micro-batches: intervals of one length, counted from the Unix epoch.

A batch time is the end of such an interval. The ledger computes batch times by the same arithmetic (rule 4 of the
design), so the two agree without exchanging data.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from airflow.exceptions import AirflowTimetableInvalid
from airflow.timetables.base import DagRunInfo, DataInterval, Timetable
from airflow.utils.types import DagRunType
from pendulum import DateTime

from headrace.clock import Clock, SystemClock, to_ms

if TYPE_CHECKING:
    from airflow.timetables.base import TimeRestriction

_MILLISECOND = timedelta(milliseconds=1)
# By so much the clocks of several schedulers may differ.
_CLOCK_DIFFERENCE_MS = 60_000
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def from_ms(at_ms: int) -> DateTime:
    """The time as Airflow expects it: a pendulum ``DateTime`` in UTC.

    Raises ValueError, which Airflow's API answers with 400, for a time before the year 1 or after the year 9999.
    """
    try:
        return DateTime.instance(_EPOCH + timedelta(milliseconds=at_ms))
    except OverflowError:
        raise ValueError(
            "The batch interval of the given logical date is not between the years 1 and 9999. Give another logical "
            "date."
        ) from None


class MicroBatchTimetable(Timetable):
    """Data intervals ``[start, end)`` of ``interval`` each, aligned to the epoch; a run begins when its interval ends,
    or shortly before (``ahead``).

    Requested runs (by API, in the UI, without a schedule) get the interval that their logical date starts or falls
    into.

    :param interval: the batch interval, whole milliseconds.
    :param catch_up: how to treat intervals that were missed because Airflow was down or the DAG was paused. It
        applies if the DAG has ``catchup=False``; with ``catchup=True`` Airflow's own rule applies: every interval
        since the DAG's ``start_date`` gets a run. (Backfills always get the intervals that they request.)

        - ``True``: every interval since the last run gets one, in order. Before the first run nothing was missed,
          so the first run is that of the interval in which the DAG is first seen: no start date is needed, and no
          runs are created for the time before.
        - a ``timedelta``: the same, but not further back than this.
        - ``False``: only the latest interval that has ended.
    :param clock: replaces this machine's clock, for tests. It is not serialized.
    :param automatic: whether the scheduler begins runs by itself. Otherwise runs come only from backfills, people
        and assets. Leave ``catchup=False`` in such a DAG: ``catchup=True`` with an ``end_date`` looks like a backfill
        here.
    :param ahead: how long before the end of its interval the scheduler begins a run, whole milliseconds and less than
        the interval. Airflow takes about a second until a run's first task works; that task waits for the end of the
        interval (`headrace.runs.batch_run.begin_run`). A scheduled run's id has the end of its interval all the same.
    """

    def __init__(
        self,
        interval: timedelta,
        *,
        catch_up: bool | timedelta = False,
        automatic: bool = True,
        ahead: timedelta = timedelta(0),
        clock: Clock | None = None,
    ) -> None:
        self._interval_ms = interval // _MILLISECOND
        self._interval = interval
        self.ahead = ahead
        self.catch_up = catch_up
        self.automatic = automatic
        self._clock = clock or SystemClock()
        self.description = f"{self.summary}{self._catch_up_text()}"

    @property
    def summary(self) -> str:
        length = f"{self._interval.total_seconds():g} s"
        return f"every {length}" if self.automatic else f"on request, intervals of {length}"

    def _catch_up_text(self) -> str:
        if not self.automatic:
            return ""
        if self.catch_up is True:
            return ", missed intervals are caught up"
        if isinstance(self.catch_up, timedelta):
            return f", intervals missed in the last {self.catch_up.total_seconds():g} s are caught up"
        return ""

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, MicroBatchTimetable):
            return NotImplemented
        return self.serialize() == other.serialize()

    def __hash__(self) -> int:
        return hash((self._interval_ms, self.catch_up, self.automatic, self.ahead))

    def validate(self) -> None:
        if self._interval <= timedelta(0) or self._interval % _MILLISECOND:
            raise AirflowTimetableInvalid(
                f"interval must be a positive number of whole milliseconds, got {self._interval}."
            )
        if isinstance(self.catch_up, timedelta) and self.catch_up < timedelta(0):
            raise AirflowTimetableInvalid(f"catch_up must not be negative, got {self.catch_up}.")
        if not timedelta(0) <= self.ahead < self._interval or self.ahead % _MILLISECOND:
            raise AirflowTimetableInvalid(
                f"ahead must be whole milliseconds, at least 0 and less than the interval of {self._interval}; "
                f"got {self.ahead}."
            )

    def serialize(self) -> dict[str, Any]:
        catch_up = self.catch_up // _MILLISECOND if isinstance(self.catch_up, timedelta) else self.catch_up
        # Two keys, since in one key only the JSON type would distinguish a bool from an int.
        reach = {"catch_up": catch_up} if isinstance(catch_up, bool) else {"catch_up_ms": catch_up}
        ahead_ms = self.ahead // _MILLISECOND
        return {"interval_ms": self._interval_ms, "automatic": self.automatic, "ahead_ms": ahead_ms, **reach}

    @classmethod
    def deserialize(cls, data: dict[str, Any]) -> MicroBatchTimetable:
        catch_up = data.get("catch_up", False)
        if "catch_up_ms" in data:
            catch_up = timedelta(milliseconds=data["catch_up_ms"])
        return cls(
            timedelta(milliseconds=data["interval_ms"]),
            catch_up=catch_up,
            automatic=data.get("automatic", True),
            ahead=timedelta(milliseconds=data.get("ahead_ms", 0)),
        )

    def containing(self, at: datetime) -> DataInterval:
        """The interval that starts at ``at`` or contains it. Raises ValueError as `from_ms`."""
        start_ms = self._floor(to_ms(at))
        return DataInterval(from_ms(start_ms), from_ms(start_ms + self._interval_ms))

    def infer_manual_data_interval(self, *, run_after: DateTime) -> DataInterval:
        """The interval that contains the date. Raises ValueError, which Airflow's API answers with 400."""
        interval = self.containing(run_after)
        if interval.start < _EPOCH:
            # Airflow would make no tasks for the run, and let it succeed.
            raise ValueError("Batch times are counted from the start of 1970, UTC: give a later logical date.")
        return interval

    def next_dagrun_info(
        self, *, last_automated_data_interval: DataInterval | None, restriction: TimeRestriction
    ) -> DagRunInfo | None:
        # A backfill passes catchup=True and the end of its range, whatever its DAG's settings; the scheduler does not.
        is_backfill = restriction.catchup and restriction.latest is not None
        if not self.automatic and not is_backfill:
            return None
        if last_automated_data_interval is not None and not is_backfill:
            last_automated_data_interval = self._not_ahead(last_automated_data_interval)
        starts = []
        if last_automated_data_interval is not None:
            # The floor of the last end, so that a changed interval leaves no gap. But always after the last start,
            # because a logical date has only one run.
            after_last = self._floor(to_ms(last_automated_data_interval.end))
            last_start = to_ms(last_automated_data_interval.start)
            starts.append(after_last if after_last > last_start else self._floor(last_start) + self._interval_ms)
        if restriction.earliest is not None:
            starts.append(self._ceil(to_ms(restriction.earliest)))
        if not restriction.catchup:
            starts.append(self._floor(self._clock.now_ms()) - self._reach_ms(last_automated_data_interval))
        if not starts:
            return None
        try:
            start, end = from_ms(max(starts)), from_ms(max(starts) + self._interval_ms)
        except ValueError:
            # A backfill up to the year 9999: the next interval would end later.
            return None
        if restriction.latest is not None and start > restriction.latest:
            return None
        # Airflow names a backfill's run by run_after, and its interval has ended.
        run_after = end if is_backfill else end - self.ahead
        return DagRunInfo.interval(start, end)._replace(run_after=run_after)

    def generate_run_id(
        self, *, run_type: DagRunType, run_after: DateTime, data_interval: DataInterval | None, **extra: Any
    ) -> str:
        """Name a scheduled run by its batch time, the end of its interval, although it begins earlier."""
        if run_type == DagRunType.SCHEDULED and data_interval is not None:
            run_after = data_interval.end
        return super().generate_run_id(run_type=run_type, run_after=run_after, data_interval=data_interval, **extra)

    def _not_ahead(self, last: DataInterval) -> DataInterval:
        """``last``, or the latest interval that has ended if a clock that was ahead has begun runs long before their
        time: else the schedule would stand until then."""
        now_ms = self._clock.now_ms()
        if to_ms(last.end) <= now_ms + self._interval_ms + _CLOCK_DIFFERENCE_MS:
            return last
        end_ms = self._floor(now_ms)
        return DataInterval(from_ms(end_ms - self._interval_ms), from_ms(end_ms))

    def _reach_ms(self, last: DataInterval | None) -> int:
        """How far before the current interval's start the next run's interval may start, in milliseconds."""
        if self.catch_up is False:
            return self._interval_ms
        if last is None:
            return 0
        if self.catch_up is True:
            return self._floor(self._clock.now_ms())
        return self._ceil(self.catch_up // _MILLISECOND)

    def _floor(self, at_ms: int) -> int:
        return at_ms - at_ms % self._interval_ms

    def _ceil(self, at_ms: int) -> int:
        return -(-at_ms // self._interval_ms) * self._interval_ms
