"""What writes to a topic: the settings of its clients, whether the topic is there, and what Kafka's refusals mean."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from confluent_kafka import KafkaError, KafkaException, TopicCollection
from confluent_kafka.admin import ConfigResource, TopicDescription  # type: ignore[attr-defined]

from headrace.connections import resolve
from headrace.errors import Failure, HeadraceError
from headrace.kafka.client import SECURITY_SETTINGS, AskingAdmin, connection_config
from headrace.kafka.client_errors import explained


class KafkaOutputError(HeadraceError):
    """Kafka did not accept what was sent to a topic. Of a transaction, consumers of committed records see nothing."""


class TopicMissingError(KafkaOutputError):
    """A topic that is written to does not exist, or may not be described."""


class OwnTopicError(KafkaOutputError):
    """The output's topic is one of which the batch has records, or a replay's is the one of the stream's own output."""

    failure = Failure.CODE


class KafkaRefusedError(KafkaOutputError):
    """Kafka refuses the client of a topic: credentials, permissions, or a setting."""


class MessageRefusedError(KafkaOutputError):
    """Kafka refuses a message: for example it is too large, or names a partition that is missing."""

    failure = Failure.CODE


Config = Mapping[str, Any]

# A connection's settings, besides security, that also apply to a producer.
_CLIENT_SETTINGS = frozenset(
    {
        "client.id",
        "client.rack",
        "reconnect.backoff.max.ms",
        "reconnect.backoff.ms",
        "socket.connection.setup.timeout.ms",
        "socket.keepalive.enable",
        "socket.receive.buffer.bytes",
        "socket.timeout.ms",
    }
)

PRODUCER_SETTINGS: Mapping[str, Any] = {
    "enable.idempotence": True,
    "compression.type": "zstd",
    "linger.ms": 20,
    # Java's partitioner, so that a key goes to the partition where Kafka Connect and others put it.
    "partitioner": "murmur2_random",
    # The topic limits the size of a message, not the producer.
    "message.max.bytes": 1_000_000_000,
    # Limits the memory to the larger of these bytes and one message.
    "queue.buffering.max.kbytes": 64 * 1024,
    "queue.buffering.max.messages": 200_000,
    "delivery.report.only.error": True,
}
"""The settings of every producer, besides those of `client_config`."""

_QUESTION_SECONDS = 20.0

_DENIED = {
    KafkaError.TOPIC_AUTHORIZATION_FAILED: "Allow it WRITE and DESCRIBE on the topic.",
    KafkaError.GROUP_AUTHORIZATION_FAILED: "Allow it READ and DELETE on the groups that begin with 'headrace-'.",
    KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED: (
        "Allow it WRITE and DESCRIBE on the transactional ids that begin with 'headrace-'."
    ),
    KafkaError.CLUSTER_AUTHORIZATION_FAILED: "Allow it IDEMPOTENT_WRITE on the cluster.",
    KafkaError.SASL_AUTHENTICATION_FAILED: "Check the login of the output's connection.",
    KafkaError.INVALID_TRANSACTION_TIMEOUT: (
        "Set transaction_timeout_seconds of the output below the brokers' transaction.max.timeout.ms (15 minutes)."
    ),
}
_AT_LOG_IN = (KafkaError._SSL, KafkaError._AUTHENTICATION)
_REFUSED_MESSAGES = {
    KafkaError.MSG_SIZE_TOO_LARGE: "Raise the topic's max.message.bytes, or drop such rows in the transform.",
    KafkaError.INVALID_MSG_SIZE: "Raise the topic's max.message.bytes, or drop such rows in the transform.",
    KafkaError.INVALID_RECORD: "A compacted topic accepts no message without a key; select a key in the transform.",
    KafkaError._UNKNOWN_PARTITION: "Use only partitions that the topic has, or drop the column.",
}
_MISSING = (KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC, KafkaError.UNKNOWN_TOPIC_ID)


def client_config(
    connection: str | None, bootstrap_servers: str | None, environ: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """The settings of all clients of a topic. Resolves the connection, if there is one, at the time of the call:
    in ``environ``, by default this process's environment.

    Raises ConnectionNotFoundError, ConnectionFormatError or ClientSettingError.
    """
    if connection is None:
        return {"bootstrap.servers": bootstrap_servers, "allow.auto.create.topics": False}
    config = connection_config(resolve(connection, environ), environ)
    taken = {name: value for name, value in config.items() if name in SECURITY_SETTINGS | _CLIENT_SETTINGS}
    return {**taken, "allow.auto.create.topics": False}


class TopicQuestions:
    """Asks about one topic."""

    def __init__(self, config: Config, topic: str, *, seconds: float = _QUESTION_SECONDS) -> None:
        """``seconds``: for each answer. Raises ClientSettingError or TokenError."""
        self._topic = topic
        self._seconds = seconds
        self._admin = AskingAdmin(config)

    def describe(self) -> TopicDescription:
        """The topic's id and partitions. Raises TopicMissingError, KafkaRefusedError or KafkaOutputError."""
        asked = TopicCollection([self._topic])
        described = self._admin.describe_topics(asked, request_timeout=self._seconds)[self._topic]
        self._admin.wait([described], self._seconds)
        try:
            return cast("TopicDescription", described.result(0))
        except KafkaException as error:
            raise reported(error.args[0], self._topic) from error
        except TimeoutError as error:
            why = self._admin.last_error()
            if why is None:
                raise KafkaOutputError(
                    f"Kafka did not describe topic {self._topic!r} in {self._seconds:g} s."
                ) from error
            raise KafkaRefusedError(
                f"Kafka does not describe topic {self._topic!r}: {why.text}.",
                remedy=why.remedy,
            ) from error

    def is_compacted(self) -> bool:
        """Whether Kafka drops records that have a newer one of their key; False if Kafka does not say."""
        topic = ConfigResource(ConfigResource.Type.TOPIC, self._topic)
        (asked,) = self._admin.describe_configs([topic], request_timeout=self._seconds).values()
        self._admin.wait([asked], self._seconds)
        try:
            return "compact" in str(asked.result(0)["cleanup.policy"].value)
        except (KafkaException, TimeoutError):
            # The right to read a topic's settings is one of its own.
            return False


def topic_id(config: Config, topic: str) -> str:
    """The topic's id. Raises as `TopicQuestions` and its `describe` do."""
    return str(TopicQuestions(config, topic).describe().topic_id)


def reported(error: KafkaError, topic: str, *, message: str = "") -> KafkaOutputError:
    """The headrace error for Kafka's error; ``message`` describes the message that it is about."""
    code = error.code()
    text = error.str()
    if code in _MISSING:
        return TopicMissingError(
            f"There is no topic {topic!r} in Kafka, or this client is not allowed to describe it.",
            remedy="Create it with the partitions that it should have; headrace does not create topics.",
        )
    why = explained(error)
    if code in _DENIED or code in _AT_LOG_IN:
        # Of TLS and log-ins librdkafka's text says which of the causes it is.
        remedy = _DENIED.get(code, why.remedy)
        return KafkaRefusedError(f"Kafka refuses the producer of topic {topic!r}: {why.text}.", remedy=remedy)
    if code in _REFUSED_MESSAGES:
        return MessageRefusedError(
            f"Topic {topic!r} does not accept {message or 'a message'}: {text}.", remedy=_REFUSED_MESSAGES[code]
        )
    return KafkaOutputError(f"Kafka did not accept the batch for topic {topic!r}: {why.text}.", remedy=why.remedy)
