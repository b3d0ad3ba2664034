"""The files of a directory that `TextFiles` reads, how far each is read, and by what it is recognised when it was
renamed, copied, compressed, truncated or replaced.

As log shippers do, a file is recognised by its inode and by its contents: here by checksums of the first and of the
last bytes that were read. (Filebeat takes the first 1,024 bytes, Vector a checksum, Fluent Bit the inode.)
"""

from __future__ import annotations

import bz2
import fnmatch
import gzip
import os
import re
import zlib
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

_MARKED_BYTES = 4096
# What Hadoop, and so Spark, decompresses by the extension. The others it would need a native library for, or reads raw.
_OPENERS: dict[str, Any] = {".gz": gzip.open, ".bz2": bz2.open}
_NOT_READ = (".deflate", ".snappy", ".lz4", ".zst", ".lzo", ".xz", ".zip", ".Z")
# What rotation adds to a name: app.log.1, app.log-20261128, app.log.2.gz.
_ROTATED = re.compile(r"(?:[.-][0-9]+|\.gz|\.bz2)+")
# Hadoop's, of a file that is being copied.
_COPYING = "._COPYING_"
# A part of a line in the position: the file was truncated or replaced, and is not read.
_CUT = -1

DAMAGED = (EOFError, zlib.error, gzip.BadGzipFile)
"""What reading a compressed file raises whose end is missing, or that is damaged."""


@dataclass(slots=True)
class FileProgress:
    """How far a file is read: ``byte`` bytes, decompressed if it is compressed.

    ``inode`` is None in a position that an earlier version stored, which had only the byte. ``packed`` is the size of
    a compressed file that was read to its end. ``head`` and ``tail`` are the bytes that are recognised later.
    """

    byte: int = 0
    inode: int | None = None
    marks: tuple[int, int] = (0, 0)
    packed: int | None = None

    @classmethod
    def of(cls, stored: Any) -> FileProgress:
        """From its JSON in a position."""
        if isinstance(stored, int):
            return cls(stored)
        if len(stored) == 2:
            return cls(*stored)
        byte, inode, head, tail, *packed = stored
        return cls(byte, inode, (head, tail), *packed)

    def to_json(self) -> Any:
        """As it is stored in a position."""
        if self.inode is None:
            return self.byte
        if self.is_cut:
            return [self.byte, self.inode]
        return [self.byte, self.inode, *self.marks, *([] if self.packed is None else [self.packed])]

    @property
    def is_cut(self) -> bool:
        """Whether the file had changed in a way that cannot be followed, and waits for a person's decision."""
        return self.byte < 0

    @classmethod
    def cut(cls, inode: int) -> FileProgress:
        """Of a file that is not read any more."""
        return cls(_CUT, inode)


@dataclass(slots=True)
class OpenedFile:
    """A file that is open at the byte after what was read, and the first and last bytes that were read."""

    file: BinaryIO
    progress: FileProgress
    head: bytes
    tail: bytes
    stat: os.stat_result

    def take(self, line: bytes) -> None:
        """Count a line as read."""
        if len(self.head) < _MARKED_BYTES:
            self.head = (self.head + line)[:_MARKED_BYTES]
        self.tail = (self.tail + line)[-_MARKED_BYTES:]
        self.progress.byte += len(line)

    def close_progress(self) -> FileProgress:
        """The progress with the checksums of what was read until now."""
        progress = self.progress
        progress.marks = (zlib.crc32(self.head), zlib.crc32(self.tail))
        progress.inode = self.stat.st_ino
        return progress


def is_compressed(name: str) -> bool:
    """Whether the file is decompressed, by its extension."""
    return name.endswith(tuple(_OPENERS))


def unread_compression(name: str) -> str | None:
    """The extension of a compressed file that cannot be read, if it has one."""
    return next((each for each in _NOT_READ if name.endswith(each)), None)


def open_file(path: Path, progress: FileProgress) -> OpenedFile | None:
    """Open a file where reading ended; None if what was read of it is no longer there.

    Raises OSError, and what `DAMAGED` names.
    """
    file = _opened(path)
    try:
        stat = os.fstat(file.fileno())
        read = FileProgress(progress.byte, progress.inode, progress.marks)
        length = min(read.byte, _MARKED_BYTES)
        head = file.read(length)
        file.seek(read.byte - length)
        tail = file.read(length)
        if len(head) == len(tail) == length and _is_same(read, head, tail, is_compressed(path.name)):
            return OpenedFile(file, read, head, tail, stat)
    except BaseException:
        file.close()
        raise
    file.close()
    return None


def _is_same(read: FileProgress, head: bytes, tail: bytes, compressed: bool) -> bool:
    if read.inode is None:
        # An earlier version stored only the byte, at which a line ended, and read compressed files as they are.
        return read.byte == 0 or (tail.endswith(b"\n") and not compressed)
    return read.marks == (zlib.crc32(head), zlib.crc32(tail))


