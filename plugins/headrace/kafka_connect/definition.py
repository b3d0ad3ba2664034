"""Reads a connector of Kafka Connect, and writes the definition of a stream that does the same.

The definition is Python, for a person to read and to change. What it does not do, it says: it lists these properties,
and refuses to load until a person has deleted each from the list.
"""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from headrace.kafka_connect.connector import (
    CLIENT_NAMES,
    KAFKA,
    REGISTRY,
    SEARCH,
    Answer,
    Connector,
    ConnectorError,
    Family,
    answer_of,
    none,
    to,
    undecided,
)
from headrace.kafka_connect.message_transforms import (
    ANY_TOPIC,
    FIELD_OF_KEY,
    RECORD_TIME,
    REGEX_ROUTER,
    TIMESTAMP_ROUTER,
    Form,
    java_pattern,
    message_transforms,
    path_of,
    transform_module,
)
from headrace.kafka_connect.topic_indices import GIVE_TOPICS, TopicIndices
from headrace.secrets import HIDDEN, looks_secret, names_secret, without_secrets
from headrace.stream.topic_pattern import topic_pattern

_WIDTH = 118
_LONGEST_VALUE = 200
_LONGEST_NAME = 63
_MIB = 1 << 20


@dataclass(frozen=True)
class PropertyAnswer:
    """A property with its answer. ``value`` has no secret; None: the connector's file does not have the property."""

    name: str
    value: str | None
    answer: Answer

    def __str__(self) -> str:
        return f"{_printable(self.name)}{'' if self.value is None else f' = {self.value}'}: {self.answer}"


@dataclass(frozen=True)
class Definition:
    """The text of a DAG file with the streams, that of its transform module (None: it needs none), and the answers."""

    name: str
    text: str
    transform: str | None
    properties: tuple[PropertyAnswer, ...]

    @property
    def to_decide(self) -> list[PropertyAnswer]:
        """The properties that the definition does not do, so that it does not load yet."""
        return [each for each in self.properties if each.answer.is_open]

    @property
    def module(self) -> str:
        """The name of the module of the definition."""
        return self.name.replace("-", "_")

    @property
    def transform_module(self) -> str:
        """The name of the transform module."""
        return _transform_module(self.name)


def define(connector: Connector, *, topics: Sequence[str] = ()) -> Definition:
    """The definition that does what the connector did. ``topics``: those that its ``topics.regex`` finds."""
    return _Defined(connector, topics).definition()


_CONVERTER_FORMS = {
    "org.apache.kafka.connect.storage.StringConverter": (Form.TEXT, "Utf8Decoder()"),
    "org.apache.kafka.connect.converters.ByteArrayConverter": (Form.BYTES, None),
    "io.confluent.connect.avro.AvroConverter": (Form.COLUMNS, "AvroDecoder"),
    "io.confluent.connect.protobuf.ProtobufConverter": (Form.COLUMNS, "ProtobufDecoder"),
    "io.confluent.connect.json.JsonSchemaConverter": (Form.COLUMNS, "JsonSchemaDecoder"),
}
_JSON_CONVERTER = "org.apache.kafka.connect.json.JsonConverter"
_CLOUD_FORMATS = {
    "AVRO": "io.confluent.connect.avro.AvroConverter",
    "PROTOBUF": "io.confluent.connect.protobuf.ProtobufConverter",
    "JSON_SR": "io.confluent.connect.json.JsonSchemaConverter",
    "STRING": "org.apache.kafka.connect.storage.StringConverter",
    "BYTES": "org.apache.kafka.connect.converters.ByteArrayConverter",
}
_BY_TIME = 'KeyIds(version_from="timestamp")'
_TOLERANT = {
    "behavior.on.malformed.documents": ("ignore", "warn", "report"),
    "behavior.on.error": ("ignore", "log"),
    "drop.invalid.message": ("true",),
    "errors.tolerance": ("all",),
}


