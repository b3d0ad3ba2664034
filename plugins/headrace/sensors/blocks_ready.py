"""The sensor that waits for a batch's blocks, and the base class of sensors that poll the ledger."""

from __future__ import annotations

import abc
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar

from airflow.sdk import BaseSensorOperator

from headrace.airflow_versions import RetriedByPolicy
from headrace.clock import to_ms
from headrace.hooks.ledger import LedgerHook, register
from headrace.runs.batch_run import BatchRun, NothingToRun, begin_run, run_request
from headrace.stream_context import StreamContext
from headrace.triggers.ledger import (
    BlocksReadyTrigger,
    FirstReceiverTrigger,
    LedgerTrigger,
    TurnTrigger,
    check_began,
    check_turn,
    in_triggerer,
    poll_seconds,
    report_readiness,
)

if TYPE_CHECKING:
    from airflow.sdk import Context

    from headrace.stream import Stream


class LedgerSensor(RetriedByPolicy, BaseSensorOperator):
    """Polls for a moment, then defers to a trigger that runs the same check.

    :param stream: the stream; the sensor registers it in the ledger, so that it may be the first to use it.
    :param deferrable: whether to wait in the triggerer; otherwise the sensor's ``mode`` applies. Default:
        ``[operators] default_deferrable``.
    :param trigger_poll_interval: seconds between two polls of the ledger; by default ``[headrace] poll_interval``.
        In mode ``poke`` it is also the default of ``poke_interval``.
    """

    POLL_SECONDS: ClassVar[float] = LedgerTrigger.POLL_SECONDS
    """The default poll interval of the trigger that `make_trigger` returns, in seconds."""

    def __init__(
        self,
        *,
        stream: Stream,
        deferrable: bool | None = None,
        trigger_poll_interval: float | None = None,
        **kwargs: Any,
    ) -> None:
        if kwargs.get("mode", "poke") == "poke":
            kwargs.setdefault("poke_interval", poll_seconds(trigger_poll_interval, otherwise=self.POLL_SECONDS))
        super().__init__(**kwargs)
        self.stream = stream
        self.deferrable = in_triggerer(deferrable)
        self.trigger_poll_interval = trigger_poll_interval

    @abc.abstractmethod
    def make_trigger(self, context: Context, stream_context: StreamContext) -> LedgerTrigger:
        """Return the trigger whose `poll` this sensor calls. The stream is registered in its ledger."""

    def execute(self, context: Context) -> Any:
        """Register the stream, then `wait`."""
        with self.opened() as stream_context:
            return self.wait(context, stream_context)

    @contextmanager
    def opened(self) -> Iterator[StreamContext]:
        """The stream with its ledger open, in which it is registered."""
        with LedgerHook(self.stream.ledger).opened() as ledger:
            register(ledger, self.stream)
            yield StreamContext(self.stream, ledger)

    def wait(self, context: Context, stream_context: StreamContext) -> Any:
        """Check the condition; defer, or poke, until it holds. The stream is registered in its ledger."""
        trigger, ledger = self.make_trigger(context, stream_context), stream_context.ledger
        payload = trigger.poll_before_deferring(ledger) if self.deferrable else trigger.poll(ledger)
        if payload is not None:
            return self.fired(context, payload)
        if not self.deferrable:
            return super().execute(context)
        return self.defer(trigger=trigger, method_name="fired", timeout=timedelta(seconds=self.timeout))

    def poke(self, context: Context) -> bool:
        """Check the condition once, for a sensor that does not defer."""
        with self.opened() as stream_context:
            payload = self.make_trigger(context, stream_context).poll(stream_context.ledger)
        if payload is not None:
            self.fired(context, payload)
        return payload is not None

    def fired(self, context: Context, event: dict[str, Any]) -> None:  # noqa: ARG002 - Airflow's signature
        """Called with the trigger's payload, in this task or after the deferral."""
        self.log.info("Done: %s.", event["reason"])


