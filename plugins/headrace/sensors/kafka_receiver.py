"""The sensor that waits until a stream receives."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from airflow.sdk import BaseSensorOperator

from headrace.errors import HeadraceError
from headrace.hooks.ledger import LedgerHook
from headrace.sensors.blocks_ready import LedgerSensor
from headrace.stream import Stream
from headrace.stream_context import StreamContext
from headrace.triggers.ledger import ReceiversReceivingTrigger

if TYPE_CHECKING:
    from airflow.sdk import Context


class KafkaReceiverSensor(LedgerSensor):
    """Waits until all of the stream is received: job alive, receivers running, no partition stopped by an error.

    The task's log shows why it waits, for example a partition's error.

    :param stream: the stream, or its name, with ``ledger``, in a DAG file that does not define it: an import of the
        file that does would make the stream's DAGs a second time. Until the ledger, and the stream in it, are there, it
        waits.
    :param ledger: where a stream given by its name is known, as ``Stream.ledger`` of its definition.
    :param max_silence: the longest time since a receiver's last heartbeat, in seconds; a receiver sends several
        heartbeats a second.
    """

    def __init__(
        self, *, stream: Stream | str, ledger: str | None = None, max_silence: float = 10.0, **kwargs: Any
    ) -> None:
        if isinstance(stream, str) != (ledger is not None):
            raise ValueError("KafkaReceiverSensor: give `ledger` with the name of a stream, and not with a Stream.")
        # A name is only used by `opened`.
        super().__init__(stream=stream, **kwargs)  # type: ignore[arg-type]
        self.ledger = ledger
        self.max_silence = max_silence

    def execute(self, context: Context) -> Any:
        """Wait. A stream that is given by its name, and that the ledger does not have yet, is waited for as well."""
        from headrace.ledger.errors import LedgerMissingError, StreamNotFoundError

        try:
            return super().execute(context)
        except (LedgerMissingError, StreamNotFoundError) as error:
            self._log_missing(error)
        if self.deferrable:
            return self.defer(
                trigger=self._trigger(str(self.stream)), method_name="fired", timeout=timedelta(seconds=self.timeout)
            )
        return BaseSensorOperator.execute(self, context)

    def poke(self, context: Context) -> bool:
        """Check the condition once, for a sensor that does not defer."""
        from headrace.ledger.errors import LedgerMissingError, StreamNotFoundError

        try:
            return super().poke(context)
        except (LedgerMissingError, StreamNotFoundError) as error:
            self._log_missing(error)
            return False

    def _log_missing(self, error: HeadraceError) -> None:
        if self.ledger is None:
            raise error
        self.log.info("Waiting for stream %s: %s", self.stream, error)

    @contextmanager
    def opened(self) -> Iterator[StreamContext]:
        """The stream with its ledger open; by its name, as it is defined there, without making a ledger.

        Raises:
            StreamNotFoundError: the ledger does not know a stream of this name.
            LedgerMissingError: there is no ledger yet.
        """
        if self.ledger is None:
            with super().opened() as stream_context:
                yield stream_context
            return
        with LedgerHook(self.ledger).get_conn(create=False) as ledger:
            yield StreamContext(Stream.from_json(ledger.streams.get(str(self.stream)).definition), ledger)

    def make_trigger(
        self,
        context: Context,  # noqa: ARG002 - the contract
        stream_context: StreamContext,
    ) -> ReceiversReceivingTrigger:
        return self._trigger(stream_context.stream.name)

    def _trigger(self, stream_name: str) -> ReceiversReceivingTrigger:
        return ReceiversReceivingTrigger(
            ledger=self.ledger or self.stream.ledger,
            stream=stream_name,
            max_silence_ms=int(self.max_silence * 1000),
            poll_interval=self.trigger_poll_interval,
        )