class _Defined:
    """The parts of a definition, which are made one after another; ``_answers`` are those that depend on others."""

    def __init__(self, connector: Connector, topics: Sequence[str]) -> None:
        self._connector, self._given = connector, connector.properties
        self._answers: dict[str, Answer] = {}
        self._name = _identifier(connector.name)
        self._topics = self._topic_names(topics)
        value = self._converter("value")
        self._chain = message_transforms(self._given, value[0], self._topics, uses_keys=True)
        self._indices = TopicIndices(connector, self._topics, self._chain)
        self._by_key = {topic: self._has_key_ids(topic) for topic in self._topics or [""]}
        self._uses_keys = any(self._by_key.values())
        if not self._uses_keys:
            self._chain = message_transforms(self._given, value[0], self._topics, uses_keys=False)
            self._indices = TopicIndices(connector, self._topics, self._chain)
        self._value_decoder = self._decoder("value", value[1])
        self._key_decoder, self._key_expression = self._key()
        self._ids = {topic: self._ids_of(topic) for topic in self._by_key}
        self._why_apart = self._reason_apart()
        self._apart = self._why_apart is not None and len(self._topics) > 1
        self._answers |= self._indices.answers
        if not self._topics:
            self._check_pattern()
        self._check_routed_ids()
        self._answers |= self._chain.answers

    def definition(self) -> Definition:
        """The texts and the answers."""
        header = self._given.get("external.version.header", "").strip() if self._uses_keys else ""
        transform = transform_module(self._chain, self._name, key=self._key_expression, version_header=header)
        streams = self._streams(transform is not None)
        # What the file does not say, and the definition needs, comes first.
        assumed = [PropertyAnswer(name, None, self._answers[name]) for name in self._answers if name not in self._given]
        properties = (*assumed, *(self._answer(name, value) for name, value in self._given.items()))
        return Definition(self._name, self._text(streams, properties), transform, properties)

    def _answer(self, name: str, value: str) -> PropertyAnswer:
        answer = self._answers.get(name) or answer_of(self._connector.family, name, value)
        return PropertyAnswer(name, _shown(name, value), answer)

    def _is(self, name: str, default: str = "false") -> bool:
        return self._given.get(name, default).strip().lower() == "true"

    def _listed(self, name: str) -> list[str]:
        return [each.strip() for each in self._given.get(name, "").split(",") if each.strip()]

    # The topics, their indices and ids.

    def _topic_names(self, topics: Sequence[str]) -> list[str]:
        listed = list(dict.fromkeys(self._listed("topics")))
        if listed and topics:
            what = "The connector's file names its topics, and --topics names others."
            raise ConnectorError(what, remedy="Leave out --topics.")
        if listed:
            return listed
        pattern = self._given.get("topics.regex")
        if pattern is None:
            raise ConnectorError(
                "The connector's file names no topics: it has neither topics nor topics.regex.",
                remedy="Give the file that Connect has.",
            )
        if topics:
            self._answers["topics.regex"] = to("KafkaInput.topics, those of --topics")
            return list(dict.fromkeys(topics))
        try:
            java_pattern(pattern)
            topic_pattern(pattern)
        except ValueError as error:
            raise ConnectorError(
                f"The connector's topics.regex is no pattern that headrace can take: {error}.",
                remedy="Give --topics with the names of the topics.",
            ) from None
        return []

    def _reason_apart(self) -> str | None:
        """Why several topics cannot be one stream."""
        ids = set(self._ids.values())
        if ids & {"KeyIds()", _BY_TIME}:
            return "offsets of several topics are no versions of keys"
        if len(ids) > 1:
            return "an output has one rule for ids, and these topics have two"
        if any("registry=" in decoder for decoder in (self._key_decoder, self._value_decoder) if decoder):
            return "each topic has schemas of its own in the registry"
        return None

    def _check_pattern(self) -> None:
        """What the connector did with the topics that it found, and a stream can do only if they are known."""
        if self._why_apart is not None:
            taken = " (here the record's time is taken)" if _BY_TIME in self._ids.values() else ""
            self._answers["topics.regex"] = undecided(f"{self._why_apart}{taken}: {GIVE_TOPICS} for a stream for each")
        if self._listed("topic.key.ignore") and not self._is("key.ignore"):
            self._answers["topic.key.ignore"] = undecided(f"it is about some topics that are found: {GIVE_TOPICS}")

    def _has_key_ids(self, topic: str) -> bool:
        if self._connector.family is Family.CONFLUENT_CLOUD_OPENSEARCH or self._is("use.autogenerated.ids"):
            return False
        if not (self._is("key.ignore") or self._indices.routed(topic) in self._listed("topic.key.ignore")):
            return True
        return self._given.get("key.ignore.id.strategy", "").strip().lower() == "record.key"

    def _check_routed_ids(self) -> None:
        """A router also changes the ids that are made of the topic."""
        renamed = [
            topic
            for topic, by_key in self._by_key.items()
            if not by_key and self._indices.routed(topic) != (topic or ANY_TOPIC)
        ]
        if renamed:
            topic, routed = renamed[0] or ANY_TOPIC, self._indices.routed(renamed[0])
            why = (
                f"ids begin with the topic, here {topic!r} and the connector's with {routed!r}: "
                "records that it wrote would be written again under other ids; take another index, or empty this one"
            )
            self._reconsider(TIMESTAMP_ROUTER if RECORD_TIME in routed else REGEX_ROUTER, why)

    # Keys and values.

    def _converter(self, part: str) -> tuple[Form, str | None]:
        """The form that a converter reads, and the decoder that does so (None: bytes as they are)."""
        name = f"{part}.converter"
        kind = self._given.get(name)
        if self._connector.family.is_cloud:
            name = "input.data.format" if part == "value" else "input.key.format"
            given = self._given.get(name, "JSON" if part == "value" else "STRING").strip().upper()
            kind = _CLOUD_FORMATS.get(given, _JSON_CONVERTER)
            if given not in (*_CLOUD_FORMATS, "JSON"):
                self._answers[name] = undecided(f"{given!r} is no format that headrace knows: give a decoder")
        with_schema = self._is(f"{part}.converter.schemas.enable", str(not self._connector.family.is_cloud).lower())
        if kind is None:
            self._answers[name] = undecided(
                "the file names none, so that of the worker counts: give its file by --worker. Taken is "
                f"{_JSON_CONVERTER} with schemas.enable={str(with_schema).lower()}, as in Connect's example of a worker"
            )
        if kind is None or kind == _JSON_CONVERTER:
            form = Form.ENVELOPE if with_schema else Form.JSON
            self._answers.setdefault(name, to(_JSON_TEXTS[form]))
            return form, None
        if kind in _CONVERTER_FORMS:
            form, decoder = _CONVERTER_FORMS[kind]
            written = "; dates, times and decimals are written as docs/types.md says" if form is Form.COLUMNS else ""
            if written and part == "key":
                written = "; the id of a key with fields, which was none to the connector, is made of their values"
            self._answers.setdefault(name, to(f"{part}_decoder: {decoder or 'the bytes as they are'}{written}"))
            return form, decoder
        self._answers[name] = undecided(
            f"headrace has no decoder for {kind.rpartition('.')[2]!r} that needs nothing else: see Converters in "
            "docs/guides/from-kafka-connect.md, and give the input a decoder. Taken are the bytes as they are"
        )
        return Form.BYTES, None

    def _decoder(self, part: str, decoder: str | None) -> str | None:
        if decoder is None or decoder.endswith(")"):
            return decoder
        urls = [self._given.get(f"{each}.converter.schema.registry.url") for each in ("key", "value")]
        is_other = part == "key" and None not in urls and urls[0] != urls[1]
        text = f"{decoder}(registry={_quoted(REGISTRY + '_keys' if is_other else REGISTRY)})"
        return f"DebeziumDecoder(events={text})" if part == "value" and self._chain.is_change_event else text

    def _key(self) -> tuple[str | None, str | None]:
        """The decoder of keys, and the expression of the transform for the key that is the id."""
        if not self._uses_keys or self._chain.sets_key:
            why = "the key is made of the value" if self._uses_keys else "keys are in no id and in no document"
            named = [name for name in self._given if name in ("key.converter", "input.key.format")]
            self._answers |= dict.fromkeys(named, none(why))
            return None, None
        form, decoder = self._converter("key")
        name = self._chain.key_field
        column = None if name is None else _quoted(f"{path_of(name)} STRING")
        if form.is_json and column is not None:
            return f"{'Json' if form is Form.JSON else 'DebeziumKey'}Decoder(fields={column})", None
        if form.is_json:
            # An object or an array was no id to the connector: without an id the record is a dead letter.
            begins, path = ("^", "$") if form is Form.JSON else ('"payload"\\s*:', "$.payload")
            text = 'F.col("key").cast("string")'
            return None, f"F.when(~{text}.rlike(r'{begins}\\s*[{{\\[]'), F.get_json_object({text}, {_quoted(path)}))"
        if form is Form.COLUMNS:
            field = None if name is None else f'F.col("key")[{_quoted(name)}].cast("string")'
            return self._decoder("key", decoder), field
        if name is not None:
            self._reconsider(FIELD_OF_KEY, "the key's converter gives no fields")
        return decoder, None

    def _reconsider(self, kind: str, why: str) -> None:
        """Let a person decide about the transforms of this type."""
        named = [name for name, given in self._given.items() if name.endswith(".type") and given == kind]
        self._chain.answers |= dict.fromkeys(named, undecided(why))

    # The fields.

    def _number(self, name: str, least: float, most: float) -> int | None:
        """The number that a property gives, within these bounds; None if it gives none."""
        given = self._given.get(name)
        if given is None:
            return None
        try:
            return int(min(most, max(least, int(given.strip()))))
        except ValueError:
            self._answers[name] = undecided("its value is no number")
            return None

    def _input(self) -> list[str]:
        named = self._topics[0] if len(self._topics) == 1 else self._topics
        topics = "topic" if self._apart else _quoted(named) if named else None
        tasks = self._number("tasks.max", 1, 10_000) or 1
        receivers = math.ceil(tasks / len(self._topics)) if self._apart else tasks
        client = {
            ours: _client_value(value)
            for name, value in self._given.items()
            if (ours := CLIENT_NAMES.get(name.removeprefix("consumer.override.")))
            and name.startswith("consumer.override.")
        }
        reset = self._given.get("consumer.override.auto.offset.reset", "").lower()
        group = self._given.get("consumer.override.group.id")
        if group is not None and self._apart:
            self._answers["consumer.override.group.id"] = none(
                "each topic's stream has a group of its own for lag tools"
            )
        return _arguments(
            connection=_quoted(KAFKA),
            topics=topics,
            topic_pattern=None if topics else _quoted(self._given["topics.regex"]),
            group=None if group is None or self._apart else _quoted(group),
            receivers=_quoted(receivers) if receivers > 1 else None,
            key_decoder=self._key_decoder,
            value_decoder=self._value_decoder,
            starting_offsets=_quoted("latest") if reset == "latest" else None,
            client=_quoted(client) if client else None,
        )

    def _output(self) -> list[str]:
        ids = sorted(set(self._ids.values()))
        actions = self._number("index1.batch.size" if "index1.batch.size" in self._given else "batch.size", 1, 100_000)
        for name, value in self._given.items():
            other = re.fullmatch(r"index[2-5](\.batch\.size|\.behavior\.on\.null\.values)", name)
            if other and value != self._given.get(f"index1{other[1]}"):
                self._answers[name] = undecided("all indices have what the first one has")
        size = self._number("bulk.size.bytes", -1, 100 * _MIB)
        in_flight = self._number("max.in.flight.requests", 1, 64)
        timeout = self._number("read.timeout.ms", 1, 86_400_000)
        return _arguments(
            connection=_quoted(SEARCH),
            index="index" if self._apart else _quoted(self._indices.of_all()),
            max_indices=_quoted(min(1000, len(self._topics))) if len(self._topics) > 100 and not self._apart else None,
            create_index="False" if self._indices.exist() else None,
            require_alias="True" if self._indices.are_aliases() else None,
            document_ids="ids" if len(ids) > 1 else ids[0],
            tombstones=self._tombstones(len(ids) > 1),
            dead_letter_topic=self._dead_letter_topic(),
            dead_letter_limit=self._limit(),
            bulk_actions=None if actions is None else _quoted(actions),
            bulk_bytes=None if size is None else _quoted(size if size > 0 else 100 * _MIB),
            requests_in_flight=None if in_flight is None else _quoted(in_flight),
            request_timeout_seconds=None if timeout is None else _quoted(timeout / 1000),
            max_retry_seconds=self._retry_seconds(),
        )

    def _ids_of(self, topic: str) -> str:
        if not self._by_key[topic]:
            return "RecordIds()"
        if self._given.get("external.version.header", "").strip():
            return 'KeyIds(version_from="version")'
        return "KeyIds()" if self._topics else _BY_TIME

    def _tombstones(self, mixed: bool) -> str:
        default = "ignore" if self._connector.family in (Family.AIVEN, Family.AIVEN_OPENSEARCH) else "fail"
        given = self._given.get("behavior.on.null.values", self._given.get("index1.behavior.on.null.values", default))
        match given.strip().lower():
            case _ if self._chain.drops_deletions:
                return _quoted("ignore")
            case "delete" if self._uses_keys and self._indices.no_deletions:
                why = f"{self._indices.no_deletions}. Here such a record is a dead letter"
                self._answers["behavior.on.null.values"] = undecided(why)
                return _quoted("dead_letter")
            case "delete" if mixed:
                return '"delete" if isinstance(ids, KeyIds) else "ignore"'
            case "delete":
                return _quoted("delete" if self._uses_keys else "ignore")
            case "ignore":
                return _quoted("ignore")
        return _quoted("dead_letter")

    def _dead_letter_topic(self) -> str | None:
        name = "errors.deadletterqueue.topic.name"
        topic = self._given.get(name, "").strip()
        if not topic:
            return None
        is_read = topic in self._topics if self._topics else topic_pattern(self._given["topics.regex"]).matches(topic)
        if is_read or not re.fullmatch(r"[a-zA-Z0-9._-]{1,249}", topic):
            why = "the stream reads this topic itself" if is_read else "this is no topic's name"
            self._answers[name] = undecided(
                f"{why}: name another in dead_letter_topic. Here dead letters are in an index"
            )
            return None
        return f"DeadLetterTopic(topic={_quoted(topic)}, connection={_quoted(KAFKA)})"

    def _limit(self) -> str:
        """One limit is for documents that are refused and for records that do not decode."""
        given = {
            name: self._given[name].strip().lower() in values
            for name, values in _TOLERANT.items()
            if name in self._given
        }
        tolerant = [name for name, tolerates in given.items() if tolerates]
        strict = [name for name, tolerates in given.items() if not tolerates]
        if tolerant:
            why = (
                f"an output has one limit for refused documents and for records that do not decode, and {tolerant[0]} "
                "tolerates them: here none fails a batch, and each is kept as a dead letter"
            )
            self._answers |= dict.fromkeys(strict, undecided(why))
        return f"DeadLetterLimit({'share=1' if tolerant else 'number=0'})"

    def _retry_seconds(self) -> str | None:
        if not {"max.retries", "retry.backoff.ms"} & self._given.keys():
            return None
        retries = self._number("max.retries", 0, 64) if "max.retries" in self._given else 5
        backoff_ms = self._number("retry.backoff.ms", 1, 86_400_000) if "retry.backoff.ms" in self._given else 100
        if retries is None or backoff_ms is None:
            return None
        # Each wait is up to twice the one before. No batch of a day helps anybody.
        return _quoted(min(86_400.0, max(1.0, backoff_ms * (2**retries - 1) / 1000)))

    # The texts.

    def _streams(self, has_transform: bool) -> list[str]:
        stream = [
            "Stream(",
            *_indented([f"name={'name' if self._apart else _quoted(self._name)},", "inputs=KafkaInput("]),
            *_indented(_indented(self._input())),
            *_indented(["),", "outputs=ElasticsearchOutput("]),
            *_indented(_indented(self._output())),
            *_indented(["),"]),
            *_indented(
                _arguments(
                    transform=_quoted(f"{_transform_module(self._name)}:documents") if has_transform else None,
                    spark="SparkSettings(py_files=(TRANSFORM,))" if has_transform else None,
                    batch_interval=_quoted("10 s"),
                    storage="STORAGE",
                    ledger="LEDGER",
                )
            ),
            ")",
        ]
        if not self._apart:
            return [f"stream = {stream[0]}", *stream[1:], "", "receiver, batches = stream_dags(stream)"]
        names = _stream_names(self._name, self._topics)
        by_key = [self._indices.of(topic) for topic in self._topics if self._by_key[topic]]
        if shared := [index for index in by_key if by_key.count(index) > 1]:
            why = f"topics share the index {shared[0]!r}, and offsets do not say which topic's value of a key is newer"
            self._answers["topics"] = undecided(why)
        mixed = len(set(self._ids.values())) > 1
        rows = [
            [*map(_quoted, (name, topic, self._indices.of(topic))), *([self._ids[topic]] if mixed else [])]
            for name, topic in zip(names, self._topics, strict=True)
        ]
        return [
            *_comment(f"Each topic has a stream, since {self._why_apart}: its name, topic, index{', ids' * mixed}."),
            "TOPICS = [",
            *_indented(f"({', '.join(row)})," for row in rows),
            "]",
            "",
            "streams = [",
            *_indented([stream[0], *stream[1:], f"for name, topic, index{', ids' if mixed else ''} in TOPICS"]),
            "]",
            "",
            "for stream in streams:",
            "    stream_dags(stream)",
        ]

    def _text(self, streams: list[str], properties: Sequence[PropertyAnswer]) -> str:
        code = "\n".join(streams)
        open_ones = [each for each in properties if each.answer.is_open]
        names = [name for name in _NAMES if re.search(rf"\b{name}\(|\b{name}\)", code)]
        names += ["StreamDefinitionError"] if open_ones else []
        lines = [
            f'"""The stream of a connector of Kafka Connect: {self._connector.family}.',
            "",
            'Made by `headrace from-connect`. (Airflow looks into files that mention both "airflow" and "dag".)',
            '"""',
            "",
        ]
        lines += ["from pathlib import Path", ""] if "TRANSFORM" in code else []
        lines += ["from headrace.dags import stream_dags", "from headrace.stream import ("]
        lines += [*_indented([f"{name}," for name in sorted(names)]), ")", ""]
        if open_ones:
            lines += [*_comment(_UNDECIDED_NOTE), "UNDECIDED = ["]
            lines += [*_indented([f"{_quoted(str(each))}," for each in open_ones]), "]", *_UNDECIDED_CHECK, ""]
        lines += [*_comment(_SETTINGS_NOTE), *_SETTINGS]
        if "TRANSFORM" in code:
            file = _quoted(f"{_transform_module(self._name)}.py")
            lines.append(f"TRANSFORM = str(Path(__file__).absolute().with_name({file}))")
        lines += ["", *self._connections(properties), "", *streams, "", "# The connector's properties:"]
        for each in properties:
            lines += _comment(str(each), item=True)
        return "\n".join([*lines, ""])

    def _connections(self, properties: Sequence[PropertyAnswer]) -> list[str]:
        """What the connections need, without secrets."""
        lines = _comment(_CONNECTIONS_NOTE)
        for conn_id in (KAFKA, SEARCH, REGISTRY):
            of_it = [each for each in properties if each.answer.connection == conn_id]
            if not of_it and conn_id == REGISTRY:
                continue
            lines.append(f"#   {conn_id}")
            lines += [] if of_it else ["#     as the worker's bootstrap.servers and its log-in say"]
            for each in of_it:
                lines += _comment(f"{each.answer.text}: {each.name} = {each.value}", item=True, indent="    ")
        return lines


