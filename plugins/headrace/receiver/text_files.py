"""`TextFiles`: lines of the files of a directory, as Spark's ``textFileStream``. It also follows files that grow, and
every line is in the log exactly once, also after a kill -9.

    ReceiverInput(
        id="lines", receiver="headrace.receiver:TextFiles", arguments={"directory": "/var/log/shop"},
        value_decoder=Utf8Decoder(),
    )

Its position holds the number of stored bytes of each file. It is stored together with the lines, all or nothing, and a
restarted receiver continues there. So files may grow and new ones may come. Lines that were read must not change, and a
file that is replaced needs another name. A file that is shorter than what was read of it, or in which no line ends
where reading ended, is an error in the ledger, and is not read any more. With several receivers, each reads its part of
the files; their number cannot change later.

``pattern`` may name folders in the directory, such as ``*/*.log``; ``**/*`` reads all of them.

The position names every file in the directory, and has room for about a thousand: delete files, or move them away,
once they are read. A file that comes back is not read again, unless the position was full and dropped it; an event
reports that.
"""

from __future__ import annotations

import json
import os
import time
import zlib
from pathlib import Path
from typing import BinaryIO

from headrace.receiver.receiver import Receiver, Record

# One call's records, with their names and headers, fit into the smallest block that a stream may have.
_LINES_AT_ONCE = 1_000
_BYTES_AT_ONCE = 256 << 10
_MAX_LINE_BYTES = 1 << 20
# In place of the bytes of a file that was truncated.
_CUT = -1
# Below headrace's 64 KiB.
_MAX_POSITION_BYTES = 60 << 10


class TextFiles(Receiver):
    """Stores each complete line (one that ends in a line feed) of the files that match ``pattern`` in ``directory``.

    The key of a record is its file's path in the directory. Its header ``byte`` is where its line begins. After reading
    nothing, the receiver waits ``look_seconds`` before it lists the directory again.

    Raises NotADirectoryError when it starts, and ValueError for a line of more than 1 MiB.
    """

    def __init__(self, directory: str, pattern: str = "*", look_seconds: float = 0.2) -> None:
        self._directory = Path(directory)
        self._pattern = pattern
        self._look_seconds = look_seconds

    def on_start(self) -> None:
        if not self._directory.is_dir():
            raise NotADirectoryError(f"{self._directory} is not a directory on this host")
        self.start_thread(self._follow)

    def _follow(self) -> None:
        read: dict[str, int] = self.position or {}
        while not self.is_stopped:
            files = self._own_files()
            self._make_room(read, {self._name(file) for file in files})
            if not any([self._read(path, read) for path in files]):
                time.sleep(self._look_seconds)

    def _make_room(self, read: dict[str, int], present: set[str]) -> None:
        """Drop deleted files from a position that is too long, those that were read first."""
        gone = [name for name in read if name not in present]
        while gone and len(json.dumps(read)) > _MAX_POSITION_BYTES:
            del read[gone.pop(0)]
            self.report_error(
                "The position is full, so it drops deleted files. A file that comes back is read from its beginning."
            )

    def _own_files(self) -> list[Path]:
        """The files that this receiver reads, by name."""
        files = sorted(file for file in self._directory.glob(self._pattern) if file.is_file())
        return [file for file in files if zlib.crc32(os.fsencode(self._name(file))) % self.receivers == self.index]

    def _name(self, file: Path) -> str:
        """Files in two folders may have the same name."""
        return file.relative_to(self._directory).as_posix()

    def _read(self, path: Path, read: dict[str, int]) -> bool:
        """Store what is new in the file, up to its last line feed. Returns whether there was anything."""
        name = self._name(path)
        byte = read.get(name, 0)
        records: list[Record] = []
        if byte < 0:
            return False
        try:
            file = path.open("rb")
        except FileNotFoundError:
            # It was moved away since the directory was listed.
            return False
        with file:
            size = file.seek(0, os.SEEK_END)
            if size < byte or (byte and not _ends_line(file, byte)):
                # In the position, which is stored with the next records of another file.
                read[name] = _CUT
                self.report_error(
                    f"{path} has {size} bytes, and is not what it was when {byte} were read: it was truncated or "
                    "replaced. It is not read any more; write what is new into a file of another name"
                )
                return False
            last = file.seek(byte) + _BYTES_AT_ONCE
            while len(records) < _LINES_AT_ONCE and (line := file.readline(_MAX_LINE_BYTES)).endswith(b"\n"):
                if records and byte + len(line) > last:
                    break
                records.append(Record(line[:-1], key=os.fsencode(name), headers=[("byte", str(byte).encode())]))
                byte += len(line)
        if not records:
            if len(line) == _MAX_LINE_BYTES:
                raise ValueError(f"{path} has a line of more than {_MAX_LINE_BYTES} bytes at byte {byte}")
            return False
        read[name] = byte
        self.store(records, position=read)
        return True


def _ends_line(file: BinaryIO, byte: int) -> bool:
    """Whether a line ends before ``byte``, as where reading ended."""
    file.seek(byte - 1)
    return file.read(1) == b"\n"
