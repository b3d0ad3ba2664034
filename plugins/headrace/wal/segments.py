"""The names of segments: by receiver, epoch and number, so that a sorted listing is the order of writing."""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import quote, unquote

from headrace.blocks import ReceiverId

SUFFIX = ".wal"
_NAME = re.compile(
    r"(?P<input>[^/]+)-(?P<index>\d+)/"
    r"(?P<epoch>\d{10,})-(?P<number>\d{6,})-(?P<opened>\d{13,})(-(?P<token>[0-9a-f]{16}))?\.wal"
)


@dataclass(frozen=True, slots=True, order=True)
class SegmentName:
    """The parts of a segment's name. Sorts by receiver, then in the order of writing.

    ``token`` is 16 random hexadecimal digits in an object store, and empty in a folder. With it, no two logs have a
    segment of the same name, not even a stream's log and that of the same stream after it was removed and created
    again. Local copies of blocks rely on this (`local_copies`).
    """

    input_id: str
    index: int
    epoch: int
    number: int
    opened_ms: int
    token: str = ""

    @property
    def directory(self) -> str:
        """The directory of its receiver, below the log's root."""
        return _directory(self.input_id, self.index)

    @property
    def path(self) -> str:
        """The segment's path below the log's root, as in handles."""
        token = f"-{self.token}" if self.token else ""
        return f"{self.directory}/{self.epoch:010d}-{self.number:06d}-{self.opened_ms:013d}{token}{SUFFIX}"

    @classmethod
    def parse(cls, path: str) -> SegmentName | None:
        """Parse ``path``; None when it is not a segment's."""
        match = _NAME.fullmatch(path)
        if match is None:
            return None
        return cls(
            unquote(match["input"]),
            int(match["index"]),
            int(match["epoch"]),
            int(match["number"]),
            int(match["opened"]),
            match["token"] or "",
        )


def receiver_directory(receiver: ReceiverId) -> str:
    """The directory below the log's root that holds a receiver's segments."""
    return _directory(receiver.input_id, receiver.index)


def _directory(input_id: str, index: int) -> str:
    return f"{quote(input_id, safe='')}-{index}"


def segments_in(paths: list[str]) -> list[SegmentName]:
    """The segments among ``paths``, in the order of writing."""
    return sorted(name for path in paths if (name := SegmentName.parse(path)) is not None)
