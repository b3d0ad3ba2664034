"""The batch of a record by timestamp, and claims that a partition is drained up to a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence

import pyarrow as pa
import pytest
from confluent_kafka import KafkaError, KafkaException
from hypothesis import given
from hypothesis import strategies as st

from headrace.blocks import OffsetRange, TopicPartition
from headrace.kafka.records import RecordChunk, combine
from headrace.receiver.event_times import EndOffsetTracker, Ends, EventTimes, Key, by_event_time
from headrace.wal.frame import RECORD_SCHEMA

INTERVAL = 10
NOW = 1_000
A0 = TopicPartition("a", "id-a", 0)
A1 = TopicPartition("a", "id-a", 1)
B0 = TopicPartition("b", "id-b", 0, incarnation=3)

Row = tuple[TopicPartition, int, int | None]
"""Partition, offset, timestamp."""


def chunk(rows: Sequence[Row], ranges: Sequence[OffsetRange]) -> RecordChunk:
    if not rows:
        return RecordChunk(None, tuple(ranges), 0)
    columns = {
        "key": [None] * len(rows),
        "value": [f"{tp.topic}{tp.partition}@{offset}".encode() for tp, offset, _ in rows],
        "topic": [tp.topic for tp, _, _ in rows],
        "partition": [tp.partition for tp, _, _ in rows],
        "offset": [offset for _, offset, _ in rows],
        "timestamp": [-1 if timestamp is None else timestamp for _, _, timestamp in rows],
        "timestampType": [-1 if timestamp is None else 0 for _, _, timestamp in rows],
        "headers": [None] * len(rows),
        "incarnation": [tp.incarnation for tp, _, _ in rows],
    }
    batch = pa.record_batch([pa.array(columns[f.name], f.type) for f in RECORD_SCHEMA], schema=RECORD_SCHEMA)
    return RecordChunk(batch, tuple(ranges), batch.nbytes)


def of_one(times: Sequence[int | None], *, until: int | None = None, first: int = 0) -> RecordChunk:
    rows = [(A0, first + number, timestamp) for number, timestamp in enumerate(times)]
    end = first + len(rows) if until is None else until
    return chunk(rows, [OffsetRange(A0, first, end, len(rows))])


def reported(parts: Sequence[RecordChunk]) -> list[tuple[int | None, int, int, int]]:
    """(event time, from, until, records) of chunks of one range each."""
    return [(p.event_time_ms, r.from_offset, r.until_offset, r.records) for p in parts for r in p.ranges]


def split(*chunks: RecordChunk, watermark_ms: int | None = None, now_ms: int = NOW) -> list[RecordChunk]:
    times = EventTimes(INTERVAL, lambda: now_ms)
    times.begin(A0, watermark_ms)
    return [part for one_chunk in chunks for part in times.split(one_chunk)]


def test_what_lies_in_one_interval_stays_one_chunk() -> None:
    whole = of_one([101, 109, 100])
    (part,) = split(whole)
    assert part.batch is whole.batch
    assert reported([part]) == [(100, 0, 3, 3)]


def test_a_chunk_is_split_where_an_interval_ends() -> None:
    """A part reaches to the first offset of the next one."""
    rows = [(A0, 3, 105), (A0, 7, 115), (A0, 8, 119)]
    parts = split(chunk(rows, [OffsetRange(A0, 0, 12, 3)]))
    assert reported(parts) == [(100, 0, 7, 1), (110, 7, 12, 2)]
    assert [part.batch.column("offset").to_pylist() for part in parts if part.batch] == [[3], [7, 8]]
    assert sum(part.nbytes for part in parts) > 0


def test_older_records_stay_with_the_latest_before_them() -> None:
    assert reported(split(of_one([125, 90, 119, 131, 120]))) == [(120, 0, 3, 3), (130, 3, 5, 2)]
    assert reported(split(of_one([100]), of_one([90], first=1))) == [(100, 0, 1, 1), (100, 1, 2, 1)]


def test_the_maximum_goes_on_where_the_ledger_says() -> None:
    assert reported(split(of_one([101, 131]), watermark_ms=127)) == [(120, 0, 1, 1), (130, 1, 2, 1)]


def test_a_timestamp_of_the_future_counts_as_now() -> None:
    assert reported(split(of_one([105, 4_102_444_800_000, 110]), now_ms=123)) == [(100, 0, 1, 1), (120, 1, 3, 2)]


def test_a_record_without_a_timestamp_belongs_to_the_one_before() -> None:
    """The first record of all belongs to now."""
    assert reported(split(of_one([105, None]))) == [(100, 0, 2, 2)]
    assert reported(split(of_one([None, 105]))) == [(1_000, 0, 2, 2)]
    assert reported(split(of_one([None, None]), watermark_ms=50)) == [(50, 0, 2, 2)]


def test_partitions_have_a_maximum_each() -> None:
    times = EventTimes(INTERVAL, lambda: NOW)
    rows: list[Row] = [(A0, 0, 101), (A1, 0, 131), (B0, 0, 111), (A0, 1, 112), (A1, 1, 102)]
    ranges = [OffsetRange(A0, 0, 2, 2), OffsetRange(A1, 0, 2, 2), OffsetRange(B0, 0, 1, 1)]
    parts = times.split(chunk(rows, ranges))
    assert [(p.event_time_ms, p.ranges) for p in parts] == [
        (100, (OffsetRange(A0, 0, 1, 1),)),
        (110, (OffsetRange(A0, 1, 2, 1), OffsetRange(B0, 0, 1, 1))),
        (130, (OffsetRange(A1, 0, 2, 2),)),
    ]
    assert [p.batch.column("value").to_pylist() for p in parts if p.batch] == [
        [b"a0@0"],
        [b"b0@0", b"a0@1"],
        [b"a1@0", b"a1@1"],
    ]


def test_offsets_without_records_move_no_partition_in_time() -> None:
    times = EventTimes(INTERVAL, lambda: NOW)
    times.begin(A1, 50)
    parts = times.split(
        chunk([(A0, 0, 101)], [OffsetRange(A0, 0, 1, 1), OffsetRange(A1, 4, 9, 0), OffsetRange(B0, 0, 2, 0)])
    )
    assert reported(parts) == [(None, 0, 2, 0), (50, 4, 9, 0), (100, 0, 1, 1)]
    assert reported(times.split(RecordChunk(None, (OffsetRange(A0, 1, 2, 0),), 0))) == [(100, 1, 2, 0)]


def test_a_partition_begun_again_keeps_its_time() -> None:
    """A partition that was forgotten does not keep it."""
    times = EventTimes(INTERVAL, lambda: NOW)
    times.split(of_one([205]))
    times.begin(A0, 100)
    assert reported(times.split(of_one([150]))) == [(200, 0, 1, 1)]
    times.forget(A0)
    times.begin(A0, 100)
    assert reported(times.split(of_one([150]))) == [(150, 0, 1, 1)]


PARTITIONS = [A0, A1, B0]
HOLE = -2
"""An offset without a record."""


class Reading:
    """Receivers that follow one another read logs; beside them the maxima are taken record by record."""

    def __init__(self, logs: dict[TopicPartition, list[int | None]]) -> None:
        self.logs = logs
        self.now_ms = 500
        self.stored = dict.fromkeys(PARTITIONS, 0)
        self.batch_of: dict[tuple[TopicPartition, int], int] = {}
        self.expected: dict[tuple[TopicPartition, int], int] = {}
        self.watermarks: dict[TopicPartition, int] = {}
        self.stored_maxima: dict[TopicPartition, int] = {}
        self.restart()

    def restart(self) -> None:
        """What was not stored is read again."""
        self.times = EventTimes(INTERVAL, lambda: self.now_ms)
        for tp in PARTITIONS:
            self.times.begin(tp, self.watermarks.get(tp))
        self.at, self.maxima, self.filling = dict(self.stored), dict(self.stored_maxima), list[RecordChunk]()

    def read(self, turns: Sequence[int]) -> None:
        """The next offset of each of ``turns``' partitions, as one chunk."""
        before, counts, rows = dict(self.at), dict.fromkeys(PARTITIONS, 0), list[Row]()
        for tp in (PARTITIONS[turn] for turn in turns if self.at[PARTITIONS[turn]] < len(self.logs[PARTITIONS[turn]])):
            timestamp = self.logs[tp][self.at[tp]]
            if timestamp != HOLE:
                rows.append((tp, self.at[tp], timestamp))
                counts[tp] += 1
                self.maxima[tp] = self._maximum(self.maxima.get(tp), timestamp)
                self.expected[tp, self.at[tp]] = self.maxima[tp] // INTERVAL
            self.at[tp] += 1
        ranges = [OffsetRange(tp, before[tp], self.at[tp], counts[tp]) for tp in PARTITIONS if self.at[tp] > before[tp]]
        self.filling += self.times.split(chunk(rows, ranges))

    def _maximum(self, known: int | None, timestamp: int | None) -> int:
        counted = self.now_ms if known is None else known
        if timestamp is not None:
            counted = min(timestamp, self.now_ms)
        return counted if known is None else max(known, counted)

    def store(self) -> None:
        """Cut what was read and store it as blocks."""
        for group in by_event_time(self.filling):
            batch, ranges = combine(group)
            for covered in ranges:
                assert covered.from_offset == self.stored[covered.partition], "a hole or an overlap"
                self.stored[covered.partition] = covered.until_offset
            if batch is not None:
                self._stored(batch, ranges, group[0].event_time_ms)
        assert self.stored == self.at
        self.stored_maxima, self.filling = dict(self.maxima), []

    def _stored(self, batch: pa.RecordBatch, ranges: Sequence[OffsetRange], event_time_ms: int | None) -> None:
        assert event_time_ms is not None
        of = {(covered.partition.topic, covered.partition.partition): covered for covered in ranges}
        for row in batch.to_pylist():
            covered = of[row["topic"], row["partition"]]
            assert covered.from_offset <= row["offset"] < covered.until_offset
            self.batch_of[covered.partition, row["offset"]] = event_time_ms // INTERVAL
        for covered in ranges:
            self.watermarks[covered.partition] = max(self.watermarks.get(covered.partition, 0), event_time_ms)


