"""The next attempt at a batch. All that runs batches asks here: a run for its batch, the stream's repair, a replay, a
run for a range of batches.

1. What is left of the batch, for the one who asks: `BatchProgress`.
2. Who holds it: a live attempt of another run is waited for, an earlier try of the same run is fenced
   (`NextAttempt.awaited`).
3. Whose turn it is: in an ordered stream earlier batches come first (`awaited_turn`), and the stream's own batches come
   before those of a range (`LiveStream`).
4. Which slot: the ledger decides when the attempt begins (`NextAttempt.begin`), with the batch's turn once more. If
   something has come first, the result is a `Wait` and no attempt.

Whoever asks does the waiting: a task of Airflow defers or sleeps, a thread of a range sleeps. Then it asks again.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Self

from headrace.clock import time_text
from headrace.errors import RANGE, REPAIR, TRY_NUMBER
from headrace.ledger.errors import AttemptFencedError, BatchRunningError, NotItsTurnError, SlotBusyError
from headrace.ledger.states import AttemptState, BatchState

if TYPE_CHECKING:
    from headrace.batch.run_request import RunIdentity, RunRequest
    from headrace.batch.time_range import TimeRange
    from headrace.ledger import Ledger
    from headrace.ledger.batches.tables import Attempt, AttemptRow, BatchOutputRow, BatchRow
    from headrace.stream import Stream
    from headrace.stream_context import StreamContext


@dataclass(frozen=True, slots=True)
class Wait:
    """What an attempt has to wait for. ``waiting_for`` identifies it, ``otherwise`` is raised if it takes too long.

    ``soon``: it takes seconds, so a task polls in place and often: a deferral takes as long.
    """

    reason: str
    waiting_for: str
    otherwise: Exception | None = None
    soon: bool = False

    @property
    def is_for_slot(self) -> bool:
        """Whether other batches hold the stream's slots, and nothing else is in the way."""
        return isinstance(self.otherwise, SlotBusyError) and not isinstance(self.otherwise, NotItsTurnError)


@dataclass(frozen=True, slots=True)
class BatchProgress:
    """How far a batch is, or its replay.

    ``needed``: the steps that it needs to complete. ``attempts``: at the batch, oldest first. ``history``: what each of
    them made of its outputs, the oldest attempt first.
    """

    needed: tuple[str, ...]
    attempts: Sequence[AttemptRow]
    history: Sequence[BatchOutputRow] = ()

    @classmethod
    def of(cls, ledger: Ledger, batch: BatchRow, steps: Sequence[str]) -> Self:
        """Read how far the batch itself is, in a stream that has these steps. Its replays do not count."""
        key = (batch.stream, batch.batch_time_ms)
        attempts = [row for row in ledger.attempts.of_batch(*key) if not row.target]
        return cls(batch.needs(steps), attempts, ledger.attempts.output_history(*key))

    @property
    def missing(self) -> list[str]:
        """The steps that the batch needs, and that have no record of success."""
        newest = {row.output_id: row for row in self.history}
        return [step for step in self.needed if not _is_done(newest.get(step))]

    def left_for(self, request: RunRequest, steps: Iterable[str]) -> tuple[tuple[str, ...], bool]:
        """Return those of ``steps`` that the run wants and that have no record of success; if the run repeats the
        batch, also those that it may repeat and has not done since it was last cleared. And whether it repeats the
        batch.

        A batch that was complete when the run began, or was last cleared, is repeated if the run asks for it
        (``reprocess``), is a backfill's, or has completed an output of it before it was cleared. If a batch failed, its
        cleared run does only what is left. Within one clear no step is done twice, however often a task is tried.
        """
        made = ((row.number, request.run.clear_of(row.attributes)) for row in self.attempts)
        clears = {number: clear for number, clear in made if clear is not None}
        newest: dict[str, BatchOutputRow] = {}
        before: dict[str, BatchOutputRow] = {}
        has_completed_earlier = False
        for row in self.history:
            clear = clears.get(row.attempt)
            newest[row.output_id] = row
            if clear != request.run.clear_number:
                before[row.output_id] = row
                has_completed_earlier |= clear is not None and _is_done(row)
        was_complete = all(_is_done(before.get(step)) for step in self.needed)
        repeats = request.reprocess or (was_complete and (request.is_backfill or has_completed_earlier))
        left = []
        for step in filter(request.wants, steps):
            last = newest.get(step)
            own = last is not None and clears.get(last.attempt) == request.run.clear_number
            if not _is_done(last) or (repeats and request.may_repeat(step) and not own):
                left.append(step)
        return tuple(left), repeats

    def is_done_by(self, run: RunIdentity) -> bool:
        """Whether the run has completed an attempt at all that is needed, since it was last cleared."""
        return any(
            row.state is AttemptState.COMPLETED and set(self.needed) <= set(row.outputs) and run.made(row.attributes)
            for row in self.attempts
        )

    def last_of(self, batches: TimeRange) -> AttemptRow | None:
        """The last attempt at all that is needed that was made for this range, or by its run for one with another
        definition: the run may have written the batch with that one since. None if there is none."""
        own = [row for row in self.attempts if batches.is_of_same_run(row) and set(self.needed) <= set(row.outputs)]
        return own[-1] if own else None

    def is_written_for(self, batches: TimeRange, *, like: AttemptRow | None) -> bool:
        """Whether the batch is written for the range, with the definition of the attempt ``like``."""
        last = self.last_of(batches)
        if last is None or like is None or last.state is not AttemptState.COMPLETED:
            return False
        return last.revision == like.revision and batches.is_range_of(last)

    def live(self, steps: Collection[str], now_ms: int) -> list[AttemptRow]:
        """The live attempts at one of these steps."""
        return [row for row in self.attempts if row.alive(now_ms) and not set(steps).isdisjoint(row.outputs)]


