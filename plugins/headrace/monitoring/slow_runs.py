"""Finds runs that take longer than the batch interval, by the newest batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headrace.ledger import Ledger
from headrace.ledger.batch_tables import BatchRow
from headrace.ledger.states import BatchState

# Runs are too slow if this many batches in a row began late: a single late start is caught up.
_SLOW_BATCHES = 5
_ALLOCATED = [state for state in BatchState if state is not BatchState.ABSORBED]


@dataclass(frozen=True, slots=True)
class SlowRuns:
    """Each of the last batches began after another batch time had ended. Milliseconds.

    ``run_ms`` is the mean time between the allocations of consecutive batches. ``late_ms`` is the time from the newest
    batch's first batch time to its allocation.
    """

    run_ms: int
    interval_ms: int
    late_ms: int
    coalesces: bool

    def __str__(self) -> str:
        grows = "batches take over several batch times" if self.coalesces else "the delay grows with each"
        return (
            f"runs take {self.run_ms / 1000:.1f} s and the batch interval is {self.interval_ms / 1000:g} s, so {grows} "
            f"(the last one began {self.late_ms / 1000:.1f} s after its first batch time). Give the stream a longer "
            "batch_interval, or its batch DAG single_task=True"
        )


def slow_runs(ledger: Ledger, stream_name: str, *, coalesces: bool) -> SlowRuns | None:
    """Figures of a stream whose runs take longer than its interval, or None if they do not."""
    newest = ledger.batches.page(stream_name, _SLOW_BATCHES, _ALLOCATED)
    if len(newest) < _SLOW_BATCHES:
        return None
    return slow_runs_of(newest, ledger.streams.get(stream_name).batch_interval_ms, coalesces=coalesces)


def slow_runs_of(newest: Sequence[BatchRow], interval_ms: int, *, coalesces: bool) -> SlowRuns | None:
    """The same from the newest batches that are not absorbed, newest first."""
    if len(newest) < _SLOW_BATCHES:
        return None
    newest = newest[:_SLOW_BATCHES]
    late_ms = [row.allocated_at_ms - row.first_time_ms for row in newest]
    run_ms = (newest[0].allocated_at_ms - newest[-1].allocated_at_ms) // (_SLOW_BATCHES - 1)
    if run_ms <= interval_ms or min(late_ms) <= interval_ms:
        return None
    return SlowRuns(run_ms, interval_ms, late_ms[0], coalesces)
