"""The settings of librdkafka's clients, merged from headrace's own, the connection's, and the input's ``client``.

All clients are made here (`open_consumer`, `open_producer`, `AskingAdmin`), since a connection may log in by tokens.

There are three kinds of settings. Those that affect offsets, assignment and delivery are set by headrace (rules 1 to 3
of the design). Secrets and security settings come from the connection only. All others that may be tuned are on the
allow-list of ``headrace.stream.inputs``.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import logging
import math
import re
import time
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from confluent_kafka import Consumer, IsolationLevel, KafkaError, KafkaException, Producer
from confluent_kafka.admin import AdminClient

from headrace.connections import Connection, ConnectionNotFoundError, resolve
from headrace.kafka.client_errors import Explained, KeptError, missing_file
from headrace.kafka.errors import ClientSettingError
from headrace.kafka.tokens import OAUTH_CALLBACK, TokenSource, with_tokens
from headrace.stream.inputs import CLIENT_SETTINGS, KafkaInput
from headrace.stream.settings import Limits

if TYPE_CHECKING:
    from headrace.stream.stream import Stream


logger = logging.getLogger(__name__)

ClientConfig = dict[str, Any]

# Only a connection may set these.
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
        "sasl.oauthbearer.assertion.algorithm",
        "sasl.oauthbearer.assertion.claim.aud",
        "sasl.oauthbearer.assertion.claim.exp.seconds",
        "sasl.oauthbearer.assertion.claim.iss",
        "sasl.oauthbearer.assertion.claim.jti.include",
        "sasl.oauthbearer.assertion.claim.nbf.seconds",
        "sasl.oauthbearer.assertion.claim.sub",
        "sasl.oauthbearer.assertion.file",
        "sasl.oauthbearer.assertion.jwt.template.file",
        "sasl.oauthbearer.assertion.private.key.file",
        "sasl.oauthbearer.assertion.private.key.passphrase",
        "sasl.oauthbearer.assertion.private.key.pem",
        "sasl.oauthbearer.client.credentials.client.id",
        "sasl.oauthbearer.client.credentials.client.secret",
        "sasl.oauthbearer.client.id",
        "sasl.oauthbearer.client.secret",
        "sasl.oauthbearer.config",
        "sasl.oauthbearer.extensions",
        "sasl.oauthbearer.grant.type",
        "sasl.oauthbearer.metadata.authentication.type",
        "sasl.oauthbearer.method",
        "sasl.oauthbearer.scope",
        "sasl.oauthbearer.sub.claim.name",
        "sasl.oauthbearer.token.endpoint.url",
        "https.ca.location",
        "https.ca.pem",
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
        # A function that the configuration allows (`headrace.kafka.tokens`).
        OAUTH_CALLBACK,
    }
)

# What librdkafka loads as code, or gives to a shell. A connection is data.
_CODE_SETTINGS = frozenset(
    {"plugin.library.paths", "ssl.engine.location", "ssl.engine.id", "ssl.providers", "sasl.kerberos.kinit.cmd"}
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

# A cut link, or a leader that hangs, leaves a request unanswered. librdkafka waits 60 s for it and 30 s for a new
# connection, even if the link works again. A fetch has to arrive within the first of the two.
_SOCKET_MS = 12_000
_CONNECTION: Mapping[str, Any] = {"socket.timeout.ms": _SOCKET_MS, "socket.connection.setup.timeout.ms": 10_000}

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
    **_CONNECTION,
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
    if "socket.timeout.ms" not in given:
        # librdkafka refuses a time that is not longer than the brokers' wait for records.
        config["socket.timeout.ms"] = _SOCKET_MS + int(config["fetch.wait.max.ms"])
    config["group.id"] = group
    config.setdefault("client.id", f"headrace-{group}")
    config.update(_FORCED)
    return config


def check_client_settings(stream: Stream) -> list[str]:
    """Check that librdkafka accepts the values in the ``client`` of the stream's inputs, and the settings of the Kafka
    connections that this process knows. No server is contacted. Returns a sentence for each connection with settings
    that are left aside.

    Raises ClientSettingError, ConnectionFormatError or ConnectionTypeError.
    """
    notes: list[str] = []
    named = [source.connection for source in stream.kafka_inputs] + [to.connection for to in stream.kafka_outputs]
    named += [to.dead_letter_topic.connection for to in stream.elasticsearch_outputs if to.dead_letter_topic]
    for conn_id in dict.fromkeys(conn_id for conn_id in named if conn_id is not None):
        # Airflow may have the connection where this command cannot see it.
        with contextlib.suppress(ConnectionNotFoundError):
            connection = resolve(conn_id)
            connection_config(connection)
            if names := left_aside(connection):
                notes.append(f"Connection {conn_id!r}: {', '.join(names)} is left aside; it does not concern reading.")
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
    return notes


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
# Only metadata is without a time limit of its own. librdkafka asks for it where it asked last, so while a broker of
# three hangs, another one is named only once this has passed: with 12 s a question took 17 to 18 s, with 6 s 7 to 8 s
# in eleven of twelve cases, and once 16 s.
_ADMIN_SOCKET_MS = 6_000


def admin_config(source: KafkaInput, environ: Mapping[str, str] | None = None) -> ClientConfig:
    """The settings of the tracker's admin client."""
    config = _connection_config(source, environ)
    config.setdefault("client.id", "headrace-tracker")
    config["allow.auto.create.topics"] = False
    kept = {name: value for name, value in config.items() if name not in _CONSUMER_ONLY}
    # The client's requests go to the broker that Kafka last named as controller, with KRaft any of them. When that
    # broker stops, no request is answered until the metadata names another one, so it is refreshed often.
    return {
        **_CONNECTION,
        "socket.timeout.ms": _ADMIN_SOCKET_MS,
        **kept,
        "reconnect.backoff.ms": _RECONNECT_MS,
        "topic.metadata.refresh.interval.ms": _ADMIN_REFRESH_MS,
    }