class BlocksReadySensor(LedgerSensor):
    """Begins a run: waits for the end of its interval, determines its batch, and waits until this batch has all the
    blocks that it can get.

    If the stream coalesces, a scheduled run takes over all batch times that have ended and have no batch, as one batch;
    if there are none, the tasks after this one are skipped. Other runs process the interval of their logical date: if
    another batch took it over, a run with ``reprocess`` repeats that batch, and the tasks of others are skipped. In a
    stream that has never received, a scheduled run first waits for the first receiver, and fails after 5 minutes.

    By arrival, the sensor waits until every live receiver has stored all the blocks that it cut for the batch. It stops
    waiting after ``grace``: blocks that come later join the next open batch.

    By timestamp, it waits until every active partition has passed the batch time or is drained. Only the task's
    ``timeout`` ends that wait; there is no grace.

    A batch without records does not count as empty if its inputs were not received: Kafka does not answer, a topic is
    missing, or no receiver is alive although the stream should run. Then the sensor waits for a minute, or three
    intervals if they are longer, logs what it waits for, and fails.

    In an ordered stream it then allocates the earlier batch times that have no batch, and waits until all earlier
    batches are done. If the turn of a run that others follow does not come within ``limits.retry_for``, its other tasks
    are skipped; a requested run fails after half an hour.

    :param stream: the stream.
    :param grace: how long after the batch time to wait at most; by default the stream's ``limits.seal_grace``. Streams
        by timestamp have ``allowed_lateness`` instead.
    """

    POLL_SECONDS = BlocksReadyTrigger.POLL_SECONDS

    def __init__(self, *, grace: timedelta | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.grace = grace
        self._batch_time_ms: int | None = None
        self._waiting_since_ms: int | None = None

    def execute(self, context: Context) -> Any:
        """Check the run's request, then wait. This is a run's first task, so an invalid request is refused here."""
        run_request(context, self.stream)
        return super().execute(context)

    def receiver_began(self, context: Context, event: dict[str, Any]) -> Any:
        """Called after the deferral: the stream's first receiver has begun, or the wait for it timed out."""
        check_began(event, self.stream)
        return self.execute(context)

    def wait(self, context: Context, stream_context: StreamContext) -> Any:
        awaited = FirstReceiverTrigger.awaited(context, stream_context)
        if awaited is not None and self.deferrable:
            self.defer(trigger=awaited, method_name="receiver_began")
        if awaited is not None:
            check_began(awaited.poll_until_it_fires(stream_context.ledger), self.stream)
        try:
            return super().wait(context, stream_context)
        except NothingToRun as nothing:
            raise nothing.skip(context, self) from None

    def make_trigger(self, context: Context, stream_context: StreamContext) -> BlocksReadyTrigger:
        if self._batch_time_ms is None:
            self._batch_time_ms = begin_run(context, stream_context)
        if self._waiting_since_ms is None:
            # In mode "reschedule" each poke is a process of its own.
            first = context["ti"].get_first_reschedule_date(context) if self.reschedule else None
            self._waiting_since_ms = stream_context.ledger.now_ms() if first is None else to_ms(first)
        return BlocksReadyTrigger.of(
            self.stream,
            self._batch_time_ms,
            waiting_since_ms=self._waiting_since_ms,
            grace=self.grace,
            poll_interval=self.trigger_poll_interval,
        )

    def fired(self, context: Context, event: dict[str, Any]) -> None:
        """Called with the trigger's payload. Waits for the batch's turn if the stream is ordered.

        Raises what `report_readiness` and `check_turn` raise.
        """
        report_readiness(event, self.stream, self.log)
        if not self.stream.is_ordered:
            return
        with self._run(context) as run:
            awaited = TurnTrigger.awaited(run)
            if awaited is None:
                return
            if self.deferrable:
                self.defer(trigger=awaited, method_name="turn_has_come")
            self._check_turn(awaited.poll_until_it_fires(run.ledger), run)

    def turn_has_come(self, context: Context, event: dict[str, Any]) -> None:
        """Called after the deferral: it is the turn of the batch of an ordered stream, or the wait timed out."""
        with self._run(context) as run:
            self._check_turn(event, run)

    @contextmanager
    def _run(self, context: Context) -> Iterator[BatchRun]:
        with self.opened() as stream_context:
            yield BatchRun.of(context, stream_context)

    def _check_turn(self, event: dict[str, Any], run: BatchRun) -> None:
        try:
            check_turn(event, run)
        except NothingToRun as nothing:
            raise nothing.skip(run.context, self) from None
