"""`python -m tests.hammer.commits`: streams by a fake clock whose ledgers lose commits, one for each seed (`Life`).

No server runs. The ledgers are SQLite files in a folder of the machine's temporary files, and are not synced.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import shutil
import sqlite3
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import typer
from sqlalchemy import Engine, event
from tests.hammer.life import Life

from headrace.cli.main import errors_as_one_line, single_command
from headrace.ledger import Ledger

# So many seeds a process: the libraries' threads of thousands of streams would add up.
_SEEDS_A_PROCESS = 50


@dataclass(frozen=True, slots=True)
class SeedOutcome:
    """How a seed's life ended: how many of its commits were lost, and the ``error``, None if all is right."""

    seed: int
    lost: int
    committed: int
    seconds: float
    error: str | None


def run_seed(seed: int) -> SeedOutcome:
    """Run the life of one seed in a folder of its own."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="headrace-commits-") as folder:
        shutil.copy(_empty_ledger(), Path(folder) / "ledger.db")
        life = Life(Path(folder), seed)
        error: str | None = None
        try:
            life.run()
        except Exception as failure:
            error = f"{type(failure).__name__}: {failure}\nIt had lost: {'; '.join(map(str, life.faults.lost))}."
    lost, committed = len(life.faults.lost), sum(life.faults.committed.values())
    return SeedOutcome(seed, lost, committed, time.monotonic() - began, error)


def command_of(seed: int) -> str:
    """The command that runs one seed alone."""
    return f"python -m tests.hammer.commits --first {seed} --seeds 1"


@cache
def _empty_ledger() -> Path:
    """An empty ledger, to be copied: making the schema takes longer than some lives."""
    path = Path(tempfile.mkdtemp(prefix="headrace-empty-ledger-")) / "ledger.db"
    Ledger.open(f"sqlite:///{path}").close()
    return path


def _quietly() -> None:
    """For each process: no logs of the streams, and no syncs of their ledgers."""
    logging.disable(logging.CRITICAL)
    event.listen(Engine, "checkout", _use_no_sync)


def _use_no_sync(connection: Any, record: Any, _proxy: Any) -> None:
    if isinstance(connection, sqlite3.Connection) and not record.info.get("no_sync"):
        connection.execute("PRAGMA synchronous=OFF")
        record.info["no_sync"] = True


def run_seeds(first: int, number: int, processes: int) -> Iterator[SeedOutcome]:
    """Run the seeds from ``first`` on, in so many processes at once, and yield their outcomes in order."""
    with ProcessPoolExecutor(
        processes,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_quietly,
        max_tasks_per_child=_SEEDS_A_PROCESS,
    ) as pool:
        yield from pool.map(run_seed, range(first, first + number))


def lose_commits(
    *,
    seeds: Annotated[int, typer.Option(min=1, help="How many seeds are run.")] = 1_000,
    first: Annotated[int, typer.Option(help="The first seed.")] = 0,
    processes: Annotated[int, typer.Option(min=1, help="How many run at once.")] = os.cpu_count() or 1,
) -> None:
    """Lose commits of the ledger of streams by a fake clock, and compare the outcome with what was produced.

    Exit code 0: all seeds hold. 1: one does not; its command line is printed.
    """
    began, failed, lost = time.monotonic(), 0, 0
    for number, outcome in enumerate(run_seeds(first, seeds, processes), start=1):
        lost += outcome.lost
        if outcome.error is not None:
            failed += 1
            typer.echo(f"Seed {outcome.seed} does not hold: {outcome.error}\nRepeat it: {command_of(outcome.seed)}")
        if number % 100 == 0 or number == seeds:
            seconds = time.monotonic() - began
            typer.echo(f"{number} seeds, {lost} lost commits, {failed} seeds do not hold, {seconds:.0f} s")
    raise typer.Exit(1 if failed else 0)


if __name__ == "__main__":
    with errors_as_one_line():
        single_command(lose_commits)()
