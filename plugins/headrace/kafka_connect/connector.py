"""Sinks of Kafka Connect for Elasticsearch and OpenSearch: their files, and the answer to each of their properties.

An answer is the counterpart here, or why there is none. The properties are those of the connectors' own references:
Confluent's (self-managed, and the three of its cloud), Aiven's for Elasticsearch and for OpenSearch, Kafka Connect's
own for every sink, and those of converters and consumers. An answer may depend on the property's value. A ``*`` in a
name stands for any text.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatchcase
from typing import Any

from headrace.errors import HeadraceError


class AnswerKind(StrEnum):
    """What there is for a property."""

    COUNTERPART = "counterpart"
    """A field of the definition."""
    DEFAULT = "default"
    """What headrace does without a setting."""
    CONNECTION = "connection"
    """A field of an Airflow connection, which the definition names."""
    NONE = "none"
    """Nothing, and the documents are the same without it."""
    UNDECIDED = "undecided"
    """Nothing, and the stream would do something else: a person has to decide."""
    UNKNOWN = "unknown"
    """No connector's reference has such a property, as far as headrace knows: a person has to decide."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What there is for a property, and where it is or why there is nothing."""

    kind: AnswerKind
    text: str
    connection: str = ""
    """The id of the connection, of which ``text`` is a field."""

    def __str__(self) -> str:
        match self.kind:
            case AnswerKind.NONE | AnswerKind.UNDECIDED:
                return f"no counterpart, because {self.text}"
            case AnswerKind.DEFAULT:
                return f"the same by default: {self.text}" if self.text else "the same by default"
            case AnswerKind.UNKNOWN:
                return f"unknown: {self.text}"
            case AnswerKind.CONNECTION:
                return f"connection {self.connection}, {self.text}"
        return self.text

    @property
    def is_open(self) -> bool:
        """Whether a person has to decide what becomes of the property."""
        return self.kind in (AnswerKind.UNDECIDED, AnswerKind.UNKNOWN)


Row = Answer | Mapping[str, Answer]
"""An answer; or the answers by value in lower case, with that of all other values under "*"."""


def to(text: str) -> Answer:
    """The counterpart."""
    return Answer(AnswerKind.COUNTERPART, text)


def same(text: str = "") -> Answer:
    """What happens without a setting."""
    return Answer(AnswerKind.DEFAULT, text)


def none(why: str) -> Answer:
    """No counterpart, and none is needed for the same documents."""
    return Answer(AnswerKind.NONE, why)


def undecided(why: str) -> Answer:
    """No counterpart, and something else would happen."""
    return Answer(AnswerKind.UNDECIDED, why)


KAFKA, SEARCH, REGISTRY = "kafka_default", "elasticsearch_default", "schema_registry_default"
"""The ids of the connections that a definition names."""


def _in(connection: str, field: str) -> Answer:
    return Answer(AnswerKind.CONNECTION, field, connection)