# A connection may set these for the consumer; an admin client would warn about them.
_CONSUMER_ONLY = frozenset(
    {*_DEFAULTS, *_prefetch(Limits()), "fetch.min.bytes", "fetch.error.backoff.ms", "fetch.message.max.bytes"}
) - frozenset(_CONNECTION)


def _connection_config(source: KafkaInput, environ: Mapping[str, str] | None = None) -> ClientConfig:
    if source.connection is None:
        return {"bootstrap.servers": source.bootstrap_servers}
    return connection_config(resolve(source.connection, environ), environ)


def connection_config(connection: Connection, environ: Mapping[str, str] | None = None) -> ClientConfig:
    """The client settings in a connection of type ``kafka``. ``extra`` uses librdkafka's names, as in Airflow's
    provider; host, port, login and password are used for what ``extra`` does not set. What else librdkafka knows is
    left aside, such as the settings of producers and groups. ``oauth_cb`` is a `TokenSource`;
    ``environ`` has the functions that it may name. Raises ClientSettingError, and ConnectionTypeError if it is of
    another type."""
    connection.check_type("kafka")
    extra = {name: value for name, value in connection.extra.items() if value is not None}
    if str(extra.pop("enable.auto.commit", False)).lower() in ("true", "1"):
        logger.warning(
            "headrace requires enable.auto.commit=false in the %r connection; got True: it is forced off, "
            "since offsets are committed after their block is stored and not before",
            connection.id,
        )
    config = {name: value for name, value in extra.items() if name in _TAKEN}
    if others := frozenset(extra) - _TAKEN:
        _leave_aside(connection.id, others)
    config["bootstrap.servers"] = bootstrap_servers(connection)
    if connection.login is not None and "sasl.username" not in config:
        config["sasl.username"] = connection.login
        if connection.password is not None:
            config.setdefault("sasl.password", connection.password)
    return _with_mechanism(connection, config, environ)


_TAKEN = SECURITY_SETTINGS | CLIENT_SETTINGS


