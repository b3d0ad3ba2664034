"""`python -m tests.hammer.host`: streams by a fake clock whose hosts fail, one for each seed (`HostLife`).

No server runs. The ledgers are SQLite files on a small tmpfs, the logs are in a folder of the machine's temporary
files.
"""

from __future__ import annotations

import logging
import shutil
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Annotated

import typer
from tests.hammer.disk import SmallDisk
from tests.hammer.errors import SmallDiskError

from headrace.cli.main import single_command

DISK_BYTES = 24 << 20
NO_DISK = 3


def command_of(seed: int) -> str:
    """The command that runs one seed alone."""
    return f"python -m tests.hammer.host --first {seed} --seeds 1"


def fail_hosts(
    *,
    seeds: Annotated[int, typer.Option(min=1, help="How many seeds are run.")] = 100,
    first: Annotated[int, typer.Option(help="The first seed.")] = 0,
) -> None:
    """Fill the ledger's disk, slow the log's syncs and set the receivers' clocks, below streams by a fake clock.

    Exit code 0: all seeds hold. 1: one does not; its command line is printed. 3: this system allows no small disk.
    """
    folder = Path(tempfile.mkdtemp(prefix="headrace-host-"))
    try:
        disk = SmallDisk(folder / "disk", DISK_BYTES)
    except SmallDiskError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(NO_DISK) from None
    try:
        failed = _run_seeds(range(first, first + seeds), disk, folder)
    finally:
        disk.unmount()
        shutil.rmtree(folder, ignore_errors=True)
    raise typer.Exit(1 if failed else 0)


def _run_seeds(seeds: range, disk: SmallDisk, folder: Path) -> int:
    """How many do not hold."""
    # Imported here, because the mount namespace has to be made before any library starts a thread.
    from tests.hammer.host_life import HostLife

    logging.disable(logging.CRITICAL)
    began, failed, hit = time.monotonic(), 0, Counter[str]()
    for seed in seeds:
        life = HostLife(folder / str(seed), seed, disk)
        try:
            life.run()
        except Exception:
            failed += 1
            typer.echo(f"Seed {seed} does not hold, after {life.hit}: {traceback.format_exc()}")
            typer.echo(f"Repeat it: {command_of(seed)}")
        hit.update(life.hit)
        for file in disk.folder.glob("ledger.db*"):
            file.unlink()
    counts = ", ".join(f"{name}: {number}" for name, number in sorted(hit.items()))
    seconds = time.monotonic() - began
    typer.echo(f"{len(seeds)} seeds, {counts}, {failed} seeds do not hold, {seconds:.0f} s")
    return failed


if __name__ == "__main__":
    single_command(fail_hosts)()
