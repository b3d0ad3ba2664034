"""Batches of the time before the stream are made of offset ranges, by the running maximum of timestamps."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.batch.allocation import Allocation, allocate
from headrace.batch.build_from_kafka import BatchBuildError, build_from_kafka
from headrace.batch.manifest import Manifest
from headrace.blocks import TopicPartition
from headrace.clock import ManualClock
from headrace.kafka.ranges import RecordedRange
from headrace.ledger import BatchState, Ledger
from headrace.ledger.errors import BatchTimeError
from headrace.stream import ConsoleOutput, ElasticsearchOutput, KafkaInput, KeyIds, State, Stream, Window
from headrace.stream_context import StreamContext
from headrace.wal.storage import open_storage

from .conftest import FakeOffsets

ZERO_MS = 1_700_000_000_000
INTERVAL_MS = 10_000


class Building:
    """A stream whose zero time is ``ZERO_MS``; `begin` says where it begins in each partition."""

    names = itertools.count()

    def __init__(self, folder: Path, ledger: Ledger, offsets: FakeOffsets) -> None:
        self.offsets = offsets
        self.ledger = ledger
        self.stream = Stream(
            name=f"shop{next(self.names)}",
            inputs=KafkaInput(id="clicks", bootstrap_servers="127.0.0.1:1", topics="clicks"),
            outputs=ConsoleOutput(),
            batch_interval="10 s",
            storage=folder / "storage",
            ledger=f"sqlite:///{folder}/ledger.db",
        )
        self.storage = open_storage(self.stream.storage.url)
        self.ledger.streams.register(
            self.stream.name,
            self.stream.to_json(),
            batch_interval_ms=self.stream.batch_interval_ms,
            block_interval_ms=self.stream.block_interval_ms,
        )
        self.job = self.ledger.jobs.acquire(self.stream.name, holder="test", lease_ms=3_600_000)

    def begin(self, starting: Mapping[int, int], topic_id: str = "id-1") -> Building:
        (seen,) = self.ledger.topics.observe(self.job, "clicks", [("clicks", topic_id, len(starting))])
        self.ledger.positions.ensure_all(
            self.job,
            "clicks",
            {
                TopicPartition("clicks", topic_id, number, seen.incarnation): offset
                for number, offset in starting.items()
            },
        )
        return self

    @property
    def context(self) -> StreamContext:
        return self.context_of(self.stream)

    def context_of(self, stream: Stream) -> StreamContext:
        """``stream``: another definition of this stream."""
        return StreamContext(stream, self.ledger, storage=self.storage.below(stream.name))

    def build(self, batch_time_ms: int) -> Allocation:
        return build_from_kafka(self.context, batch_time_ms, offsets_of=lambda _: self.offsets)

    def built(self, batch_time_ms: int) -> dict[int, tuple[int, int]]:
        """The ranges of a batch time by partition, as its manifest and the ledger have them."""
        allocation = self.build(batch_time_ms)
        batch = allocation.batch
        manifest = Manifest.load(batch.manifest_uri, sha256=batch.manifest_sha256)
        ranges = manifest.ranges("clicks")
        assert [
            RecordedRange(row.partition, row.from_offset, row.until_offset, None) for row in allocation.inputs
        ] == sorted(ranges, key=lambda covered: covered.partition)
        assert (batch.blocks, batch.records) == (0, manifest.records)
        return {covered.partition.partition: (covered.from_offset, covered.until_offset) for covered in ranges}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("building")


@pytest.fixture(scope="module")
def ledger(folder: Path) -> Iterator[Ledger]:
    opened = Ledger.open(f"sqlite:///{folder}/ledger.db", clock=ManualClock(ZERO_MS))
    yield opened
    opened.close()


def ago(intervals: float) -> int:
    """A time so many intervals before zero."""
    return ZERO_MS - int(intervals * INTERVAL_MS)


def test_a_batch_is_what_arrived_in_its_interval(folder: Path, ledger: Ledger) -> None:
    times: list[int | None] = [ago(3), ago(2), ago(1.5), ago(1) - 1, ago(1), ago(0.5), ZERO_MS]
    building = Building(folder, ledger, FakeOffsets({0: times})).begin({0: 7})
    assert building.built(ago(1)) == {0: (1, 4)}
    assert building.built(ZERO_MS) == {0: (4, 6)}
    assert building.built(ago(2)) == {0: (0, 1)}
    batch = building.ledger.batches.get(building.stream.name, ago(1))
    assert (batch.state, batch.built, batch.records) == (BatchState.ALLOCATED, True, 3)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    st.lists(
        st.tuples(st.lists(st.integers(-45_000, 20_000), max_size=30), st.integers(0, 30)), min_size=1, max_size=3
    ),
    st.permutations(range(4)),
)
def test_built_batches_neither_overlap_nor_leave_holes(
    folder: Path, ledger: Ledger, partitions: list[tuple[list[int], int]], order: list[int]
) -> None:
    """Each of them ends at the running maximum."""
    times: dict[int, list[int | None]] = {
        number: [ZERO_MS + shift for shift in shifts] for number, (shifts, _) in enumerate(partitions)
    }
    starting = {number: min(begin, len(times[number])) for number, (_, begin) in enumerate(partitions)}
    building = Building(folder, ledger, FakeOffsets(times)).begin(starting)
    built = {ago(seconds): building.built(ago(seconds)) for seconds in order}
    for number, shifts in times.items():
        maxima = itertools.accumulate((time for time in shifts if time is not None), max)
        wanted: dict[int, list[int]] = {}
        for at, maximum in enumerate(maxima):
            if at < starting[number]:
                wanted.setdefault((maximum // INTERVAL_MS + 1) * INTERVAL_MS, []).append(at)
        taken = {time: list(range(*ranges[number])) for time, ranges in built.items() if number in ranges}
        assert taken == {time: offsets for time, offsets in wanted.items() if time in built}


def test_neighbours_meet_also_after_a_compaction(folder: Path, ledger: Ledger) -> None:
    """A compaction took the very records by which the bounds had been found."""
    offsets = FakeOffsets({0: [ago(2), ago(1), ago(1.5), ago(0.5), ZERO_MS]})
    building = Building(folder, ledger, offsets).begin({0: 5})
    assert building.built(ago(1)) == {0: (0, 1)}
    offsets.times[0][1] = None
    assert building.built(ZERO_MS) == {0: (1, 4)}
    offsets.times[0][0] = None
    offsets.times[0][2] = ago(3)
    assert building.built(ago(2)) == {}


def test_what_the_stream_received_is_its_own(folder: Path, ledger: Ledger, caplog: pytest.LogCaptureFixture) -> None:
    times: list[int | None] = [ago(1), ago(0.5), ago(0.5), ago(0.5)]
    building = Building(folder, ledger, FakeOffsets({0: times, 1: times, 2: times})).begin({0: 2, 1: 0, 2: 4})
    assert building.built(ZERO_MS) == {0: (0, 2), 2: (0, 4)}
    late = Building(folder, ledger, FakeOffsets({0: [ago(4), ago(0.5)]})).begin({0: 1})
    with caplog.at_level(logging.INFO):
        assert late.built(ZERO_MS) == {}
    assert "takes nothing of clicks-0: what may be of its interval the stream received itself" in caplog.text
    assert "is empty" in caplog.text


def test_a_batch_is_built_once(folder: Path, ledger: Ledger) -> None:
    offsets = FakeOffsets({0: [ago(0.5), ago(0.4)]})
    building = Building(folder, ledger, offsets).begin({0: 2})
    first = building.build(ZERO_MS)
    offsets.low[0] = 2
    again = building.build(ZERO_MS)
    assert (first.fresh, again.fresh) == (True, False)
    assert again.batch == first.batch
    assert again.inputs == first.inputs


def test_an_empty_batch_of_the_time_is_replaced(folder: Path, ledger: Ledger) -> None:
    building = Building(folder, ledger, FakeOffsets({0: [ago(0.5)]})).begin({0: 1})
    empty = allocate(building.context, ZERO_MS).batch
    attempt = ledger.attempts.begin(building.stream.name, ZERO_MS, holder="test", way="connect", lease_ms=60_000)
    ledger.attempts.record_output(attempt, building.stream.outputs[0].id, {})
    ledger.attempts.complete(attempt)
    assert building.built(ZERO_MS) == {0: (0, 1)}
    batch = ledger.batches.get(building.stream.name, ZERO_MS)
    assert (batch.state, batch.built) == (BatchState.ALLOCATED, True)
    assert Manifest.load(empty.manifest_uri, sha256=empty.manifest_sha256).records == 0


def test_times_after_the_streams_beginning_are_refused(folder: Path, ledger: Ledger) -> None:
    building = Building(folder, ledger, FakeOffsets({0: [ago(0.5)]})).begin({0: 1})
    with pytest.raises(BatchBuildError, match="has its own batches after"):
        building.build(ZERO_MS + INTERVAL_MS)
    with pytest.raises(BatchTimeError):
        building.build(ZERO_MS - 1)


@pytest.mark.parametrize(
    ("fields", "reported"),
    [
        ({"state": State(update="m:f", fields="word STRING", keys="word")}, "starts from the state"),
        ({"outputs": (ConsoleOutput(window=Window(length="20 s")),)}, "output 'console' has a window"),
        (
            {"outputs": (ElasticsearchOutput(hosts="http://h:1", index="a", document_ids=KeyIds()),)},
            "output 'elasticsearch' deletes documents by key",
        ),
    ],
)
def test_a_stream_that_builds_on_earlier_batches_gets_none_there(
    folder: Path, ledger: Ledger, fields: dict[str, Any], reported: str
) -> None:
    """No batch is built from Kafka before the stream's own."""
    building = Building(folder, ledger, FakeOffsets({0: [ago(0.5)]})).begin({0: 1})
    building.stream = building.stream.model_copy(update=fields)
    with pytest.raises(BatchBuildError, match=rf"{reported}.*batch_by='timestamp'"):
        building.build(ZERO_MS)
    assert ledger.batches.find(building.stream.name, ZERO_MS) is None


