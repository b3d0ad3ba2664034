from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from airflow.exceptions import AirflowTimetableInvalid
from airflow.timetables.base import DagRunInfo, DataInterval, TimeRestriction
from airflow.utils.types import DagRunType

from headrace.clock import SystemClock, to_ms
from headrace.timetables.micro_batch import MicroBatchTimetable, from_ms

TEN = timedelta(seconds=10)


def at(text: str):
    return from_ms(to_ms(datetime.fromisoformat(f"2026-03-01T{text}+00:00")))


def interval(start: str, end: str) -> DataInterval:
    return DataInterval(at(start), at(end))


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch):
    def stand_at(text: str) -> None:
        monkeypatch.setattr(SystemClock, "now_ms", lambda _: to_ms(at(text)))

    return stand_at


def runs(timetable: MicroBatchTimetable, last: DataInterval | None, restriction: TimeRestriction, count: int):
    """What the scheduler would create, one after another."""
    infos: list[DagRunInfo] = []
    for _ in range(count):
        info = timetable.next_dagrun_info(last_automated_data_interval=last, restriction=restriction)
        if info is None:
            break
        infos.append(info)
        last = info.data_interval
    return infos


UNRESTRICTED = TimeRestriction(None, None, catchup=False)


class TestAlignment:
    @pytest.mark.parametrize(
        ("asked", "start", "end"),
        [
            ("12:00:00", "12:00:00", "12:00:10"),
            ("12:00:09.999999", "12:00:00", "12:00:10"),
            ("12:00:10", "12:00:10", "12:00:20"),
        ],
    )
    def test_a_manual_run_gets_the_interval_that_contains_its_date(self, asked, start, end):
        assert MicroBatchTimetable(TEN).infer_manual_data_interval(run_after=at(asked)) == interval(start, end)

    def test_intervals_are_counted_from_the_epoch_at_any_length(self):
        timetable = MicroBatchTimetable(timedelta(seconds=7))
        start, end = timetable.containing(at("12:00:00"))
        assert to_ms(start) % 7000 == 0
        assert to_ms(end) - to_ms(start) == 7000
        assert start <= at("12:00:00") < end

    def test_milliseconds_survive_where_floats_would_lose_them(self):
        timetable = MicroBatchTimetable(timedelta(milliseconds=200))
        for ms in range(1_772_366_400_000, 1_772_366_402_000, 200):
            assert to_ms(timetable.containing(from_ms(ms)).start) == ms

    @pytest.mark.parametrize("asked", ["9999-12-31T23:59:59+00:00", "0001-01-01T00:00:00+00:00"])
    def test_a_date_without_a_possible_interval_is_a_value_error(self, asked):
        """No date can end the interval or begin it, and the error says so."""
        with pytest.raises(ValueError, match=r"between the years 1 and 9999.*Give another logical date"):
            MicroBatchTimetable(timedelta(seconds=7)).infer_manual_data_interval(
                run_after=datetime.fromisoformat(asked)
            )

    def test_dates_in_other_time_zones_are_moments(self):
        asked = datetime.fromisoformat("2026-03-29T02:30:05+02:00")
        assert MicroBatchTimetable(TEN).containing(asked).start == datetime(2026, 3, 29, 0, 30, tzinfo=UTC)


