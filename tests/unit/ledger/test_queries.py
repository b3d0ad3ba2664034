"""No query of the ledger reads a whole table: a call costs the same however many batches and blocks there are."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from sqlalchemy import event

from headrace.blocks import BlockHandle
from headrace.ledger import EventKind, Ledger
from headrace.ledger.batches.run_batch_times import BatchBounds
from headrace.ledger.batches.tables import BatchInputRow

NOW_MS = 1_700_000_000_000
T1, T2 = NOW_MS + 1000, NOW_MS + 2000
# Small tables by nature: an input has few receivers, a stream few topics, partitions and listeners, a ledger few
# streams.
SMALL = {"listener_cursors", "streams", "receivers", "topics", "receiver_jobs"}
GROWING = {"blocks", "batches", "batch_attempts", "batch_inputs", "batch_outputs", "segments", "events", "replays"}


@pytest.fixture
def plans(ledger: Ledger) -> Iterator[dict[str, list[str]]]:
    """The plans of all statements that run, by statement."""
    found: dict[str, list[str]] = {}
    engine = ledger.streams._database.engine
    is_sqlite = engine.dialect.name == "sqlite"

    def explain(_c: Any, cursor: Any, statement: str, parameters: Any, _x: Any, executemany: bool) -> None:
        if statement in found or not statement.startswith(("SELECT", "UPDATE", "DELETE", "WITH")):
            return
        first = parameters[0] if executemany else parameters
        own = cursor.connection.cursor()
        if is_sqlite:
            own.execute(f"EXPLAIN QUERY PLAN {statement}", first)
            found[statement] = [row[3] for row in own.fetchall()]
        else:
            # A small table is scanned and sorted whatever its indexes; forbidden that, only where there is none.
            for way in ("seqscan", "sort", "bitmapscan"):
                own.execute(f"SET LOCAL enable_{way} = off")
            own.execute(f"EXPLAIN {statement}", first)
            found[statement] = [row[0] for row in own.fetchall()]
        own.close()

    event.listen(engine, "before_cursor_execute", explain)
    yield found
    event.remove(engine, "before_cursor_execute", explain)


def scanned(plan: list[str]) -> set[str]:
    """The tables that a plan reads from one end to the other."""
    tables = set()
    for line in plan:
        words = line.replace("->", "").split()
        if words[0] == "SCAN" and "INDEX" not in words:
            tables.add(words[1])
        if "Seq Scan on" in line:
            tables.add(line.split("Seq Scan on ")[1].split()[0])
    # The last two are not tables: rows that the statement itself has read by an index.
    return tables - SMALL - {"CONSTANT", "(subquery", "locked", "counted_failures"}


def walk(world: Any) -> None:
    """Call everything once."""
    ledger = world.ledger
    for number, segment in enumerate("aab"):
        world.add({0: (number * 10, number * 10 + 10), 1: (number, number + 1)}, handle=BlockHandle(segment, number, 1))
    ledger.positions.advance(world.receiver, world.partitions[2], 0, 5, gap="lost")
    world.ledger.receivers.heartbeat(world.receiver, sealed_through_ms=T1, drained={world.partitions[0]: NOW_MS})
    ledger.positions.unpassed("flights", T1)
    ledger.runs.assign("flights", "manual")
    ledger.runs.take("flights", "asset", bounds=BatchBounds(1, 1))
    ledger.runs.find("flights", "asset")
    ledger.receivers.unsealed("flights", T1)
    ledger.jobs.renew(world.job)
    ledger.jobs.current("flights")
    world.clock.advance(2500)
    ledger.blocks.unclaimed("flights")
    ledger.blocks.waiting("flights", T2)
    ledger.batches.next_unclaimed("flights")
    ledger.batches.absorbable("flights", T2)
    ledger.batches.earlier_unfinished("flights", T2)
    world.allocate(T1, absorb=[])
    world.allocate(T2, absorb=[NOW_MS])
    world.allocate(NOW_MS - 1000)
    built = BatchInputRow("flights", NOW_MS - 1000, "kafka", world.partitions[2], 0, 0, 0, 0)
    other = replace(built, partition=replace(built.partition, topic_id="id-0"), until_offset=9)
    world.allocate(NOW_MS - 1000, inputs=[built, other], replace_empty=True)
    world.complete(T1)
    ledger.batches.origins("flights", [T1, T2])
    ledger.results.behind("flights")
    ledger.results.replays_of("flights", [T1, T2])
    ledger.results.runs_of("flights", [T1, T2])
    ledger.results.open_segments("flights")
    ledger.results.moved("flights")
    copy = {"target": "v2", "definition": '{"outputs": [{"id": "index"}]}', "outputs": ["index"]}
    for _ in range(2):
        replay = ledger.replays.begin("flights", T1, holder="task", way="connect", lease_ms=1000, **copy)
    ledger.attempts.record_output(replay, "index", {})
    ledger.attempts.complete(replay, code_version="v")
    ledger.replays.between("flights", "v2", T1, T2)
    ledger.batches.written("flights", "index", T1, T2)
    ledger.replays.written_by("flights", "v2", "index", T1, T2)
    ledger.attempts.of_batch("flights", T1)
    ledger.cleanup.needed_from("flights")
    ledger.attempts.renew(ledger.attempts.begin("flights", T2, holder="task", way="connect", lease_ms=1000))
    ledger.receivers.heartbeat(world.receiver, sealed_through_ms=T1, stats={"failed": 1})
    ledger.overviews.of(ledger.streams.all(), 30)
    ledger.batches.abandon("flights", T2, "no")
    ledger.batches.page("flights")
    ledger.batches.page("flights", states=["completed", "failed"], before_ms=T2)
    ledger.batches.inputs("flights", T1)
    ledger.attempts.outputs("flights", T1)
    ledger.batches.containing("flights", "kafka", world.partitions[0], 5)
    ledger.positions.all("flights")
    ledger.gaps.page("flights")
    ledger.segments.page("flights")
    ledger.events.page("flights", 3, [EventKind.GAP])
    ledger.events.page("flights", 3, blocks=False)
    ledger.events.newest_id("flights")
    ledger.listener_cursors.open(world.job, ["stats"])
    ledger.listener_cursors.save(world.job, {"stats": 1})
    ledger.events.latest("flights")
    ledger.events.of_batch("flights", T1)
    ledger.cleanup.removable_segments("flights", NOW_MS * 2)
    ledger.cleanup.claim_removal("flights", ["a"], NOW_MS * 2)
    ledger.cleanup.fold_blocks("flights", "a")
    ledger.cleanup.cleanable_batches("flights", NOW_MS * 2)
    ledger.events.prune("flights", NOW_MS)


def test_every_statement_goes_by_an_index(world: Any, plans: dict[str, list[str]]) -> None:
    walk(world)
    assert len(plans) > 40
    assert {statement: plan for statement, plan in plans.items() if scanned(plan)} == {}


def test_no_statement_reads_all_that_a_stream_has(world: Any, plans: dict[str, list[str]]) -> None:
    walk(world)
    whole = {
        statement: line
        for statement, plan in plans.items()
        for line in plan
        if line.startswith("SEARCH")
        and line.endswith("(stream=?)")
        and line.split()[1] in GROWING
        # In the order of the index it ends at its limit, or at the first row that is not left out.
        and "LIMIT" not in statement
    }
    assert whole == {}


def test_what_is_cut_off_at_a_limit_is_not_sorted_first(world: Any, plans: dict[str, list[str]]) -> None:
    walk(world)
    sorts = {
        statement: plan
        for statement, plan in plans.items()
        if "LIMIT" in statement and any("TEMP B-TREE" in line or "Sort" in line for line in plan)
    }
    assert sorts == {}


def test_adding_a_block_takes_few_statements(world: Any) -> None:
    world.add({0: (0, 10)})
    count = 0

    def counted(*_: Any) -> None:
        nonlocal count
        count += 1

    engine = world.ledger.streams._database.engine
    event.listen(engine, "before_cursor_execute", counted)
    world.add({0: (10, 20), 1: (0, 10), 2: (0, 10)})
    event.remove(engine, "before_cursor_execute", counted)
    # BEGIN IMMEDIATE (SQLite only), stream, receiver, positions, move them, receiver, block, unclaimed, event.
    assert count <= 9
