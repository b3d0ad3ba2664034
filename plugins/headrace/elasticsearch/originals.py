"""The interface to look up the original record of a transformed row, for its dead letter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class OriginalRecord:
    """A record's key, value, headers and time as read from Kafka."""

    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...] = ()
    timestamp_ms: int | None = None


class OriginalRecords(Protocol):
    """Looks up records by their position in Kafka. Called from one thread, only for dead letters."""

    def fetch(self, topic: str, partition: int, offset: int, incarnation: int) -> OriginalRecord | None:
        """The record, or None if it is no longer available; the dead letter is then written without it."""
        ...
