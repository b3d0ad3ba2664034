"""A ledger that is lost is rebuilt as it was, whatever its stream had gone through."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select

from headrace.batching.recovery.recover import recover
from headrace.ledger import Ledger
from headrace.ledger.tables import (
    batch_inputs,
    batch_outputs,
    batch_runs,
    batches,
    blocks,
    gaps,
    positions,
    replay_definitions,
    replays,
    segments,
    streams,
    topics,
    unclaimed_times,
)
from headrace.stream import Limits

from .life import LEASE_MS, NAME, Life

# What is not promised: who owns what, the ids and times that a ledger gives by itself, and the numbers of attempts.
NOT_PROMISED = {
    "streams": {"job_epoch"},
    "positions": {"receiver_index", "wanted_receiver_index"},
    "blocks": {"block_id", "segment_id", "added_at_ms"},
    "batches": {"attempt", "history", "cleaned_at_ms", "cleanup"},
    "batch_outputs": {"attempt", "recorded_at_ms", "code_version"},
    "batch_runs": {"at_ms"},
    "gaps": {"gap_id"},
    "replays": {"attempt"},
}
TABLES = (
    streams,
    topics,
    positions,
    blocks,
    unclaimed_times,
    batches,
    batch_inputs,
    batch_outputs,
    batch_runs,
    gaps,
    replays,
    replay_definitions,
)


def contents(ledger: Ledger) -> dict[str, list[str]]:
    """Every table's rows, without what is not promised."""
    found: dict[str, list[str]] = {}
    with ledger.streams._database.read() as connection:
        paths = dict(connection.execute(select(segments.c.segment_id, segments.c.path)).all())
        newest = newest_outputs(connection)
        for table in TABLES:
            rows = []
            for row in connection.execute(select(table)):
                fields = {k: v for k, v in row._mapping.items() if k not in NOT_PROMISED.get(table.name, ())}
                if table is blocks:
                    fields["segment"] = paths[row.segment_id]
                if table is batch_outputs and (row.batch_time_ms, row.attempt, row.output_id) not in newest:
                    continue
                if fields.get("state") == "running":
                    # Whoever ran it is lost.
                    fields["state"] = "allocated"
                rows.append(str(sorted((name, str(value)) for name, value in fields.items())))
            found[table.name] = sorted(rows)
    return found


def newest_outputs(connection: Any) -> set[tuple[Any, ...]]:
    """Of each output of each batch what counts: its newest attempt's record of success."""
    newest: dict[tuple[Any, ...], Any] = {}
    query = select(batch_outputs).where(batch_outputs.c.target == "")
    for row in connection.execute(query.order_by(batch_outputs.c.attempt)):
        newest[row.batch_time_ms, row.output_id] = row
    return {(row.batch_time_ms, row.attempt, row.output_id) for row in newest.values() if row.state == "completed"}


@pytest.fixture
def lost_url(tmp_path: Path) -> str:
    """The ledger that gets lost."""
    return f"sqlite:///{tmp_path}/lost.db"


@pytest.fixture
def new_url(tmp_path: Path) -> str:
    """Where it is rebuilt."""
    return f"sqlite:///{tmp_path}/new.db"


@pytest.fixture
def live(tmp_path: Path, lost_url: str) -> Callable[..., Life]:
    """Lives some steps by a seed."""

    def live(seed: int, steps: int = 120, **options: Any) -> Life:
        life = Life(tmp_path, lost_url, seed, **options)
        for _ in range(steps):
            life.step()
        return life

    return live


def rebuild(life: Life, new_url: str) -> Ledger:
    """Lose the ledger, and rebuild it once nothing of it lives."""
    life.clock.advance(LEASE_MS)
    ledger = Ledger.open(new_url, clock=life.clock)
    recover(NAME, ledger, life.storage.below(NAME))
    return ledger


KINDS: dict[str, dict[str, Any]] = {
    "arrival": {},
    "coalescing": {"coalesce": True, "limits": Limits()},
    "timestamp": {"batch_by": "timestamp"},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(4))
def test_a_rebuilt_ledger_is_the_lost_one_table_by_table(
    live: Callable[..., Life], new_url: str, kind: str, seed: int
) -> None:
    life = live(seed, **KINDS[kind])
    life.finish()
    life.checkpoint()
    life.checkpoint()
    expected = contents(life.ledger)
    found = contents(rebuild(life, new_url))
    for table in expected:
        assert found[table] == expected[table], table
