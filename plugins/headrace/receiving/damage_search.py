"""Finds where a partition can be read again after something that Kafka gives but the client cannot take.

librdkafka does not pass over a damaged batch of records: it fails at each of its offsets, however often it is fetched,
and does not say where the batch ends. So later offsets are tried, ever further ahead until one can be read, and then
between: twenty tries or so find the end of the largest batch.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class DamageSearch:
    """All offsets of ``[position, damaged]`` cannot be read; ``readable`` can, once there is such an offset.

    ``end`` is where Kafka's log ends. It is not tried itself: that it ends there is told by a broker that can read
    nothing of it, too, and nothing that may still be read is to be given up.
    """

    position: int
    end: int
    damaged: int = field(init=False)
    readable: int | None = None
    at: int = field(init=False)
    """The offset to be tried next."""

    def __post_init__(self) -> None:
        self.damaged = self.position
        self._go_on()

    @property
    def found(self) -> int | None:
        """The first offset that can be read, once it is known."""
        return self.readable if self.readable == self.damaged + 1 else None

    @property
    def hopeless(self) -> bool:
        """Nothing up to the end can be read."""
        return self.damaged >= self.end - 1

    def was_readable(self) -> None:
        """The offset that was tried can be read."""
        self.readable = self.at
        self._go_on()

    def was_damaged(self) -> None:
        """The offset that was tried cannot."""
        self.damaged = self.at
        self._go_on()

    def _go_on(self) -> None:
        if self.readable is not None:
            self.at = (self.damaged + self.readable + 1) // 2
        else:
            self.at = min(self.end - 1, self.damaged + max(1, self.damaged - self.position))
