"""The sensor that waits for a batch's blocks."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

from headrace.runs.request import run_request
from headrace.sensors.base import LedgerSensor
from headrace.timetables.batch_time import NothingToRun, begin_run
from headrace.triggers.blocks_ready import BlocksReadyTrigger, report_what_was_found
from headrace.triggers.first_receiver import FirstReceiverTrigger, check_began

if TYPE_CHECKING:
    from airflow.sdk import Context

    from headrace.ledger import Ledger


class BlocksReadySensor(LedgerSensor):
    """Begins a run: takes its batch, and waits until this has all the blocks that it can get.

    Of a stream that coalesces, a run of the schedule takes over all batch times that have ended and have no batch, as
    one batch; where there is none, the tasks after this one are skipped. Other runs are about the interval of their
    date. In a stream that has never received, a run of the schedule waits for the first receiver before that, and fails
    after 5 minutes.

    By arrival: until every live receiver has stored all it cut for the batch. After ``grace`` it waits no longer:
    blocks that come later join the next open batch.

    By timestamp: until every active partition has passed it or is drained; no grace ends that wait, only the task's
    ``timeout``.

    A batch without records whose inputs were not received is not empty (Kafka does not answer, a topic is missing, no
    receiver is alive though the stream is to run): it waits for a minute, or three intervals if they are longer, its
    log says for what, and then it fails.

    :param stream: the stream.
    :param grace: how long after the batch time to wait at most; by default the stream's ``limits.seal_grace``. Streams
        by timestamp have ``allowed_lateness`` instead.
    """

    POLL_SECONDS = BlocksReadyTrigger.POLL_SECONDS

    def __init__(self, *, grace: timedelta | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.grace = grace
        self._at_ms: int | None = None
        self._waiting_since_ms: int | None = None

    def execute(self, context: Context) -> Any:
        """Wait; this is a run's first task, so it refuses a run that asks for what the stream does not have."""
        run_request(context, self.stream)
        return super().execute(context)

    def receiver_began(self, context: Context, event: dict[str, Any]) -> Any:
        """Called when the stream's first receiver has begun, or was waited for in vain."""
        check_began(event, self.stream)
        return self.execute(context)

    def wait(self, context: Context, ledger: Ledger) -> Any:
        awaited = FirstReceiverTrigger.awaited(context, self.stream, ledger)
        if awaited is not None and self.deferrable:
            self.defer(trigger=awaited, method_name="receiver_began")
        if awaited is not None:
            check_began(awaited.look_until_it_fires(ledger), self.stream)
        try:
            return super().wait(context, ledger)
        except NothingToRun as nothing:
            raise nothing.skip(self) from None

    def make_trigger(self, context: Context, ledger: Ledger) -> BlocksReadyTrigger:
        if self._at_ms is None:
            self._at_ms = begin_run(context, self.stream, ledger)
        if self._waiting_since_ms is None:
            self._waiting_since_ms = ledger.now_ms()
        return BlocksReadyTrigger.of(
            self.stream,
            self._at_ms,
            waiting_since_ms=self._waiting_since_ms,
            grace=self.grace,
            poll_interval=self.trigger_poll_interval,
        )

    def found(self, context: Context, event: dict[str, Any]) -> None:  # noqa: ARG002 - Airflow's signature
        """Called with what the look found. Raises what `tell_what_was_found` raises."""
        report_what_was_found(event, self.stream, self.log)
