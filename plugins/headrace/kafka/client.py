"""The settings of librdkafka's clients, merged from headrace's own, the connection's, and the input's ``client``.

There are three kinds of settings. Those that affect offsets, assignment and delivery are set by headrace (rules 1 to 3
of the design). Secrets and security settings come from the connection only. All others that may be tuned are on the
allow-list of ``headrace.stream.inputs``.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from confluent_kafka import Consumer, IsolationLevel, KafkaException

from headrace.connections import Connection, resolve
from headrace.kafka.errors import (
    ClientSettingError,
)
from headrace.stream.inputs import CLIENT_SETTINGS, KafkaInput
from headrace.stream.settings import Limits

if TYPE_CHECKING:
    from headrace.stream.stream import Stream


logger = logging.getLogger(__name__)

ClientConfig = dict[str, Any]

# Only a connection may set these. Settings that name files to be loaded as code (plugin.library.paths,
# ssl.engine.location, ssl.providers) are on no list: a connection is data.
SECURITY_SETTINGS = frozenset(
    {
        "bootstrap.servers",
        "security.protocol",
        "sasl.mechanism",
        "sasl.mechanisms",
        "sasl.username",
        "sasl.password",
        "sasl.kerberos.keytab",
        "sasl.kerberos.principal",
        "sasl.kerberos.service.name",
        "sasl.oauthbearer.client.id",
        "sasl.oauthbearer.client.secret",
        "sasl.oauthbearer.extensions",
        "sasl.oauthbearer.method",
        "sasl.oauthbearer.scope",
        "sasl.oauthbearer.token.endpoint.url",
        "ssl.ca.location",
        "ssl.ca.pem",
        "ssl.certificate.location",
        "ssl.certificate.pem",
        "ssl.cipher.suites",
        "ssl.crl.location",
        "ssl.curves.list",
        "ssl.endpoint.identification.algorithm",
        "ssl.key.location",
        "ssl.key.password",
        "ssl.key.pem",
        "ssl.keystore.location",
        "ssl.keystore.password",
        "ssl.sigalgs.list",
        "enable.ssl.certificate.verification",
        "broker.address.family",
    }
)

# Connections made for other consumers may hold these. headrace sets its own, so they are ignored, with a log line.
_LEFT_ASIDE = frozenset(
    {"group.id", "auto.offset.reset", "group.instance.id", "session.timeout.ms", "max.poll.interval.ms"}
)

# The prefetch is bounded in bytes, but librdkafka counts only a message's own bytes and keeps about 330 more with each
# (measured: a million records of 190 bytes took 560 MB). So the number of messages is bounded too, one per 512 bytes.
_BYTES_PER_MESSAGE = 512
# At least librdkafka's default of 100,000, also for a small prefetch. More is faster: 212,000 records/s with 100,000,
# over 400,000 with more.
_LEAST_MESSAGES = 100_000
# Of a partition whose rate is reached, what was prefetched is dropped and read again later. So only about a second's
# worth is prefetched: its number of records, and these bytes of each. A small fetch still gets a whole record batch.
_BYTES_PER_LIMITED_RECORD = 256
_LEAST_FETCH_BYTES = 1 << 16
# One fetch response may exceed the bound, since it is compressed: a sixteenth of the bound that expands four to eight
# times is still within half of it.
_FETCH_SHARE = 16

# When no broker can be reached, librdkafka 2.16 starts again from the bootstrap servers each time, and the backoff does
# not grow: with its default of 100 ms a client tries, and writes a line to stderr, 18 times a second.
_RECONNECT_MS = 1_000

_DEFAULTS: Mapping[str, Any] = {
    "fetch.wait.max.ms": 100,
    # When its queue is full, librdkafka checks again after this time; its default of a second starves a fast receiver.
    "fetch.queue.backoff.ms": 20,
    "check.crcs": True,
    "isolation.level": "read_committed",
    "topic.metadata.refresh.interval.ms": 30_000,
    "reconnect.backoff.ms": _RECONNECT_MS,
    "reconnect.backoff.max.ms": 5_000,
    "statistics.interval.ms": 5_000,
}

_FORCED: Mapping[str, Any] = {
    "enable.auto.commit": False,
    "enable.auto.offset.store": False,
    # Positions come from the ledger: the client must never choose one (rule 2).
    "auto.offset.reset": "error",
    "enable.partition.eof": True,
    "allow.auto.create.topics": False,
}


def consumer_config(
    source: KafkaInput, *, group: str, limits: Limits, environ: Mapping[str, str] | None = None
) -> ClientConfig:
    """The settings of a receiver's consumer. ``environ``: where the connection is looked up; by default this process's
    environment. Raises ClientSettingError, ConnectionNotFoundError or ConnectionFormatError."""
    given = {**_connection_config(source, environ), **_checked(source)}
    config: ClientConfig = {**_DEFAULTS, **_prefetch(limits), **given}
    if "reconnect.backoff.max.ms" in given and "reconnect.backoff.ms" not in given:
        # The given maximum may be below our reconnect.backoff.ms, which librdkafka refuses.
        del config["reconnect.backoff.ms"]
    # This bounds only the largest record: Kafka sends one even if it exceeds the bounds of a fetch. A client that may
    # not receive it drops the connection, which stops every other partition of that broker as well.
    config.setdefault("receive.message.max.bytes", 1_000_000_000)
    config["group.id"] = group
    config.setdefault("client.id", f"headrace-{group}")
    config.update(_FORCED)
    return config


def check_client_settings(stream: Stream) -> None:
    """Check that librdkafka accepts the values in the ``client`` of the stream's inputs. No server is contacted.

    Raises ClientSettingError.
    """
    for source in stream.kafka_inputs:
        alone = source.model_copy(update={"connection": None, "bootstrap_servers": ""})
        config = consumer_config(alone, group=stream.group_of(source), limits=stream.limits)
        try:
            Consumer({**config, "log_level": 0}).close()
        except KafkaException as error:
            raise ClientSettingError(
                f"client of input {source.id!r} is refused by librdkafka: {error.args[0].str().strip()}.",
                remedy="Correct the value; librdkafka's CONFIGURATION.md has what each setting takes.",
            ) from error


def isolation_level(source: KafkaInput) -> IsolationLevel:
    """The isolation level of the input's consumers, for queries of the end offsets that they see. Raises as
    `consumer_config` does."""
    level = {**_DEFAULTS, **_connection_config(source), **_checked(source)}["isolation.level"]
    # librdkafka ignores upper and lower case, too.
    uncommitted = str(level).strip().lower() == "read_uncommitted"
    return IsolationLevel.READ_UNCOMMITTED if uncommitted else IsolationLevel.READ_COMMITTED


def _prefetch(limits: Limits) -> ClientConfig:
    fetch_bytes = max(1 << 20, limits.prefetch_bytes // _FETCH_SHARE)
    messages = max(_LEAST_MESSAGES, limits.prefetch_bytes // _BYTES_PER_MESSAGE)
    partition_bytes = max(1 << 20, fetch_bytes // 4)
    if limits.max_rate_per_partition is not None:
        rate = math.ceil(limits.max_rate_per_partition)
        messages = min(messages, rate)
        partition_bytes = min(partition_bytes, max(_LEAST_FETCH_BYTES, rate * _BYTES_PER_LIMITED_RECORD))
    return {
        "queued.max.messages.kbytes": max(1024, limits.prefetch_bytes // 1024),
        "queued.min.messages": messages,
        "fetch.max.bytes": fetch_bytes,
        "max.partition.fetch.bytes": partition_bytes,
    }


_ADMIN_REFRESH_MS = 5_000


def admin_config(source: KafkaInput, environ: Mapping[str, str] | None = None) -> ClientConfig:
    """The settings of the tracker's admin client."""
    config = _connection_config(source, environ)
    config.setdefault("client.id", "headrace-tracker")
    config["allow.auto.create.topics"] = False
    kept = {name: value for name, value in config.items() if name not in _CONSUMER_ONLY}
    # The client's requests go to the broker that Kafka last named as controller, with KRaft any of them. When that
    # broker stops, no request is answered until the metadata names another one, so it is refreshed often.
    return {**kept, "reconnect.backoff.ms": _RECONNECT_MS, "topic.metadata.refresh.interval.ms": _ADMIN_REFRESH_MS}