_BY_INTERVAL = none("a batch has all records of its interval; it is not cut by waiting times or numbers of records")
_BOUNDED = none("receivers and requests are bounded in bytes (Limits, bulk_bytes)")
_NO_MAPPING = none("headrace creates no mapping: create the index or its template before, or let the server infer it")
_TLS_DEFAULT = none("the TLS library's own defaults are used: TLS 1.2 and newer, and its ciphers")
_NO_STREAMS = undecided("headrace refuses data streams")
_AN_INDEX = same("an index, or an alias of one, is named")
_RETRIES = to("max_retry_seconds, the time of all retries together; then the repair DAG tries the batch again")
_WRITE_METHOD = {
    "insert": same("a document is written whole"),
    "*": undecided("an upsert merges fields into a document, and headrace writes documents whole"),
}
_NULL_VALUES: Row = {
    "ignore": to('tombstones="ignore"'),
    "delete": to('tombstones="delete", with ids by key; with other ids a deletion finds no document, so "ignore"'),
    "*": to('tombstones="dead_letter": the record is kept as a dead letter, and the stream goes on'),
}
_MALFORMED = {
    "fail": to("dead_letter_limit: the batch fails, and its refused documents are kept as dead letters"),
    "*": to("dead_letter_limit: refused documents never fail a batch; they are kept as dead letters, with the reason"),
}
_KEY_IGNORE = to("document_ids: KeyIds() is the key with the offset as version; RecordIds() is topic+partition+offset")
_IDS_OF_SERVER = {
    "true": none(
        "headrace refuses ids of the server, since a batch that runs again would write its documents twice; "
        "RecordIds() gives each record one document"
    ),
    "*": same(),
}
_TOPIC_INDEX = to("ElasticsearchOutput.index, one for each topic's stream")
_TRUSTSTORE = _in(SEARCH, "ca_certs in the extra, a PEM file with the authorities' certificates")
_KEYSTORE = _in(SEARCH, "client_cert and client_key in the extra, two PEM files")
_KEY_PASSWORD = none("client_key is a file without a password, which only the worker's user may read")
_COMPACT_MAPS: Row = {
    "true": same("a map is a JSON object"),
    "*": undecided("headrace writes a map as a JSON object, not as a list of keys and values; a transform can do it"),
}
_LOGIN: dict[str, Row] = {
    "connection.url": _in(SEARCH, "host, schema and port"),
    "connection.username": _in(SEARCH, "login"),
    "connection.password": _in(SEARCH, "password"),
}
_BULK: dict[str, Row] = {
    "batch.size": to("bulk_actions, at most 100,000"),
    "max.in.flight.requests": to("requests_in_flight, for each Spark task; at most 64"),
    "max.buffered.records": _BOUNDED,
    "linger.ms": _BY_INTERVAL,
    "flush.timeout.ms": none("a batch ends when all its documents are written; Airflow's own timeouts bound its task"),
    "max.retries": _RETRIES,
    "retry.backoff.ms": _RETRIES,
    "connection.timeout.ms": none("request_timeout_seconds is for the whole request, from the connection on"),
    "read.timeout.ms": to("request_timeout_seconds"),
}
_CONVERSION: dict[str, Row] = {
    "key.ignore": _KEY_IGNORE,
    "topic.key.ignore": _KEY_IGNORE,
    "schema.ignore": {"true": same("the server infers the mapping"), "*": _NO_MAPPING},
    "topic.schema.ignore": same("the server infers the mapping"),
    "compact.map.entries": _COMPACT_MAPS,
    "drop.invalid.message": {"true": _MALFORMED["*"], "*": _MALFORMED["fail"]},
    "behavior.on.null.values": _NULL_VALUES,
    "behavior.on.malformed.documents": _MALFORMED,
}
_TYPE_NAME = none("Elasticsearch 8 and newer, and OpenSearch, have no types of documents")
_NAME_OF_SERVER: Row = {
    "": undecided(
        "a certificate is checked with the server's name; else give the connection its ssl_assert_fingerprint"
    ),
    "*": same("the server's name is checked"),
}
_HTTPS_FILES: dict[str, Row] = {
    "elastic.https.ssl.truststore.*": _TRUSTSTORE,
    "elastic.https.ssl.keystore.*": _KEYSTORE,
    "elastic.https.ssl.key.password": _KEY_PASSWORD,
    "elastic.https.ssl.endpoint.identification.algorithm": _NAME_OF_SERVER,
    "elastic.https.ssl.*": _TLS_DEFAULT,
}
_DATA_STREAM: dict[str, Row] = {
    "data.stream.type": {"none": same("documents go to an index"), "*": _NO_STREAMS},
    "data.stream.dataset": {"": same("documents go to an index"), "*": _NO_STREAMS},
    "data.stream.namespace": none("it only is a part of a data stream's name"),
    "data.stream.timestamp.field": none("it only is for data streams; a transform can make the field @timestamp"),
}
_VERSION_HEADER: Row = {
    "": same("the version is the offset"),
    "*": to("KeyIds(version_from=…), of a column that the transform makes of the header"),
}