def is_of(path: Path, progress: FileProgress) -> bool:
    """Whether the file begins with all that was read of another name or inode. A file that cannot be read does not."""
    try:
        opened = open_file(path, progress)
    except (OSError, *DAMAGED):
        return False
    if opened is None:
        return False
    opened.file.close()
    return True


def is_rotated_name(name: str, of: str) -> bool:
    """Whether rotation may have given the name: the other one with a number, a date or the extension of compression."""
    return name.startswith(of) and _ROTATED.fullmatch(name, len(of)) is not None


def stem(name: str) -> str:
    """The name without what rotation adds."""
    found = re.search(rf"(?:{_ROTATED.pattern})$", name)
    return name if found is None else name[: found.start()]


@dataclass(slots=True)
class Listing:
    """The files of a directory that match a pattern, by their paths in it, and the other names in the same folders."""

    files: dict[str, os.stat_result] = field(default_factory=dict)
    others: dict[int, str] = field(default_factory=dict)
    errors: dict[str, OSError] = field(default_factory=dict)

    @classmethod
    def of(cls, directory: Path, pattern: str, known: Collection[str]) -> Listing:
        """List the directory. Names that begin with a dot or an underscore are left out unless the pattern begins so,
        as by Spark, and so are Hadoop's incomplete copies; not ``known`` ones, which an earlier version read.

        Raises OSError for the directory itself.
        """
        listing = cls()
        with os.scandir(directory):
            pass
        listing._walk(str(directory), tuple(part for part in pattern.split("/") if part not in ("", ".")), "", known)
        # A file with several names is read by one of them: the one that is known, or the first.
        names: dict[tuple[int, int], str] = {}
        for name in sorted(listing.files, key=lambda name: (name not in known, name)):
            stat = listing.files[name]
            if names.setdefault((stat.st_dev, stat.st_ino), name) != name:
                del listing.files[name]
        listing.files = dict(sorted(listing.files.items()))
        return listing

    @property
    def names(self) -> dict[int, str]:
        """The name of each inode, one that matches if there is one."""
        return self.others | {stat.st_ino: name for name, stat in self.files.items()}

    def _walk(self, folder: str, parts: tuple[str, ...], above: str, known: Collection[str]) -> None:
        if not parts:
            return
        part, rest = parts[0], parts[1:]
        below = parts if part == "**" else rest
        if part == "**":
            self._walk(folder, rest, above, known)
        try:
            with os.scandir(folder) as entries:
                found = list(entries)
        except OSError as error:
            self.errors[above] = error
            return
        for entry in found:
            name = above + entry.name
            try:
                if entry.is_dir(follow_symlinks=part != "**"):
                    if below and _is_visible(entry.name, part, name, known, folder=True):
                        self._walk(entry.path, below, f"{name}/", known)
                elif not below and entry.is_file():
                    self._add(entry, name, matches=_is_visible(entry.name, part, name, known))
            except FileNotFoundError:
                # It was moved away meanwhile.
                continue
            except OSError as error:
                self.errors[name] = error

    def _add(self, entry: os.DirEntry[str], name: str, *, matches: bool) -> None:
        if matches:
            self.files[name] = entry.stat()
        else:
            self.others[entry.inode()] = name


def _is_visible(name: str, part: str, path: str, known: Collection[str], *, folder: bool = False) -> bool:
    if not fnmatch.fnmatchcase(name, "*" if part == "**" else part):
        return False
    hidden = (name[0] in "._" and part[0] != name[0]) or name.endswith(_COPYING)
    if folder:
        return not hidden or any(one.startswith(f"{path}/") for one in known)
    return not hidden or path in known


def is_part_of(path: Path, of: Path, progress: FileProgress) -> bool:
    """Whether a file is a copy of another one, or the part of it that is there before the copying ends."""
    try:
        with _opened(path) as copy, of.open("rb") as original:
            size = os.fstat(original.fileno()).st_size
            head = copy.read(min(progress.byte, _MARKED_BYTES))
            if not head or head != original.read(len(head)):
                return False
            if is_compressed(path.name):
                return True
            copied = os.fstat(copy.fileno()).st_size
            if copied > size:
                return False
            for file in (copy, original):
                file.seek(max(0, copied - _MARKED_BYTES))
            return copy.read(min(copied, _MARKED_BYTES)) == original.read(min(copied, _MARKED_BYTES))
    except EOFError:
        # Compressed, and not yet written.
        return True
    except (OSError, *DAMAGED):
        return False


def _opened(path: Path) -> BinaryIO:
    opener = next((opener for end, opener in _OPENERS.items() if path.name.endswith(end)), open)
    return opener(path, "rb")