_JSON_TEXTS = {
    Form.JSON: "no decoder: the JSON of a record is its document",
    Form.ENVELOPE: "the transform module, which takes the payload; the schema beside it is not looked at, so that a "
    "decimal stays base64: DebeziumDecoder(fields=…) reads it too",
}
_NAMES = (
    *("Stream", "KafkaInput", "ElasticsearchOutput", "KeyIds", "RecordIds", "DeadLetterLimit", "DeadLetterTopic"),
    "SparkSettings",
    *("Utf8Decoder", "JsonDecoder", "AvroDecoder", "ProtobufDecoder", "JsonSchemaDecoder", "DebeziumDecoder"),
    "DebeziumKeyDecoder",
)
_UNDECIDED_NOTE = (
    "What the connector did and the streams below do not do. Decide about each, change the streams if you need it, and "
    "delete the line: the file does not load before."
)
_UNDECIDED_CHECK = (
    "if UNDECIDED:",
    "    raise StreamDefinitionError(",
    "        f\"This file does not do all that the connector did. {'; '.join(UNDECIDED)}.\",",
    '        remedy="Decide about each, and delete its line from UNDECIDED.",',
    "    )",
)
_SETTINGS_NOTE = (
    "Connect has no counterpart of these: the folder of the streams' logs, and the ledger. The batch interval is yours "
    "too."
)
_SETTINGS = ('STORAGE = "/data/streams"', 'LEDGER = "connection:headrace_ledger_default"')
_CONNECTIONS_NOTE = (
    "The connections of Airflow that the streams name, and the connector's properties that say what they need. Secrets "
    "are not repeated here."
)