CONFLUENT: dict[str, Row] = {
    **_LOGIN,
    **_BULK,
    **_CONVERSION,
    **_HTTPS_FILES,
    **_DATA_STREAM,
    "bulk.size.bytes": to("bulk_bytes, at most 100 MiB"),
    "flush.synchronously": same("a batch has ended when all its documents are written"),
    "connection.compression": _in(SEARCH, "http_compress in the extra"),
    "max.connection.idle.time.ms": none("a batch opens its own connections and closes them at its end"),
    "write.method": _WRITE_METHOD,
    "external.version.header": _VERSION_HEADER,
    "use.autogenerated.ids": _IDS_OF_SERVER,
    "proxy.*": _in(SEARCH, "proxy in the extra, a URL"),
    "elastic.security.protocol": _in(SEARCH, "schema (https for SSL)"),
    "kerberos.*": undecided("a connection to a search server has no log-in by Kerberos; give it an API key or a user"),
    "external.resource.usage": {"disabled": _AN_INDEX, "index": _AN_INDEX, "alias_index": _AN_INDEX, "*": _NO_STREAMS},
    "topic.to.external.resource.mapping": _TOPIC_INDEX,
    "max.external.resource.mappings": none("a definition may have any number of streams"),
    # Of older versions.
    "type.name": _TYPE_NAME,
    "topic.index.map": none("the connector has not read it since its version 11, and it names the same index"),
    "auto.create.indices.at.start": same("the first batch creates an index that does not exist"),
    "log.sensitive.data": none("contents of documents are in no log; a dead letter has them"),
}

_AUTH_TYPE: Row = {
    "api_key": _in(SEARCH, "api_key in the extra"),
    "none": _in(SEARCH, "no login"),
    "*": _in(SEARCH, "login and password"),
}
_LOG_IN = none("a connection has the log-in itself: an API key and its secret")
_CLOUD: dict[str, Row] = {
    "input.data.format": to("value_decoder"),
    "input.key.format": to("key_decoder"),
    "kafka.auth.mode": _LOG_IN,
    "kafka.service.account.id": _LOG_IN,
    "kafka.api.key": _in(KAFKA, "sasl.username in the extra"),
    "kafka.api.secret": _in(KAFKA, "sasl.password in the extra"),
    "kafka.endpoint": _in(KAFKA, "bootstrap.servers in the extra"),
    "kafka.region": none("the servers' addresses have it"),
    "schema.context.name": {"default": same(), "*": _in(REGISTRY, "path in the extra (/contexts/.NAME)")},
    "sr.service.account.id": _LOG_IN,
    "max.poll.interval.ms": none("a receiver is in no consumer group"),
    "max.poll.records": _BOUNDED,
    "auto.restart.on.user.error": same("the repair DAG tries a failed batch again"),
    "connector.egress.whitelist": none("it is about the cloud's network"),
    "csfle.enabled": {"false": same(), "*": undecided("headrace decrypts no fields; do it in the transform")},
    "csfle.onfailure": none("it only is for encrypted fields"),
    "reporter.result.topic.name": none("the ledger has the counts of each batch, and sends no record for a success"),
    "reporter.error.topic.name": to("the dead letters, in an index"),
}
CONFLUENT_CLOUD: dict[str, Row] = {**CONFLUENT, **_CLOUD}
CONFLUENT_CLOUD_V2: dict[str, Row] = {
    **CONFLUENT_CLOUD,
    "elastic.server.version": same("a batch asks the server for its version"),
    "auth.type": _AUTH_TYPE,
    "api.key.value": _in(SEARCH, "api_key in the extra"),
    "elastic.ssl.enabled": _in(SEARCH, "schema (https for true), and client_cert and client_key in the extra"),
    "auto.create": {
        "true": same("the first batch creates an index that does not exist"),
        "*": same("a batch writes to the index that exists; check it with `headrace streams check --connect`"),
    },
    "resource.type": {"index": _AN_INDEX, "alias_index": _AN_INDEX, "*": _NO_STREAMS},
    "topic.to.resource.mapping": _TOPIC_INDEX,
    "data.stream.type": none("it only is for data streams, which resource.type chooses"),
    "data.stream.dataset": none("it only is for data streams, which resource.type chooses"),
}
CONFLUENT_CLOUD_OPENSEARCH: dict[str, Row] = {
    **_CLOUD,
    "connector.class": undecided(
        "its reference does not say which ids its documents have; here topic+partition+offset"
    ),
    "instance.url": _LOGIN["connection.url"],
    "auth.type": _AUTH_TYPE,
    "connection.user": _LOGIN["connection.username"],
    "connection.password": _LOGIN["connection.password"],
    "opensearch.ssl.enabled": _in(SEARCH, "schema (https for true)"),
    "opensearch.ssl.keystore*": _KEYSTORE,
    "opensearch.ssl.key.password": _KEY_PASSWORD,
    "opensearch.ssl.truststore*": _TRUSTSTORE,
    "opensearch.ssl.protocol": _TLS_DEFAULT,
    "behavior.on.error": _MALFORMED,
    "request.method": none("documents are written in bulk requests"),
    "retry.backoff.policy": none("waiting times between retries are headrace's own"),
    "retry.backoff.ms": _RETRIES,
    "retry.on.status.codes": none("errors are of a kind by type and status, which error_kinds can change"),
    "max.retries": _RETRIES,
    "indexes.num": to("a stream for each index"),
    "index*.name": to("ElasticsearchOutput.index"),
    "index*.topic": to("KafkaInput.topics"),
    "index*.behavior.on.null.values": _NULL_VALUES,
    "index*.batch.size": to("bulk_actions, at most 100,000"),
    "index*.report.only.status.code.to.success.topic": none("the ledger has the counts of each batch"),
    "index*.write.method": _WRITE_METHOD,
}

