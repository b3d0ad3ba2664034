"""Keeps the evidence of a failed run: the log, the ledger's rows, the table of processes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import psutil

from headrace.devstack.state import processes_of_stack


def keep_evidence(data: Path, log: Path, ledger_url: str | None, stack_id: str) -> Path:
    """Copy what would be lost with the processes to ``data``/evidence; the servers' logs and data are in ``data``."""
    folder = data / "evidence"
    folder.mkdir(exist_ok=True)
    (folder / "processes.json").write_text(json.dumps(_processes(stack_id), indent=1))
    if log.is_dir():
        shutil.copytree(log, folder / "log", dirs_exist_ok=True, ignore=shutil.ignore_patterns(".filler"))
    if ledger_url is not None:
        _dump_ledger(ledger_url, folder / "ledger")
    return folder


def _processes(stack_id: str) -> list[dict[str, object]]:
    found = []
    for process in processes_of_stack(stack_id):
        try:
            found.append(process.as_dict(["pid", "ppid", "status", "create_time", "cmdline"]))
        except psutil.Error:
            continue
    return found


def _dump_ledger(url: str, folder: Path) -> None:
    """Each table as a file of JSON lines."""
    from sqlalchemy import MetaData, create_engine, select
    from sqlalchemy.exc import SQLAlchemyError

    folder.mkdir(exist_ok=True)
    engine = create_engine(url)
    try:
        tables = MetaData()
        tables.reflect(engine)
        with engine.connect() as connection:
            for table in tables.sorted_tables:
                with (folder / f"{table.name}.jsonl").open("w") as file:
                    for row in connection.execute(select(table)).mappings():
                        file.write(json.dumps(dict(row), default=str) + "\n")
    except SQLAlchemyError as error:
        (folder / "error.txt").write_text(str(error))
    finally:
        engine.dispose()
