"""Finds the offset at which a partition can be read again after damaged record batches.

librdkafka does not skip a damaged record batch: it fails at each of its offsets, however often it is fetched. It
reports where the batch begins, but no end that damage could not have changed. So the search first tries offsets further
and further ahead until one can be read. Then it goes through the skipped offsets, batch by batch, up to the first one
that can be read. Only offsets that were seen to belong to a damaged batch are given up.
"""

from __future__ import annotations

from dataclasses import dataclass, field

# A batch counts as damaged after this many failed fetches. (The first batch had them before the search.)
_TRIES = 3
# If nothing ahead can be read (perhaps the broker's fault), the search ends after this many tries and skips nothing.
_MOST_TRIES = 200


@dataclass(slots=True)
class DamageSearch:
    """``position`` cannot be read; ``found`` is the first offset after it that can, once known.

    ``end`` is the end of Kafka's log. It is not tried itself: a broker that can read nothing of the log reports the
    same end, and no offset that may still be readable is given up.
    """

    position: int
    end: int
    at: int = field(init=False)
    """The offset to try next."""
    found: int | None = field(init=False, default=None)
    hopeless: bool = field(init=False, default=False)
    """No offset that was tried can be read, so the end of the damage is unknown."""
    _looks_ahead: bool = field(init=False, default=True)
    _readable: int | None = field(init=False, default=None)
    _passed: int = field(init=False)
    """``[position, _passed)`` belongs to damaged batches."""
    _base: int | None = field(init=False, default=None)
    """Where the batch that holds ``_passed`` begins, as the client reports; None until it is known to be damaged."""
    _last: int = field(init=False)
    """The last offset known to belong to that batch."""
    _beyond: int | None = field(init=False, default=None)
    """The first offset known not to belong to it."""
    _tries: int = field(init=False, default=0)
    _confirmed: int = field(init=False, default=_TRIES - 1)

    def __post_init__(self) -> None:
        self._passed = self._last = self.at = self.position
        self.hopeless = self.position >= self.end - 1
        self._go_ahead()

    def was_readable(self) -> None:
        """Note that the offset tried can be read."""
        if self._looks_ahead:
            self._readable, self._looks_ahead = self.at, False
            self.at = self._passed
        elif self._base is None:
            self.found = self.at
        else:
            self._beyond = self.at
            self._go_on()

    def was_damaged(self, base_offset: int | None = None) -> None:
        """Note that the offset tried cannot be read. ``base_offset``: where its batch begins, if the client knows."""
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
