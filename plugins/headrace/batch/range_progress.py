"""How far a run has come with its range of batches.

The ledger has no row for the range itself: each attempt of the run names it in an attribute. So a run that was killed,
retried or cleared finds by the attempts what is left, and every batch keeps its own attempts, counts and fencing.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from headrace.batch.next_attempt import BatchProgress
from headrace.clock import time_text
from headrace.errors import Failure, HeadraceError
from headrace.ledger.states import AttemptState, BatchState

if TYPE_CHECKING:
    from headrace.batch.time_range import TimeRange
    from headrace.ledger import Ledger
    from headrace.ledger.batches.tables import AttemptRow, BatchRow


class RangeError(HeadraceError):
    """The range cannot be run."""

    failure = Failure.FINAL


@dataclass(frozen=True, slots=True)
class RangeProgress:
    """How far a run has come with its range.

    ``left``: the batches to run, oldest first, those that have failed in this run last; in an ordered range oldest
    first. A batch that was written with another definition than the range has now is among them. ``failed``
    are the last attempts at these, by batch time. ``left_out`` counts the batches that are not run, by reason.
    """

    left: tuple[BatchRow, ...]
    completed: tuple[BatchRow, ...]
    failed: Mapping[int, AttemptRow]
    left_out: Mapping[str, int]

    @classmethod
    def of(
        cls,
        ledger: Ledger,
        stream_name: str,
        batches: TimeRange,
        outputs: Collection[str],
        *,
        target: str,
        ordered: bool,
    ) -> Self:
        """Read it from the ledger.

        Args:
            outputs: the ids of the outputs that the run writes of each batch.
            target: the name of the replay; "" if the batches themselves are run again.

        Raises:
            RangeError: the range has no batch that can be run, or some of its batches were removed.
        """
        rows = ledger.batches.between(stream_name, batches.after_ms, batches.until_ms)
        attempts = ledger.attempts.between(stream_name, batches.after_ms, batches.until_ms, target=target)
        of_range = [attempt for attempt in attempts if batches.is_range_of(attempt)]
        of_batch: Mapping[int, list[AttemptRow]] = defaultdict(list)
        for attempt in attempts:
            of_batch[attempt.batch_time_ms].append(attempt)
        if not of_range:
            # They may be removed while the run goes on.
            _check_not_removed(ledger, stream_name, batches)
        newest = max(of_range, key=lambda row: (row.started_at_ms, row.revision or 0), default=None)
        began_ms = min((row.started_at_ms for row in of_range), default=None)
        completed_since = set() if target or began_ms is None else _completed_since(began_ms, attempts, batches)
        left, failed, completed, left_out = [], {}, [], Counter[str]()
        for batch in rows:
            done = BatchProgress(tuple(outputs), of_batch[batch.batch_time_ms])
            came_ms = batch.allocated_at_ms
            if batch.batch_time_ms in completed_since:
                came_ms = max(came_ms, _first_completed_ms(ledger, batch))
            reason = _left_out(batch, batches, is_replay=bool(target), began_ms=began_ms, came_ms=came_ms)
            if reason is not None:
                left_out[reason] += 1
            elif done.is_written_for(batches, like=newest):
                completed.append(batch)
            else:
                left.append(batch)
                last = done.last_of(batches)
                if last is not None and last.state is AttemptState.FAILED and batches.is_range_of(last):
                    failed[batch.batch_time_ms] = last
        if not left and not completed:
            raise RangeError(
                f"Stream {stream_name!r} has no batch to run in {batches}{_counted(left_out)}.",
                remedy="`from` and `until` are times: the batches whose intervals lie between them are run. "
                f"`headrace batches list {stream_name}` shows the batches.",
            )
        if not ordered:
            left.sort(key=lambda batch: batch.batch_time_ms in failed)
        return cls(tuple(left), tuple(completed), failed, left_out)

    @property
    def number(self) -> int:
        """The number of batches in the range, without those left out."""
        return len(self.left) + len(self.completed)

    def __str__(self) -> str:
        failed = f", {len(self.failed):,} have failed" if self.failed else ""
        return f"{len(self.completed):,} of {self.number:,} batches are done{failed}{_counted(self.left_out)}"

    def to_dict(self) -> dict[str, int]:
        """The numbers, small enough for an XCom."""
        return {
            "batches": self.number,
            "completed": len(self.completed),
            "failed": len(self.failed),
            "left": len(self.left),
            "left_out": sum(self.left_out.values()),
            "records": sum(batch.records for batch in self.completed),
        }

    def failures(self, most: int = 5) -> Iterator[str]:
        """The first of the failed batches, with their errors."""
        for time_ms, attempt in sorted(self.failed.items())[:most]:
            yield f"{time_text(time_ms)}, attempt {attempt.number}: {attempt.error}"
        if len(self.failed) > most:
            yield f"and {len(self.failed) - most:,} more"


def _completed_since(began_ms: int, attempts: Iterable[AttemptRow], batches: TimeRange) -> set[int]:
    """The batches at which other runs have completed an attempt since the range began: perhaps their first."""
    return {
        row.batch_time_ms
        for row in attempts
        if row.state is AttemptState.COMPLETED and not batches.is_range_of(row) and (row.ended_at_ms or 0) > began_ms
    }


def _first_completed_ms(ledger: Ledger, batch: BatchRow) -> int:
    """When the last of the batch's outputs was first written, in milliseconds since the epoch."""
    first: dict[str, int] = {}
    # The oldest attempt comes first. One that failed may have written some of them.
    for row in ledger.attempts.output_history(batch.stream, batch.batch_time_ms):
        if row.state is AttemptState.COMPLETED and row.recorded_at_ms is not None:
            first.setdefault(row.output_id, row.recorded_at_ms)
    return max((first.get(step, 0) for step in batch.steps or ()), default=0)


def _left_out(
    batch: BatchRow, batches: TimeRange, *, is_replay: bool, began_ms: int | None, came_ms: int
) -> str | None:
    """Why the batch is not run; None if it is.

    Args:
        began_ms: when the run began with its range; None: it begins now.
        came_ms: when the batch was allocated, or first completed if the run is about completed batches.
    """
    if batch.state is BatchState.ABSORBED:
        if (batch.absorbed_by_ms or 0) > batches.until_ms:
            return "taken over by a batch after the range (a later `until` includes it)"
        return "taken over by a later batch"
    if batch.state is BatchState.ABANDONED:
        return "abandoned"
    if not is_replay and batch.steps is None:
        # Its own run, or the stream's repair, is to complete it.
        return "not completed yet"
    if began_ms is not None and came_ms > began_ms:
        # Else a range that reaches into the present would have something left whenever it ends.
        return "new since the run began"
    return None


def _counted(left_out: Mapping[str, int]) -> str:
    return "".join(f"; {number:,} {reason}" for reason, number in left_out.items())


def _check_not_removed(ledger: Ledger, stream_name: str, batches: TimeRange) -> None:
    row = ledger.streams.get(stream_name)
    last_ms = row.removed_until_ms
    if last_ms and row.removed_from_ms <= batches.until_ms and row.batch_time_after(batches.after_ms) <= last_ms:
        raise RangeError(
            f"Batches of {batches} were removed: stream {stream_name!r} keeps its batches for limits.history, and has "
            f"removed those up to {time_text(last_ms)}.",
            remedy=f"Begin at {time_text(last_ms)} or later. What the removed ones wrote is where it was written.",
        )
