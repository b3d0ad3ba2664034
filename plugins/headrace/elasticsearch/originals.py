"""Where a dead letter finds the record that a transformed row came from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class OriginalRecord:
    """A record's bytes as Kafka gave them."""

    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...] = ()
    timestamp_ms: int | None = None


class OriginalRecords(Protocol):
    """A look-up of records by where they stood in Kafka; called from one thread, only for dead letters."""

    def fetch(self, topic: str, partition: int, offset: int, incarnation: int) -> OriginalRecord | None:
        """The record, or None if it cannot be had any more; the dead letter is then written without it."""
        ...