def test_a_beginning_that_is_not_known_is_refused(folder: Path, ledger: Ledger) -> None:
    building = Building(folder, ledger, FakeOffsets({0: [ago(0.5)], 1: []}))
    with pytest.raises(BatchBuildError, match=r"is not known of clicks-0; clicks-1, .*Start its receiver job"):
        building.build(ZERO_MS)
    building.begin({0: 1})
    with pytest.raises(BatchBuildError, match="is not known of clicks-1,"):
        building.build(ZERO_MS)


def test_what_retention_may_have_taken_is_refused_with_its_time(folder: Path, ledger: Ledger) -> None:
    times: list[int | None] = [ago(3), ago(2), ago(2), ago(1), ago(0.5)]
    offsets = FakeOffsets({0: times, 1: times, 2: times, 3: []})
    building = Building(folder, ledger, offsets).begin({0: 5, 1: 5, 2: 5, 3: 0})
    offsets.low = {0: 2, 1: 5, 2: 1, 3: 0}
    with pytest.raises(BatchBuildError) as reported:
        building.build(ago(1))
    text = str(reported.value)
    # The record at 2 has the time of the interval's begin, and the one at 1, which is gone, had it too.
    assert "clicks-0: Kafka keeps offsets from 2 on, records since 2023-11-14T22:13:00Z" in text
    assert "clicks-1: Kafka keeps offsets from 5 on, and no record" in text
    assert "clicks-3" not in text
    assert ledger.batches.find(building.stream.name, ago(1)) is None
    offsets.low = dict.fromkeys(range(4), 2) | {3: 0}
    assert building.built(ZERO_MS) == {number: (3, 5) for number in range(3)}


