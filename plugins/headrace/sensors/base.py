"""A sensor that looks into the ledger, and defers when there is nothing yet."""

from __future__ import annotations

import abc
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar

from airflow.sdk import BaseSensorOperator

from headrace.hooks.ledger import LedgerHook, register
from headrace.runs.waiting import in_triggerer, poll_seconds
from headrace.triggers.base import LedgerTrigger
from headrace.triggers.first_look import look_before_deferring

if TYPE_CHECKING:
    from airflow.sdk import Context

    from headrace.ledger import Ledger
    from headrace.stream import Stream


class LedgerSensor(BaseSensorOperator):
    """Looks for a moment, then defers to a trigger that does the same look.

    :param stream: the stream; it is registered in the ledger, so that a sensor may be the first to know it.
    :param deferrable: whether to wait in the triggerer; otherwise as the sensor's ``mode`` says. By default as
        ``[operators] default_deferrable``.
    :param trigger_poll_interval: seconds between two looks into the ledger; by default ``[headrace] poll_interval``.
        A sensor that pokes has its ``poke_interval`` from here too, unless that is given.
    """

    POLL_SECONDS: ClassVar[float] = LedgerTrigger.POLL_SECONDS
    """Of the trigger that `make_trigger` makes."""

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
    def make_trigger(self, context: Context, ledger: Ledger) -> LedgerTrigger:
        """The trigger whose look this sensor repeats; the ledger knows the stream."""

    def execute(self, context: Context) -> Any:
        """Look; defer if there is nothing yet."""
        with LedgerHook(self.stream.ledger).opened() as ledger:
            register(ledger, self.stream)
            return self.wait(context, ledger)

    def wait(self, context: Context, ledger: Ledger) -> Any:
        """Look at a ledger that knows the stream; defer if there is nothing yet."""
        trigger = self.make_trigger(context, ledger)
        payload = look_before_deferring(trigger, ledger, None if self.deferrable else 0.0)
        if payload is not None:
            return self.found(context, payload)
        if not self.deferrable:
            return super().execute(context)
        return self.defer(trigger=trigger, method_name="found", timeout=timedelta(seconds=self.timeout))

    def poke(self, context: Context) -> bool:
        """One look, for a sensor that does not defer."""
        with LedgerHook(self.stream.ledger).opened() as ledger:
            payload = self.make_trigger(context, ledger).look(ledger)
        if payload is not None:
            self.found(context, payload)
        return payload is not None

    def found(self, context: Context, event: dict[str, Any]) -> None:  # noqa: ARG002 - Airflow's signature
        """Called with what the look found, in this task or after the deferral."""
        self.log.info("Done: %s.", event["reason"])
