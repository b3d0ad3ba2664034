"""The small disk, in a process of its own: it changes the process that makes it for good."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import errno, json, sys, time
from pathlib import Path
from tests.hammer.disk import SmallDisk
from tests.hammer.errors import SmallDiskError

folder = Path(sys.argv[1])
try:
    disk = SmallDisk(folder, 4 << 20)
except SmallDiskError as error:
    print(json.dumps({"impossible": str(error)}))
    sys.exit()
found = {"size": disk.free}
with (folder / "open").open("wb", buffering=0) as writer:
    writer.write(b"before")
    disk.fill()
    try:
        writer.write(bytes(1 << 16))
        writer.write(bytes(1 << 16))
    except OSError as error:
        found["refused"] = error.errno == errno.ENOSPC
    try:
        (folder / "a").write_bytes(b"x")
    except OSError as error:
        found["new"] = error.errno == errno.ENOSPC
disk.empty()
with disk.full():
    (folder / "open").write_bytes(b"before")
    (folder / ".filler").open("rb+").truncate(1 << 20)
    deadline = time.monotonic() + 60
    while disk.free and time.monotonic() < deadline:
        time.sleep(0.01)
    found["full again"] = disk.free == 0
try:
    disk.check_full()
except SmallDiskError:
    found["free again"] = disk.free > 3 << 20
found["kept"] = (folder / "open").read_bytes()[:6].decode()
print(json.dumps(found))
"""


def test_a_full_disk_refuses_until_it_is_emptied(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "disk")], capture_output=True, text=True, check=True
    )
    fields = json.loads(done.stdout)
    if "impossible" in fields:
        pytest.skip(f"no small file system can be made here: {fields['impossible']}")
    assert fields == {
        "size": 4 << 20,
        "refused": True,
        "new": True,
        "full again": True,
        "free again": True,
        "kept": "before",
    }
    assert list((tmp_path / "disk").iterdir()) == [], "nobody else sees it, and it ended with its process"