# Once in a process: a connection is read for each client.
@functools.lru_cache(maxsize=256)
def _leave_aside(conn_id: str, names: frozenset[str]) -> None:
    """Log which settings are not passed on: they are of producers or groups, or headrace has its own. Raises
    ClientSettingError for what would load code, and for what librdkafka does not know."""
    if code := sorted(names & _CODE_SETTINGS):
        raise ClientSettingError(
            f"The {conn_id!r} connection sets {', '.join(code)}, by which Kafka's client would run code of the "
            "connection.",
            remedy="Remove it: a connection is data.",
        )
    if unknown := sorted(name for name in names if not _is_known(name)):
        # Not for each worker of Spark.
        import difflib

        near = {name: difflib.get_close_matches(name, _TAKEN, n=1, cutoff=0.75) for name in unknown}
        meant = [f"{found[0]} in place of {name}" for name, found in near.items() if found]
        raise ClientSettingError(
            f"The {conn_id!r} connection sets {', '.join(unknown)}, which librdkafka does not know.",
            remedy=(f"Did you mean {', '.join(meant)}? " if meant else "")
            + "The names are those of librdkafka's CONFIGURATION.md; Kafka's Java client has others.",
        )
    logger.info(
        "%s of connection %r is left aside: it does not concern reading, or headrace sets its own",
        ", ".join(sorted(names)),
        conn_id,
    )


def _is_known(name: str) -> bool:
    """Whether librdkafka has a setting of this name, or confluent-kafka a callback. No client is made: at the latest,
    the second name is refused."""
    try:
        Consumer({"group.id": "headrace", name: "", "headrace": ""})
    except KafkaException as error:
        text = error.args[0].str()
        return text != f'No such configuration property: "{name}"' and not text.startswith("Java JAAS configuration")
    except (TypeError, ValueError, AttributeError):
        # A callback or a dict, which confluent-kafka checks itself.
        return True
    return True


def left_aside(connection: Connection) -> tuple[str, ...]:
    """The names of the settings in a connection's extra that headrace does not pass to Kafka's client."""
    return tuple(sorted(name for name, value in connection.extra.items() if value is not None and name not in _TAKEN))


def _with_mechanism(connection: Connection, config: ClientConfig, environ: Mapping[str, str] | None) -> ClientConfig:
    """The settings with what makes tokens, if their mechanism needs it. Raises ClientSettingError for a log-in that
    this client cannot do: librdkafka would say nothing, or not what to do."""
    config = dict(config)
    is_sasl = str(config.get("security.protocol", "")).lower().startswith("sasl")
    given = config.get("sasl.mechanism") or config.get("sasl.mechanisms")
    mechanism = str(given or "GSSAPI").upper() if is_sasl else ""
    if mechanism == "OAUTHBEARER" and str(config.get("sasl.oauthbearer.method", "")).lower() != "oidc":
        return {**config, OAUTH_CALLBACK: TokenSource.of(connection, config, environ)}
    # A callback that is never called would keep the client waiting for its token.
    config.pop(OAUTH_CALLBACK, None)
    if mechanism == "GSSAPI":
        _check_kerberos(connection, config, is_default=given is None)
    return config


# librdkafka puts these values into the command line of kinit, for a shell.
_KERBEROS_TEXT = re.compile(r"[\w.@/:+-]*")


def _check_kerberos(connection: Connection, config: ClientConfig, *, is_default: bool) -> None:
    for name in ("sasl.kerberos.keytab", "sasl.kerberos.principal", "sasl.kerberos.service.name"):
        if not _KERBEROS_TEXT.fullmatch(str(config.get(name, ""))):
            raise ClientSettingError(
                f"The {connection.id!r} connection's {name} has other characters than letters, digits and _.@/:+-, "
                "which a shell could take for commands.",
                remedy="Use a name without them.",
            )
    if not has_kerberos():
        why = "sets no sasl.mechanism, which means GSSAPI (Kerberos)" if is_default else "logs in by GSSAPI (Kerberos)"
        raise ClientSettingError(
            f"The {connection.id!r} connection {why}, and the librdkafka of this confluent-kafka was built without it.",
            remedy=("Name the mechanism, such as SCRAM-SHA-512; or for Kerberos, i" if is_default else "I")
            + "nstall confluent-kafka from its source beside a librdkafka with GSSAPI, here and on each executor's "
            "host: docs/guides/kafka-log-ins.md#kerberos.",
        )


@functools.cache
def has_kerberos() -> bool:
    """Whether this librdkafka was built with GSSAPI; the wheels of confluent-kafka are not."""
    try:
        Consumer({"group.id": "headrace", "builtin.features": "sasl_gssapi", "log_level": 0}).close()
    except KafkaException:
        return False
    return True


