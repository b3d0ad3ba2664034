"""The range of batch times that a run runs again or replays."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Self

from headrace.clock import time_text
from headrace.errors import RANGE

if TYPE_CHECKING:
    from headrace.ledger.batches.tables import AttemptRow


@dataclass(frozen=True, slots=True)
class TimeRange:
    """The batches of the times ``(after_ms, until_ms]``: those whose intervals begin at ``after_ms`` or later, and have
    ended by ``until_ms``.

    ``run`` identifies the Airflow run, since it last began the range. ``definition`` identifies the definition that
    writes all of it, the digest of a replay's or the revision of the stream's: with another one, the range begins
    again.
    """

    after_ms: int
    until_ms: int
    run: str
    definition: str = ""

    @classmethod
    def of(cls, attributes: Mapping[str, Any]) -> Self | None:
        """The range of the attempt with these attributes; None if it was made for its batch alone."""
        fields = attributes.get(RANGE)
        return None if fields is None else cls(**fields)

    @property
    def attributes(self) -> dict[str, Any]:
        """The attributes by which an attempt names the range."""
        return {RANGE: asdict(self)}

    def is_of_same_run(self, attempt: AttemptRow) -> bool:
        """Whether the run of this range made the attempt, for this range or for one with another definition."""
        other = TimeRange.of(attempt.attributes)
        return other is not None and other.run == self.run

    def is_range_of(self, attempt: AttemptRow) -> bool:
        """Whether the attempt was made for this range."""
        return TimeRange.of(attempt.attributes) == self

    def __str__(self) -> str:
        return f"{time_text(self.after_ms)} until {time_text(self.until_ms)}"