def _arguments(**given: str | None) -> list[str]:
    return [line for name, text in given.items() if text is not None for line in f"{name}={text},".split("\n")]


def _indented(lines: Iterable[str]) -> list[str]:
    return [f"    {line}" if line else "" for line in lines]


def _comment(text: str, *, item: bool = False, indent: str = "") -> list[str]:
    first, later = (f"#{indent} - ", f"#{indent}   ") if item else ("# ", "# ")
    return textwrap.wrap(text, _WIDTH, initial_indent=first, subsequent_indent=later, break_on_hyphens=False)


def _quoted(value: object) -> str:
    """Python's literal of a value, as the formatters write it: texts in double quotes, a long list on several lines."""
    if isinstance(value, list):
        return _listing("[", [_quoted(each) for each in value], "]")
    if isinstance(value, dict):
        return _listing("{", [f"{_quoted(name)}: {_quoted(each)}" for name, each in value.items()], "}")
    text = repr(value)
    return f'"{text[1:-1]}"' if text[0] == "'" and '"' not in text else text


def _listing(begin: str, items: Sequence[str], end: str) -> str:
    line = f"{begin}{', '.join(items)}{end}"
    # What is before it on its line takes the rest.
    return line if len(line) < _WIDTH - 40 else "\n".join([begin, *_indented(f"{item}," for item in items), end])


