"""`TextFiles`: lines of the files of a directory, as Spark's ``textFileStream``. It also follows files that grow and
are rotated, and every line is in the log exactly once, also after a kill -9.

    ReceiverInput(
        id="lines", receiver="headrace.receiver:TextFiles", arguments={"directory": "/var/log/shop"},
        value_decoder=Utf8Decoder(),
    )

Its position holds the number of stored bytes of each file, and by what the file is recognised (``followed_files``). It
is stored together with the lines, all or nothing, and a restarted receiver continues there. At each look

1. the directory is listed;
2. files that were renamed, copied and truncated, or compressed, are followed under their new names;
3. of each file that has changed, what is new is read, if what was read of it is still there;
4. what cannot be read, or followed, is reported until a person decides. It keeps no other file from being read.

The position names every file in the directory, and has room for about a thousand: delete files, or move them away,
once they are read. A file that comes back is not read again, unless the position was full and dropped it; an event
reports that. docs/receivers.md says what differs from Spark.
"""

from __future__ import annotations

import json
import os
import time
import zlib
from pathlib import Path, PurePosixPath
from typing import Literal

from headrace.receiver.followed_files import (
    DAMAGED,
    FileProgress,
    Listing,
    OpenedFile,
    is_compressed,
    is_of,
    is_part_of,
    is_rotated_name,
    open_file,
    stem,
    unread_compression,
)
from headrace.receiver.receiver import Receiver, Record

# One call's records, with their names and headers, fit into the smallest block that a stream may have.
_LINES_AT_ONCE = 1_000
_BYTES_AT_ONCE = 256 << 10
# Below headrace's 64 KiB.
_MAX_POSITION_BYTES = 60 << 10
# A receiver counts as well ten seconds after its last error.
_REPORT_SECONDS = 5.0
_COPY_SECONDS = 10.0
_LISTINGS = 10

_DECISION = (
    "It is not read any more until you give it another name, and is then read from its beginning; or delete it; or let "
    'the receiver\'s arguments have changed="read", which reads each such file so'
)

_Signature = tuple[int, int, int, int]


