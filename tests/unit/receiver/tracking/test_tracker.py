"""Topics that come, grow, go and fail; the files by which a job is seen, and stopped, without its ledger."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.support.memory_storage import MemoryStorage
from tests.unit.receiver.tracking.setting import MakeStream, Setting
from tests.unit.receiver.waiting import eventually

from headrace.batch.recover import RecoveryRefusedError, recover_if_lost
from headrace.kafka.errors import KafkaNotAskedError
from headrace.kafka.topics import SeenTopic
from headrace.ledger import EventKind, Ledger, PartitionState
from headrace.ledger.errors import LedgerUnavailableError
from headrace.ledger.tables import JobLease
from headrace.receiver import tracker
from headrace.receiver.partitioning import Discovery, Partitioning, check_key_versions
from headrace.receiver.receiver import KeyVersionsError
from headrace.receiver.tracker import (
    STOP_REQUEST_PATH,
    TrackerEnd,
    TrackerReport,
    find_sign,
    find_stop_request,
    write_stop_request,
)
from headrace.stream import ElasticsearchOutput, KeyIds
from headrace.stream_context import StreamContext
from headrace.wal.storage import open_storage

KEYED = ElasticsearchOutput(hosts="http://nowhere:9200", index="air", document_ids=KeyIds())
VERSIONED = KEYED.model_copy(update={"document_ids": KeyIds(version_from="changed_at")})


def test_new_topics_and_grown_ones_are_handed_out(setting: Setting) -> None:
    setting.begin()
    eventually(lambda: setting.loads() == [2, 2])
    setting.kafka.grow("flights", 6)
    setting.kafka.create("weather", 2)
    eventually(lambda: setting.loads() == [4, 4])
    setting.kafka.produce("flights", 5, b"a")
    setting.kafka.produce("weather", 1, b"b")
    eventually(lambda: setting.positions() == 2)


def test_a_topic_created_again_is_another_incarnation(setting: Setting) -> None:
    setting.begin()
    setting.kafka.produce("flights", 0, b"old", b"old")
    eventually(lambda: setting.positions() == 2)
    with setting.kafka.lock:
        setting.kafka.create("flights", 4)
        setting.kafka.produce("flights", 0, b"new", b"new", b"new")
    eventually(lambda: setting.positions() == 5)
    rows = [row for row in setting.ledger.positions.all("air") if row.partition.partition == 0]
    assert [(row.partition.incarnation, row.next_offset, row.state) for row in rows] == [
        (1, 2, PartitionState.ENDED),
        (2, 3, PartitionState.ACTIVE),
    ]
    assert len(setting.ledger.events.page("air", kinds=[EventKind.TOPIC_RECREATED])) == 1


def test_a_topic_created_again_with_fewer_records_has_not_failed(setting: Setting) -> None:
    """The receiver finds the end before its position, some time before the tracker looks at the topics."""
    setting.begin()
    setting.kafka.produce("flights", 0, b"old", b"old", b"old")
    eventually(lambda: setting.positions() == 3)
    setting.discoverer.failure = KafkaNotAskedError("The tracker does not look yet.")
    with setting.kafka.lock:
        setting.kafka.create("flights", 4)
        setting.kafka.produce("flights", 0, b"new")

    def seen_by_the_receiver() -> bool:
        rows = setting.ledger.receivers.all("air")
        return any(row.stats.get("failed") for row in rows) and min(row.heartbeat_ms for row in rows) > until_ms

    until_ms = setting.ledger.now_ms() + 2_000
    eventually(seen_by_the_receiver)
    setting.discoverer.failure = None
    eventually(lambda: setting.positions() == 4)
    assert setting.ledger.events.page("air", kinds=[EventKind.PARTITION_FAILED]) == []


def test_a_failed_partition_is_tried_again_by_the_next_job(setting: Setting, make_stream: MakeStream) -> None:
    for partition in range(4):
        setting.kafka.produce("flights", partition, b"a", b"b", b"c")
    setting.kafka.expire("flights", 1, 2)
    setting.begin()

    def states() -> list[PartitionState]:
        return [row.state for row in setting.ledger.positions.all("air")]

    failed = [PartitionState.ACTIVE, PartitionState.FAILED, PartitionState.ACTIVE, PartitionState.ACTIVE]
    eventually(lambda: states() == failed and setting.positions() == 9)
    setting.end()
    # The cause persists: it fails again, and says so again.
    second = setting.again()
    second.begin()
    eventually(lambda: len(setting.ledger.events.page("air", kinds=[EventKind.PARTITION_FAILED])) == 2)
    assert states() == failed
    second.end()
    third = second.again(make_stream(receivers=2, on_lost_offsets="reset"))
    third.begin()
    eventually(lambda: third.positions() == 12)
    assert set(states()) == {PartitionState.ACTIVE}
    assert [(gap.from_offset, gap.until_offset) for gap in setting.ledger.gaps.page("air")] == [(0, 2)]
    third.end()


def test_the_partitions_of_a_removed_input_come_back_with_it(setting: Setting, make_stream: MakeStream) -> None:
    """They end while the input is removed."""
    setting.kafka.produce("flights", 0, b"a", b"b", b"c")
    setting.kafka.expire("flights", 0, 2)
    setting.begin()
    eventually(lambda: PartitionState.FAILED in {row.state for row in setting.ledger.positions.all("air")})
    setting.end()
    renamed = setting.again(make_stream(receivers=2, id="renamed", on_lost_offsets="reset"))
    renamed.begin()
    eventually(lambda: len(setting.ledger.positions.all("air", "renamed")) == 4)
    before = setting.ledger.positions.all("air", "records")
    assert {(row.state, row.error) for row in before} == {
        (PartitionState.ENDED, "the input was removed from the definition")
    }
    assert {row.input_id for row in setting.ledger.positions.unpassed("air", 2**62)} == {"renamed"}
    renamed.end()
    back = renamed.again(make_stream(receivers=2, on_lost_offsets="reset"))
    back.begin()
    eventually(lambda: sum(row.next_offset for row in setting.ledger.positions.all("air", "records")) == 3)
    assert {row.state for row in setting.ledger.positions.all("air", "records")} == {PartitionState.ACTIVE}
    back.end()


def test_a_topic_removed_from_the_definition_is_not_deleted(setting: Setting, make_stream: MakeStream) -> None:
    setting.begin()
    eventually(lambda: setting.loads() == [2, 2])
    setting.end()
    after = setting.again(make_stream(topics=("weather",)))
    partitioning = Partitioning(
        StreamContext(after.stream, after.ledger), after.stream.inputs[0], after.job, grace_ms=10_000
    )
    for _ in range(3):
        partitioning.apply(Discovery((SeenTopic("weather", "id-weather", 1),)))
    ended = [row for row in after.ledger.positions.all("air") if row.partition.topic == "flights"]
    assert {(row.state, row.error) for row in ended} == {
        (PartitionState.ENDED, "the topic was removed from the definition")
    }


@pytest.mark.parametrize("change", ["has grown from 4 to 6", "was created again"])
def test_a_stream_of_key_ids_stops_when_keys_may_have_moved(setting: Setting, change: str) -> None:
    """It stops for good, and so does its next job."""
    setting.stream = setting.stream.model_copy(update={"outputs": (KEYED,)})
    setting.begin()
    eventually(lambda: setting.loads() == [2, 2])
    with setting.kafka.lock:
        setting.kafka.grow("flights", 6) if "grown" in change else setting.kafka.create("flights", 4)
        setting.kafka.produce("flights", 3, b"a")
    setting.thread.join(30)
    assert isinstance(setting.error, KeyVersionsError)
    assert change in str(setting.error)
    assert "version_from" in (setting.error.remedy or "")
    assert len(setting.ledger.positions.all("air")) == 4, "no new partition has a position to be received from"
    # The next job knows it from the ledger: no receiver starts.
    second = setting.again()
    second.begin()
    second.thread.join(30)
    assert isinstance(second.error, KeyVersionsError)
    assert second.launcher.handles == {}
    third = second.again(setting.stream.model_copy(update={"outputs": (VERSIONED,)}))
    third.begin()
    eventually(lambda: len(third.owners()) == (6 if "grown" in change else 4) and None not in third.owners().values())
    third.end()


def test_topics_of_one_name_in_two_inputs_move_no_keys(setting: Setting) -> None:
    stream = setting.stream.model_copy(update={"outputs": (KEYED,)})
    topics = setting.ledger.topics
    check_key_versions(stream, topics.observe(setting.job, "here", [("flights", "id-1", 1)]))
    there = topics.observe(setting.job, "there", [("flights", "id-2", 1)])
    assert there[0].incarnation == 2
    check_key_versions(stream, topics.all("air", "there"))


def test_a_topic_of_the_first_look_stays_one_if_understood_later(setting: Setting) -> None:
    """Where to begin in one topic is known at once, in the other one only at the next look."""
    partitioning = Partitioning(
        StreamContext(setting.stream, setting.ledger), setting.stream.inputs[0], setting.job, grace_ms=1
    )
    flights, weather = SeenTopic("flights", "id-1", 1), SeenTopic("weather", "id-2", 1)
    known = partitioning.known()
    assert not known.appeared("flights", "id-1", 0)
    partitioning.apply(Discovery((flights, weather), starting={("flights", "id-1", 0): 7}))
    delays = SeenTopic("delays", "id-3", 1)
    partitioning.apply(Discovery((flights, weather, delays)))
    # The next job's too.
    for discovery in (
        partitioning,
        Partitioning(StreamContext(setting.stream, setting.ledger), setting.stream.inputs[0], setting.job, grace_ms=1),
    ):
        known = discovery.known()
        assert known.appeared("flights", "id-1", 1), "it has grown"
        assert [known.appeared(seen.topic, seen.topic_id, 0) for seen in (weather, delays)] == [False, True]
        assert known.began_ms("weather", "id-2") is not None
        assert known.appeared("weather", "another id", 0)


def test_a_receiver_seen_by_a_clock_ahead_keeps_no_partitions(setting: Setting) -> None:
    partitioning = Partitioning(
        StreamContext(setting.stream, setting.ledger), setting.stream.inputs[0], setting.job, grace_ms=10_000
    )
    now_ms = setting.ledger.now_ms()
    assert partitioning._receivers({0, 1}, now_ms + 3_600_000) == {0, 1}
    assert partitioning._receivers({0}, now_ms) == {0, 1}
    assert partitioning._receivers({0}, now_ms + 10_000) == {0}


def test_what_comes_after_a_first_look_at_nothing_has_appeared(setting: Setting) -> None:
    partitioning = Partitioning(
        StreamContext(setting.stream, setting.ledger), setting.stream.inputs[0], setting.job, grace_ms=1
    )
    partitioning.apply(Discovery((), missing=("flights",)))
    assert partitioning.known().appeared("flights", "id-1", 0)
    partitioning.apply(Discovery((SeenTopic("flights", "id-1", 1),)))
    assert partitioning.known().appeared("flights", "id-1", 0)


def test_a_foreign_member_and_a_missing_topic_are_reported_once(setting: Setting) -> None:
    setting.discoverer.foreign = ("rogue at /10.0.0.9",)
    setting.discoverer.missing = ("absent",)
    setting.begin()
    eventually(lambda: "rogue" in setting.errors() and "absent" in setting.errors())
    eventually(lambda: len(setting.troubles()) == 1)
    eventually(lambda: setting.loads() == [2, 2])
    assert setting.errors().count("rogue") == 1
    assert "headrace-air-records" in setting.errors()
    assert ["rogue" in trouble for trouble in setting.troubles()] == [True], "the topic is in the inputs' health"


def test_the_ledger_knows_since_when_kafka_could_not_be_asked(setting: Setting) -> None:
    """The ledger also knows whether Kafka could be asked."""

    def noted() -> dict[str, Any]:
        job = setting.ledger.jobs.current("air")
        assert job is not None
        return dict(job.attributes.get("inputs", {}).get("records", {"error": "", "topics": {}}))

    setting.discoverer.missing = ("absent",)
    setting.begin()
    eventually(lambda: noted()["error"] is None)
    assert noted()["topics"]["absent"]["asked_ms"] == 0
    setting.discoverer.failure = KafkaNotAskedError("Kafka at nowhere:9092 cannot be asked: refused.")
    eventually(lambda: "nowhere:9092" in (noted()["error"] or ""))
    asked_ms = noted()["asked_ms"]
    assert 0 < asked_ms < setting.ledger.now_ms()
    assert "nowhere:9092" in setting.errors()
    setting.discoverer.failure = None
    eventually(lambda: noted()["error"] is None and noted()["asked_ms"] > asked_ms)
    setting.end()


def test_a_topic_that_may_not_be_described_is_not_called_deleted(setting: Setting) -> None:
    partitioning = Partitioning(
        StreamContext(setting.stream, setting.ledger), setting.stream.inputs[0], setting.job, grace_ms=0
    )
    seen = SeenTopic("flights", "id-1", 1)
    partitioning.apply(Discovery((seen,), starting={("flights", "id-1", 0): 7}))
    for _ in range(5):
        partitioning.apply(Discovery((), refused={"flights": "no DESCRIBE"}))
    (row,) = setting.ledger.positions.all("air")
    assert row.state is PartitionState.ACTIVE
    for _ in range(5):
        partitioning.apply(Discovery((), missing=("flights",)))
    (row,) = setting.ledger.positions.all("air")
    assert row.state is PartitionState.ENDED


def test_a_topic_is_deleted_when_three_discoveries_lack_it(setting: Setting) -> None:
    """Three discoveries in a row must lack it."""
    partitioning = Partitioning(
        StreamContext(setting.stream, setting.ledger), setting.stream.inputs[0], setting.job, grace_ms=0
    )
    seen = Discovery((SeenTopic("flights", "id-1", 1),), starting={("flights", "id-1", 0): 7})
    missing = Discovery((), missing=("flights",))

    def state_after(discovery: Discovery) -> PartitionState:
        partitioning.apply(discovery)
        (row,) = setting.ledger.positions.all("air")
        return row.state

    active, ended = PartitionState.ACTIVE, PartitionState.ENDED
    assert [state_after(seen_now) for seen_now in (seen, missing, missing, seen)] == [active] * 4
    assert [state_after(seen_now) for seen_now in (missing, missing, missing)] == [active, active, ended]


def short_lease(job: JobLease) -> JobLease:
    return replace(job, lease_ms=300)


def test_an_idle_job_renews_its_sign_and_deletes_it_at_its_end(setting: Setting) -> None:
    setting.job = short_lease(setting.job)
    folder = open_storage(setting.stream.folder_url)
    started_ms = setting.ledger.now_ms()
    setting.begin()
    eventually(lambda: find_sign(folder) is not None)
    first = find_sign(folder)
    assert first is not None and first.lease_ms == 300 and first.written_ms >= started_ms
    eventually(lambda: (sign := find_sign(folder)) is not None and sign.written_ms > first.written_ms)
    assert setting.end().end is TrackerEnd.STOPPED
    assert find_sign(folder) is None


def test_a_wrong_ledgers_task_begins_no_job_beside_an_idle_one(
    setting: Setting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ledger is empty, and the idle job is found by its sign."""
    monkeypatch.setattr("headrace.batch.recover.LEASE_MS", 1_500)
    setting.job = short_lease(setting.job)
    setting.kafka.produce("flights", 0, b"once")
    setting.begin()
    eventually(lambda: setting.positions() == 1)
    stream = setting.stream.model_copy(update={"recover": "automatic"})
    with Ledger.open(f"sqlite:///{tmp_path}/wrong.db") as wrong:
        context = StreamContext(stream, wrong)
        with pytest.raises(RecoveryRefusedError, match="it has another ledger"):
            recover_if_lost(context)
        assert wrong.streams.all() == []
        assert setting.end().end is TrackerEnd.STOPPED
        waits: list[float] = []
        assert recover_if_lost(context, wait=waits.append) is not None
        assert waits == [], "the job had received nothing for long, and has stopped"


