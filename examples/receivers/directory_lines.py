"""A receiver that tails the files of a directory: every line is in the log exactly once, also after a kill -9.

    ReceiverInput(
        id="lines", receiver="directory_lines:DirectoryLines", arguments={"directory": "/var/log/shop"},
        value_decoder=Utf8Decoder(),
    )

Its position holds for each file up to which byte its lines are stored. It is stored together with the lines, all or
nothing, and reading goes on there after a restart. So files may grow and new ones may come; lines that were read must
stay as they are, and a file that is replaced needs another name. With several receivers, each reads its part of the
files; their number cannot change later.

The position names every file in the directory, and has room for about a thousand: delete files, or move them away,
once they are read.
"""

from __future__ import annotations

import time
import zlib
from pathlib import Path

from headrace.receiver import Receiver, Record

_MOST_BYTES_AT_ONCE = 1 << 20


class DirectoryLines(Receiver):
    """Stores each complete line (one that ends in a line feed) of the files that match ``pattern`` in ``directory``.

    The key of a record is its file's name, its header ``byte`` where its line begins. Files are looked at every
    ``look_seconds``.
    """

    def __init__(self, directory: str, pattern: str = "*", look_seconds: float = 0.2) -> None:
        self._directory = Path(directory)
        self._pattern = pattern
        self._look_seconds = look_seconds

    def on_start(self) -> None:
        if not self._directory.is_dir():
            raise NotADirectoryError(f"{self._directory} is no directory on this host")
        self.start_thread(self._follow)

    def _follow(self) -> None:
        read: dict[str, int] = self.position or {}
        while not self.is_stopped:
            files = self._mine()
            # Files that are gone need no position any more.
            read = {each.name: read[each.name] for each in files if each.name in read}
            if not any([self._read(path, read) for path in files]):
                time.sleep(self._look_seconds)

    def _mine(self) -> list[Path]:
        """The files that this receiver reads, by name."""
        files = sorted(each for each in self._directory.glob(self._pattern) if each.is_file())
        return [each for each in files if zlib.crc32(each.name.encode()) % self.receivers == self.index]

    def _read(self, path: Path, read: dict[str, int]) -> bool:
        """Store what is new in the file, up to its last line feed. Returns whether there was anything."""
        begin = read.get(path.name, 0)
        with path.open("rb") as file:
            file.seek(begin)
            data = file.read(_MOST_BYTES_AT_ONCE)
        end = data.rfind(b"\n") + 1
        if end == 0:
            if len(data) == _MOST_BYTES_AT_ONCE:
                raise ValueError(f"{path} has a line of more than {_MOST_BYTES_AT_ONCE} bytes at byte {begin}")
            return False
        records, byte = [], begin
        for line in data[:end].split(b"\n")[:-1]:
            records.append(Record(line, key=path.name, headers=[("byte", str(byte).encode())]))
            byte += len(line) + 1
        read[path.name] = byte
        self.store(records, position=read)
        return True
