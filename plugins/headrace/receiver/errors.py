"""The errors of receiving."""

from __future__ import annotations

from headrace.errors import HeadraceError


class ReceivingError(HeadraceError):
    """Receiving cannot continue. The receiver stops, and the tracker decides about its restart."""


class GeneratorStateError(ReceivingError):
    """The block generator's state does not allow the call."""


class KafkaClientError(ReceivingError):
    """The Kafka client has failed permanently; a new one is needed."""


class KeyVersionsError(ReceivingError):
    """Offsets no longer order the values of a key: new values would be lost."""


class StoreFailedError(ReceivingError):
    """A block could not be stored after all tries."""


class ReceiverStoppedError(ReceivingError):
    """A custom receiver gave records after its end, or its records could not be stored."""


class ReceiverClassError(ReceivingError):
    """The class of a custom receiver cannot be found, is no Receiver, or does not take the definition's arguments."""
