"""A scrape reads no table whose size grows with batches, blocks or events."""

from __future__ import annotations

from typing import Any

from sqlalchemy import event

from headrace.ledger import Ledger

GROWING = {
    *("batches", "batch_attempts", "batch_outputs", "batch_inputs", "batch_runs", "replays"),
    *("blocks", "segments", "events", "gaps", "samples", "receiver_jobs", "unclaimed_times"),
}


def test_no_statement_of_a_scrape_scans_a_table_that_grows(world: Any) -> None:
    world.add({0: (0, 10)})
    world.clock.advance(1500)
    world.allocate(1_700_000_001_000)
    world.complete(1_700_000_001_000)
    world.add({0: (10, 20)})
    world.clock.advance(1000)
    world.allocate(1_700_000_002_000)
    scanned = {line for line in plans_of_a_scrape(world.ledger) if line.startswith("SCAN ")}
    assert {line.split()[1] for line in scanned} & GROWING == set()
    assert {line.split()[1] for line in scanned} >= {"streams", "totals"}, "plans name their tables"


def plans_of_a_scrape(ledger: Ledger) -> list[str]:
    """The lines of SQLite's query plans for all statements of a scrape."""
    statements: list[tuple[str, Any]] = []
    engine = ledger.streams._database.engine

    def note(_connection: Any, _cursor: Any, statement: str, parameters: Any, *_: Any) -> None:
        statements.append((statement, parameters))

    event.listen(engine, "before_cursor_execute", note)
    try:
        ledger.overviews.numbers()
    finally:
        event.remove(engine, "before_cursor_execute", note)
    queries = [each for each in statements if each[0].lstrip().upper().startswith("SELECT")]
    assert queries
    with engine.connect() as connection:
        return [
            str(row[3])
            for statement, parameters in queries
            for row in connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}", parameters)
        ]
