"""LazyFS: a file system of FUSE that keeps what is written in its process's memory until it is synced.

`LazyFS.cut_power` kills this process, so data that was not synced is lost. Names are not: files are created, renamed
and deleted below at once, so a missing sync of a directory cannot be shown with it.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

HOW_TO_BUILD = """\
Build it from its source, github.com/dsrhaslab/lazyfs, on a machine with /dev/fuse; it needs root, or /dev/fuse for you:
  apt-get install g++ cmake libfuse3-dev fuse3
  (cd libs/libpcache && ./build.sh) && (cd lazyfs && ./build.sh)
and name the program: LAZYFS=.../lazyfs/build/lazyfs. The builds fetch toml11 and spdlog; Debian has these too, as
libtoml11-dev and libspdlog-dev, for find_package instead of FetchContent; lazyfs then links spdlog and fmt too."""

_CONFIG = """\
[faults]
fifo_path="{fifo}"
[cache]
apply_eviction=false
[cache.simple]
custom_size="64mb"
blocks_per_page=1
[filesystem]
log_all_operations=false
logfile=""
{injection}
"""
_LIMIT_SECONDS = 20.0


class LazyFSError(Exception):
    """LazyFS cannot be mounted or unmounted."""


def find_lazyfs() -> str:
    """Return the program: the environment's LAZYFS, or the one in PATH. Raises LazyFSError: there is none, or no
    FUSE."""
    program = shutil.which(os.environ.get("LAZYFS") or "lazyfs")
    if program is None:
        raise LazyFSError(f"There is no LazyFS here. {HOW_TO_BUILD}")
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        raise LazyFSError("This machine has no /dev/fuse that this user may open, so no LazyFS can be mounted.")
    if shutil.which("fusermount3") is None:
        raise LazyFSError("There is no fusermount3 in PATH; Debian's package fuse3 has it.")
    return str(Path(program).resolve())


class LazyFS:
    """A file system with power: its content is at ``path`` while it is mounted, and what is durable at ``below``."""

    def __init__(self, program: str, folder: Path) -> None:
        self._program = program
        self._folder = folder
        self.path = folder / "disk"
        self.below = folder / "below"
        for directory in (self.path, self.below):
            directory.mkdir()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """The process whose end is a power cut."""
        assert self._process is not None
        return self._process.pid

    @property
    def has_power(self) -> bool:
        """Whether it is mounted and its process runs."""
        try:
            # A process that is ending answers no more, and is still there for a moment.
            self.path.stat()
        except OSError:
            return False
        return self._process is not None and self._process.poll() is None

    def mount(self, injection: str = "") -> None:
        """Mount it, with a fault that LazyFS itself injects (a table of its configuration). Raises LazyFSError."""
        (self._folder / "lazyfs.toml").write_text(_CONFIG.format(fifo=self._folder / "fifo", injection=injection))
        options = ("-f", "-o", "modules=subdir", "-o", f"subdir={self.below}")
        with (self._folder / "lazyfs.log").open("ab") as log:
            self._process = subprocess.Popen(
                # The name alone: LazyFS ignores a path that has "-o" in it.
                [self._program, str(self.path), "--config-path", "lazyfs.toml", *options],
                cwd=self._folder,
                stdout=log,
                stderr=log,
            )
        until = time.monotonic() + _LIMIT_SECONDS
        while not self.path.is_mount():
            if not self.has_power or time.monotonic() > until:
                said = (self._folder / "lazyfs.log").read_text(errors="replace").strip().splitlines()[-3:]
                raise LazyFSError(f"LazyFS cannot be mounted: {' '.join(said)}")
            time.sleep(0.005)

    def cut_power(self) -> None:
        """End its process, if that has not ended, and unmount it. Raises LazyFSError."""
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()
            self._process = None
        # The mount stays when the process is killed, and is no directory then.
        unmounted = subprocess.run(["fusermount3", "-u", "-z", str(self.path)], capture_output=True, check=False)
        if not self.path.is_dir() or self.path.is_mount():
            raise LazyFSError(f"LazyFS cannot be unmounted: {unmounted.stderr.decode()}")
