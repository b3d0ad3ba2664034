"""A batch of three records, and a toy in place of the batch's process."""

from __future__ import annotations

from tests.unit.operators.conftest import (
    allocated,
    connectable,
    deferrable,
    ledger,
    make_task,
    source,
    stream,
    task,
    toy_batch,
    toy_process,
)

__all__ = [
    "allocated",
    "connectable",
    "deferrable",
    "ledger",
    "make_task",
    "source",
    "stream",
    "task",
    "toy_batch",
    "toy_process",
]