def _is_done(row: BatchOutputRow | None) -> bool:
    return row is not None and row.state is AttemptState.COMPLETED


@dataclass(frozen=True, slots=True)
class ReplayTarget:
    """The replay that an attempt is made for: its name, its stream's definition as JSON, and those of its steps whose
    batches must be written in the order of their times."""

    target: str
    definition: str
    ordered: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class NextAttempt:
    """The next attempt at a batch.

    Args:
        left: the steps to run. If none is left, the batch may still not be complete, because an attempt died after its
            last record: the ledger notices that when an attempt at what was ``asked`` for is to begin.
        attempts: the earlier ones that may still run, oldest first; of a range those that have ended too.
        is_own: whether the run that asks has made the attempt. Such a one is not waited for; it gets fenced.
        attributes: those of the attempt. By `TRY_NUMBER` a try that was replaced by a later one of its run notices it.
        repeats: also run the steps that have a record of success.
        replay: the replay that it is made for; by default it is at the batch itself.
    """

    ledger: Ledger
    batch: BatchRow
    left: tuple[str, ...]
    attempts: Sequence[AttemptRow] = ()
    is_own: Callable[[AttemptRow], bool] = lambda _: False
    attributes: Mapping[str, Any] = field(default_factory=dict)
    asked: tuple[str, ...] = ()
    repeats: bool = False
    replay: ReplayTarget | None = None

    @classmethod
    def of_run(
        cls, context: StreamContext, batch: BatchRow, request: RunRequest, steps: tuple[str, ...]
    ) -> Self | None:
        """The attempt that a run makes at these steps of its batch; None if there is nothing to do."""
        progress = BatchProgress.of(context.ledger, batch, context.stream.steps)
        left, repeats = progress.left_for(request, steps)
        may_complete = batch.state is not BatchState.COMPLETED and any(map(request.wants, steps))
        if batch.state is BatchState.ABANDONED or not (left or may_complete):
            return None
        return cls(
            context.ledger,
            batch,
            left,
            progress.live(left or steps, context.ledger.now_ms()),
            # One that no run of Airflow has made is not waited for.
            lambda row: row.run_id is None or request.run.clear_of(row.attributes) is not None,
            request.attributes,
            asked=steps,
            repeats=repeats and bool(left),
        )

    @classmethod
    def of_replay(
        cls, ledger: Ledger, batch: BatchRow, request: RunRequest, step: str, replay: ReplayTarget
    ) -> Self | None:
        """The attempt that a run makes at its batch in a replay; None if the run has replayed the batch."""
        attempts = _attempts_at(ledger, batch, (step,), target=replay.target)
        if BatchProgress((step,), attempts).is_done_by(request.run):
            return None
        return cls(ledger, batch, (step,), attributes=request.attributes, replay=replay)

    @classmethod
    def of_range(
        cls,
        ledger: Ledger,
        batch: BatchRow,
        *,
        batches: TimeRange,
        steps: tuple[str, ...],
        attributes: Mapping[str, Any],
        replay: ReplayTarget | None,
    ) -> Self:
        """The attempt that a run makes at a batch of its range."""
        attempts = _attempts_at(ledger, batch, steps, target="" if replay is None else replay.target)
        return cls(ledger, batch, steps, attempts, batches.is_of_same_run, attributes, repeats=True, replay=replay)

    @property
    def steps(self) -> tuple[str, ...]:
        """The steps that the attempt begins with; none if no attempt can begin."""
        return self.left or self.asked

    def awaited(self) -> Wait | None:
        """The wait for an attempt of another run that holds the batch.

        Raises:
            AttemptFencedError: a later try of the same run has made an attempt, so this try must not make one.
        """
        for row in self.attempts:
            if self.is_own(row) and row.attributes.get(TRY_NUMBER, 0) > self.attributes.get(TRY_NUMBER, 0):
                raise AttemptFencedError(
                    f"A later try of this task has taken over the batch: {row.holder}, attempt {row.number}."
                )
        other = next((row for row in self._live() if not self.is_own(row)), None)
        if other is None:
            return None
        at = time_text(self.batch.batch_time_ms)
        return Wait(f"Batch {at} is being run by {other.holder}, attempt {other.number}.", f"attempt {other.number}")

    def begin(self, *, holder: str, way: str, lease_ms: int, revision: int | None = None) -> Attempt | Wait:
        """Begin the attempt in the ledger, or return what came first: another attempt at the batch, other batches in
        the slots, the turn of an earlier batch. The arguments are those of `Attempts.begin`.

        Raises:
            AlreadyCompletedError: nothing is left.
            StepsLostError: what the batch still needs is no longer in the definition.
            BatchStateError: the batch was abandoned, or absorbed into a later one, or has no such step.
        """
        stream_name, time_ms = self.batch.stream, self.batch.batch_time_ms
        begun: dict[str, Any] = {"holder": holder, "way": way, "lease_ms": lease_ms, "attributes": self.attributes}
        begun["outputs"] = self.steps
        busy: Collection[int] = (time_ms,)
        try:
            if self.replay is not None:
                return self.ledger.replays.begin(stream_name, time_ms, **asdict(self.replay), **begun)
            # Two runs of a batch often begin in the same moment. Only an earlier try of this run is fenced.
            begun |= {"force": self.repeats, "unless_running": not self._live(), "revision": revision}
            return self.ledger.attempts.begin(stream_name, time_ms, **begun)
        except BatchRunningError as error:
            otherwise: Exception = error
        except SlotBusyError as error:
            otherwise, busy = error, error.busy
        # Else a repair, or a range that is run again, would hardly ever find a free slot beside the runs of batches.
        soon = not self.attributes.keys().isdisjoint((REPAIR, RANGE))
        soon = soon or (self.replay is None and _give_way_soon(self.ledger, stream_name, busy))
        return Wait(str(otherwise), f"batches {busy}", otherwise=otherwise, soon=soon)

    def _live(self) -> list[AttemptRow]:
        running = [row for row in self.attempts if row.state is AttemptState.RUNNING]
        # Most batches have none, and the time is the ledger's.
        now_ms = self.ledger.now_ms() if running else 0
        return [row for row in running if row.alive(now_ms)]


