"""The trigger of KafkaReceiverSensor: waits until all of a stream is received."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headrace.runs.receiver_job import receiving
from headrace.triggers.base import LedgerTrigger

if TYPE_CHECKING:
    from headrace.ledger import Ledger


class ReceiversReceivingTrigger(LedgerTrigger):
    """Fires once all of the stream is received. Until then the task's log shows why it is not."""

    def __init__(
        self, *, ledger: str, stream: str, receivers: int, max_silence_ms: int, poll_interval: float | None = None
    ) -> None:
        super().__init__(
            ledger=ledger,
            stream=stream,
            poll_interval=poll_interval,
            receivers=receivers,
            max_silence_ms=max_silence_ms,
        )
        self._reported = ""
        self._warned = ""

    def look(self, ledger: Ledger) -> dict[str, Any] | None:
        from headrace.receiver.health import unadopted

        found_unadopted = unadopted(ledger, self.stream)
        if found_unadopted is not None and str(found_unadopted) != self._warned:
            self._warned = str(found_unadopted)
            self.log.warning("%s", self._warned)
        found = receiving(ledger, self.stream, **self.parameters)
        if found.reason != self._reported:
            self._reported = found.reason
            self.log.info("%s", found.reason)
        return {"reason": found.reason} if found.ok else None
