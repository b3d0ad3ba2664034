"""The settings of a Kafka output's clients, the topic's id, and the mapping of Kafka's errors to headrace's errors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from confluent_kafka import KafkaError, KafkaException, TopicCollection
from confluent_kafka.admin import AdminClient

from headrace.connections import resolve
from headrace.kafka.client import SECURITY_SETTINGS, connection_config
from headrace.spark.outputs.errors import (
    KafkaOutputError,
    KafkaRefusedError,
    MessageRefusedError,
    TopicMissingError,
)

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

_QUESTION_SECONDS = 20.0

_DENIED = {
    KafkaError.TOPIC_AUTHORIZATION_FAILED: "Allow it WRITE and DESCRIBE on the topic.",
    KafkaError.GROUP_AUTHORIZATION_FAILED: "Allow it READ and DELETE on the groups that begin with 'headrace-'.",
    KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED: (
        "Allow it WRITE and DESCRIBE on the transactional ids that begin with 'headrace-'."
    ),
    KafkaError.CLUSTER_AUTHORIZATION_FAILED: "Allow it IDEMPOTENT_WRITE on the cluster.",
    KafkaError.SASL_AUTHENTICATION_FAILED: "Check the login of the output's connection.",
    KafkaError._AUTHENTICATION: "Check the login of the output's connection.",
    KafkaError._SSL: "Check the certificates of the output's connection.",
    KafkaError.INVALID_TRANSACTION_TIMEOUT: (
        "Set transaction_timeout_seconds of the output below the brokers' transaction.max.timeout.ms (15 minutes)."
    ),
}
_REFUSED_MESSAGES = {
    KafkaError.MSG_SIZE_TOO_LARGE: "Raise the topic's max.message.bytes, or drop such rows in the transform.",
    KafkaError.INVALID_MSG_SIZE: "Raise the topic's max.message.bytes, or drop such rows in the transform.",
    KafkaError.INVALID_RECORD: "A compacted topic accepts no message without a key; select a key in the transform.",
    KafkaError._UNKNOWN_PARTITION: "Use only partitions that the topic has, or drop the column.",
}
_MISSING = (KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC, KafkaError.UNKNOWN_TOPIC_ID)


def client_config(connection: str | None, bootstrap_servers: str | None) -> dict[str, Any]:
    """The settings of all clients of the output. Resolves the connection, if there is one, at the time of the call.

    Raises ConnectionNotFoundError, ConnectionFormatError or ClientSettingError.
    """
    if connection is None:
        return {"bootstrap.servers": bootstrap_servers, "allow.auto.create.topics": False}
    found = connection_config(resolve(connection))
    taken = {name: value for name, value in found.items() if name in SECURITY_SETTINGS | _CLIENT_SETTINGS}
    return {**taken, "allow.auto.create.topics": False}


def topic_id(config: Config, topic: str) -> str:
    """The topic's id. Raises TopicMissingError, KafkaRefusedError or KafkaOutputError."""
    admin = AdminClient(dict(config))
    described = admin.describe_topics(TopicCollection([topic]), request_timeout=_QUESTION_SECONDS)[topic]
    try:
        return str(described.result(_QUESTION_SECONDS + 5).topic_id)
    except KafkaException as error:
        raise reported(error.args[0], topic) from error
    except TimeoutError as error:
        raise KafkaOutputError(f"Kafka did not describe topic {topic!r} in {_QUESTION_SECONDS:g} s.") from error


def reported(error: KafkaError, topic: str, *, message: str = "") -> KafkaOutputError:
    """The headrace error for Kafka's error; ``message`` describes the message that it is about."""
    code = error.code()
    text = error.str()
    if code in _MISSING:
        return TopicMissingError(
            f"There is no topic {topic!r} in Kafka, or this client is not allowed to describe it.",
            remedy="Create it with the partitions that it should have; headrace does not create topics.",
        )
    if code in _DENIED:
        return KafkaRefusedError(f"Kafka refuses the producer of topic {topic!r}: {text}.", remedy=_DENIED[code])
    if code in _REFUSED_MESSAGES:
        return MessageRefusedError(
            f"Topic {topic!r} does not accept {message or 'a message'}: {text}.", remedy=_REFUSED_MESSAGES[code]
        )
    return KafkaOutputError(f"Kafka did not accept the batch for topic {topic!r}: {text} ({error.name()}).")