def _attempts_at(ledger: Ledger, batch: BatchRow, steps: Collection[str], *, target: str) -> list[AttemptRow]:
    """The attempts at one of these steps of the batch, or of its replay, oldest first."""
    time_ms = batch.batch_time_ms
    rows = ledger.attempts.between(batch.stream, time_ms - 1, time_ms, target=target)
    return [row for row in rows if not set(steps).isdisjoint(row.outputs)]


def _give_way_soon(ledger: Ledger, stream_name: str, times: Collection[int]) -> bool:
    """Whether the live attempts at these batches are repairs, or run a range again: they give way soon."""
    now_ms = ledger.now_ms()
    live = [row for row in ledger.attempts.running(stream_name) if row.batch_time_ms in times and row.alive(now_ms)]
    return bool(live) and all(row.attributes.get(REPAIR) or RANGE in row.attributes for row in live)


# A batch takes over at most 360 batch times. The first allocated one is behind them.
_MAX_UNCLAIMED = 1_000


def awaited_turn(ledger: Ledger, stream_name: str, batch_time_ms: int, *, unclaimed: bool) -> Wait | None:
    """The wait for the batch that comes first in an ordered stream; None if no earlier one is unfinished.

    Args:
        unclaimed: whether earlier batch times without a batch count too. They do not if this batch will take them over.
    """
    most = 1 if unclaimed else _MAX_UNCLAIMED
    unfinished = ledger.batches.earlier_unfinished(stream_name, batch_time_ms, limit=most)
    first = next((row for row in unfinished if row.state is not None or unclaimed), None)
    if first is None:
        return None
    state = "not allocated" if first.state is None else first.state.value
    reason = f"batch {time_text(first.batch_time_ms)} comes first, and is {state}"
    return Wait(f"{reason}: {first.error}" if first.error else reason, f"batches {(first.batch_time_ms,)}")