AIVEN: dict[str, Row] = {**_LOGIN, **_BULK, **_CONVERSION, "type.name": _TYPE_NAME, "topic.index.map": _TOPIC_INDEX}
AIVEN_OPENSEARCH: dict[str, Row] = {
    **_LOGIN,
    **_BULK,
    **_CONVERSION,
    "key.ignore.id.strategy": {"none": _IDS_OF_SERVER["true"], "*": to("document_ids: KeyIds() or RecordIds()")},
    "behavior.on.version.conflict": none("a conflict is settled by comparing the documents, and counted"),
    "index.write.method": _WRITE_METHOD,
    "data.stream.enabled": {"false": same("documents go to an index"), "*": _NO_STREAMS},
    "data.stream.prefix": none("it only is a part of a data stream's name"),
    "data.stream.timestamp.field": _DATA_STREAM["data.stream.timestamp.field"],
    "data.streams.existing.index.template.name": none("it only is for data streams"),
    "routing.type": {"none": same(), "*": undecided("headrace sets no routing")},
    "routing.type.record.value.path": none("it only is for routing.type=value"),
    "existing.resource.type": {"none": _AN_INDEX, "index": _AN_INDEX, "index_alias": _AN_INDEX, "*": _NO_STREAMS},
    "topic.to.existing.resource.mapping": _TOPIC_INDEX,
    "connection.trust.all.certificates": {"false": same(), "*": _in(SEARCH, "verify_certs=false in the extra")},
    "connection.ssl.truststore.*": _TRUSTSTORE,
    "connection.ssl.keystore.*": _KEYSTORE,
    "connection.ssl.key.password": _KEY_PASSWORD,
    "connection.ssl.endpoint.identification.algorithm": _NAME_OF_SERVER,
    "connection.ssl.*": _TLS_DEFAULT,
    "aws.region": _in(SEARCH, "aws_region in the extra"),
    "aws.service.signing.name": _in(SEARCH, "aws_service in the extra"),
    "aws.access_key_id": _in(SEARCH, "login"),
    "aws.secret_access_key": _in(SEARCH, "password"),
    "aws.sts.*": _in(SEARCH, "aws_profile in the extra, of a profile on the hosts that assumes the role"),
    # Of older versions.
    "type.name": _TYPE_NAME,
}

