"""Triggers of the receiver operator: wait for the end of a receiver job, or for a stopped stream to be started."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headrace.hooks.ledger import LedgerHook
from headrace.runs.receiver_job import JobWatch
from headrace.runs.threads import in_thread
from headrace.triggers.base import LedgerTrigger

if TYPE_CHECKING:
    from headrace.ledger import Ledger


class ReceiverJobTrigger(LedgerTrigger):
    """Fires when the receiver job of one epoch is over: ``{"outcome": "stopped|failed|lost|superseded", "epoch": …}``.

    The trigger follows the job by its lease alone, so a new triggerer continues where the last one stopped. Changes
    (states, receivers' errors) are written to the task's log.
    """

    def __init__(self, *, ledger: str, stream: str, epoch: int, poll_interval: float | None = None) -> None:
        super().__init__(ledger=ledger, stream=stream, poll_interval=poll_interval, epoch=epoch)
        self._watch = JobWatch(stream, epoch, progress=self._report, warn=self._warn)

    def _report(self, text: str) -> None:
        self.log.info("%s", text)

    def _warn(self, text: str) -> None:
        self.log.warning("%s", text)

    def look(self, ledger: Ledger) -> dict[str, Any] | None:
        outcome = self._watch.look(ledger)
        return None if outcome is None else {"outcome": outcome.value, "epoch": self._watch.epoch}

    async def on_kill(self) -> None:
        """Called when a person marks or clears the deferred task: ask the job to stop, so that it drains."""
        ledger = await LedgerHook(self.ledger).aget_conn()
        try:
            reason = "its Airflow task was ended by a person"
            await in_thread(self.ledger, ledger.jobs.request_stop, self.stream, reason)
        finally:
            await in_thread(self.ledger, ledger.close)


class StreamWantedTrigger(LedgerTrigger):
    """Fires when the stream's desired state is running: ``headrace streams start`` after ``stop``."""

    def __init__(self, *, ledger: str, stream: str, poll_interval: float | None = None) -> None:
        super().__init__(ledger=ledger, stream=stream, poll_interval=poll_interval)

    def look(self, ledger: Ledger) -> dict[str, Any] | None:
        from headrace.ledger.states import DesiredState

        if ledger.streams.get(self.stream).desired_state is DesiredState.RUNNING:
            return {"desired_state": DesiredState.RUNNING.value}
        return None
