"""A producer that keeps a given rate, and records what the proof needs: deliveries and damaged records."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from examples.demo.damage import Damage
from examples.demo.errors import DemoError
from examples.demo.flights import FlightRecord
from examples.demo.proof import Place

from headrace.clock import Clock, SystemClock

if TYPE_CHECKING:
    from confluent_kafka import Message

# The rate is kept in slices of this many seconds.
_SLICE_SECONDS = 0.1
_FLUSH_SECONDS = 60.0


class Producing:
    """Sends records to a topic from its own thread, at ``rate`` records a second (None: as fast as possible).

    ``delivered`` counts the records that the broker has acknowledged; ``malformed`` has the places of damaged ones.
    """

    def __init__(
        self,
        bootstrap_servers: str,
        topic: str,
        records: Iterable[FlightRecord],
        *,
        rate: float | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.topic = topic
        self.delivered = 0
        self.malformed: dict[Place, Damage] = {}
        self._bootstrap_servers = bootstrap_servers
        self._records = records
        self._rate = rate
        self._clock = clock or SystemClock()
        self._stop = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="producer", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def so_far(self) -> int:
        """The number of records delivered. Raises the thread's error if it failed."""
        if self._error is not None:
            raise self._error
        return self.delivered

    def wait(self) -> None:
        """Wait until everything is delivered. Raises the thread's error if it failed."""
        self._thread.join()
        self.so_far()

    def stop(self) -> None:
        """Stop sending, and wait for the thread to end."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        try:
            self._produce()
        except BaseException as error:  # raised by `so_far`
            self._error = error

    def _produce(self) -> None:
        from confluent_kafka import Producer

        producer = Producer(
            {
                "bootstrap.servers": self._bootstrap_servers,
                # Otherwise the producer itself may write a record twice.
                "enable.idempotence": True,
                "linger.ms": 50,
                "compression.type": "lz4",
                # The partitioner of the Java client, so that all clients choose the same partition for a key.
                "partitioner": "murmur2_random",
                "queue.buffering.max.messages": 200_000,
                "log_level": 3,
            }
        )
        began = self._clock.monotonic()
        sent = 0
        for record in self._records:
            self._send(producer, record)
            sent += 1
            if self._rate is not None and sent % max(int(self._rate * _SLICE_SECONDS), 1) == 0:
                producer.poll(0)
                self._clock.wait(self._stop, began + sent / self._rate - self._clock.monotonic())
            if self._stop.is_set():
                break
        left = producer.flush(_FLUSH_SECONDS)
        if left:
            raise DemoError(
                f"Kafka did not acknowledge {left} of {sent} records within {_FLUSH_SECONDS:g} s.",
                remedy="See Kafka's log; is the disk full?",
            )

    def _send(self, producer: Any, record: FlightRecord) -> None:
        while True:
            try:
                producer.produce(
                    self.topic,
                    key=record.key,
                    value=record.value,
                    on_delivery=self._delivered if record.damage is None else self._damaged(record.damage),
                )
                return
            except BufferError:  # the queue is full: let deliveries make room
                producer.poll(0.1)

    def _delivered(self, error: object, _: Message) -> None:
        if error is not None:
            self._error = DemoError(f"Kafka refused a record: {error}.")
            return
        self.delivered += 1

    def _damaged(self, damage: Damage) -> Any:
        def delivered(error: object, message: Message) -> None:
            self._delivered(error, message)
            topic, partition, offset = message.topic(), message.partition(), message.offset()
            if error is None and topic is not None and partition is not None and offset is not None:
                self.malformed[Place(topic, partition, offset)] = damage

        return delivered


def create_topic(bootstrap_servers: str, topic: str, partitions: int, replicas: int = 1) -> None:
    """Create the topic. Raises DemoError if that fails, also if the topic exists already."""
    from confluent_kafka import KafkaException
    from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]

    admin = AdminClient({"bootstrap.servers": bootstrap_servers, "log_level": 3})
    try:
        admin.create_topics([NewTopic(topic, num_partitions=partitions, replication_factor=replicas)])[topic].result(30)
    except KafkaException as error:
        raise DemoError(f"The topic {topic} cannot be created: {error}.") from error
