"""The batches that their runs left unfinished: which of them the stream's repair tries again now, and when the others.

1. An attempt that was ended from outside (`was_interrupted`) is tried again at once, a few times in a row. After that
   it counts as a failure: its own data may kill its process each time.
2. What failed by itself, for a reason that may pass, backs off. In a stream whose batches run in any order, a step is
   due once it has succeeded for another batch: that shows that its output is available again. In an ordered stream no
   other batch can show it, so the first batch is due after a pause. Pauses double with each failed repair.
3. A batch that failed by the user's code, or finally, is tried again only when the definition or the code has changed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile

from headrace.batch.next_attempt import BatchProgress, NextAttempt
from headrace.clock import time_text
from headrace.errors import FAILURE, INTERRUPTED, REPAIR, Failure
from headrace.ledger import Ledger
from headrace.ledger.batches.tables import AttemptRow, BatchRow, EarlierBatch
from headrace.ledger.errors import StepsLostError
from headrace.ledger.states import UNFINISHED, AttemptState
from headrace.ledger.tables import StreamRow

_LONGEST_PAUSE_MS = 3_600_000
# The longest pause in an ordered stream, in batch intervals: all later batches wait for the one that failed.
_LONGEST_PAUSE_IN_ORDER = 4
# So many attempts in a row that were ended from outside are tried again at once.
_INTERRUPTIONS = 3
# How many of the newest outputs' rows show whether an output is available.
_NEWEST_OUTPUTS = 200
# Above every batch time.
_END_MS = 2**62
_CHANGED = "the definition or the code has changed"


@dataclass(frozen=True, slots=True)
class NextTry:
    """When the repair tries a batch again: from ``at_ms`` on, or if that is None, once ``event`` has happened."""

    at_ms: int | None = None
    event: str | None = None

    def text(self, now_ms: int) -> str:
        """The time or the event, as the end of a sentence."""
        if self.at_ms is None:
            return f"once {self.event}"
        return "now" if self.at_ms <= now_ms else f"at {time_text(self.at_ms)}"


def due_batches(
    ledger: Ledger,
    stream_name: str,
    *,
    held_back: Callable[[AttemptRow], bool],
    has_own_run: Callable[[BatchRow], bool],
    without: Collection[int] = (),
    at_once: bool = False,
    most: int = 1_000,
) -> Iterator[NextAttempt]:
    """The attempts to make now at batches, the oldest batch first; in an ordered stream at most one, at the first
    unfinished batch. Each has all attempts at its batch before. It has no steps if the definition has lost all that the
    batch still needs.

    Each batch is judged by what the ledger has of it when it is asked for, so that an attempt made meanwhile counts.

    Batches that have completed once are left out: if one is run again and fails, it is for a person to clear that run.

    Args:
        held_back: whether another attempt would fail as this one did.
        has_own_run: whether a batch that was never begun is about to be begun by a run of its own.
        without: batch times that are left out.
        at_once: without a pause, and what is held back too.
        most: the number of unfinished batches that are checked.

    Raises:
        StreamNotFoundError: the ledger does not know the stream.
    """
    stream = ledger.streams.get(stream_name)
    unfinished = ledger.batches.earlier_unfinished(stream_name, _END_MS, limit=1 if stream.ordered else most)
    # Without a state they have blocks, and no batch yet.
    idle = [each for each in unfinished if each.state and not each.alive and each.batch_time_ms not in without]
    if not idle:
        return
    judge = _Judge(ledger, stream, held_back=held_back, at_once=at_once)
    for earlier in idle:
        due = judge.due(earlier)
        if due is not None and (due.batch.started_at_ms is not None or not has_own_run(due.batch)):
            yield due


class NextTries:
    """Says when batches of a stream are tried again, as far as the ledger shows it: not whether code has changed."""

    def __init__(self, ledger: Ledger, stream_name: str) -> None:
        self.now_ms = ledger.now_ms()
        self._stream = ledger.streams.get(stream_name)
        self._judge = _Judge(ledger, self._stream, held_back=lambda last: is_as_it_failed(self._stream, last))
        first = ledger.batches.earlier_unfinished(stream_name, _END_MS, limit=1) if self._stream.ordered else []
        self._first_ms = first[0].batch_time_ms if first else None

    def of(self, batch: BatchRow) -> NextTry | None:
        """When the batch is tried again; None if it is finished, is being run, was never begun, or is not repaired."""
        if batch.state not in UNFINISHED or batch.steps is not None or batch.started_at_ms is None:
            return None
        if self._first_ms is not None and self._first_ms < batch.batch_time_ms:
            return NextTry(event=f"batch {time_text(self._first_ms)} has completed")
        progress = self._judge.progress(batch)
        if not progress.missing or any(row.alive(self.now_ms) for row in progress.attempts):
            return None
        tries = list(self._judge.tries(batch, progress).values())
        times = [each.at_ms for each in tries if each.at_ms is not None]
        return NextTry(min(times)) if times else next(iter(tries), None)


def is_as_it_failed(stream: StreamRow, last: AttemptRow) -> bool:
    """Whether the attempt failed by the user's code, or finally, with the definition that the stream still has."""
    return _failure(last) is not Failure.PASSING and last.revision == stream.revision


def was_interrupted(attempt: AttemptRow) -> bool:
    """Whether the attempt was ended from outside: its process was killed, or what it ran in has gone, or it is silent
    (its lease has run out, or another attempt has fenced it)."""
    return attempt.state in (AttemptState.RUNNING, AttemptState.FENCED) or bool(attempt.attributes.get(INTERRUPTED))