def test_a_job_that_was_cut_off_leaves_its_sign(setting: Setting) -> None:
    folder = open_storage(setting.stream.folder_url)
    setting.begin()
    eventually(lambda: find_sign(folder) is not None)
    setting.ledger.jobs.release(setting.job)
    setting.ledger.jobs.acquire("air", holder="another", lease_ms=60_000)
    eventually(lambda: setting.report is not None)
    assert setting.report is not None and setting.report.end is TrackerEnd.LOST
    assert find_sign(folder) is not None, "it is the next job's"


def test_the_sign_is_not_renewed_while_the_ledger_is_silent(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    setting.job = short_lease(setting.job)
    folder = open_storage(setting.stream.folder_url)
    asked = []

    def away(*_: Any, **__: Any) -> None:
        asked.append(find_sign(folder))
        raise LedgerUnavailableError("it does not answer")

    setting.begin()
    eventually(lambda: find_sign(folder) is not None)
    monkeypatch.setattr(setting.ledger.jobs, "renew", away)
    eventually(lambda: len(asked) == 3)
    assert asked[1] == asked[2]


@pytest.fixture
def lost(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> Setting:
    """A job that receives, and whose ledger has just gone away."""

    def away(*_: Any, **__: Any) -> None:
        raise LedgerUnavailableError("it does not answer")

    monkeypatch.setattr(tracker, "STOP_POLL_SECONDS", 0.0)
    setting.begin()
    eventually(lambda: setting.loads() == [2, 2])
    monkeypatch.setattr(setting.ledger.jobs, "renew", away)
    monkeypatch.setattr(setting.ledger.receivers, "heartbeat", away)
    return setting


def test_a_job_without_its_ledger_ends_when_it_is_asked_to(lost: Setting) -> None:
    folder = open_storage(lost.stream.folder_url)
    write_stop_request(folder, "the ledger is lost", requested_ms=lost.ledger.now_ms() + 1)
    eventually(lambda: lost.report is not None)
    assert lost.report == TrackerReport(TrackerEnd.WITHOUT_LEDGER, "the ledger is lost")
    assert all(handle.stop.is_set() for handles in lost.launcher.handles.values() for handle in handles)


def test_a_request_from_before_the_ledgers_answer_ends_nothing(lost: Setting) -> None:
    """The request is from before the ledger last answered."""
    folder = open_storage(lost.stream.folder_url)
    write_stop_request(folder, "long ago", requested_ms=lost.job.lease_until_ms - lost.job.lease_ms)
    over = time.monotonic() + 1.5
    eventually(lambda: time.monotonic() > over)
    assert lost.report is None


def test_a_request_that_cannot_be_read_is_none() -> None:
    folder = MemoryStorage()
    assert find_stop_request(folder, since_ms=0) is None
    for content in (b"{", b"[]", b'{"reason": "x"}', b'{"reason": "x", "requested_ms": "soon"}'):
        folder.write_atomically(STOP_REQUEST_PATH, content)
        assert find_stop_request(folder, since_ms=0) is None
