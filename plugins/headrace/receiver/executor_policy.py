"""Decides when a receiver job gets or loses executors, by Spark's ExecutorAllocationManager for streaming.

The measure is the ratio of the batches' average processing time to the batch interval. Spark's own dynamic allocation
waits for idle executors. That does not fit: a batch comes every few seconds, so no executor is idle for long.
"""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Iterable, Sequence

from headrace.stream.model import milliseconds
from headrace.stream.settings import ExecutorAllocation


def least_executors(settings: ExecutorAllocation, receivers: int, slots_per_executor: int) -> int:
    """The number of executors that a receiver job keeps.

    It is the minimum of ``settings``, or more if those executors have no slot for a batch beside the receivers.
    """
    minimum = settings.minimum or max(1, receivers)
    return max(minimum, -(-(receivers + 1) // max(1, slots_per_executor)))


class ExecutorPolicy:
    """Collects the processing times of one scaling interval after the other, and computes what follows from them.

    ``least`` in its methods is a number of executors, by `least_executors`.
    """

    def __init__(
        self, settings: ExecutorAllocation, batch_interval_ms: int, *, chance: random.Random | None = None
    ) -> None:
        self._settings = settings
        self._batch_interval_ms = batch_interval_ms
        self._chance = chance or random.Random()  # noqa: S311 - no secret
        self._processing_ms: list[int] = []

    @property
    def scaling_interval_seconds(self) -> float:
        """The time between two decisions, in seconds."""
        return milliseconds(self._settings.scaling_interval) / 1000

    def add(self, processing_ms: Iterable[int]) -> None:
        """Add the processing times of completed batches, in milliseconds."""
        self._processing_ms += processing_ms

    def end_interval(self) -> float | None:
        """End the scaling interval. Returns its ratio, or None if no batch completed in it."""
        times, self._processing_ms = self._processing_ms, []
        if not times:
            return None
        # Whole milliseconds, as in Spark.
        return sum(times) // len(times) / self._batch_interval_ms

    def new_executors(self, ratio: float) -> int:
        """How many executors to add at this ratio; 0 if none."""
        if ratio < self._settings.scaling_up_ratio:
            return 0
        # Half is rounded up, as in Spark; Python's round() would make 2 of 2.5.
        return max(math.floor(ratio + 0.5), 1)

    def may_release(self, ratio: float) -> bool:
        """Whether one executor may be released at this ratio."""
        return ratio <= self._settings.scaling_down_ratio

    def total(self, live: int, new: int, least: int) -> int:
        """The total of executors to request in order to have ``new`` more than the ``live`` ones.

        Raises:
            ValueError: ``new`` is less than 1.
        """
        if new < 1:
            raise ValueError(f"{new} executors cannot be added")
        wanted = live + new
        if self._settings.maximum is not None:
            wanted = min(wanted, self._settings.maximum)
        return max(wanted, least)

    def executor_to_release(self, live: Sequence[str], with_receivers: Collection[str], least: int) -> str | None:
        """A random one of the ``live`` executors that runs no receiver; None if ``least`` or fewer are live, or if all
        of them run receivers."""
        if len(live) <= least:
            return None
        removable = [each for each in live if each not in with_receivers]
        return self._chance.choice(removable) if removable else None
