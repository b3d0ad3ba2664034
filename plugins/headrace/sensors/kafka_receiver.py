"""The sensor that waits until a stream receives."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headrace.sensors.blocks_ready import LedgerSensor
from headrace.triggers.ledger import ReceiversReceivingTrigger

if TYPE_CHECKING:
    from airflow.sdk import Context

    from headrace.stream_context import StreamContext


class KafkaReceiverSensor(LedgerSensor):
    """Waits until all of the stream is received: job alive, receivers running, no partition stopped by an error.

    The task's log shows why it waits, for example a partition's error.

    :param stream: the stream.
    :param max_silence: the longest time since a receiver's last heartbeat, in seconds; a receiver sends several
        heartbeats a second.
    """

    def __init__(self, *, max_silence: float = 10.0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.max_silence = max_silence

    def make_trigger(
        self,
        context: Context,  # noqa: ARG002 - the contract
        stream_context: StreamContext,
    ) -> ReceiversReceivingTrigger:
        stream = stream_context.stream
        return ReceiversReceivingTrigger(
            ledger=stream.ledger,
            stream=stream.name,
            receivers=stream.receivers,
            max_silence_ms=int(self.max_silence * 1000),
            poll_interval=self.trigger_poll_interval,
        )
