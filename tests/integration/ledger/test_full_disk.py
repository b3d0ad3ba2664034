"""A ledger in Postgres whose disk is really full: a tablespace on a tmpfs, in a mount namespace of the test's own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tests.hammer.host import NO_DISK

# The server is in the namespace too, so the test starts its own.
LEDGER = rf"""
import os, shutil, sys, tempfile, time
from pathlib import Path
from tests.hammer.disk import SmallDisk
from tests.hammer.errors import SmallDiskError

folder = Path(tempfile.mkdtemp(prefix="headrace-test-"))
folder.chmod(0o755)
try:
    disk = SmallDisk(folder / "disk", 64 << 20)
except SmallDiskError as error:
    print(error, file=sys.stderr)
    sys.exit({NO_DISK})

import psycopg
from headrace.devstack.postgres import PostgresServer
from headrace.ledger import EventKind, Ledger
from headrace.ledger.errors import LedgerFullError
from tests.hammer.kinds import WORDS, Target
from tests.hammer.onlooker import Onlooker, Shown

words = WORDS[Target.LEDGER_DISK]
server = PostgresServer(folder / "postgres")
try:
    server.start()
    owner = server.data.stat()
    os.chown(disk.folder, owner.st_uid, owner.st_gid)
    disk.folder.chmod(0o700)

    def connect(database: str) -> psycopg.Connection:
        url = server.url(database).replace("postgresql+psycopg:", "postgresql:")
        return psycopg.connect(url, autocommit=True)

    with connect("postgres") as connection:
        connection.execute(f"CREATE TABLESPACE small LOCATION '{{disk.folder}}'")
        connection.execute("CREATE DATABASE ledger TABLESPACE small")
    url = server.url("ledger")
    with Ledger.open(url) as ledger:
        ledger.streams.register("air", "{{}}", batch_interval_ms=1_000, block_interval_ms=20)
        # As a receiver job that ended within the disk's trouble.
        job = ledger.jobs.acquire("air", holder="test", lease_ms=1_000)
        ledger.jobs.update(job, state="running")

        def write() -> None:
            ledger.events.append("air", EventKind.RECEIVER_ERROR, {{"error": os.urandom(1_000).hex()}})

        write()
        with connect("ledger") as connection:
            connection.execute("VACUUM FULL")
        with disk.full():
            refused = None
            for _ in range(1_000):
                try:
                    write()
                except LedgerFullError as error:
                    refused = error
                    break
            assert refused is not None, "1,000 events were written to a full disk"
            assert Shown("error", refused.what, refused.remedy).names(words), refused
            time.sleep(1.5)  # the job's lease ends
            shown = Onlooker(url, "air").look()
            assert shown.names(words), shown
            # A process of Postgres writes this file if it is missing, and refuses the connection if it cannot.
            for file in disk.folder.rglob("pg_internal.init"):
                file.unlink()
            time.sleep(1.5)
            shown = Onlooker(url, "air").look()
            assert shown.names(words), shown
        write()
        assert "disk" not in Onlooker(url, "air").look().reason
finally:
    server.wipe()
    disk.unmount()
    shutil.rmtree(folder)
print("done")
"""


@pytest.mark.slow
def test_a_full_disk_of_a_postgres_is_named_and_passes() -> None:
    root = Path(__file__).parents[3]
    done = subprocess.run(
        [sys.executable, "-"], input=LEDGER, capture_output=True, text=True, check=False, timeout=240, cwd=root
    )
    if done.returncode == NO_DISK:
        pytest.skip(done.stderr)
    assert done.returncode == 0, done.stderr