class TextFiles(Receiver):
    """Stores each line of the files that match ``pattern`` in ``directory``.

    A line ends in a line feed, or a carriage return and a line feed, which are not stored. The key of a record is its
    file's path in the directory. Its header ``byte`` is where its line begins.

    Args:
        pattern: as for a shell; it may name folders, such as ``*/*.log``, and ``**/*`` reads all of them.
        look_seconds: the wait before the directory is listed again, after nothing was read.
        last_line_seconds: the last line of a file is stored without a line end once the file has not changed for so
            long; None: never.
        changed: what happens with a file that was truncated, or whose lines that were read have changed: "error", it is
            reported and not read until it gets another name; "read", it is read from its beginning.
        max_line_bytes: a longer line is an error of its file. A line fits into one block of the log.

    Raises NotADirectoryError or ValueError when it starts.
    """

    def __init__(
        self,
        directory: str,
        pattern: str = "*",
        look_seconds: float = 0.2,
        *,
        last_line_seconds: float | None = 5.0,
        changed: Literal["error", "read"] = "error",
        max_line_bytes: int = 1 << 20,
    ) -> None:
        self._directory = Path(directory)
        self._pattern = pattern
        self._look_seconds = look_seconds
        self._last_line_seconds = last_line_seconds
        self._changed = changed
        self._max_line_bytes = max_line_bytes
        # By name: how far each file is read, also of files that are gone.
        self._read: dict[str, FileProgress] = {}
        # The files as they were when they were read to their ends; and since when the last line waits for its end.
        self._finished: dict[str, _Signature] = {}
        self._waiting: dict[str, tuple[_Signature, float]] = {}
        self._copies: dict[str, float] = {}
        self._listed: dict[int, str] = {}
        # Size and time of change at the last look.
        self._seen: dict[str, tuple[int, int]] = {}
        # What a person is to know: of this look, and of files that are not read until they change.
        self._problems: dict[str, str] = {}
        self._stays: dict[str, str] = {}
        self._reported_at = float("-inf")
        self._reported: dict[str, str] = {}

    def on_start(self) -> None:
        if not self._directory.is_dir():
            raise NotADirectoryError(f"{self._directory} is not a directory on this host")
        if self._pattern.startswith("/") or ".." in PurePosixPath(self._pattern).parts:
            raise ValueError(f"pattern is {self._pattern!r}; it must name files in the directory, such as */*.log")
        if self._changed not in ("error", "read"):
            raise ValueError(f'changed is {self._changed!r}; it must be "error" or "read"')
        self.start_thread(self._follow)

    def _follow(self) -> None:
        self._read = {name: FileProgress.of(stored) for name, stored in (self.position or {}).items()}
        while not self.is_stopped:
            listing = self._list()
            self._problems = {name: f"{self._directory / name}: {error}" for name, error in listing.errors.items()}
            self._recognise(listing)
            self._make_room(listing)
            stored = [self._read_file(name, stat) for name, stat in self._own_files(listing)]
            self._report_problems(listing)
            if not any(stored):
                time.sleep(self._look_seconds)

    # -- which files there are -------------------------------------------------------------------------------------

    def _list(self) -> Listing:
        """The directory's files. While files are renamed, a listing may have one of them under no name, or under two.
        So one that differs from the listing before is made again."""
        listing = Listing.of(self._directory, self._pattern, self._read)
        for _ in range(_LISTINGS):
            if (names := listing.names) == self._listed:
                break
            self._listed = names
            listing = Listing.of(self._directory, self._pattern, self._read)
        return listing

    def _is_own(self, name: str) -> bool:
        return zlib.crc32(os.fsencode(name)) % self.receivers == self.index

    def _own_files(self, listing: Listing) -> list[tuple[str, os.stat_result]]:
        """The files that this receiver reads, by name; also those that got another name while it read them."""
        files = {name: stat for name, stat in listing.files.items() if name in self._read or self._is_own(name)}
        for name in listing.others.values():
            if name in self._read:
                try:
                    files[name] = (self._directory / name).stat()
                except OSError:
                    continue
        return [(name, stat) for name, stat in files.items() if name not in self._copies]

    def _recognise(self, listing: Listing) -> None:
        """Find the files whose names, contents or inodes have changed since they were read."""
        names = listing.names
        moved: dict[str, str] = {}
        gone: dict[str, FileProgress] = {}
        for name, progress in list(self._read.items()):
            stat = listing.files.get(name)
            if progress.is_cut:
                if stat is None or (progress.inode is not None and stat.st_ino != progress.inode):
                    # A person has decided: another name, or another file.
                    del self._read[name]
                    self._stays.pop(name, None)
            elif progress.inode is None:
                self._upgrade(name, stat)
            elif stat is None or stat.st_ino != progress.inode:
                new = names.get(progress.inode)
                if new is not None and new != name and self._was_renamed(name, new, progress):
                    moved[name] = new
                elif new != name:
                    gone[name] = progress
        for name, progress in gone.items():
            self._is_gone(name, progress, None if name in moved.values() else listing.files.get(name))
        self._move(moved, listing)
        self._find_copies(listing)

    def _was_renamed(self, name: str, new: str, progress: FileProgress) -> bool:
        """Whether the file of the same inode is the same: a new file may have got the inode of a deleted one, and equal
        contents."""
        path = self._directory / new
        size, changed_ns = self._seen.get(name, (-1, 0))
        try:
            stat = path.stat()
        except OSError:
            return False
        return (stat.st_size != size or stat.st_mtime_ns == changed_ns) and is_of(path, progress)

    def _upgrade(self, name: str, stat: os.stat_result | None) -> None:
        """Note by what a file is recognised, of which the position of an earlier version has only the byte."""
        if stat is None:
            return
        try:
            opened = open_file(self._directory / name, self._read[name])
        except (OSError, *DAMAGED):
            return
        if opened is not None:
            opened.file.close()
            former, self._read[name] = self._read[name], opened.close_progress()
            if self._position_bytes() > _MAX_POSITION_BYTES:
                self._read[name] = former

    def _is_gone(self, name: str, progress: FileProgress, stat: os.stat_result | None) -> None:
        """A file is under no name any more. ``stat``: of the one that has its name now, unless that is known by another
        name, as when the oldest file of a rotation is replaced."""
        (size, _), byte = self._seen.pop(name, (0, 0)), progress.byte
        if size > byte and not is_compressed(name):
            self.report_error(
                f"{self._directory / name} was deleted or moved out of the directory when {byte} of its {size} bytes "
                "were read; the others are not in the stream"
            )
        if stat is None:
            return
        if is_of(self._directory / name, progress):
            # Replaced by a copy that has grown: an editor writes files so.
            progress.inode = stat.st_ino
            return
        self.report_error(
            f"{self._directory / name} is another file than the one of which {byte} bytes were read, and that one is "
            "not in the directory any more. It is read from its beginning"
        )
        self._rename({name: f"{name}/{progress.inode}"})

    def _move(self, moved: dict[str, str], listing: Listing) -> None:
        self._rename(moved)
        for name, new in moved.items():
            if not self._is_own(new) and new in listing.files:
                self.report_error(
                    f"{self._directory / name} was renamed to {new}, which another receiver reads from its beginning, "
                    "so that its lines come twice. With several receivers, files must keep their names"
                )

    def _rename(self, names: dict[str, str]) -> None:
        """Keep what is known of these files under other names. What else has such a name is gone."""
        if not names:
            return
        kept: dict[str, FileProgress] = {}
        for name, progress in self._read.items():
            taken = name not in names and name in names.values()
            kept[names.get(name, f"{name}/{progress.inode}" if taken else name)] = progress
        self._read = kept
        for name in {*names, *names.values()}:
            for known in (self._finished, self._waiting, self._seen):
                known.pop(name, None)

    def _find_copies(self, listing: Listing) -> None:
        """Find files that were copied, or compressed, before the original was truncated or deleted."""
        now = time.monotonic()
        copies: dict[str, float] = {}
        changed = {
            name
            for name, stat in listing.files.items()
            if name in self._read and self._has_lost_lines(name, stat, self._read[name])
        }
        names = [name for name in listing.files if name not in self._read]
        names += [name for name in listing.others.values() if changed and name not in self._read]
        for name in names:
            path = self._directory / name
            for other, progress in list(self._read.items()):
                if progress.byte <= 0 or not self._may_be_copy(name, other):
                    continue
                original = self._directory / other
                is_there = other in listing.files and other not in changed
                if is_there and is_part_of(path, original, progress):
                    copies[name] = self._copies.get(name, now)
                elif (not is_there or not is_of(original, progress)) and is_of(path, progress):
                    # Also of an original that was truncated just now, after the look at it.
                    progress.inode = path.stat().st_ino
                    self._move({other: name}, listing)
                    break
        self._copies = copies
        for name, since in copies.items():
            if now - since > _COPY_SECONDS:
                self._problems[name] = (
                    f"{self._directory / name} is a copy of a file that is read, as rotation makes it, and is not read "
                    "itself; give it a name that does not begin with the other's to have it read too"
                )

    @staticmethod
    def _may_be_copy(name: str, other: str) -> bool:
        if is_compressed(name):
            return name != other and not is_compressed(other) and stem(name) == stem(other)
        return is_rotated_name(name, other)

    def _has_lost_lines(self, name: str, stat: os.stat_result, progress: FileProgress) -> bool:
        if progress.is_cut or is_compressed(name) or self._finished.get(name) == _signature(stat):
            return False
        return stat.st_size < progress.byte or not is_of(self._directory / name, progress)

    # -- the position ----------------------------------------------------------------------------------------------

    def _position(self) -> dict[str, object]:
        return {name: progress.to_json() for name, progress in self._read.items()}

    def _position_bytes(self) -> int:
        return len(json.dumps(self._position(), separators=(",", ":")))

    def _make_room(self, listing: Listing) -> None:
        """Drop deleted files from a position that is too long, those that were read first."""
        present = {*listing.files, *listing.others.values()}
        gone = [name for name in self._read if name not in present]
        dropped = False
        while gone and self._position_bytes() > _MAX_POSITION_BYTES:
            del self._read[gone.pop(0)]
            dropped = True
        if dropped:
            self.report_error(
                "The position is full, so it drops deleted files. A file that comes back is read from its beginning."
            )

    # -- reading ---------------------------------------------------------------------------------------------------

    def _read_file(self, name: str, stat: os.stat_result) -> bool:
        """Store what is new in the file. Returns whether there was anything."""
        path, progress = self._directory / name, self._read.get(name, FileProgress())
        self._seen[name] = (stat.st_size, stat.st_mtime_ns)
        if progress.is_cut:
            self._stays.setdefault(name, f"{_not_followed(path, stat.st_size, None)}. {_DECISION}")
            return False
        if self._is_finished(name, stat, progress):
            return False
        self._stays.pop(name, None)
        try:
            opened = self._open(path, name, stat, progress)
        except FileNotFoundError:
            # It was moved away since the directory was listed.
            return False
        except (OSError, *DAMAGED) as error:
            if isinstance(error, DAMAGED):
                self._note_damage(path, name, stat, error)
            else:
                self._problems[name] = f"{path} cannot be read: {error}"
            opened = None
        if opened is None:
            return False
        with opened.file:
            return self._store_lines(path, name, opened)

    def _is_finished(self, name: str, stat: os.stat_result, progress: FileProgress) -> bool:
        """Whether nothing has changed since the file was read to its end."""
        is_whole = progress.packed == stat.st_size and progress.inode == stat.st_ino
        return is_whole or self._finished.get(name) == _signature(stat)

    def _open(self, path: Path, name: str, stat: os.stat_result, progress: FileProgress) -> OpenedFile | None:
        """Open the file where reading ended; None if it is not to be read."""
        if (extension := unread_compression(name)) is not None:
            self._problems[name] = f"{path} is compressed as {extension}, which is not read; .gz and .bz2 are"
        elif name not in self._read and self._position_bytes() > _MAX_POSITION_BYTES:
            self._problems[name] = (
                f"{path} is not read: the position of this receiver is full, with {len(self._read)} files. Delete "
                "files that are read, or move them away"
            )
        elif (opened := open_file(path, progress)) is not None:
            if opened.stat.st_ino == stat.st_ino:
                return opened
            # Another file got the name since the directory was listed: the next look says which.
            opened.file.close()
        elif path.stat().st_ino == stat.st_ino:
            self._cut(path, name, stat, progress)
        return None

    def _note_damage(self, path: Path, name: str, stat: os.stat_result, error: BaseException) -> None:
        self._stop_at(name, stat, f"{path} is damaged, or not complete, and is read on once it has changed: {error}")

    def _stop_at(self, name: str, stat: os.stat_result, problem: str) -> None:
        """Read a file on only when it has changed."""
        self._stays[name] = problem
        self._finished[name] = _signature(stat)

    def _cut(self, path: Path, name: str, stat: os.stat_result, progress: FileProgress) -> None:
        problem = _not_followed(path, stat.st_size, progress.byte)
        if self._changed == "read":
            self.report_error(f"{problem}. It is read from its beginning, as changed says")
            self._read.pop(name, None)
            return
        # In the position, which is stored with the next records of another file.
        self._read[name] = FileProgress.cut(stat.st_ino)
        self._stays[name] = f"{problem}. {_DECISION}"

    def _store_lines(self, path: Path, name: str, opened: OpenedFile) -> bool:
        """Store the next lines of a file; of a compressed one all, since going to a byte of it takes long."""
        compressed, stored, pending = is_compressed(name), False, b""
        while not self.is_stopped:
            records: list[Record] = []
            taken, error = opened.progress.byte, None
            at_end = False
            while len(records) < _LINES_AT_ONCE:
                try:
                    line = pending or opened.file.readline(self._max_line_bytes)
                except DAMAGED as damage:
                    error, at_end = damage, True
                    break
                pending = b""
                if not line.endswith(b"\n") and not self._is_last_line(path, name, opened, line, compressed=compressed):
                    at_end = True
                    break
                if records and opened.progress.byte + len(line) > taken + _BYTES_AT_ONCE:
                    pending = line
                    break
                self._take(path, name, opened, line, records)
            if at_end and error is None and compressed:
                opened.progress.packed = opened.stat.st_size
            if records and not self._store(path, name, opened, records):
                return stored
            stored = stored or bool(records)
            if error is not None:
                self._note_damage(path, name, opened.stat, error)
            if at_end or not compressed:
                break
        return stored

    def _take(self, path: Path, name: str, opened: OpenedFile, line: bytes, records: list[Record]) -> None:
        """Count a line as read, and make a record of it."""
        begin, continues = opened.progress.byte, bool(opened.tail) and not opened.tail.endswith(b"\n")
        opened.take(line)
        text = line.removesuffix(b"\n").removesuffix(b"\r") if line.endswith(b"\n") else line
        if continues and not text:
            # Only the end of a line that is stored.
            self._read[name] = opened.close_progress()
            return
        if continues:
            self.report_error(
                f"{path} was continued at byte {begin}, in the middle of a line that was stored as the last one: "
                f"nothing was written for {self._last_line_seconds} s. The rest is another record; let the writer "
                "write whole lines, or set last_line_seconds"
            )
        records.append(Record(text, key=os.fsencode(name), headers=[("byte", str(begin).encode())]))

    def _is_last_line(self, path: Path, name: str, opened: OpenedFile, line: bytes, *, compressed: bool) -> bool:
        """Whether the rest of a file, which has no line end, is a line."""
        signature = _signature(opened.stat)
        if not line:
            self._finished[name] = signature
            return False
        if len(line) >= self._max_line_bytes:
            self._stop_at(
                name,
                opened.stat,
                f"{path} has a line of more than {self._max_line_bytes} bytes at byte {opened.progress.byte}, and is "
                "not read on; other files are. Raise max_line_bytes in the receiver's arguments, or give the rest of "
                "the file another name",
            )
            return False
        if compressed:
            return True
        now = time.monotonic()
        seen, since = self._waiting.get(name, (None, now))
        if seen != signature:
            since = now
            self._waiting[name] = (signature, now)
        if self._last_line_seconds is None:
            self._finished[name] = signature
            return False
        if now - since < self._last_line_seconds:
            return False
        del self._waiting[name]
        return True

    def _store(self, path: Path, name: str, opened: OpenedFile, records: list[Record]) -> bool:
        """Store the records with the position after them. Returns False if they do not fit into a block."""
        former = self._read.get(name)
        self._read[name] = opened.close_progress()
        try:
            self.store(records, position=self._position())
        except ValueError as error:
            self._read.pop(name) if former is None else self._read.update({name: former})
            self._stop_at(name, opened.stat, f"{path} is not read on at byte {opened.progress.byte}: {error}")
            return False
        return True

    # -- what a person is to decide --------------------------------------------------------------------------------

    def _report_problems(self, listing: Listing) -> None:
        """Report what cannot be read, again and again: it stays the receiver's error as long as it is so."""
        now = time.monotonic()
        for name in [name for name in self._stays if name not in listing.files and name not in self._read]:
            del self._stays[name]
        self._problems |= self._stays
        is_new = self._problems != self._reported
        self._reported = self._problems
        if self._problems and (is_new or now - self._reported_at >= _REPORT_SECONDS):
            self._reported_at = now
            texts = list(self._problems.values())
            more = f" And {len(texts) - 3} more files" if len(texts) > 3 else ""
            self.report_error(". ".join(texts[:3]) + more)


def _signature(stat: os.stat_result) -> _Signature:
    return stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns


def _not_followed(path: Path, size: int, byte: int | None) -> str:
    then = "before" if byte is None else f"when {byte} were read"
    return f"{path} has {size} bytes, and is not what it was {then}: it was truncated or replaced"