# What Kafka Connect itself reads of any sink.
CONNECT: dict[str, Row] = {
    "name": to("Stream.name"),
    "connector.class": to("ElasticsearchOutput"),
    "connector.plugin.version": none("the version of headrace is that of its package"),
    "tasks.max": to("KafkaInput.receivers, shared by the topics' streams"),
    "tasks.max.enforce": same("a stream has as many receivers as it is given"),
    "topics": to("KafkaInput.topics"),
    "topics.regex": undecided(
        "an output has one index, and the connector had one for each topic that it found; give --topics with their "
        "names for a stream for each"
    ),
    "header.converter*": same("headers are bytes, and in no document"),
    "config.action.reload": none("connections are read again when a process starts"),
    "predicates*": none("only transforms use them"),
    "errors.tolerance": {
        "none": to("dead_letter_limit: a record that does not decode fails the batch, and is kept as a dead letter"),
        "*": to("dead_letter_limit: records that do not decode never fail a batch; they are kept as dead letters"),
    },
    "errors.retry.*": same("the repair DAG tries a failed batch again"),
    "errors.log.enable": same("a dead letter has the reason and the place of its record"),
    "errors.log.include.messages": none("contents of records are in no log; a dead letter has them"),
    "errors.deadletterqueue.topic.name": to(
        "dead letters, in the index <index>-dead-letters; or name a dead_letter_topic"
    ),
    "errors.deadletterqueue.topic.replication.factor": none("headrace creates no topic for dead letters"),
    "errors.deadletterqueue.context.headers.enable": same("a dead letter has topic, partition, offset and reason"),
    # What people write into a connector's file, and Connect does not read there.
    **dict.fromkeys(
        ("bootstrap.servers", "consumer.*", "producer.*", "key.serializer*", "value.serializer*", "type_name"),
        none("Kafka Connect does not read it in a connector's file either"),
    ),
}

_ANY_FORMAT = none("it shapes Connect's own schema of a value; docs/types.md says what headrace makes of each type")
_OF_WRITERS = none("only a converter that writes needs it")
CONVERTERS: dict[str, Row] = {
    "plugin.version": none("decoders are part of headrace"),
    "schemas.enable": to("the decoder"),
    "schema.registry.url": _in(REGISTRY, "host"),
    "basic.auth.user.info": _in(REGISTRY, "login and password"),
    "basic.auth.credentials.source": _in(REGISTRY, "login and password"),
    "bearer.auth.token": _in(REGISTRY, "bearer_token in the extra"),
    "bearer.auth.client.secret": _in(REGISTRY, "oauth_client_secret in the extra"),
    "bearer.auth.*": _in(REGISTRY, "oauth_token_url, oauth_client_id, oauth_scope and others in the extra"),
    "proxy.*": _in(REGISTRY, "proxy in the extra"),
    "ssl.truststore.*": _in(REGISTRY, "ca_certs in the extra, a PEM file"),
    "ssl.keystore.*": _in(REGISTRY, "client_cert and client_key in the extra, PEM files"),
    "ssl.key.password": _in(REGISTRY, "client_key_password in the extra"),
    "ssl.*": _TLS_DEFAULT,
    "*.subject.name.strategy": {
        **dict.fromkeys(("topicnamestrategy", "defaultreferencesubjectnamestrategy"), same()),
        "io.confluent.kafka.serializers.subject.topicnamestrategy": same(),
        "*": undecided("the subject of the columns' schema has another name: give it to the decoder as subject"),
    },
    "use.latest.version": same("the columns are those of the subject's newest version when a batch begins"),
    "*.schema.id.deserializer": same("a schema's id is read before the value and in the headers"),
    "use.schema.id": undecided("a decoder names a version of the subject, not an id: give it version"),
    "use.schema.guid": undecided("a decoder names a version of the subject, not an id: give it version"),
    "decimal.format": same("a decimal is a number or base64, as the JSON has it"),
    "replace.null.with.default": none("a null stays a null"),
    "converter.encoding": {
        **dict.fromkeys(("utf-8", "utf8"), same()),
        "*": undecided("texts are read as UTF-8: take BytesDecoder(), and decode(value, '…') in the transform"),
    },
    **dict.fromkeys(
        ("auto.register.schemas", "latest.compatibility.strict", "normalize.schemas", "object.additional.properties"),
        _OF_WRITERS,
    ),
    **dict.fromkeys(
        ("schemas.cache.size", "schemas.cache.config", "max.schemas.per.subject", "latest.cache.*"), _BOUNDED
    ),
    **dict.fromkeys(
        (
            *("allow.optional.map.keys", "avro.*", "connect.meta.data", "enhanced.*", "flatten.*", "generate.*"),
            *("ignore.default.for.nullables", "int.for.enums", "json.*", "optional.for.*", "scrub.invalid.names"),
            *("use.optional.for.nonrequired", "wrapper.for.*"),
        ),
        _ANY_FORMAT,
    ),
}
"""By the name after ``key.converter.`` or ``value.converter.``; some also have ``schema.registry.`` before it."""

