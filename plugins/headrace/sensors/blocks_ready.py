"""The sensor that waits for a batch's blocks."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

from headrace.sensors.base import LedgerSensor
from headrace.timetables.batch_time import batch_time_ms
from headrace.triggers.blocks_ready import BlocksReadyTrigger

if TYPE_CHECKING:
    from airflow.sdk import Context

# Receivers seal several times a second; a batch should not wait for the poll.
_POLL_SECONDS = 0.2


class BlocksReadySensor(LedgerSensor):
    """Waits until every live receiver has stored all it cut for this batch time.

    With no live receiver there is nothing to wait for, and after ``grace`` it waits no longer: blocks that come
    later join the next open batch.

    :param stream: the stream.
    :param grace: how long after the batch time to wait at most; by default the stream's ``limits.seal_grace``.
    """

    def __init__(self, *, grace: timedelta | None = None, **kwargs: Any) -> None:
        super().__init__(**{"trigger_poll_interval": _POLL_SECONDS, **kwargs})
        self.grace = self.stream.limits.seal_grace if grace is None else grace

    def make_trigger(self, context: Context) -> BlocksReadyTrigger:
        return BlocksReadyTrigger(
            ledger=self.stream.ledger,
            stream=self.stream.name,
            batch_time_ms=batch_time_ms(context, self.stream.batch_interval),
            grace_ms=self.grace // timedelta(milliseconds=1),
            poll_interval=self._poll_seconds(),
        )
