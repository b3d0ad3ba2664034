"""Base class of triggers that poll the ledger until they fire."""

from __future__ import annotations

import abc
import asyncio
import time
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any, ClassVar

from airflow.triggers.base import BaseTrigger, TriggerEvent

from headrace.hooks.ledger import LedgerHook
from headrace.runs.threads import in_thread
from headrace.runs.waiting import poll_seconds

if TYPE_CHECKING:
    from headrace.ledger import Ledger

FIRST_LOOK_SECONDS = 1.0
"""How long a task polls in place before it defers, in seconds: a deferral and resume costs 2.2 s."""
_FIRST_LOOK_EVERY = 0.1
# The longest pause after a ledger did not answer, in seconds. The pause starts at the poll interval and doubles.
_LONGEST_PAUSE = 30.0


class LedgerTrigger(BaseTrigger):
    """Polls the ledger from a thread, and retries while it is unavailable: a database restart fails no task.

    Subclasses keep their arguments in ``parameters`` (`serialize` stores them; no secrets) and implement `look`.
    ``run`` starts from its beginning in every new triggerer, so `look` must depend on the ledger alone.

    :param poll_interval: seconds between two polls; by default ``[headrace] poll_interval``.
    """

    POLL_SECONDS: ClassVar[float] = 1.0
    """The poll interval in seconds if neither the argument nor the configuration gives one."""

    def __init__(self, *, ledger: str, stream: str, poll_interval: float | None = None, **parameters: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ledger = ledger
        self.stream = stream
        self.poll_interval = poll_seconds(poll_interval, otherwise=self.POLL_SECONDS)
        self.parameters = parameters

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """Airflow's form of the trigger: the class path and its arguments."""
        kind = type(self)
        return f"{kind.__module__}.{kind.__qualname__}", {
            "ledger": self.ledger,
            "stream": self.stream,
            "poll_interval": self.poll_interval,
            **self.parameters,
        }

    @abc.abstractmethod
    def look(self, ledger: Ledger) -> dict[str, Any] | None:
        """Called in a thread at each poll. Returns the event's payload, or None to poll again."""

    def look_before_deferring(self, ledger: Ledger) -> dict[str, Any] | None:
        """Poll `look` in this thread for ``FIRST_LOOK_SECONDS``, at least once. Returns its payload, or None."""
        deadline = time.monotonic() + FIRST_LOOK_SECONDS
        while (payload := self.look(ledger)) is None and time.monotonic() <= deadline:
            time.sleep(_FIRST_LOOK_EVERY)
        return payload

    def look_until_it_fires(self, ledger: Ledger) -> dict[str, Any]:
        """Poll `look` in this thread, for a task that does not defer. Returns its payload."""
        while (payload := self.look(ledger)) is None:
            time.sleep(self.poll_interval)
        return payload

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Poll until there is an event, and yield it."""
        ledger = await self._opened()
        try:
            yield TriggerEvent(await self._looked(ledger))  # type: ignore[no-untyped-call]
        finally:
            await in_thread(self.ledger, ledger.close)

    async def _opened(self) -> Ledger:
        from headrace.ledger.errors import LedgerUnavailableError

        pause = self.poll_interval
        while True:
            try:
                return await LedgerHook(self.ledger).aget_conn()
            except LedgerUnavailableError as error:
                self.log.warning("The ledger cannot be opened, trying again in %.0f s: %s", pause, error)
            await asyncio.sleep(pause)
            pause = min(pause * 2, _LONGEST_PAUSE)

    async def _looked(self, ledger: Ledger) -> dict[str, Any]:
        """Poll until `look` returns a payload, and return it."""
        from headrace.ledger.errors import LedgerUnavailableError

        pause = self.poll_interval
        while True:
            try:
                payload = await in_thread(self.ledger, self.look, ledger)
            except LedgerUnavailableError as error:
                self.log.warning("The ledger does not answer, trying again in %.0f s: %s", pause, error)
                await asyncio.sleep(pause)
                pause = min(pause * 2, _LONGEST_PAUSE)
                continue
            if payload is not None:
                return payload
            pause = self.poll_interval
            await asyncio.sleep(pause)
