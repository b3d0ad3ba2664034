"""Checks which principal a stream logs in to Kafka as, and whether the broker gives it the rights that it needs.

Kafka's protocol has no query for the own principal, so it is named as far as the client knows it. The broker reports
the allowed operations in its descriptions of topics and groups. Rights on
transactional ids are in no description.
"""

from __future__ import annotations

import contextlib
import json
import time
from base64 import urlsafe_b64decode
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotAnsweredError
from pathlib import Path
from typing import Any

from confluent_kafka import KafkaError, KafkaException, TopicCollection
from confluent_kafka import TopicPartition as KafkaPartition
from confluent_kafka.admin import AclOperation  # type: ignore[attr-defined]

from headrace.checks.connecting import Checked, topic_of
from headrace.errors import HeadraceError
from headrace.kafka.client import AskingAdmin, admin_config, open_consumer
from headrace.kafka.client_errors import explained
from headrace.kafka.errors import TopicsNotFoundError
from headrace.kafka.tokens import OAUTH_CALLBACK, TokenSource
from headrace.kafka.topics import TopicWatch, error_text
from headrace.stream import KafkaInput, Stream

_SECONDS = 5.0
_STEP_SECONDS = 1.0
_READING = (AclOperation.DESCRIBE, AclOperation.READ)
_WRITING = (AclOperation.DESCRIBE, AclOperation.WRITE)
# By its settings it is known whether the topic is compacted.
_LETTERS = (*_WRITING, AclOperation.DESCRIBE_CONFIGS)
_REFUSED = (
    KafkaError.TOPIC_AUTHORIZATION_FAILED,
    KafkaError.GROUP_AUTHORIZATION_FAILED,
    KafkaError.CLUSTER_AUTHORIZATION_FAILED,
)


def check_kafka_rights(stream: Stream) -> Iterator[Checked]:
    """For each Kafka input and output: the principal, and the rights on its topics and its consumer group.

    An input or output whose Kafka does not answer gives nothing: that is reported by other checks.
    """
    for source in stream.kafka_inputs:
        yield from _check(f"input {source.id}", source, _READING, stream.group_of(source), (AclOperation.READ,))
    for output in stream.kafka_outputs:
        # The groups of its batches, which mark what was sent, are named after their times.
        group = f"headrace-{stream.name}.{output.step}-0"
        rights = (AclOperation.READ, AclOperation.DELETE)
        yield from _check(f"output {output.id}", topic_of(output, output.id), _WRITING, group, rights)
    for indexed in stream.elasticsearch_outputs:
        if indexed.dead_letter_topic is not None:
            letters = topic_of(indexed.dead_letter_topic, indexed.id)
            yield from _check(f"output {indexed.id}, dead letters", letters, _LETTERS, None, ())


def _check(
    name: str,
    source: KafkaInput,
    of_topics: Collection[AclOperation],
    group: str | None,
    of_group: Collection[AclOperation],
) -> Iterator[Checked]:
    with contextlib.suppress(HeadraceError, KafkaException, NotAnsweredError):
        # librdkafka writes nothing to standard error, among the results.
        config = {**admin_config(source), "log_level": 0}
        admin = AskingAdmin(config, gives_up_early=True)
        refused: dict[str, TopicsNotFoundError] = {}
        seen, _ = TopicWatch(admin, source).topics(refused)
        yield Checked(f"{name}, principal", principal(config))
        topics = [topic.topic for topic in seen]
        if not topics:
            return
        described = admin.describe_topics(
            TopicCollection(topics), include_authorized_operations=True, request_timeout=_SECONDS
        )
        admin.wait(described.values(), _SECONDS)
        for topic in topics:
            yield _compared(f"{name}, rights on topic {topic}", described[topic], of_topics, f"topic {topic}")
        if group is None:
            return
        about_group = f"{name}, rights on group {group}"
        try:
            _await_coordinator(config, group, topics)
        except KafkaException as error:
            yield _unanswered(about_group, f"group {group}", of_group, error)
            return
        groups = admin.describe_consumer_groups([group], include_authorized_operations=True, request_timeout=_SECONDS)
        admin.wait(groups.values(), _SECONDS)
        yield _compared(about_group, groups[group], of_group, f"group {group}")


