"""A sensor that looks into the ledger, and defers when there is nothing yet."""

from __future__ import annotations

import abc
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from airflow.configuration import conf
from airflow.sdk import BaseSensorOperator

from headrace.hooks.ledger import LedgerHook, register

if TYPE_CHECKING:
    from airflow.sdk import Context

    from headrace.ledger import Ledger
    from headrace.stream import Stream
    from headrace.triggers.base import LedgerTrigger

# To defer and resume costs 2.2 s; what is about to come is cheaper to wait for here, in seconds.
_PATIENCE = 1.0
_LOOK_EVERY = 0.1


class LedgerSensor(BaseSensorOperator):
    """Looks for a moment, then defers to a trigger that does the same look.

    :param stream: the stream; it is registered in the ledger, so that a sensor may be the first to know it.
    :param deferrable: whether to wait in the triggerer; otherwise as the sensor's ``mode`` says.
    """

    def __init__(
        self, *, stream: Stream, deferrable: bool = True, trigger_poll_interval: float | None = None, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.stream = stream
        self.deferrable = deferrable
        self.trigger_poll_interval = trigger_poll_interval

    @abc.abstractmethod
    def make_trigger(self, context: Context) -> LedgerTrigger:
        """The trigger whose look this sensor repeats."""

    def execute(self, context: Context) -> Any:
        """Look; defer if there is nothing yet."""
        trigger = self.make_trigger(context)
        with LedgerHook(self.stream.ledger).opened() as ledger:
            register(ledger, self.stream)
            payload = self._patiently(trigger, ledger)
        if payload is not None:
            return self.found(context, payload)
        if not self.deferrable:
            return super().execute(context)
        return self.defer(trigger=trigger, method_name="found", timeout=timedelta(seconds=self.timeout))

    def poke(self, context: Context) -> bool:
        """One look, for a sensor that does not defer."""
        with LedgerHook(self.stream.ledger).opened() as ledger:
            return self.make_trigger(context).look(ledger) is not None

    def found(self, context: Context, event: dict[str, Any]) -> None:  # noqa: ARG002 - Airflow's signature
        """Called with what the look found, in this task or after the deferral."""
        if event.get("complete", True):
            self.log.info("Done: %s.", event["reason"])
        else:
            self.log.warning("Not waiting any longer: %s.", event["reason"])

    def _patiently(self, trigger: LedgerTrigger, ledger: Ledger) -> dict[str, Any] | None:
        deadline = time.monotonic() + (_PATIENCE if self.deferrable else 0)
        while True:
            payload = trigger.look(ledger)
            if payload is not None or time.monotonic() > deadline:
                return payload
            time.sleep(_LOOK_EVERY)

    def _poll_seconds(self) -> float:
        if self.trigger_poll_interval is not None:
            return self.trigger_poll_interval
        return conf.getfloat("headrace", "poll_interval", fallback=1.0)