GIVE_WAY_SECONDS = 30.0
"""How long a batch of a range waits for a batch of the stream that is due: that one may wait for a person."""
_ASK_SECONDS = 1.0
# A batch is due for so many intervals, at least a minute. After that nobody seems to run it.
_LIVE_INTERVALS = 10
_AVERAGED_SECONDS = 60.0
# One of so many threads runs batches where processors are short. With 4, the live stream's p99 rose by 11% on Postgres.
_FEWER = 8
# None: it has blocks, and is not allocated yet.
_DUE = (None, BatchState.ALLOCATED, BatchState.RUNNING)


class LiveStream:
    """The stream that a range of batches gives way to: in an ordered stream, and where processors are short. While a
    batch of the stream is due, none of the range begins. Else a few of the range's threads run batches, because those
    that run when the stream's next batch is due delay it, and many hold up its receivers in the ledger.

    A low priority of the range's process would not do: the stream would wait for it whenever it holds the ledger's
    lock.

    Args:
        threads: how many threads of the range run batches.
        in_order: whether the range takes the slot of an ordered stream, and so gives way wherever it runs.
    """

    def __init__(self, ledger: Ledger, stream: Stream, *, threads: int, in_order: bool) -> None:
        self._ledger, self._stream, self._in_order = ledger, stream, in_order
        self._few, self._began = max(1, threads // _FEWER), time.monotonic()
        self._asking, self._ask_at = threading.Lock(), 0.0
        self._is_due = self._has_batches = False

    def awaited(self, number: int, waited: float) -> Wait | None:
        """What the thread of this number waits for before it takes a batch of the range, after it has waited for so
        many seconds. Not for ever: the batch that is due may wait for a person."""
        if not (self._in_order or processors_are_short(self._began)):
            return None
        with self._asking:
            # Once for all threads.
            if time.monotonic() >= self._ask_at:
                self._ask_at = time.monotonic() + _ASK_SECONDS
                self._read()
            is_due, has_batches = self._is_due, self._has_batches
        if is_due and waited < GIVE_WAY_SECONDS:
            return Wait("A batch of the stream is due.", "the stream")
        if has_batches and number >= self._few:
            return Wait("Few batches of a range run beside a live stream.", "the stream")
        return None

    def _read(self) -> None:
        """Read whether a batch of the stream is due and has not completed, and whether there was one lately."""
        now_ms, stream = self._ledger.now_ms(), self._stream
        since_ms = now_ms - max(60_000, _LIVE_INTERVALS * stream.batch_interval_ms)
        batches, newest = self._ledger.batches, self._ledger.batches.page(stream.name, 1)
        catches_up = False
        if stream.is_ordered:
            # The others wait for the first one, which may wait for a person.
            unfinished = batches.earlier_unfinished(stream.name, now_ms, limit=1)
            for batch in unfinished:
                # However old it is, it is due while the stream works through a backlog.
                before = batches.page(stream.name, 1, [BatchState.COMPLETED], before_ms=batch.batch_time_ms)
                catches_up = batch.alive or any((row.completed_at_ms or 0) >= since_ms for row in before)
        else:
            unfinished = batches.earlier_unfinished(stream.name, now_ms, after_ms=since_ms)
        due = (batch for batch in unfinished if batch.state in _DUE)
        self._is_due = any(catches_up or batch.batch_time_ms > since_ms for batch in due)
        self._has_batches = any(batch.batch_time_ms > since_ms for batch in newest)


def processors_are_short(began: float) -> bool:
    """Whether more threads of this host want a processor than it has, on average over the last minute. True for the
    first minute from ``began`` on (`time.monotonic`): the average does not show yet what the range itself adds."""
    is_new = time.monotonic() < began + _AVERAGED_SECONDS
    return is_new or os.getloadavg()[0] > (os.cpu_count() or 1)
