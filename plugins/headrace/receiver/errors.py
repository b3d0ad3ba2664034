"""What goes wrong while receiving."""

from __future__ import annotations

from headrace.errors import HeadraceError


class ReceivingError(HeadraceError):
    """Receiving cannot go on; the receiver stops and the tracker decides about its restart."""


class GeneratorStateError(ReceivingError):
    """The block generator was asked for something that its state does not allow."""


class KafkaClientError(ReceivingError):
    """The Kafka client is beyond repair; a new one is needed."""


class KeyVersionsError(ReceivingError):
    """Offsets no longer order the values of a key: new values would be lost."""


class StoreFailedError(ReceivingError):
    """A block could not be stored after all tries."""