CLIENT_NAMES = {
    **{
        name: name
        for name in (
            *("check.crcs", "client.id", "client.rack", "fetch.max.bytes", "fetch.min.bytes", "isolation.level"),
            *("max.partition.fetch.bytes", "metadata.max.age.ms", "reconnect.backoff.max.ms", "reconnect.backoff.ms"),
            "socket.connection.setup.timeout.ms",
        )
    },
    "fetch.max.wait.ms": "fetch.wait.max.ms",
    "request.timeout.ms": "socket.timeout.ms",
}
"""Settings of Java's consumer, and the names that librdkafka has for them."""

_GROUPS = none("a receiver is in no consumer group: its partitions and positions are in the ledger")
CONSUMER: dict[str, Row] = {
    **{name: to(f'client["{ours}"] of the KafkaInput') for name, ours in CLIENT_NAMES.items()},
    "auto.offset.reset": {
        **dict.fromkeys(("earliest", "latest"), to("starting_offsets")),
        "*": to('starting_offsets: "earliest"'),
    },
    "group.id": to("KafkaInput.group, for lag tools only"),
    "bootstrap.servers": _in(KAFKA, "bootstrap.servers in the extra"),
    "security.protocol": _in(KAFKA, "security.protocol in the extra"),
    "sasl.mechanism": _in(KAFKA, "sasl.mechanism in the extra"),
    "sasl.jaas.config": _in(KAFKA, "sasl.username and sasl.password in the extra (docs/guides/kafka-log-ins.md)"),
    "sasl.*": _in(KAFKA, "the log-in in the extra (docs/guides/kafka-log-ins.md)"),
    "ssl.*": _in(KAFKA, "ssl.ca.location, ssl.certificate.location and ssl.key.location in the extra, PEM files"),
    **dict.fromkeys(
        (
            *("group.*", "heartbeat.interval.ms", "session.timeout.ms", "max.poll.interval.ms", "enable.auto.commit"),
            *("partition.assignment.strategy", "auto.commit.interval.ms", "default.api.timeout.ms"),
        ),
        _GROUPS,
    ),
    **dict.fromkeys(
        ("max.poll.records", "receive.buffer.bytes", "send.buffer.bytes", "connections.max.idle.ms", "retry.backoff.*"),
        _BOUNDED,
    ),
    "interceptor.classes": none("code of Java's client does not run here; headrace sends lineage and metrics itself"),
    "exclude.internal.topics": same("a pattern never finds internal topics"),
    "allow.auto.create.topics": same("no topic is created"),
    **dict.fromkeys(
        ("client.dns.lookup", "metric.reporters", "metrics.*", "auto.include.jmx.reporter", "enable.metrics.push"),
        none("it is about Java's client itself"),
    ),
}
"""By the name after ``consumer.override.``, or after ``consumer.`` in the worker's file."""


