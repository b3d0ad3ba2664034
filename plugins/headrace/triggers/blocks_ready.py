"""The trigger of BlocksReadySensor: waits until a batch's blocks are ready."""

from __future__ import annotations

import logging
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from airflow.sdk.exceptions import AirflowFailException

from headrace.runs.readiness import InputsNotReceivedError, blocks_ready
from headrace.triggers.base import LedgerTrigger

if TYPE_CHECKING:
    from headrace.ledger import Ledger
    from headrace.stream import Stream

# How often the task's log repeats why a batch waits, in seconds. A batch may wait for hours, with five polls a second.
# The warning interval is shorter because that wait is bounded.
_REPORT_SECONDS = 60.0
_WARN_SECONDS = 15.0


class BlocksReadyTrigger(LedgerTrigger):
    """Fires once a batch time has all its blocks, or the bounded wait for its inputs is over.

    :param waiting_since_ms: when the batch's task began to wait, by the ledger's clock; a new triggerer keeps it.
    """

    # Receivers seal several times a second; a batch should not wait for the poll.
    POLL_SECONDS = 0.2

    def __init__(
        self,
        *,
        ledger: str,
        stream: str,
        batch_time_ms: int,
        grace_ms: int,
        waiting_since_ms: int = 0,
        poll_interval: float | None = None,
    ) -> None:
        super().__init__(
            ledger=ledger,
            stream=stream,
            poll_interval=poll_interval,
            batch_time_ms=batch_time_ms,
            grace_ms=grace_ms,
            waiting_since_ms=waiting_since_ms,
        )
        self._report_at = 0.0
        self._reported_trouble = False

    @classmethod
    def of(
        cls,
        stream: Stream,
        batch_time_ms: int,
        *,
        waiting_since_ms: int = 0,
        grace: timedelta | None = None,
        poll_interval: float | None = None,
    ) -> BlocksReadyTrigger:
        """The trigger for a batch time of a stream; ``grace`` is by default the stream's ``limits.seal_grace``."""
        return cls(
            ledger=stream.ledger,
            stream=stream.name,
            batch_time_ms=batch_time_ms,
            grace_ms=(stream.limits.seal_grace if grace is None else grace) // timedelta(milliseconds=1),
            waiting_since_ms=waiting_since_ms,
            poll_interval=poll_interval,
        )

    def look(self, ledger: Ledger) -> dict[str, Any] | None:
        found = blocks_ready(ledger, self.stream, **self.parameters)
        if found.ready or found.failed:
            return {"reason": found.reason, "complete": found.complete, "failed": found.failed}
        if time.monotonic() >= self._report_at or found.troubled != self._reported_trouble:
            self._reported_trouble = found.troubled
            self._report_at = time.monotonic() + (_WARN_SECONDS if found.troubled else _REPORT_SECONDS)
            self.log.log(logging.WARNING if found.troubled else logging.INFO, "Not ready: %s.", found.reason)
        return None


def report_what_was_found(event: dict[str, Any], stream: Stream, log: Any) -> None:
    """Log the result of the trigger's `look`.

    Raises:
        AirflowFailException: the inputs of a batch by arrival were not received in time. The batch has no records, so
            a retry has nothing to do: later batches take the records that come later.
        InputsNotReceivedError: the same for a batch by timestamp, whose records may still come.
    """
    reason = event["reason"]
    if event.get("failed"):
        what = f"{reason[0].upper()}{reason[1:]}."
        if stream.batch_by == "timestamp":
            raise InputsNotReceivedError(what)
        raise AirflowFailException(what)
    if event.get("complete", True):
        log.info("Done: %s.", reason)
    else:
        log.warning("Not waiting any longer: %s.", reason)
