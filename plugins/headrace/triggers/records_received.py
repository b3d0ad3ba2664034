"""The trigger that starts batches by the number and age of received records, instead of by the clock."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from headrace.triggers.ledger import LedgerWatcher

if TYPE_CHECKING:
    from headrace.ledger import Ledger
    from headrace.ledger.receiving.tables import WaitingTimes

_FIRED = "headrace_fired"


@dataclass(frozen=True, slots=True)
class Due:
    """A batch is due: it would take ``records`` records of ``batch_times`` batch times, up to ``through_ms``."""

    through_ms: int
    batch_times: int
    records: int
    reason: Literal["min_records", "max_delay"]


@dataclass(frozen=True, slots=True)
class Fired:
    """The trigger fired at ``at_ms`` for the batch times up to ``through_ms``."""

    through_ms: int
    at_ms: int


def due(
    waiting: WaitingTimes | None, now_ms: int, *, min_records: int, max_delay_ms: int, interval_ms: int
) -> Due | None:
    """Return the batch to start for the waiting records, or None if none is due yet. Times are milliseconds.

    A record may have come at the very start of its interval, so its wait is counted from there.

    Args:
        waiting: the batch times of intervals that have ended; blocks of open intervals cannot be allocated yet.
    """
    if waiting is None:
        return None
    if waiting.records >= min_records:
        return Due(waiting.last_ms, waiting.batch_times, waiting.records, "min_records")
    if now_ms >= waiting.first_ms - interval_ms + max_delay_ms:
        return Due(waiting.last_ms, waiting.batch_times, waiting.records, "max_delay")
    return None


class RecordsReceivedTrigger(LedgerWatcher):
    """Fires whenever ``min_records`` wait in intervals that have ended, or the oldest has waited ``max_delay_ms``.

    After it has fired for some batch times, it does not fire for them again until ``repeat_after_ms`` have passed
    without a run that claimed them: an event may be lost with a triggerer that dies. A new triggerer reads the last
    fired batch times from the asset's state store.

    :param interval_ms: the stream's batch interval.
    """

    def __init__(
        self,
        *,
        ledger: str,
        stream: str,
        min_records: int,
        max_delay_ms: int,
        interval_ms: int,
        repeat_after_ms: int = 300_000,
        poll_interval: float | None = None,
    ) -> None:
        super().__init__(
            ledger=ledger,
            stream=stream,
            poll_interval=poll_interval,
            min_records=min_records,
            max_delay_ms=max_delay_ms,
            interval_ms=interval_ms,
            repeat_after_ms=repeat_after_ms,
        )
        self._limits = {"min_records": min_records, "max_delay_ms": max_delay_ms, "interval_ms": interval_ms}
        self._repeat_after_ms = repeat_after_ms
        self._fired = Fired(0, 0)

    def poll(self, ledger: Ledger) -> dict[str, Any] | None:
        """Return the payload for a due batch that was not fired for yet, or None."""
        now_ms = ledger.now_ms()
        waiting = ledger.blocks.waiting(self.stream, now_ms)
        batch = due(waiting, now_ms, **self._limits)
        if waiting is None or batch is None:
            return None
        if now_ms < self._fired.at_ms:
            # The ledger's clock was ahead.
            self._fired = Fired(0, 0)
        awaited = waiting.first_ms <= self._fired.through_ms
        if awaited and now_ms < self._fired.at_ms + self._repeat_after_ms:
            return None
        if awaited:
            self.log.warning(
                "No run has taken the waiting records in the %d s since the last event, so the event is sent again.",
                (now_ms - self._fired.at_ms) // 1000,
            )
        self._fired = Fired(batch.through_ms, now_ms)
        return {
            "stream": self.stream,
            "reason": batch.reason,
            "records": batch.records,
            "batch_times": batch.batch_times,
            "through_ms": batch.through_ms,
        }

    async def recall(self) -> None:
        # Airflow 3.2 has none.
        store = getattr(self, "asset_state_store", None)
        if store is None:
            return
        try:
            kept: Any = await store.aget(_FIRED)
        except Exception as error:
            self.log.warning("The last event cannot be read from Airflow, so it may be sent again: %s", error)
            return
        if isinstance(kept, dict):
            self._fired = Fired(int(kept["through_ms"]), int(kept["at_ms"]))

    async def remember(self) -> None:
        """Store the fired batch times before the event is emitted: a lost event is repeated later, but a duplicate
        event would start a needless run."""
        store = getattr(self, "asset_state_store", None)
        if store is None:
            return
        try:
            await store.aset(_FIRED, {"through_ms": self._fired.through_ms, "at_ms": self._fired.at_ms})
        except Exception as error:
            self.log.warning("This event cannot be stored in Airflow, so a new triggerer may send it again: %s", error)
