"""`KeptValues`: what a decoder keeps with the stream, so that a batch that runs again decodes as it did before."""

from __future__ import annotations

import re
from functools import cached_property
from typing import Literal

from headrace.wal.errors import StoredFileExistsError, StoredFileMissingError
from headrace.wal.log_storage import LogStorage
from headrace.wal.storage import open_storage

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")


KeptUse = Literal["first_run", "repeat", "first_look", "look"]
"""For what values are kept: a batch whose records have never been decoded to their end, whose decoder may ask whether
what it looks up is still the same; one that runs again, and takes what is kept; or a look at either, which keeps
nothing."""


class KeptValues:
    """Values by their names, such as the schemas of a registry by their ids. A decoder that has `keeps` gets them.

    They are below the stream's folder, and stay as long as the stream: a replay in a year finds them without the
    registry. A value never changes. So what a batch's tasks decide, the first of them decides for all, and for each
    later attempt.
    """

    def __init__(self, url: str, use: KeptUse = "repeat") -> None:
        """``url``: the folder, as `open_storage` takes it."""
        self.url = url
        self.is_first = use in ("first_run", "first_look")
        self.is_look = use in ("first_look", "look")

    @cached_property
    def _storage(self) -> LogStorage:
        return open_storage(self.url)

    def get(self, name: str) -> bytes | None:
        """The value of this name; None if none was kept.

        Raises:
            ValueError: the name has other characters than letters, digits, ".", "_" and "-", or more than 200.
            OSError, WalError: the store does not answer.
        """
        try:
            return self._storage.read(_checked(name))
        except StoredFileMissingError:
            return None

    def names(self, prefix: str) -> list[str]:
        """The names that begin with this, sorted. Raises as `get`."""
        return sorted(path for path in self._storage.paths() if path.startswith(_checked(prefix)))

    def mend(self, name: str, value: bytes) -> None:
        """Keep the value in place of one that the caller knows to be damaged. For a look at a batch nothing is kept.

        Raises as `get`.
        """
        if not self.is_look:
            self._storage.write_atomically(_checked(name), value)

    def keep(self, name: str, value: bytes) -> bytes:
        """Keep the value, unless the name has one already; return the one that is kept, which is durable.

        For a look at a batch nothing is kept. Raises ValueError, OSError and WalError, as `get`.
        """
        if self.is_look:
            known = self.get(name)
            return value if known is None else known
        try:
            self._storage.write_atomically(_checked(name), value, exclusive=True)
        except StoredFileExistsError:
            return self._storage.read(name)
        return value


def _checked(name: str) -> str:
    if _NAME.fullmatch(name) is None:
        raise ValueError(f"{name!r:.100} cannot name a kept value: it has 1 to 200 of A-Z, a-z, 0-9, '.', '_' and '-'")
    return name
