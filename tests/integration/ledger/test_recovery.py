"""A ledger on Postgres that is lost, and rebuilt on Postgres: compared as in `tests/unit/batch/recovery`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.unit.batch.life import KINDS, LEASE_MS, NAME, Life
from tests.unit.batch.recovery.ledger_contents import all_blocks, contents

from headrace.batch.recover import recover
from headrace.devstack.postgres import PostgresServer
from headrace.ledger import Ledger


@pytest.mark.parametrize("kind", KINDS)
def test_a_rebuilt_ledger_is_the_lost_one_table_by_table(
    tmp_path: Path, postgres_server: PostgresServer, kind: str
) -> None:
    lost, new = (postgres_server.create_database(f"{name}_{kind}") for name in ("lost", "new"))
    options: dict[str, Any] = KINDS[kind]
    life = Life(tmp_path, lost, 2, **options)
    for _ in range(120):
        life.step()
    life.finish()
    # The second says of each batch which checkpoint holds it: the first.
    life.checkpoint()
    life.checkpoint()
    expected = contents(life.ledger)
    assert all_blocks(life.ledger)
    life.clock.advance(LEASE_MS + 1_000)
    with Ledger.open(new, clock=life.clock) as ledger:
        recover(NAME, ledger, life.storage.below(NAME), definition=life.stream)
        found = contents(ledger)
    life.ledger.close()
    assert {name: rows for name, rows in found.items() if rows != expected[name]} == {}
    for name in ("lost", "new"):
        postgres_server.drop_database(f"{name}_{kind}")
