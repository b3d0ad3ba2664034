"""The errors of queries to Kafka and of reading from it."""

from __future__ import annotations

from headrace.errors import Failure, HeadraceError


class ReplayError(HeadraceError):
    """Ranges cannot be read again from Kafka."""


class OverlappingRangesError(ReplayError):
    """Two ranges share offsets."""

    failure = Failure.FINAL


class RangesGoneError(ReplayError):
    """Kafka no longer has all of the ranges: retention removed them, or the topic was deleted or created again."""

    failure = Failure.FINAL


class RecordsDifferError(ReplayError):
    """A range holds more or fewer records than were counted when it was first read."""

    failure = Failure.FINAL


class RecordsReplacedError(RecordsDifferError):
    """Kafka's log was truncated after records were received, and their offsets were given to others."""

    def __init__(self, ranges: str) -> None:
        super().__init__(
            "Kafka's log was truncated after these records were received, and it has given their offsets to others: "
            f"{ranges}.",
            remedy="The log no longer has them, and Kafka has other records in their place. Documents that were "
            "written stay as they are. If the batch has not completed, give it up: `headrace batches abandon`.",
        )


class RangesUnreadableError(ReplayError):
    """Kafka does not answer, or does not deliver the records that it should have."""


class ClientSettingError(HeadraceError):
    """A setting of the Kafka client is unknown, reserved for headrace, or in the wrong place."""


class TokenError(HeadraceError):
    """There is no token for a client that logs in by OAUTHBEARER: what makes it raised an error, or is missing."""


class KafkaNotAskedError(HeadraceError):
    """No broker of an input's cluster answers, or none accepts the client."""


class StartingOffsetsError(HeadraceError):
    """A starting position cannot be resolved, for example because its partition does not exist."""


class TopicsNotFoundError(HeadraceError):
    """A named topic does not exist, or may not be described."""
