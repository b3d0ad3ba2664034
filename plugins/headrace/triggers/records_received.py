"""The trigger that starts batches by what has been received, in place of the clock."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from airflow.triggers.base import BaseEventTrigger, TriggerEvent

from headrace.runs.threads import in_thread
from headrace.triggers.base import LedgerTrigger

if TYPE_CHECKING:
    from headrace.ledger import Ledger
    from headrace.ledger.rows import WaitingTimes

_FIRED = "headrace_fired"
# A ledger that is of another version, or not there yet, is looked for this often, in seconds.
_RETRY_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Due:
    """A batch is due: it would take ``records`` of the batch times up to ``through_ms``."""

    through_ms: int
    batch_times: int
    records: int
    reason: Literal["min_records", "max_delay"]


@dataclass(frozen=True, slots=True)
class Fired:
    """The trigger has fired, at ``at_ms``, for the batch times up to ``through_ms``."""

    through_ms: int
    at_ms: int


def due(
    waiting: WaitingTimes | None, now_ms: int, *, min_records: int, max_delay_ms: int, interval_ms: int
) -> Due | None:
    """Whether a batch is to be started for what waits. Times are milliseconds.

    A record may have come at the very start of its interval, so it is from there that it waits.

    Args:
        waiting: of intervals that have ended: no batch may take others' blocks yet.
    """
    if waiting is None:
        return None
    if waiting.records >= min_records:
        return Due(waiting.last_ms, waiting.batch_times, waiting.records, "min_records")
    if now_ms >= waiting.first_ms - interval_ms + max_delay_ms:
        return Due(waiting.last_ms, waiting.batch_times, waiting.records, "max_delay")
    return None


class RecordsReceivedTrigger(LedgerTrigger, BaseEventTrigger):
    """Fires whenever ``min_records`` wait in intervals that have ended, or the oldest has waited ``max_delay_ms``.

    It watches an asset, and goes on for as long as the DAG that is scheduled by it is there and not paused. What it
    fired for it does not fire for again, until a run has claimed it or ``repeat_after_ms`` have passed: an event may
    be lost with a triggerer that dies. A new triggerer finds in the asset's state store what the last one fired for.

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

    def look(self, ledger: Ledger) -> dict[str, Any] | None:
        """What is due and was not fired for."""
        now_ms = ledger.now_ms()
        waiting = ledger.blocks.waiting(self.stream, now_ms)
        found = due(waiting, now_ms, **self._limits)
        if waiting is None or found is None:
            return None
        awaited = waiting.first_ms <= self._fired.through_ms
        if awaited and now_ms < self._fired.at_ms + self._repeat_after_ms:
            return None
        if awaited:
            self.log.warning(
                "No run has claimed what was waiting %d s ago, so this is said again.",
                (now_ms - self._fired.at_ms) // 1000,
            )
        self._fired = Fired(found.through_ms, now_ms)
        return {
            "stream": self.stream,
            "reason": found.reason,
            "records": found.records,
            "batch_times": found.batch_times,
            "through_ms": found.through_ms,
        }

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Fire, again and again. A ledger that cannot be read is waited for."""
        from headrace.ledger.errors import LedgerError

        await self._recall()
        while True:
            try:
                async for event in self._watch():
                    yield event
            except LedgerError as error:
                # Airflow would begin an ended watcher anew at once, and again and again.
                self.log.warning("The ledger cannot be read, trying again in %.0f s: %s", _RETRY_SECONDS, error)
            await asyncio.sleep(_RETRY_SECONDS)

    async def _watch(self) -> AsyncIterator[TriggerEvent]:
        ledger = await self._opened()
        try:
            while True:
                payload = await self._looked(ledger)
                await self._remember()
                yield TriggerEvent(payload)  # type: ignore[no-untyped-call]
        finally:
            await in_thread(self.ledger, ledger.close)

    async def _recall(self) -> None:
        if self.asset_state_store is None:
            return
        try:
            kept: Any = await self.asset_state_store.aget(_FIRED)
        except Exception as error:
            self.log.warning("It is not known for what was fired before, so that may be said again: %s", error)
            return
        if isinstance(kept, dict):
            self._fired = Fired(int(kept["through_ms"]), int(kept["at_ms"]))

    async def _remember(self) -> None:
        """Before the event goes out: one that is lost is repeated in time, one too many would be a run for nothing."""
        if self.asset_state_store is None:
            return
        try:
            await self.asset_state_store.aset(
                _FIRED, {"through_ms": self._fired.through_ms, "at_ms": self._fired.at_ms}
            )
        except Exception as error:
            self.log.warning("A new triggerer will not know of this event, and may repeat it: %s", error)
