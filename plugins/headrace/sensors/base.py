"""Base class of sensors that poll the ledger, and defer to a trigger if the condition does not hold yet."""

from __future__ import annotations

import abc
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar

from airflow.sdk import BaseSensorOperator

from headrace.hooks.ledger import LedgerHook, register
from headrace.runs.waiting import in_triggerer, poll_seconds
from headrace.stream_context import StreamContext
from headrace.triggers.base import LedgerTrigger

if TYPE_CHECKING:
    from airflow.sdk import Context

    from headrace.stream import Stream


class LedgerSensor(BaseSensorOperator):
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
        """Return the trigger whose `look` this sensor calls. The stream is registered in its ledger."""

    def execute(self, context: Context) -> Any:
        """Register the stream, then `wait`."""
        with LedgerHook(self.stream.ledger).opened() as ledger:
            register(ledger, self.stream)
            return self.wait(context, StreamContext(self.stream, ledger))

    def wait(self, context: Context, stream_context: StreamContext) -> Any:
        """Check the condition; defer, or poke, until it holds. The stream is registered in its ledger."""
        trigger, ledger = self.make_trigger(context, stream_context), stream_context.ledger
        payload = trigger.look_before_deferring(ledger) if self.deferrable else trigger.look(ledger)
        if payload is not None:
            return self.found(context, payload)
        if not self.deferrable:
            return super().execute(context)
        return self.defer(trigger=trigger, method_name="found", timeout=timedelta(seconds=self.timeout))

    def poke(self, context: Context) -> bool:
        """Check the condition once, for a sensor that does not defer."""
        with LedgerHook(self.stream.ledger).opened() as ledger:
            payload = self.make_trigger(context, StreamContext(self.stream, ledger)).look(ledger)
        if payload is not None:
            self.found(context, payload)
        return payload is not None

    def found(self, context: Context, event: dict[str, Any]) -> None:  # noqa: ARG002 - Airflow's signature
        """Called with the trigger's payload, in this task or after the deferral."""
        self.log.info("Done: %s.", event["reason"])
