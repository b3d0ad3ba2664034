"""Finds where a partition can be read again after something that Kafka gives but the client cannot take.

librdkafka does not pass over a damaged batch of records: it fails at each of its offsets, however often it is fetched.
It says where the batch begins and not, in a way that damage could not have changed, where it ends. So first an offset
is looked for that can be read, ever further ahead; then what was jumped over is gone through, batch by batch, up to the
first offset that can be read. Nothing is given up that was not seen to be of a damaged batch.
"""

from __future__ import annotations

from dataclasses import dataclass, field

# A batch counts as damaged when it was fetched so often in vain. (The first one was, before the search.)
_TRIES = 3
# Where nothing ahead can be read, which may be the broker's doing, so many offsets are tried, and then all is kept.
_MOST_TRIES = 200


@dataclass(slots=True)
class DamageSearch:
    """``position`` cannot be read; ``found`` is the first offset after it that can, once that is known.

    ``end`` is where Kafka's log ends. It is not tried itself: that it ends there is told by a broker that can read
    nothing of it, too, and nothing that may still be read is to be given up.
    """

    position: int
    end: int
    at: int = field(init=False)
    """The offset to be tried next."""
    found: int | None = field(init=False, default=None)
    hopeless: bool = field(init=False, default=False)
    """Nothing that was tried can be read: there is no saying where the damage ends."""
    _looks_ahead: bool = field(init=False, default=True)
    _readable: int | None = field(init=False, default=None)
    _passed: int = field(init=False)
    """All of ``[position, _passed)`` is of damaged batches."""
    _base: int | None = field(init=False, default=None)
    """Where the batch begins that holds ``_passed``, as the client tells; None until it is known to be damaged."""
    _last: int = field(init=False)
    """The last offset that is known to be that batch's."""
    _beyond: int | None = field(init=False, default=None)
    """The first that is known not to be."""
    _tries: int = field(init=False, default=0)
    _confirmed: int = field(init=False, default=_TRIES - 1)

    def __post_init__(self) -> None:
        self._passed = self._last = self.at = self.position
        self.hopeless = self.position >= self.end - 1
        self._go_ahead()

    def was_readable(self) -> None:
        """The offset that was tried can be read."""
        if self._looks_ahead:
            self._readable, self._looks_ahead = self.at, False
            self.at = self._passed
        elif self._base is None:
            self.found = self.at
        else:
            self._beyond = self.at
            self._go_on()

    def was_damaged(self, base_offset: int | None = None) -> None:
        """The offset that was tried cannot; ``base_offset``: where its batch begins, as far as the client tells."""
        base = self.at if base_offset is None or base_offset < 0 else base_offset
        if self._looks_ahead:
            self._go_ahead()
            return
        if self._base is None:
            self._confirmed += 1
            if self._confirmed >= _TRIES:
                self._base, self._last, self._beyond = base, self.at, None
        elif base == self._base:
            self._last = self.at
        else:
            self._beyond = self.at
        self._go_on()

    def _go_ahead(self) -> None:
        if self.at >= self.end - 1:
            self._looks_ahead = False
            self.at = self._passed
        else:
            self.at = min(self.end - 1, self.at + max(1, self.at - self.position))

    def _go_on(self) -> None:
        limit = self.end if self._readable is None else self._readable
        self._tries += 1
        if self._base is not None:
            until = limit if self._beyond is None else self._beyond
            if self._last + 1 < until:
                ahead = self._last + max(1, self._last - self._passed)
                self.at = min(ahead, until - 1) if self._beyond is None else (self._last + until) // 2
                return
            self._passed, self._base, self._confirmed = until, None, 0
        self.at = self._passed
        if self._passed >= limit:
            self.found, self.hopeless = self._readable, self._readable is None
        elif self._readable is None and self._tries >= _MOST_TRIES:
            self.hopeless = True