class Family(StrEnum):
    """Whose connector it is."""

    CONFLUENT = "Confluent's Elasticsearch sink"
    CONFLUENT_CLOUD = "Confluent Cloud's Elasticsearch sink"
    CONFLUENT_CLOUD_V2 = "Confluent Cloud's Elasticsearch sink V2"
    CONFLUENT_CLOUD_OPENSEARCH = "Confluent Cloud's OpenSearch sink"
    AIVEN = "Aiven's Elasticsearch sink"
    AIVEN_OPENSEARCH = "Aiven's OpenSearch sink"

    @property
    def is_cloud(self) -> bool:
        """Whether formats are named by ``input.data.format`` instead of converters."""
        return self.name.startswith("CONFLUENT_CLOUD")

    @property
    def properties(self) -> Mapping[str, Row]:
        """The connector's own properties, by name."""
        return _PROPERTIES[self]


_PROPERTIES: dict[Family, dict[str, Row]] = {
    Family.CONFLUENT: CONFLUENT,
    Family.CONFLUENT_CLOUD: CONFLUENT_CLOUD,
    Family.CONFLUENT_CLOUD_V2: CONFLUENT_CLOUD_V2,
    Family.CONFLUENT_CLOUD_OPENSEARCH: CONFLUENT_CLOUD_OPENSEARCH,
    Family.AIVEN: AIVEN,
    Family.AIVEN_OPENSEARCH: AIVEN_OPENSEARCH,
}

FAMILY_OF_CLASS: dict[str, Family] = {
    "io.confluent.connect.elasticsearch.elasticsearchsinkconnector": Family.CONFLUENT,
    "elasticsearchsinkconnector": Family.CONFLUENT,
    "elasticsearchsink": Family.CONFLUENT_CLOUD,
    "elasticsearchsinkv2": Family.CONFLUENT_CLOUD_V2,
    "opensearchsink": Family.CONFLUENT_CLOUD_OPENSEARCH,
    "io.aiven.connect.elasticsearch.elasticsearchsinkconnector": Family.AIVEN,
    "io.aiven.kafka.connect.opensearch.opensearchsinkconnector": Family.AIVEN_OPENSEARCH,
    "opensearchsinkconnector": Family.AIVEN_OPENSEARCH,
}
"""By ``connector.class`` in lower case, as older files write ``Opensearch``. Connect also takes the class alone."""

_CONVERTER = re.compile(r"(?:key|value)\.converter\.(?:schema\.registry\.(?!url$))?(.+)")


def answer_of(family: Family, name: str, value: str) -> Answer:
    """What there is for a property that no transform and no converter's class is.

    A property that no table has gets an answer of the kind `AnswerKind.UNKNOWN`.
    """
    if name.startswith("consumer.override."):
        found = _found(CONSUMER, name.removeprefix("consumer.override."), value)
    elif match := _CONVERTER.fullmatch(name):
        found = _found(CONVERTERS, match[1], value)
    else:
        found = _found(family.properties, name, value) or _found(CONNECT, name, value)
    if found is not None:
        return found
    close = difflib.get_close_matches(name, [*family.properties, *CONNECT], 1)
    meant = f" (did you mean {close[0]}?)" if close else ""
    return Answer(
        AnswerKind.UNKNOWN, f"neither {family} nor Kafka Connect has such a property{meant}; see what it does"
    )


def _found(table: Mapping[str, Row], name: str, value: str) -> Answer | None:
    name = name.lower() if name.lower() in table else name
    row = table.get(name) or next((table[each] for each in table if "*" in each and fnmatchcase(name, each)), None)
    if row is None or isinstance(row, Answer):
        return row
    return row.get(value.strip().lower()) or row["*"]


class ConnectorError(HeadraceError):
    """The text is no connector's, or it is of a connector that headrace does not know."""


@dataclass(frozen=True)
class Connector:
    """A sink of Kafka Connect: its properties, all of them texts."""

    name: str
    family: Family
    properties: Mapping[str, str]