def _client_value(text: str) -> str | int | bool:
    text = text.strip()
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    return int(text) if re.fullmatch(r"[0-9]{1,15}", text) else text


def _identifier(name: str) -> str:
    """A stream's name like this one."""
    made = re.sub(r"[^a-z0-9_-]+", "-", name.lower()).strip("-_")[:_LONGEST_NAME].rstrip("-_")
    return made if made[:1].isalpha() else f"connector-{made}".rstrip("-")[:_LONGEST_NAME]


def _stream_names(name: str, topics: Sequence[str]) -> list[str]:
    """A name for each topic's stream, no two alike."""
    names: list[str] = []
    for number, topic in enumerate(topics, 1):
        made = _identifier(f"{name}-{topic}")
        names.append(made if made not in names else f"{made[: _LONGEST_NAME - 6]}-{number}")
    return names


def _transform_module(name: str) -> str:
    return f"{name.replace('-', '_')}_transform"


def _printable(name: str) -> str:
    return name if re.fullmatch(r"[\w.$-]{1,200}", name) else _quoted(without_secrets(name[:_LONGEST_VALUE]))


def _shown(name: str, value: str) -> str:
    """The value in quotes, without what is secret in it."""
    clean = without_secrets(value)
    if names_secret(name, value) or name.endswith("user.info") or looks_secret(clean):
        return HIDDEN
    return _quoted(clean if len(clean) <= _LONGEST_VALUE else f"{clean[:_LONGEST_VALUE]} …")
