"""The producer of the load: it keeps its rate while brokers fail, and records every delivery report."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from examples.demo.damage import Damage
from examples.demo.proof import Place
from tests.hammer.errors import HammerError
from tests.hammer.pipeline import Numbered

if TYPE_CHECKING:
    from confluent_kafka import Message

_SLICE_SECONDS = 0.1
FLUSH_SECONDS = 120.0
"""How long the end waits for what was sent last."""
STUCK_SECONDS = 120.0
"""Longer than a broker is away by one fault, and than it then takes to start on a busy machine."""
# A fault lasts a minute at most, and after several in a row a broker takes its time.
_DELIVERY_MS = 600_000


@dataclass(slots=True)
class Receipts:
    """The delivery reports: ``places`` of acknowledged records by number, and ``refused``, the errors of failed
    deliveries by number. A record whose delivery failed may be in Kafka or not."""

    places: dict[int, Place] = field(default_factory=dict)
    malformed: dict[Place, Damage] = field(default_factory=dict)
    refused: dict[int, str] = field(default_factory=dict)


class Load:
    """Sends ``records`` to ``topic`` from its own thread, ``rate`` a second; while Kafka is down they queue up."""

    def __init__(self, bootstrap_servers: str, topic: str, records: Iterable[Numbered], *, rate: float) -> None:
        self.receipts = Receipts()
        self.sent = 0
        self.purged = 0
        """How often the producer was stuck and had to be replaced."""
        self._moved, self._seen = time.monotonic(), 0
        self._bootstrap_servers = bootstrap_servers
        self._topic = topic
        self._records = records
        self._rate = rate
        self._stop = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="load", daemon=True)

    @property
    def acknowledged(self) -> int:
        """Records that the broker has acknowledged so far."""
        return len(self.receipts.places)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """Stop sending, and wait until Kafka has acknowledged everything, or the flush times out.

        Raises:
            HammerError: the producer has broken.
        """
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join()
        self.check()

    def give_up(self) -> None:
        """Stop sending without waiting."""
        self._stop.set()

    def check(self) -> None:
        """Raise HammerError if the thread has failed."""
        if self._error is not None:
            raise HammerError(f"The producer has failed: {self._error}.") from self._error

    def _run(self) -> None:
        try:
            self._produce()
        except BaseException as error:  # told to whoever asks
            self._error = error

    def _produce(self) -> None:
        producer = self._connect()
        began = time.monotonic()
        for record in self._records:
            self._send(producer, record)
            self.sent += 1
            if self.sent % max(int(self._rate * _SLICE_SECONDS), 1) == 0:
                producer.poll(0)
                if self._stuck(producer):
                    self._purge(producer)
                    producer = self._connect()
                self._stop.wait(max(0.0, began + self.sent / self._rate - time.monotonic()))
            if self._stop.is_set():
                break
        if producer.flush(FLUSH_SECONDS):
            self._purge(producer)

    def _connect(self) -> Any:
        from confluent_kafka import Producer

        self._moved, self._seen = time.monotonic(), self.acknowledged
        return Producer(
            {
                "bootstrap.servers": self._bootstrap_servers,
                # Otherwise the producer itself may write a record twice when a broker breaks.
                "enable.idempotence": True,
                "acks": "all",
                "message.timeout.ms": _DELIVERY_MS,
                "reconnect.backoff.max.ms": 1_000,
                "linger.ms": 20,
                "queue.buffering.max.messages": 1_000_000,
                # Otherwise it would log ten times a second that a broker is down, which is intended here.
                "log_level": 0,
            }
        )

    def _stuck(self, producer: Any) -> bool:
        """Whether records have waited for ``STUCK_SECONDS`` without any acknowledgement.

        librdkafka 2.16 was observed never to reconnect to a restarted broker.
        """
        if self.acknowledged != self._seen or not len(producer):
            self._moved, self._seen = time.monotonic(), self.acknowledged
        return time.monotonic() - self._moved > STUCK_SECONDS

    def _purge(self, producer: Any) -> None:
        """Give up the records that are not acknowledged: they count as refused, whether Kafka has them or not."""
        self.purged += 1
        producer.purge()
        producer.flush(FLUSH_SECONDS)

    def _send(self, producer: Any, record: Numbered) -> None:
        while True:
            try:
                producer.produce(
                    self._topic,
                    key=record.key,
                    value=record.value,
                    on_delivery=self._reported(record.number, record.damage),
                )
                return
            except BufferError:  # the queue is full: let deliveries make room
                producer.poll(0.1)

    def _reported(self, number: int, damage: Damage | None) -> Any:
        receipts = self.receipts

        def reported(error: object, message: Message) -> None:
            topic, partition, offset = message.topic(), message.partition(), message.offset()
            if error is not None or topic is None or partition is None or offset is None:
                receipts.refused[number] = str(error)
                return
            place = receipts.places[number] = Place(topic, partition, offset)
            if damage is not None:
                receipts.malformed[place] = damage

        return reported