class TestSchedule:
    def test_a_run_begins_when_its_interval_ends(self, now):
        now("12:00:04")
        (info,) = runs(MicroBatchTimetable(TEN, catch_up=True), None, UNRESTRICTED, 1)
        assert info.data_interval == interval("12:00:00", "12:00:10")
        assert info.run_after == at("12:00:10")
        assert info.logical_date == at("12:00:00")

    def test_a_run_begins_ahead_and_its_id_has_its_batch_time(self, now):
        now("12:00:04")
        timetable = MicroBatchTimetable(TEN, catch_up=True, ahead=timedelta(seconds=1))
        first, second = runs(timetable, None, UNRESTRICTED, 2)
        assert [first.data_interval, second.data_interval] == [
            interval("12:00:00", "12:00:10"), interval("12:00:10", "12:00:20"),
        ]  # fmt: skip
        assert [first.run_after, second.run_after] == [at("12:00:09"), at("12:00:19")]
        names = [
            timetable.generate_run_id(run_type=kind, run_after=first.run_after, data_interval=first.data_interval)
            for kind in (DagRunType.SCHEDULED, DagRunType.MANUAL)
        ]
        assert names[0] == "scheduled__2026-03-01T12:00:10+00:00"
        assert names[1].startswith("manual__2026-03-01T12:00:09")

    def test_a_backfills_runs_begin_when_their_intervals_end(self, now):
        now("18:00:04")
        timetable = MicroBatchTimetable(TEN, ahead=timedelta(seconds=1))
        backfill = TimeRestriction(at("12:00:00"), at("12:00:10"), catchup=True)
        assert [info.run_after for info in runs(timetable, None, backfill, 3)] == [at("12:00:10"), at("12:00:20")]

    def test_a_backfill_to_the_end_of_all_dates_ends_there(self):
        end = datetime.fromisoformat("9999-12-31T23:59:59+00:00")
        restriction = TimeRestriction(from_ms(to_ms(end) - 19_000), from_ms(to_ms(end)), catchup=True)
        (info,) = runs(MicroBatchTimetable(TEN), None, restriction, 5)
        assert to_ms(info.data_interval.end) == to_ms(end) - 9_000

    def test_intervals_follow_each_other_without_gap_or_overlap(self, now):
        now("12:00:04")
        infos = runs(MicroBatchTimetable(TEN, catch_up=True), interval("11:59:50", "12:00:00"), UNRESTRICTED, 5)
        ends = [info.data_interval.end for info in infos]
        starts = [info.data_interval.start for info in infos]
        assert starts[0] == at("12:00:00")
        assert starts[1:] == ends[:-1]

    def test_every_missed_interval_gets_a_run(self, now):
        now("18:00:04")
        infos = runs(MicroBatchTimetable(TEN, catch_up=True), interval("11:59:50", "12:00:00"), UNRESTRICTED, 3)
        assert [info.logical_date for info in infos] == [at("12:00:00"), at("12:00:10"), at("12:00:20")]

    def test_a_bounded_catch_up_skips_what_is_older(self, now):
        now("18:00:04")
        timetable = MicroBatchTimetable(TEN, catch_up=timedelta(seconds=25))
        infos = runs(timetable, interval("11:59:50", "12:00:00"), UNRESTRICTED, 2)
        assert [info.logical_date for info in infos] == [at("17:59:30"), at("17:59:40")]

    def test_a_bounded_catch_up_never_goes_back_behind_the_last_run(self, now):
        now("18:00:04")
        timetable = MicroBatchTimetable(TEN, catch_up=timedelta(hours=1))
        (info,) = runs(timetable, interval("17:59:40", "17:59:50"), UNRESTRICTED, 1)
        assert info.logical_date == at("17:59:50")

    def test_without_catch_up_the_latest_ended_interval_comes_next(self, now):
        now("18:00:04")
        (info,) = runs(MicroBatchTimetable(TEN), interval("11:59:50", "12:00:00"), UNRESTRICTED, 1)
        assert info.data_interval == interval("17:59:50", "18:00:00")

    def test_a_static_start_date_makes_no_runs_before_the_first(self, now):
        now("18:00:04")
        restriction = TimeRestriction(at("00:00:00"), None, catchup=False)
        (info,) = runs(MicroBatchTimetable(TEN, catch_up=True), None, restriction, 1)
        assert info.logical_date == at("18:00:00")

    def test_airflows_catchup_begins_at_the_start_date_aligned_up(self, now):
        now("18:00:04")
        restriction = TimeRestriction(at("12:00:03"), None, catchup=True)
        infos = runs(MicroBatchTimetable(TEN), None, restriction, 2)
        assert [info.logical_date for info in infos] == [at("12:00:10"), at("12:00:20")]

    def test_a_backfill_gets_what_it_asks_for_to_the_inclusive_end(self, now):
        now("18:00:04")
        restriction = TimeRestriction(at("12:00:00"), at("12:00:30"), catchup=True)
        infos = runs(MicroBatchTimetable(TEN, catch_up=timedelta(seconds=20)), None, restriction, 10)
        assert [info.logical_date for info in infos] == [
            at("12:00:00"), at("12:00:10"), at("12:00:20"), at("12:00:30"),
        ]  # fmt: skip

    def test_a_future_start_date_is_waited_for(self, now):
        now("12:00:04")
        restriction = TimeRestriction(at("13:00:00"), None, catchup=False)
        (info,) = runs(MicroBatchTimetable(TEN, catch_up=True), None, restriction, 1)
        assert info.logical_date == at("13:00:00")

    def test_an_end_date_ends_the_schedule(self, now):
        now("12:00:04")
        restriction = TimeRestriction(None, at("12:00:10"), catchup=False)
        infos = runs(MicroBatchTimetable(TEN, catch_up=True), None, restriction, 10)
        assert [info.logical_date for info in infos] == [at("12:00:00"), at("12:00:10")]

    def test_there_is_nothing_to_catch_up_without_start_date_and_run(self):
        restriction = TimeRestriction(None, None, catchup=True)
        assert runs(MicroBatchTimetable(TEN), None, restriction, 1) == []

    def test_a_longer_interval_goes_on_after_the_shorters_last_run(self, now):
        now("12:00:25")
        last = interval("12:00:00", "12:00:10")
        infos = runs(MicroBatchTimetable(timedelta(minutes=1), catch_up=True), last, UNRESTRICTED, 2)
        assert [info.logical_date for info in infos] == [at("12:01:00"), at("12:02:00")]


