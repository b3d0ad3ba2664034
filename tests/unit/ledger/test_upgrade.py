"""A ledger of the first schema, with everything in it, goes on after its upgrade."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from alembic.migration import MigrationContext

from headrace.blocks import BlockHandle, BlockInfo, OffsetRange, ReceiverId, TopicPartition
from headrace.clock import ManualClock
from headrace.ledger import AttemptState, BatchState, Ledger
from headrace.ledger.database import Database
from headrace.ledger.engines import open_engine
from headrace.ledger.errors import AlreadyCompletedError, AttemptFencedError
from headrace.ledger.rows import ReceiverLease
from headrace.ledger.schema import HEAD, upgrade
from headrace.ledger.urls import engine_url

NOW_MS = 1_700_000_010_000
# Completed; failed in its re-run; failed at one of two outputs; running; fenced and running; allocated; unclaimed.
DONE, REDONE, HALF, RUNS, TAKEN, WAITS, OPEN = (1_700_000_000_000 + 1000 * number for number in range(7))
RUN = {"holder": "new", "way": "connect", "lease_ms": 5_000}
BOTH = '["index", "console"]'


def batch(time_ms: int, state: str, attempt: int, error: str = "NULL") -> str:
    done = str(time_ms + 500) if state == "completed" else "NULL"
    return (
        f"INSERT INTO batches VALUES ('flights', {time_ms}, 1000, '{state}', 1, 'm', '0', NULL, 1, 10, 100, '[]', NULL,"
        f" {attempt}, 1, 2, {done}, {done}, NULL, NULL, NULL, {error})"
    )


def attempt(time_ms: int, number: int, state: str, error: str = "NULL") -> str:
    ended = "NULL" if state == "running" else "7"
    return (
        f"INSERT INTO batch_attempts VALUES ('flights', {time_ms}, {number}, 'old', 'connect', '{state}', '{BOTH}',"
        f" '{{}}', 5, 5000, {NOW_MS + 5000}, 5, {ended}, {error})"
    )


def output(time_ms: int, number: int, output_id: str) -> str:
    return f"INSERT INTO batch_outputs VALUES ('flights', {time_ms}, {number}, '{output_id}', '{{\"n\": {number}}}', 6)"


FIRST_SCHEMA = [
    f"INSERT INTO streams VALUES ('flights', '{{}}', 1, 1000, 200, '{BOTH}', 10, false, {DONE}, {WAITS}, 'running', 1,"
    " 1, 1)",
    "INSERT INTO receiver_jobs VALUES ('flights', 1, 'driver', 'running', 1, 60000, 9999999999999, 1, '{}', '{}', NULL,"
    " NULL, NULL, NULL)",
    "INSERT INTO segments VALUES (1, 'flights', 'a', 'kafka', 0, 1, 1, NULL, NULL, NULL, NULL)",
    "INSERT INTO segments VALUES (2, 'flights', '0', 'kafka', 0, 1, 1, 2, NULL, NULL, NULL)",
    "INSERT INTO receivers VALUES ('flights', 'kafka', 0, 1, 1, 'running', 'here', 1, 60000, 9999999999999, 1, 0, 6,"
    " 1, '{}', NULL, 0, false)",
    "INSERT INTO topics VALUES ('flights', 'kafka', 'departures', 'id-1', 1, 1, 1, true, true, 1, 1)",
    "INSERT INTO positions VALUES ('flights', 'kafka', 'departures', 'id-1', 0, 1, 70, 0, 0, 0,"
    f" {OPEN}, 'active', NULL, 1)",
    *(
        f"INSERT INTO blocks VALUES ({number + 1}, 'flights', {time_ms}, 'kafka', 0, 1, {number}, 1, 1, 1,"
        f' {number * 100}, 100, \'[["departures", "id-1", 0, 1, {number * 10}, {number * 10 + 10}, 10]]\', 10, 100)'
        for number, time_ms in enumerate((DONE, REDONE, HALF, RUNS, TAKEN, WAITS, OPEN))
    ),
    batch(DONE, "completed", 1),
    batch(REDONE, "failed", 2, "'boom'"),
    batch(HALF, "failed", 1, "'disk full'"),
    batch(RUNS, "running", 1),
    batch(TAKEN, "running", 2),
    batch(WAITS, "allocated", 0),
    f"INSERT INTO unclaimed_times VALUES ('flights', {OPEN}, 1, 10, 100)",
    *(
        f"INSERT INTO batch_inputs VALUES ('flights', {time_ms}, 'kafka', 'departures', 'id-1', 0, 1, {number * 10},"
        f" {number * 10 + 10}, 10, 1)"
        for number, time_ms in enumerate((DONE, REDONE, HALF, RUNS, TAKEN, WAITS))
    ),
    attempt(DONE, 1, "completed"),
    output(DONE, 1, "index"),
    output(DONE, 1, "console"),
    attempt(REDONE, 1, "completed"),
    output(REDONE, 1, "index"),
    output(REDONE, 1, "console"),
    attempt(REDONE, 2, "failed", "'boom'"),
    attempt(HALF, 1, "failed", "'disk full'"),
    output(HALF, 1, "index"),
    attempt(RUNS, 1, "running"),
    output(RUNS, 1, "index"),
    attempt(TAKEN, 1, "fenced"),
    attempt(TAKEN, 2, "running"),
]


@pytest.fixture
def upgraded(fresh_url: str) -> Iterator[Ledger]:
    """The ledger, migrated by this version after the one before left it."""
    database = Database(open_engine(engine_url(fresh_url, None), create=True))
    with database.write() as connection:
        upgrade(connection, "0001")
        for statement in FIRST_SCHEMA:
            connection.exec_driver_sql(statement)
        if not database.is_sqlite:
            for table, key in (("blocks", "block_id"), ("segments", "segment_id")):
                connection.exec_driver_sql(
                    f"SELECT setval(pg_get_serial_sequence('{table}', '{key}'), (SELECT max({key}) FROM {table}))"
                )
    Ledger.migrate(fresh_url)
    with Ledger.open(fresh_url, clock=ManualClock(NOW_MS)) as ledger:
        yield ledger


def outputs(ledger: Ledger, time_ms: int) -> dict[str, tuple[int, AttemptState]]:
    return {row.output_id: (row.attempt, row.state) for row in ledger.batches.outputs("flights", time_ms)}


def finish(ledger: Ledger, time_ms: int, **options: Any) -> tuple[str, ...]:
    begun = ledger.batches.begin_attempt("flights", time_ms, **RUN, **options)
    for output_id in begun.outputs:
        ledger.batches.record_output(begun, output_id, {})
    assert ledger.batches.complete_attempt(begun).state is BatchState.COMPLETED
    return begun.outputs


def test_everything_can_be_read(upgraded: Ledger) -> None:
    stream = upgraded.streams.get("flights")
    assert (stream.batch_by, stream.allowed_lateness_ms, stream.outputs) == ("arrival", 0, ("index", "console"))
    rows = upgraded.batches.page("flights", oldest_first=True)
    assert [row.state.value for row in rows] == ["completed", "failed", "failed", *["allocated"] * 3]
    # What failed when it was run again has completed before.
    assert [row.steps for row in rows[:3]] == [("index", "console"), ("index", "console"), None]
    assert {(row.late_records, row.built) for row in rows} == {(0, False)}
    assert {origin.source for origin in upgraded.batches.origins("flights", [DONE, WAITS]).values()} == {"log"}
    assert [row.records for row in upgraded.blocks.of_batch("flights", DONE)[0].info.ranges] == [10]
    assert [row.last_batch_time_ms for row in upgraded.segments.page("flights")] == [None, 0]
    assert [row.path for row in upgraded.cleanup.removable_segments("flights", DONE)] == ["0"]
    (position,) = upgraded.positions.all("flights")
    assert (position.next_offset, position.watermark_ms, position.drained_ms) == (70, 0, 0)
    (first, second) = upgraded.batches.attempts("flights", TAKEN)
    assert (first.state, first.target, first.source, first.definition) == (AttemptState.FENCED, "", "log", None)
    assert (second.state, second.ended_at_ms) == (AttemptState.FENCED, second.heartbeat_ms)


def test_records_and_failures_are_by_output(upgraded: Ledger) -> None:
    done, failed = AttemptState.COMPLETED, AttemptState.FAILED
    assert outputs(upgraded, DONE) == {"index": (1, done), "console": (1, done)}
    assert outputs(upgraded, REDONE) == {"index": (2, failed), "console": (2, failed)}
    assert outputs(upgraded, HALF) == {"index": (1, done), "console": (1, failed)}
    assert upgraded.batches.outputs("flights", HALF)[0].error == "disk full"
    assert outputs(upgraded, RUNS) == {"index": (1, done)}
    assert outputs(upgraded, TAKEN) == {}


def test_every_batch_goes_on(upgraded: Ledger) -> None:
    with pytest.raises(AlreadyCompletedError):
        upgraded.batches.begin_attempt("flights", DONE, **RUN)
    # What was being done again has to be done again; what one output had recorded stays recorded.
    assert finish(upgraded, REDONE) == ("index", "console")
    assert finish(upgraded, HALF) == ("console",)
    assert finish(upgraded, TAKEN) == ("index", "console")
    assert finish(upgraded, RUNS) == ("console",)
    assert finish(upgraded, WAITS) == ("index", "console")
    assert finish(upgraded, DONE, outputs=["index"], force=True) == ("index",)


def test_an_attempt_that_runs_through_the_upgrade_is_refused(upgraded: Ledger) -> None:
    """Its process knows nothing of the rows that outputs have had since: it would leave them running for ever."""
    batches = upgraded.batches
    for time_ms in (RUNS, TAKEN):
        zombie = batches.attempts("flights", time_ms)[-1].claim()
        for step in (
            lambda zombie=zombie: batches.renew_attempt(zombie),
            lambda zombie=zombie: batches.record_output(zombie, "console", {}),
            lambda zombie=zombie: batches.complete_attempt(zombie),
            lambda zombie=zombie: batches.fail_attempt(zombie, "late"),
        ):
            with pytest.raises(AttemptFencedError):
                step()
    # Nor does it hold the slot, or what it had recorded hide what it had not.
    assert batches.begin_attempt("flights", RUNS, **RUN).outputs == ("console",)


def test_receiving_and_allocation_go_on(upgraded: Ledger) -> None:
    receiver, tp = ReceiverId("flights", "kafka", 0), TopicPartition("departures", "id-1", 0)
    lease = ReceiverLease(receiver, 1, 1, 60_000, 0)
    ranges = (OffsetRange(tp, 70, 80, 10),)
    added = upgraded.blocks.add(lease, BlockInfo(receiver, 1, 7, NOW_MS, BlockHandle("a", 700, 100), ranges, 10, 100))
    assert (added.block_id, added.batch_time_ms, added.late) == (8, NOW_MS + 1000, False)
    assert upgraded.runs.assign("flights", "manual") == OPEN
    batch = upgraded.batches.allocate("flights", OPEN, manifest_uri="m", manifest_sha256="0", blocks_expected=1)
    assert batch.records == 10


def test_the_schema_is_the_newest(upgraded: Ledger) -> None:
    with upgraded.streams._database.read() as connection:
        assert MigrationContext.configure(connection).get_current_revision() == HEAD
        if connection.dialect.name == "sqlite":
            assert connection.exec_driver_sql("PRAGMA foreign_key_check").all() == []