def bootstrap_servers(connection: Connection) -> str:
    """The servers that a connection of type ``kafka`` names. Raises ClientSettingError if there are none."""
    if connection.extra.get("bootstrap.servers"):
        return str(connection.extra["bootstrap.servers"])
    if connection.host is None:
        raise ClientSettingError(
            f"The {connection.id!r} connection has neither bootstrap.servers nor a host.",
            remedy='Add {"bootstrap.servers": "host:port"} to its extra.',
        )
    port = f":{connection.port}" if connection.port and ":" not in connection.host else ""
    return f"{connection.host}{port}"


def _checked(source: KafkaInput) -> ClientConfig:
    refused = sorted(set(source.client) - CLIENT_SETTINGS)
    if refused:
        where = "the connection" if set(refused) & SECURITY_SETTINGS else "nowhere: headrace decides about it"
        raise ClientSettingError(
            f"client of input {source.id!r} sets {', '.join(refused)}, which belongs into {where}.",
            remedy=f"Allowed are {', '.join(sorted(CLIENT_SETTINGS))}.",
        )
    return dict(source.client)


def open_consumer(config: Mapping[str, Any]) -> Consumer:
    """A consumer with these settings. A client that logs in by a callback's tokens takes about a second.

    Raises ClientSettingError for settings that librdkafka refuses, and TokenError.
    """
    with _refusals(config):
        return Consumer(with_tokens(config))


def open_producer(config: Mapping[str, Any]) -> Producer:
    """A producer with these settings. Raises as `open_consumer` does."""
    with _refusals(config):
        return Producer(with_tokens(config))


def open_admin(config: Mapping[str, Any]) -> AdminClient:
    """An admin client with these settings; nothing has to poll it. Raises as `open_consumer` does."""
    with _refusals(config):
        return AdminClient(with_tokens(config))


@contextlib.contextmanager
def _refusals(config: Mapping[str, Any]) -> Iterator[None]:
    if (missing := missing_file(config)) is not None:
        raise ClientSettingError(
            f"A client of Kafka is not made: {missing}.",
            remedy="Put the file there, or correct the path in the connection.",
        )
    try:
        yield
    except KafkaException as error:
        raise ClientSettingError(
            f"librdkafka refuses the settings of a client: {error.args[0].str().strip()}.",
            remedy="Correct the connection, or the input's client; files that it names have to be on this host.",
        ) from error


HOPE_SECONDS = 3.0
"""How long a Kafka is asked of which no broker lets the client in. By then it has tried several times: another broker
would have answered."""
_SLACK_SECONDS = 5.0


class AskingAdmin(AdminClient):
    """An admin client that keeps the last error of its connections: its answers say only that time is over. Not
    thread-safe."""

    def __init__(self, config: Mapping[str, Any], *, gives_up_early: bool = False) -> None:
        """``gives_up_early``: an unreachable server ends a wait early, not only a refused log-in. Raises as
        `open_consumer` does."""
        self._gives_up_early = gives_up_early
        self._last = KeptError(config)
        self._has_heard = False
        with _refusals(config):
            super().__init__(with_tokens({**config, "error_cb": self._on_error}))

    def wait(self, futures: Collection[concurrent.futures.Future[Any]], seconds: float) -> None:
        """Wait until all are done, but not much longer than ``seconds``, and about 3 s if no broker lets it log in."""
        began = time.monotonic()
        self._has_heard = False
        open_ones = set(futures)
        while open_ones and time.monotonic() < began + seconds + _SLACK_SECONDS:
            self.poll(0)
            done, open_ones = concurrent.futures.wait(open_ones, timeout=0.1)
            if any(not future.cancelled() and future.exception() is None for future in done):
                self._last.clear()
            hopeless = self._last.is_refused or (self._gives_up_early and self._has_heard)
            if hopeless and time.monotonic() > began + HOPE_SECONDS:
                return

    def last_error(self) -> Explained | None:
        """The last real error of a connection since the last answer, examined; None if there was none."""
        self.poll(0)
        return self._last.examined()

    def _on_error(self, error: KafkaError) -> None:
        self._has_heard = True
        self._last.note(error)