class TestSerialisation:
    @pytest.mark.parametrize("catch_up", [True, False, timedelta(hours=6)])
    def test_survives_the_serialised_dag(self, catch_up):
        ahead = timedelta(milliseconds=150)
        timetable = MicroBatchTimetable(timedelta(milliseconds=1500), catch_up=catch_up, ahead=ahead)
        again = MicroBatchTimetable.deserialize(timetable.serialize())
        assert again == timetable
        assert again.ahead == ahead
        assert again.catch_up == catch_up
        assert again.description == timetable.description

    @pytest.mark.parametrize("bad", [timedelta(0), timedelta(seconds=-1), timedelta(microseconds=1500)])
    def test_no_interval_that_is_not_whole_positive_milliseconds(self, bad):
        with pytest.raises(AirflowTimetableInvalid, match="whole milliseconds"):
            MicroBatchTimetable(bad).validate()

    @pytest.mark.parametrize("bad", [TEN, timedelta(seconds=-1), timedelta(microseconds=1500)])
    def test_no_run_begins_an_interval_ahead_or_after_its_end(self, bad):
        with pytest.raises(AirflowTimetableInvalid, match="less than the interval"):
            MicroBatchTimetable(TEN, ahead=bad).validate()


class TestOnRequest:
    timetable = MicroBatchTimetable(TEN, automatic=False)

    @pytest.mark.parametrize(
        "restriction",
        [
            pytest.param(TimeRestriction(at("12:00:00"), None, catchup=False), id="the scheduler's, of such a DAG"),
            pytest.param(TimeRestriction(at("12:00:00"), at("13:00:00"), catchup=False), id="with an end date"),
            pytest.param(TimeRestriction(None, None, catchup=True), id="unrestricted, as `dags next-execution` asks"),
        ],
    )
    def test_the_scheduler_begins_nothing(self, restriction):
        last = interval("12:00:00", "12:00:10")
        assert runs(self.timetable, None, restriction, 1) == runs(self.timetable, last, restriction, 1) == []

    def test_a_backfill_gets_every_interval_of_its_range(self):
        asked = TimeRestriction(at("12:00:03"), at("12:00:40"), catchup=True)
        dates = runs(self.timetable, None, asked, 10)
        assert [run.logical_date for run in dates] == [at(f"12:00:{second}") for second in (10, 20, 30, 40)]

    def test_airflows_own_backfill_finds_them_in_the_serialised_dag(self):
        from airflow.models.backfill import _get_info_list
        from airflow.sdk import DAG
        from airflow.serialization.serialized_objects import DagSerialization

        dag = DAG("replay", schedule=self.timetable, start_date=at("12:00:00"), catchup=False)
        kept = DagSerialization.from_dict(DagSerialization.to_dict(dag))
        assert kept.next_dagrun_info(last_automated_run_info=None) is None
        asked = {"from_date": at("10:00:00"), "to_date": at("10:00:20"), "dag": kept}
        found = [run.logical_date for run in _get_info_list(**asked, reverse=False)]
        assert found == [at("10:00:00"), at("10:00:10"), at("10:00:20")]
        assert [run.logical_date for run in _get_info_list(**asked, reverse=True)] == found[::-1]

    def test_a_manual_run_gets_its_interval(self):
        assert self.timetable.infer_manual_data_interval(run_after=at("12:00:03")) == interval("12:00:00", "12:00:10")

    def test_it_survives_the_database_and_says_what_it_is(self):
        again = MicroBatchTimetable.deserialize(self.timetable.serialize())
        assert again == self.timetable != MicroBatchTimetable(TEN)
        assert again.description == again.summary == "on request, intervals of 10 s"


@pytest.mark.parametrize("catchup", [False, True])
@pytest.mark.parametrize("catch_up", [False, True, timedelta(hours=1)])
def test_runs_of_a_clock_that_was_ahead_do_not_stop_the_schedule(now, catchup, catch_up):
    now("12:00:05")
    year = timedelta(days=365)
    last = DataInterval(at("12:00:00") + year, at("12:00:10") + year)
    restriction = TimeRestriction(at("00:00:00"), None, catchup=catchup)
    info = MicroBatchTimetable(TEN, catch_up=catch_up).next_dagrun_info(
        last_automated_data_interval=last, restriction=restriction
    )
    assert info.data_interval == interval("12:00:00", "12:00:10")


def test_a_run_that_begins_before_its_end_is_followed_by_another(now):
    now("12:00:09")
    (info,) = runs(MicroBatchTimetable(TEN), interval("12:00:00", "12:00:10"), UNRESTRICTED, 1)
    assert info.data_interval == interval("12:00:10", "12:00:20")