# A connection may set these for the consumer; an admin client would warn about them.
_CONSUMER_ONLY = frozenset(
    {*_DEFAULTS, *_prefetch(Limits()), "fetch.min.bytes", "fetch.error.backoff.ms", "fetch.message.max.bytes"}
)


def _connection_config(source: KafkaInput, environ: Mapping[str, str] | None = None) -> ClientConfig:
    if source.connection is None:
        return {"bootstrap.servers": source.bootstrap_servers}
    return connection_config(resolve(source.connection, environ))


def connection_config(connection: Connection) -> ClientConfig:
    """The client settings in a connection of type ``kafka``. ``extra`` uses librdkafka's names, as in Airflow's
    provider; host, port, login and password are used for what ``extra`` does not set. Raises ClientSettingError, and
    ConnectionTypeError if it is of another type."""
    connection.check_type("kafka")
    extra = {name: value for name, value in connection.extra.items() if value is not None}
    if str(extra.pop("enable.auto.commit", False)).lower() in ("true", "1"):
        logger.warning(
            "headrace requires enable.auto.commit=false in the %r connection; got True: it is forced off, "
            "since offsets are committed after their block is stored and not before",
            connection.id,
        )
    aside = sorted(set(extra) & _LEFT_ASIDE)
    if aside:
        logger.info("%s of connection %r are headrace's own and left aside", ", ".join(aside), connection.id)
    config = {name: value for name, value in extra.items() if name not in _LEFT_ASIDE}
    refused = sorted(set(config) - SECURITY_SETTINGS - CLIENT_SETTINGS)
    if refused:
        raise ClientSettingError(
            f"The {connection.id!r} connection sets {', '.join(refused)}, which headrace does not pass to its Kafka "
            "client.",
            remedy=f"Remove them; security settings and {', '.join(sorted(CLIENT_SETTINGS))} are taken.",
        )
    if "bootstrap.servers" not in config:
        if connection.host is None:
            raise ClientSettingError(
                f"The {connection.id!r} connection has neither bootstrap.servers nor a host.",
                remedy='Add {"bootstrap.servers": "host:port"} to its extra.',
            )
        port = f":{connection.port}" if connection.port and ":" not in connection.host else ""
        config["bootstrap.servers"] = f"{connection.host}{port}"
    if connection.login is not None and "sasl.username" not in config:
        config["sasl.username"] = connection.login
        if connection.password is not None:
            config.setdefault("sasl.password", connection.password)
    return config


def _checked(source: KafkaInput) -> ClientConfig:
    refused = sorted(set(source.client) - CLIENT_SETTINGS)
    if refused:
        where = "the connection" if set(refused) & SECURITY_SETTINGS else "nowhere: headrace decides about it"
        raise ClientSettingError(
            f"client of input {source.id!r} sets {', '.join(refused)}, which belongs into {where}.",
            remedy=f"Allowed are {', '.join(sorted(CLIENT_SETTINGS))}.",
        )
    return dict(source.client)