def _await_coordinator(config: Mapping[str, Any], group: str, topics: Collection[str]) -> None:
    """Ask for the group's offsets with a consumer. Raises KafkaException.

    If a group's coordinator is not there, librdkafka 2.16 ends the process of an admin client that describes the group
    (an assertion in rd_kafka_admin_coord_request).
    """
    consumer = open_consumer({**config, "group.id": group, "enable.auto.commit": False})
    until = time.monotonic() + _SECONDS
    try:
        while True:
            try:
                consumer.committed([KafkaPartition(topic, 0) for topic in topics], timeout=_STEP_SECONDS)
                return
            except KafkaException:
                # That it may not ask for the coordinator is an event, and no answer.
                event = consumer.poll(0)
                refused = None if event is None else event.error()
                if refused is not None and refused.code() == KafkaError.GROUP_AUTHORIZATION_FAILED:
                    raise KafkaException(refused) from None
                if time.monotonic() > until:
                    raise
    finally:
        consumer.close()


def _compared(name: str, described: Future[Any], wanted: Collection[AclOperation], what: str) -> Checked:
    try:
        allowed = described.result(timeout=0).authorized_operations
    except KafkaException as error:
        return _unanswered(name, what, wanted, error)
    if allowed is None:
        return Checked(name, "the broker does not report them")
    missing = [operation for operation in wanted if operation not in allowed]
    if missing:
        return _missing(
            name, what, missing, f"The principal may not {' and '.join(operation.name for operation in missing)}."
        )
    return Checked(name, ", ".join(operation.name for operation in wanted))


def _unanswered(name: str, what: str, wanted: Collection[AclOperation], error: KafkaException) -> Checked:
    """An ACL helps only against a refusal."""
    kafka_error: KafkaError = error.args[0]
    if kafka_error.code() in _REFUSED:
        return _missing(name, what, wanted, f"{error_text(error)}.")
    why = explained(kafka_error)
    return Checked(name, what, f"{why.text}.", why.remedy)


def _missing(name: str, what: str, operations: Collection[AclOperation], error: str) -> Checked:
    names = " and ".join(operation.name for operation in operations)
    return Checked(name, what, error, f"Give the principal an ACL that allows {names} on {what}.")


def principal(config: Mapping[str, Any]) -> str:
    """The principal of a client with these settings, as far as the client knows; never a secret.

    Raises TokenError.
    """
    protocol = str(config.get("security.protocol", "plaintext")).lower()
    if protocol.startswith("sasl"):
        mechanism = str(config.get("sasl.mechanism") or config.get("sasl.mechanisms") or "GSSAPI").upper()
        return f"{_of_mechanism(mechanism, config)} ({mechanism})"
    if protocol == "ssl":
        return _of_certificate(config)
    return _ANONYMOUS


_ANONYMOUS = "none, so it is the broker's User:ANONYMOUS"


def _of_mechanism(mechanism: str, config: Mapping[str, Any]) -> str:
    if mechanism == "GSSAPI":
        return str(config.get("sasl.kerberos.principal", "the Kerberos principal of this host"))
    if mechanism != "OAUTHBEARER":
        return f"User:{config.get('sasl.username')}"
    source = config.get(OAUTH_CALLBACK)
    if not isinstance(source, TokenSource):
        return f"what the token server names for the client {config.get('sasl.oauthbearer.client.id')!r}"
    if source.kind == "msk":
        return f"the AWS identity of this host's credentials, signed for {source.argument}"
    subject = _subject(str(source.token(config.get("sasl.oauthbearer.config"))[0]))
    return "what the broker reads in the token" if subject is None else f"User:{subject}"


def _subject(token: str) -> str | None:
    """The ``sub`` of a JSON web token, which a broker takes for the principal unless it is configured otherwise."""
    with contextlib.suppress(ValueError, IndexError, AttributeError):
        claims = token.split(".")[1]
        subject = json.loads(urlsafe_b64decode(claims + "=" * (-len(claims) % 4))).get("sub")
        return None if subject is None else str(subject)
    return None


def _of_certificate(config: Mapping[str, Any]) -> str:
    pem = config.get("ssl.certificate.pem")
    path = config.get("ssl.certificate.location")
    if pem is None and path is None:
        if config.get("ssl.keystore.location"):
            return f"the subject of the certificate in {config['ssl.keystore.location']}"
        return _ANONYMOUS
    try:
        # Part of Airflow's installation; without it, the file is all that can be named.
        from cryptography import x509

        data = str(pem).encode() if pem is not None else Path(str(path)).read_bytes()
        return f"User:{x509.load_pem_x509_certificate(data).subject.rfc4514_string()} (certificate)"
    except (ImportError, OSError, ValueError):
        return f"the subject of the certificate in {path or 'the connection'}"