class _Judge:
    """Judges a stream's unfinished batches at one time."""

    def __init__(
        self, ledger: Ledger, stream: StreamRow, *, held_back: Callable[[AttemptRow], bool], at_once: bool = False
    ) -> None:
        self._ledger = ledger
        self._stream = stream
        self._held_back = held_back
        self._at_once = at_once
        self._now_ms = ledger.now_ms()
        self._last_results = {} if stream.ordered else _last_results(ledger, stream.name)

    def due(self, earlier: EarlierBatch) -> NextAttempt | None:
        """The attempt at the steps of the batch that are due; None if there are none."""
        batch = self._ledger.batches.get(self._stream.name, earlier.batch_time_ms)
        if batch.state not in UNFINISHED:
            return None
        progress = self.progress(batch)
        missing = progress.missing
        if not missing:
            asked = tuple(self._known(progress.needed))
            return NextAttempt(self._ledger, batch, (), progress.attempts, asked=asked) if asked else None
        if not self._known(missing):
            # No attempt can begin, and so report it.
            is_reported = batch.error == str(StepsLostError(batch, missing))
            return None if is_reported else NextAttempt(self._ledger, batch, (), progress.attempts)
        tries = self.tries(batch, progress)
        steps = [step for step, each in tries.items() if each.at_ms is not None and each.at_ms <= self._now_ms]
        return NextAttempt(self._ledger, batch, tuple(steps), progress.attempts) if steps else None

    def progress(self, batch: BatchRow) -> BatchProgress:
        """Read how far the batch is."""
        return BatchProgress.of(self._ledger, batch, self._stream.outputs)

    def tries(self, batch: BatchRow, progress: BatchProgress) -> dict[str, NextTry]:
        """When each step that is missing is tried again, of those that an attempt can run."""
        steps, attempts = self._known(progress.missing), progress.attempts
        if self._stream.ordered:
            return dict.fromkeys(steps, self._after(attempts))
        return {step: self._try_of(batch, step, attempts) for step in steps}

    def _known(self, steps: Iterable[str]) -> list[str]:
        return [step for step in steps if step in self._stream.outputs]

    def _try_of(self, batch: BatchRow, step: str, attempts: Iterable[AttemptRow]) -> NextTry:
        tried = [row for row in attempts if step in row.outputs]
        after = self._after(tried)
        if self._at_once or after.at_ms is None:
            return after
        if tried and (_failure(tried[-1]) is not Failure.PASSING or was_interrupted(tried[-1])):
            return after
        at_ms, succeeded = self._last_results.get(step, (0, batch.started_at_ms is None))
        # Else the output may be unavailable, or the batch's own run is about to begin this step.
        if succeeded and at_ms >= (self._ended_ms(tried[-1]) if tried else batch.started_at_ms or 0):
            return after
        return NextTry(event=f"output {self._stream.id_of_step.get(step, step)} is written for another batch")

    def _after(self, attempts: Sequence[AttemptRow]) -> NextTry:
        """When another attempt may be made after these (oldest first): not if it would fail alike, and not before the
        pause is over."""
        if self._at_once or not attempts:
            return NextTry(0)
        if self._held_back(attempts[-1]):
            return NextTry(event=_CHANGED)
        return NextTry(self._ended_ms(attempts[-1]) + self._pause_ms(attempts))

    def _pause_ms(self, attempts: Sequence[AttemptRow]) -> int:
        interrupted = sum(1 for _ in takewhile(was_interrupted, reversed(attempts)))
        if 0 < interrupted <= _INTERRUPTIONS:
            return 0
        failed: int = min(_failed_repairs(attempts) + max(interrupted - _INTERRUPTIONS, 0), 20)
        interval_ms = self._stream.batch_interval_ms
        pause_ms = interval_ms << failed
        if self._stream.ordered:
            return min(pause_ms, interval_ms * _LONGEST_PAUSE_IN_ORDER, _LONGEST_PAUSE_MS)
        return min(pause_ms, _LONGEST_PAUSE_MS) if failed else 0

    def _ended_ms(self, attempt: AttemptRow) -> int:
        """When it ended; 0 if that is still to come: it ended while the ledger's clock was ahead."""
        ended_ms = attempt.ended_at_ms or attempt.heartbeat_ms
        return ended_ms if ended_ms <= self._now_ms else 0


def _failure(attempt: AttemptRow) -> Failure:
    return Failure(attempt.attributes.get(FAILURE, Failure.PASSING))


def _last_results(ledger: Ledger, stream_name: str) -> dict[str, tuple[int, bool]]:
    """When each step last succeeded or failed, in milliseconds since the epoch, and whether it succeeded."""
    last: dict[str, tuple[int, bool]] = {}
    for row in ledger.attempts.newest_outputs(stream_name, _NEWEST_OUTPUTS):
        if row.state in (AttemptState.COMPLETED, AttemptState.FAILED):
            result = (row.recorded_at_ms, row.state is AttemptState.COMPLETED)
            last[row.output_id] = max(last.get(row.output_id, result), result)
    return last


def _failed_repairs(attempts: Iterable[AttemptRow]) -> int:
    """How many of the last consecutive repairs have failed by themselves."""
    repairs = takewhile(lambda row: row.attributes.get(REPAIR), reversed(list(attempts)))
    return sum(not was_interrupted(row) for row in repairs)