def test_a_topic_that_is_gone_or_another_is_refused(folder: Path, ledger: Ledger) -> None:
    offsets = FakeOffsets({0: [ago(0.5)]})
    building = Building(folder, ledger, offsets).begin({0: 1})
    offsets.missing = ["clicks"]
    with pytest.raises(BatchBuildError, match="topic clicks does not exist"):
        building.build(ZERO_MS)
    offsets.missing, offsets.topic_id = [], "id-2"
    building.begin({0: 0}, topic_id="id-2")
    with pytest.raises(BatchBuildError, match=r"clicks-0: the topic \(id id-1\) was deleted"):
        building.build(ZERO_MS)


def test_a_lost_manifest_of_ranges_is_written_again(folder: Path, ledger: Ledger) -> None:
    times: list[int | None] = [ZERO_MS - 5_000 + number for number in range(4)]
    building = Building(folder, ledger, FakeOffsets({0: times, 1: times})).begin({0: 4, 1: 3})
    first = building.built(ZERO_MS)
    batch = building.build(ZERO_MS).batch
    assert building.storage.delete(batch.manifest_uri.removeprefix(f"{building.stream.storage.url}/"))
    assert allocate(building.context, ZERO_MS).batch == batch
    assert building.built(ZERO_MS) == first


def test_a_build_without_ranges_writes_over_no_manifest(folder: Path, ledger: Ledger) -> None:
    building = Building(folder, ledger, FakeOffsets({0: []})).begin({0: 0})
    before = building.stream.model_copy(update={"inputs": ()})
    empty = allocate(building.context_of(before), ZERO_MS).batch
    assert building.build(ZERO_MS).batch == empty
    assert Manifest.load(empty.manifest_uri, sha256=empty.manifest_sha256).inputs == {}
