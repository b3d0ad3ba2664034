"""The trigger with which a run waits for the stream's first receiver."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

from headrace.errors import HeadraceError
from headrace.runs.first_receiver import find_beginning
from headrace.runs.identity import of_schedule
from headrace.triggers.base import LedgerTrigger

if TYPE_CHECKING:
    from airflow.sdk import Context

    from headrace.ledger import Ledger
    from headrace.stream import Stream
    from headrace.stream_context import StreamContext

MOST_WAITED = timedelta(minutes=5)
"""How long a run waits for the stream's first receiver, before it fails."""


class NoReceiverError(HeadraceError):
    """The stream has never received."""


def check_began(event: dict[str, Any], stream: Stream) -> None:
    """Fail the run if the wait timed out.

    Raises:
        NoReceiverError: no receiver has begun.
    """
    if not event["began"]:
        raise NoReceiverError(
            f"No receiver has begun within {MOST_WAITED}: {event['reason']}.",
            remedy=f"Unpause the DAG {stream.name}_receiver, and see the log of its task.",
        )


class FirstReceiverTrigger(LedgerTrigger):
    """Fires once an interval has ended since the stream's first receiver began, or when the ledger's clock reaches
    ``until_ms``. The payload has ``began`` and ``reason``."""

    def __init__(
        self, *, ledger: str, stream: str, interval_ms: int, until_ms: int, poll_interval: float | None = None
    ) -> None:
        super().__init__(
            ledger=ledger, stream=stream, poll_interval=poll_interval, interval_ms=interval_ms, until_ms=until_ms
        )
        self._reported = ""

    @classmethod
    def awaited(cls, context: Context, stream_context: StreamContext) -> FirstReceiverTrigger | None:
        """The trigger that a scheduled run has to wait for before its batch is determined, if the stream has not begun
        to receive; else None. Requested runs do not wait, nor do batches by timestamp, whose records may be older."""
        stream, ledger = stream_context.stream, stream_context.ledger
        if not of_schedule(context) or stream.batch_by != "arrival":
            return None
        until_ms = ledger.now_ms() + MOST_WAITED // timedelta(milliseconds=1)
        trigger = cls(ledger=stream.ledger, stream=stream.name, interval_ms=stream.batch_interval_ms, until_ms=until_ms)
        return None if trigger.look(ledger) is not None else trigger

    def look(self, ledger: Ledger) -> dict[str, Any] | None:
        now_ms = ledger.now_ms()
        beginning = find_beginning(ledger, self.stream)
        if beginning.at_ms is None:
            if now_ms >= self.parameters["until_ms"]:
                return {"began": False, "reason": beginning.reason}
            if beginning.reason != self._reported:
                self._reported = beginning.reason
                self.log.info("Waiting for the stream's first receiver: %s.", beginning.reason)
            return None
        interval_ms = self.parameters["interval_ms"]
        if now_ms // interval_ms * interval_ms < beginning.at_ms:
            return None
        return {"began": True, "reason": "the stream's receivers have begun"}