def read_connector(text: str, *, name: str = "connector", worker: str = "") -> Connector:
    """Read a connector's file, as JSON or as Java's properties.

    Args:
        text: a JSON object of properties, or one with ``name`` and ``config`` as Connect's REST API has it; or lines
            ``property=value``.
        name: the connector's name where the text has none.
        worker: the text of the worker's file, whose converters and consumer settings count where the connector has none
            of its own.

    Raises:
        ConnectorError: it is neither, or its class is no connector that headrace knows.
    """
    given = _properties(text)
    config = given.get("config")
    if isinstance(config, dict):
        given = ({"name": given["name"]} if "name" in given else {}) | config
    if nested := sorted(key for key, value in given.items() if isinstance(value, dict | list)):
        raise ConnectorError(
            f"The connector's property {nested[0]!r} is no text, number or truth value.",
            remedy='Give an object of properties, or one with "name" and "config".',
        )
    properties = {key: _text(value) for key, value in given.items() if value is not None}
    kind = properties.get("connector.class", "")
    family = FAMILY_OF_CLASS.get(kind.strip().lower())
    if family is None:
        raise ConnectorError(
            f"The connector's class is {kind!r}, which is no sink for Elasticsearch or OpenSearch that headrace knows."
            if kind
            else "The file has no property connector.class, so it is no connector's.",
            remedy=f"Known are {', '.join(sorted(FAMILY_OF_CLASS))}.",
        )
    return Connector(properties.get("name") or name, family, _of_worker(worker, properties) | properties)


def _of_worker(worker: str, properties: Mapping[str, str]) -> dict[str, str]:
    """What of the worker's file counts for this connector."""
    counted: dict[str, str] = {}
    for key, given in (_properties(worker) if worker.strip() else {}).items():
        part = re.match(r"(key|value|header)\.converter(?:\.|$)", key)
        if part and f"{part[1]}.converter" not in properties:
            counted[key] = _text(given)
        elif key.startswith("consumer.") and not key.startswith("consumer.override."):
            counted[f"consumer.override.{key.removeprefix('consumer.')}"] = _text(given)
        elif key == "bootstrap.servers":
            counted["consumer.override.bootstrap.servers"] = _text(given)
    return counted


def _properties(text: str) -> dict[str, Any]:
    """The properties of a file. Raises ConnectorError."""
    if not text.lstrip().startswith("{"):
        return dict(_java_properties(text))
    try:
        return dict(json.loads(text))
    except (ValueError, RecursionError) as error:
        # The text may have a password: it is not repeated.
        where = f" at line {error.lineno}" if isinstance(error, json.JSONDecodeError) else ""
        raise ConnectorError(f"The connector's file is no JSON{where}.", remedy="Correct it.") from None


_ESCAPES = {"t": "\t", "n": "\n", "r": "\r", "f": "\f"}
_ESCAPED = re.compile(r"\\(?:u([0-9a-fA-F]{4})|(.))", re.DOTALL)
_PROPERTY = re.compile(r"((?:[^\\=:\s]|\\.)+)\s*[=:\s]?\s*(.*)", re.DOTALL)


def _java_properties(text: str) -> Iterable[tuple[str, str]]:
    """The properties of lines ``name=value``, as java.util.Properties reads them."""
    joined: list[str] = []
    continues = False
    for raw in text.splitlines():
        line = raw.lstrip()
        if not continues and (not line or line[0] in "#!"):
            continue
        if continues:
            joined[-1] += line
        else:
            joined.append(line)
        continues = (len(line) - len(line.rstrip("\\"))) % 2 == 1
        if continues:
            joined[-1] = joined[-1][:-1]
    for line in joined:
        if match := _PROPERTY.fullmatch(line):
            yield _unescaped(match[1]), _unescaped(match[2])


def _unescaped(text: str) -> str:
    return _ESCAPED.sub(lambda found: chr(int(found[1], 16)) if found[1] else _ESCAPES.get(found[2], found[2]), text)


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