ENTRY = st.one_of(st.integers(0, 600), st.sampled_from([None, HOLE, 10_000]))
LOGS = st.fixed_dictionaries({tp: st.lists(ENTRY, max_size=15) for tp in PARTITIONS})
READ = st.lists(st.integers(0, len(PARTITIONS) - 1), min_size=1, max_size=15)
STEPS = st.lists(st.one_of(READ, st.sampled_from(["store", "restart", "later"])), max_size=25)


@given(LOGS, STEPS)
def test_batches_are_those_of_the_running_maximum(
    logs: dict[TopicPartition, list[int | None]], steps: list[str | list[int]]
) -> None:
    reading = Reading(logs)
    for step in steps:
        if isinstance(step, list):
            reading.read(step)
        elif step == "later":
            reading.now_ms += 7
        else:
            reading.store() if step == "store" else reading.restart()
    reading.store()
    done = {key: number for key, number in reading.expected.items() if key[1] < reading.stored[key[0]]}
    assert reading.batch_of == done


@pytest.mark.parametrize("rows", [20_000])
def test_a_fetch_of_many_intervals_is_split_in_milliseconds(rows: int) -> None:
    """At 700,000 records a second there are 28 ms for as many records, for everything."""
    topic = [TopicPartition("a", "id-a", number) for number in range(4)]
    read: list[Row] = [(topic[n % 4], n // 4, n // 4) for n in range(rows)]
    whole = chunk(read, [OffsetRange(tp, 0, rows // 4, rows // 4) for tp in topic])
    best = 1.0
    for _ in range(5):
        times = EventTimes(1_000, lambda: 1 << 40)
        begun = time.perf_counter()
        parts = times.split(whole)
        best = min(best, time.perf_counter() - begun)
    assert len(parts) == 5
    assert best < 0.02


P0, P1 = TopicPartition("a", "id-a", 0), TopicPartition("a", "id-a", 1)


class Kafka:
    """Answers when told to."""

    def __init__(self) -> None:
        self.ends: dict[Key, int] = {("a", 0): 0, ("a", 1): 0}
        self.answers = True
        self.refuses = False
        self.asked = 0

    def ask(self, partitions: Collection[Key]) -> Callable[[], Ends | None]:
        self.asked += 1
        if self.refuses:
            raise KafkaException(KafkaError(KafkaError._STATE, "closing"))
        ends = {key: self.ends[key] for key in partitions if key in self.ends}
        return lambda: Ends(ends) if self.answers else None


class Setting:
    def __init__(self, lateness_ms: int = 0) -> None:
        self.kafka = Kafka()
        self.now_ms = 10_000
        self.tracker = EndOffsetTracker(self.kafka, lambda: self.stored, lambda: self.now_ms, lateness_ms=lateness_ms)
        self.stored = {P0: 0, P1: 0}

    def poll(self) -> bool:
        return self.tracker.poll()

    def drained(self) -> dict[TopicPartition, int]:
        """What the next heartbeat tells, and the ledger hears."""
        drained = self.tracker.drained()
        self.tracker.reported(drained)
        return drained


@pytest.fixture
def setting() -> Setting:
    return Setting()


def test_an_idle_partition_is_drained_at_every_question(setting: Setting) -> None:
    assert not setting.poll()
    assert setting.poll()
    assert setting.drained() == {P0: 10_000, P1: 10_000}
    assert setting.drained() == {}
    setting.now_ms = 11_000
    setting.poll()
    assert setting.poll()
    assert setting.drained() == {P0: 11_000, P1: 11_000}


def test_what_is_still_queued_is_not_claimed_until_it_is_stored(setting: Setting) -> None:
    setting.kafka.ends["a", 0] = 100
    setting.poll()
    setting.poll()
    assert setting.drained() == {P1: 10_000}
    setting.stored[P0] = 99
    assert setting.drained() == {}
    setting.stored[P0] = 100
    assert setting.drained() == {P0: 10_000}


def test_an_end_that_moves_on_is_claimed_as_it_was_when_asked(setting: Setting) -> None:
    """A partition that is always a little behind: what it had a while ago is stored."""
    for second in range(5):
        setting.now_ms = 10_000 + 1_000 * second
        setting.kafka.ends["a", 0] = 100 * (second + 1)
        setting.poll()
        setting.poll()
        setting.drained()
    setting.stored[P0] = 100
    assert setting.drained() == {P0: 10_000}


def test_without_an_answer_there_is_no_claim_at_a_later_time(setting: Setting) -> None:
    setting.poll()
    setting.poll()
    assert setting.drained()
    setting.kafka.answers = False
    for _ in range(100):
        setting.now_ms += 200
        assert not setting.poll()
        assert setting.drained() == {}
    assert setting.kafka.asked == 2
    setting.kafka.answers = True
    assert setting.poll()
    assert setting.drained() == {P0: 11_000, P1: 11_000}


def test_a_partition_without_an_answer_is_not_claimed(setting: Setting) -> None:
    del setting.kafka.ends["a", 0]
    setting.poll()
    setting.poll()
    assert setting.drained() == {P1: 10_000}


def test_a_question_that_cannot_be_asked_is_asked_later(setting: Setting) -> None:
    setting.kafka.refuses = True
    assert not setting.poll()
    assert not setting.poll()
    assert setting.kafka.asked == 1
    setting.kafka.refuses, setting.now_ms = False, 11_000
    setting.poll()
    assert setting.poll()


def test_a_log_that_ends_before_the_position_drained_nothing(setting: Setting) -> None:
    """It is that of another topic of the name, or lost its end: what comes now will not be read."""
    setting.stored[P0] = 50
    setting.kafka.ends["a", 0] = 20
    setting.poll()
    setting.poll()
    assert setting.drained() == {P1: 10_000}


def test_an_end_that_was_cut_off_is_not_waited_for(setting: Setting) -> None:
    setting.kafka.ends["a", 0] = 100
    setting.poll()
    setting.poll()
    setting.drained()
    setting.kafka.ends["a", 0] = 60
    setting.stored[P0], setting.now_ms = 60, 11_000
    setting.poll()
    setting.poll()
    assert setting.drained()[P0] == 11_000


def test_a_partition_that_is_gone_is_claimed_no_more(setting: Setting) -> None:
    setting.poll()
    del setting.stored[P0]
    setting.poll()
    assert setting.drained() == {P1: 10_000}


def test_kafka_is_asked_when_the_lateness_of_a_batch_ends() -> None:
    setting = Setting(lateness_ms=300)
    asked = []
    for now_ms in range(10_000, 13_000, 100):
        setting.now_ms = now_ms
        before = setting.kafka.asked
        setting.poll()
        if setting.kafka.asked > before:
            asked.append(now_ms)
    assert asked == [10_000, 10_300, 11_300, 12_300]


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("produce"), st.integers(1, 5)),
            st.tuples(st.just("store"), st.integers(1, 5)),
            st.tuples(st.sampled_from(["look", "look", "claim", "silence", "second"]), st.just(0)),
        ),
        max_size=60,
    )
)
def test_a_claim_is_never_ahead_of_the_truth(steps: list[tuple[str, int]]) -> None:
    setting = Setting()
    setting.stored = {P0: 0}
    produced: list[int] = []
    for step, number in steps:
        if step == "produce":
            produced += [setting.now_ms] * number
            setting.kafka.ends["a", 0] = len(produced)
            # Time stands still at a question, so what comes at the same moment may be on either side of it.
            setting.now_ms += 1
        elif step == "store":
            setting.stored[P0] = min(len(produced), setting.stored[P0] + number)
        elif step == "look":
            setting.poll()
        elif step == "silence":
            setting.kafka.answers = not setting.kafka.answers
        elif step == "second":
            setting.now_ms += 1_000
        for drained_ms in setting.drained().values() if step == "claim" else ():
            assert all(at_ms >= drained_ms for at_ms in produced[setting.stored[P0] :])
