"""A small file system for the log or the ledger, that can be filled to the last byte.

It is a tmpfs in a mount namespace of this process and its children: no other process sees it, and it ends with them,
however they end. Root mounts it directly; other users need their own user namespace, if the kernel allows it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from tests.hammer.errors import SmallDiskError

_CLONE_NEWNS = 0x00020000
_CLONE_NEWUSER = 0x10000000
_MS_REC, _MS_PRIVATE = 0x4000, 0x40000
_MNT_DETACH = 2
_FILLER = ".filler"
_CHUNK = 1 << 20
_REFILL_SECONDS = 0.5


class SmallDisk:
    """A tmpfs of ``size`` bytes on ``folder``. Make it before the process has a second thread."""

    def __init__(self, folder: Path, size: int) -> None:
        """Mount it.

        Raises:
            SmallDiskError: this system does not allow it.
        """
        if not sys.platform.startswith("linux"):
            raise SmallDiskError("Only Linux has file systems of one process's own.")
        self.folder = folder
        self.is_full = False
        folder.mkdir(parents=True, exist_ok=True)
        _own_namespace()
        _mount("tmpfs", folder, "tmpfs", 0, f"size={size},mode=0755")

    @contextlib.contextmanager
    def full(self) -> Iterator[None]:
        """Full as long as this lasts, even if cleanup frees space that would let writers continue. Raises
        SmallDiskError if it has room when this begins."""
        over = threading.Event()
        self.is_full = True
        refilling = threading.Thread(target=self._refill, args=(over,), daemon=True)
        try:
            self.fill()
            refilling.start()
            yield
        finally:
            over.set()
            if refilling.ident is not None:
                refilling.join()
            self.empty()
            self.is_full = False

    def _refill(self, over: threading.Event) -> None:
        while not over.wait(_REFILL_SECONDS):
            # What is freed just now is used up the next time.
            with contextlib.suppress(SmallDiskError):
                self.fill()

    def fill(self) -> None:
        """Use up all free space. Raises SmallDiskError if there is still room afterwards."""
        with (self.folder / _FILLER).open("ab", buffering=0) as filler:
            size = _CHUNK
            while size:
                try:
                    if filler.write(bytes(size)) < size:
                        size //= 2
                except OSError as error:
                    if error.errno != errno.ENOSPC:
                        raise
                    size //= 2
        self.check_full()

    def check_full(self) -> None:
        """Raise SmallDiskError unless a write of one page is refused."""
        probe = self.folder / ".probe"
        try:
            probe.write_bytes(bytes(4096))
        except OSError as error:
            if error.errno == errno.ENOSPC:
                return
            raise
        finally:
            with contextlib.suppress(OSError):
                probe.unlink()
        raise SmallDiskError(f"{self.folder} still has room: {self.free} bytes.")

    def empty(self) -> None:
        """Free the space that `fill` used."""
        (self.folder / _FILLER).unlink(missing_ok=True)

    def unmount(self) -> None:
        """End it now, so that its folder can be deleted."""
        ctypes.CDLL(None).umount2(str(self.folder).encode(), _MNT_DETACH)

    @property
    def free(self) -> int:
        """Bytes that can be written."""
        status = os.statvfs(self.folder)
        return status.f_bavail * status.f_frsize


def _own_namespace() -> None:
    if threading.active_count() > 1:
        raise SmallDiskError("A mount namespace can only be made by a process of one thread.")
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNS) != 0:
        user, group = os.geteuid(), os.getegid()
        if libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNS) != 0:
            reason = os.strerror(ctypes.get_errno())
            raise SmallDiskError(f"This system allows no mount namespace ({reason}).")
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    _mount("none", Path("/"), None, _MS_REC | _MS_PRIVATE, None)


def _mount(source: str, target: Path, kind: str | None, flags: int, data: str | None) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    words = [None if word is None else word.encode() for word in (source, str(target), kind)]
    if libc.mount(*words, ctypes.c_ulong(flags), None if data is None else data.encode()) != 0:
        raise SmallDiskError(f"{target} cannot be mounted: {os.strerror(ctypes.get_errno())}.")
