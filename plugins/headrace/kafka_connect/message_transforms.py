"""What the single message transforms of a connector become: a decoder, the name of an index, or lines of Python.

The lines are those of a transform module, which does with each value what the connector's transforms did, in their
order. They work on the JSON of a value, or on the columns of a value that a registry's schema decodes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from headrace.kafka_connect.connector import Answer, none, same, to, undecided
from headrace.secrets import looks_secret

_APACHE = "org.apache.kafka.connect.transforms."
REGEX_ROUTER = f"{_APACHE}RegexRouter"
TIMESTAMP_ROUTER = f"{_APACHE}TimestampRouter"
ANY_TOPIC, RECORD_TIME = "${topic}", "${timestamp}"
"""What a topic's name after the routers has for the topic, where topics are not known, and for the record's time."""
FIELD_OF_KEY = f"{_APACHE}ExtractField$Key"
_TOPIC_MATCHES = f"{_APACHE}predicates.TopicNameMatches"
# Java reads these otherwise than Python, or Python does not read them.
_JAVA_ONLY = re.compile(r"&&|\\[pPQEGhHRvVX]|\\k<|\(\?<[A-Za-z]|[*+?}]\+|\(\?>")
_IN_TRANSFORM = to("the transform module")


class Form(Enum):
    """What a key or a value is before the transforms."""

    JSON = auto()
    """JSON as it comes."""
    ENVELOPE = auto()
    """JSON with a ``schema`` and a ``payload``."""
    COLUMNS = auto()
    """The columns of a registry's schema."""
    TEXT = auto()
    BYTES = auto()

    @property
    def is_json(self) -> bool:
        """Whether the lines work on a value of JSON."""
        return self in (Form.JSON, Form.ENVELOPE)


@dataclass
class Chain:
    """What the transforms of a connector come to.

    ``lines`` are those of the transform module: on ``key`` and ``value`` of one record if the form is JSON, else on
    columns. ``answers`` are by the names of properties.
    """

    form: Form
    topics: Sequence[str]
    lines: list[str] = field(default_factory=list)
    answers: dict[str, Answer] = field(default_factory=dict)
    topic_names: dict[str, str] = field(default_factory=dict)
    """Each topic's name after the routers, of which the index is made; that of "" is for topics that are not known."""
    time_format: str = ""
    """How the record's time is written in these names."""
    key_field: str | None = None
    """The field of the record's key that is the id."""
    sets_key: bool = False
    """Whether the lines make the key of the value."""
    is_change_event: bool = False
    """Whether the decoder takes the row of a change event."""
    drops_deletions: bool = False
    """Whether deletions never reached the connector's task."""


class _NotTakenOverError(Exception):
    """Why a transform has no counterpart."""


@dataclass(frozen=True)
class _MessageTransform:
    alias: str
    settings: Mapping[str, str]
    """By the names after ``transforms.<alias>.``."""

    def names(self, *settings: str) -> list[str]:
        """The comma-separated names of the first setting that is there, of which there may be an old spelling."""
        given = next((self.settings[each] for each in settings if self.settings.get(each)), "")
        return [name.strip() for name in given.split(",") if name.strip()]

    def only(self, *settings: str) -> None:
        """Raise _NotTakenOverError if there are others, since they would change what the transform does."""
        if others := sorted(self.settings.keys() - {"type", "predicate", "negate", *settings}):
            raise _NotTakenOverError(f"its setting {', '.join(others)} is not one that headrace takes over")


def java_pattern(text: str) -> re.Pattern[str]:
    """The pattern of a regular expression of Java. Raises ValueError if Python reads it otherwise, or not at all."""
    if found := _JAVA_ONLY.search(text):
        raise ValueError(f"the regular expression has {found[0]!r}, which Python does not read as Java does")
    try:
        return re.compile(text)
    except re.error as error:
        raise ValueError(f"Python does not read the regular expression ({error})") from None


def message_transforms(properties: Mapping[str, str], form: Form, topics: Sequence[str], *, uses_keys: bool) -> Chain:
    """Follow the transforms that ``properties`` name, in their order.

    Args:
        properties: the connector's.
        form: that of the values.
        topics: the topics, as far as they are known.
        uses_keys: whether ids are made of keys.
    """
    chain = Chain(form, topics, topic_names={topic: topic for topic in topics} or {"": ANY_TOPIC})
    if form is Form.ENVELOPE:
        chain.lines += ["if isinstance(value, dict) and 'payload' in value:", "    value = value['payload']"]
    aliases = [name.strip() for name in properties.get("transforms", "").split(",") if name.strip()]
    for alias in aliases:
        prefix = f"transforms.{alias}."
        settings = {name.removeprefix(prefix): value for name, value in properties.items() if name.startswith(prefix)}
        one = _MessageTransform(alias, settings)
        try:
            answer = _take_over(one, chain, properties, uses_keys)
        except (_NotTakenOverError, ValueError) as error:
            answer = undecided(f"{error}")
        chain.answers |= dict.fromkeys((prefix + name for name in settings), answer)
        if answer.is_open and "type" in settings:
            # One decision for each transform.
            about = none(f"it is about {prefix}type")
            chain.answers |= {prefix + name: about for name in settings if name != "type"}
    for name in properties:
        if name == "transforms":
            left = [answer for answer in chain.answers.values() if answer.is_open]
            chain.answers[name] = none("each transform has its answer") if left else to("each transform's answer")
        elif name.startswith("transforms.") and name not in chain.answers:
            chain.answers[name] = none("the list of transforms does not name it, so Connect does not read it")
    return chain


def _take_over(one: _MessageTransform, chain: Chain, properties: Mapping[str, str], uses_keys: bool) -> Answer:
    kind = one.settings.get("type", "")
    if kind not in _KNOWN:
        named = kind.rpartition(".")[2] or "a transform without a type"
        raise _NotTakenOverError(f"headrace does not know {named}: write it into a transform")
    applied = {topic: _applies(one, properties, chain.topic_names[topic]) for topic in chain.topics}
    if None in applied.values() or (not applied and "predicate" in one.settings):
        raise _NotTakenOverError("its predicate is asked for each record: write it into a transform")
    if applied and not any(applied.values()):
        return none("its predicate matches none of the topics")
    if kind in _REFUSED:
        raise _NotTakenOverError(_REFUSED[kind])
    if kind == REGEX_ROUTER:
        return _regex_router(one, chain, [topic for topic in chain.topics if applied[topic]])
    if kind == TIMESTAMP_ROUTER:
        return _timestamp_router(one, chain, [topic for topic in chain.topic_names if applied.get(topic, True)])
    if not all(applied.values()):
        raise _NotTakenOverError("its predicate matches some of the topics, and all of them have one transform")
    if kind.endswith("$Key") and not uses_keys:
        return none("keys are in no id and in no document")
    if kind in _WITHOUT_EFFECT:
        return _WITHOUT_EFFECT[kind]
    return _handled(one, chain, kind)


def _handled(one: _MessageTransform, chain: Chain, kind: str) -> Answer:
    if not kind.endswith("$Key") and not (chain.form.is_json or chain.form is Form.COLUMNS):
        raise _NotTakenOverError("the value's converter gives no fields to work on")
    before = len(chain.lines)
    answer = _HANDLERS[kind](one, chain)
    if len(chain.lines) > before:
        alias = one.alias if re.fullmatch(r"[\w-]+", one.alias) else repr(one.alias)
        chain.lines.insert(before, f"# transforms.{alias}: {kind.rpartition('.')[2]}")
    return answer


def _applies(one: _MessageTransform, properties: Mapping[str, str], topic: str) -> bool | None:
    """Whether it is applied to records of a topic that has this name by then; None if that is asked for each record."""
    name = one.settings.get("predicate")
    if name is None:
        return True
    if properties.get(f"predicates.{name}.type") != _TOPIC_MATCHES or RECORD_TIME in topic:
        return None
    matches = java_pattern(properties.get(f"predicates.{name}.pattern", "")).fullmatch(topic) is not None
    return matches != (one.settings.get("negate", "false").lower() == "true")


def _regex_router(one: _MessageTransform, chain: Chain, topics: Sequence[str]) -> Answer:
    one.only("regex", "replacement")
    pattern = java_pattern(one.settings.get("regex", ""))
    replacement = one.settings.get("replacement", "")
    if chain.time_format:
        raise _NotTakenOverError("it changes names that have the record's time: write the index of each topic")
    for topic in topics:
        name = chain.topic_names[topic]
        if pattern.fullmatch(name):
            chain.topic_names[topic] = pattern.sub(lambda found: _replaced(found, replacement), name, count=1)
    if not topics:
        raise _NotTakenOverError("the topics are not known; give --topics with their names")
    return to("ElasticsearchOutput.index, of the topic's new name")


_DIRECTIVES = {"yyyy": "%Y", "MM": "%m", "dd": "%d", "HH": "%H", "DDD": "%j"}
"""What Java's SimpleDateFormat has for parts of a time that an index may have."""


def _timestamp_router(one: _MessageTransform, chain: Chain, topics: Sequence[str]) -> Answer:
    one.only("topic.format", "timestamp.format")
    if chain.time_format:
        raise _NotTakenOverError("another transform has put the record's time into the index before")
    topic_format = one.settings.get("topic.format", f"{ANY_TOPIC}-{RECORD_TIME}")
    given = one.settings.get("timestamp.format", "yyyyMMdd")
    time_format = _time_format(given)
    for topic in topics:
        chain.topic_names[topic] = topic_format.replace(ANY_TOPIC, chain.topic_names[topic])
    chain.time_format = time_format if RECORD_TIME in topic_format else ""
    return to("ElasticsearchOutput.index, by the record's time in Kafka and in UTC, as here")


def _time_format(given: str) -> str:
    """The format of a time in an index, for one of Java. The connector puts all of the name into small letters."""
    made = ""
    for found in re.finditer(r"'([^']+)'|([A-Za-z])\2*|.", given, re.DOTALL):
        part, literal = found[0], (found[1] or found[0]).lower()
        if part in _DIRECTIVES:
            made += _DIRECTIVES[part]
        elif found[2] or set(literal) & set("%{}'"):
            raise _NotTakenOverError(
                f"its timestamp.format {given!r} has {part!r}, and a time in an index can have texts and "
                f"{', '.join(_DIRECTIVES)}"
            )
        else:
            made += literal
    return made


def _replaced(found: re.Match[str], replacement: str) -> str:
    """Java's replacement: ``$1`` is a group, a backslash takes the next character as it is."""

    def one(part: re.Match[str]) -> str:
        if part[1] is not None:
            return part[1]
        number = part[2]
        # As many digits as name a group.
        while len(number) > 1 and int(number) > (found.re.groups or 0):
            number = number[:-1]
        return (found[int(number)] or "") + part[2][len(number) :]

    try:
        return re.sub(r"\\(.)|\$(\d+)", one, replacement)
    except (IndexError, re.error):
        raise ValueError(f"the replacement {replacement!r} names a group that the regular expression lacks") from None


_BY_FIELD = (
    "a field of each record chooses its index: let a transform make a column of it, and name that in the index, as in "
    '"{tenant}" or "orders-{created:%Y.%m.%d}"'
)
_REFUSED: dict[str, str] = {
    "io.confluent.connect.transforms.MessageTimestampRouter": _BY_FIELD,
    "io.confluent.connect.transforms.ExtractTopic$Key": _BY_FIELD,
    "io.confluent.connect.transforms.ExtractTopic$Value": _BY_FIELD,
    "io.confluent.connect.transforms.ExtractTopic$Header": (
        'a header of each record chooses its index: name it in the index, "{header.NAME}"; capital letters in it were '
        "made small ones, and are refused here"
    ),
    "io.debezium.transforms.ByLogicalTableRouter": (
        "it makes one topic of several: name the index of each topic in a mapping, index={topic: index}"
    ),
}
_NO_MAPPING_SCHEMA = none("a schema's name and version are in no document")
_HEADERS = same("headers are in no document")
_WITHOUT_EFFECT: dict[str, Answer] = {
    f"{_APACHE}SetSchemaMetadata$Key": _NO_MAPPING_SCHEMA,
    f"{_APACHE}SetSchemaMetadata$Value": _NO_MAPPING_SCHEMA,
    f"{_APACHE}InsertHeader": _HEADERS,
    f"{_APACHE}DropHeaders": _HEADERS,
}


def _replace_field(one: _MessageTransform, chain: Chain) -> Answer:
    one.only("exclude", "blacklist", "include", "whitelist", "renames")
    exclude, include = one.names("exclude", "blacklist"), one.names("include", "whitelist")
    pairs = [pair.split(":") for pair in one.names("renames")]
    if any(len(pair) != 2 for pair in pairs):
        raise _NotTakenOverError("renames is no list of old:new")
    renames = {old.strip(): new.strip() for old, new in pairs}
    if chain.form.is_json:
        tests = [f"name not in {exclude!r}"] if exclude else []
        tests += [f"name in {include!r}"] if include else []
        where = f" if {' and '.join(tests)}" if tests else ""
        renamed = f"{renames!r}.get(name, name)" if renames else "name"
        chain.lines += [
            "if isinstance(value, dict):",
            f"    value = {{{renamed}: field for name, field in value.items(){where}}}",
        ]
        return _IN_TRANSFORM
    if include:
        fields = ", ".join(f"value[{name!r}].alias({renames.get(name, name)!r})" for name in include)
        chain.lines.append(f"value = F.when(value.isNotNull(), F.struct({fields}))")
        return _IN_TRANSFORM
    if exclude:
        chain.lines.append(f"value = value.dropFields({', '.join(repr(path_of(name)) for name in exclude)})")
    if {new.lower() for old, new in renames.items() if old.lower() != new.lower()} & {old.lower() for old in renames}:
        raise _NotTakenOverError("a field gets the name of another that is renamed too: write it into a transform")
    for old, new in renames.items():
        # To Spark, names that differ in case only are one: the field is replaced by itself under its new name.
        dropped = "" if old.lower() == new.lower() else f".dropFields({path_of(old)!r})"
        chain.lines.append(f"value = value.withField({path_of(new)!r}, value[{old!r}]){dropped}")
    return _IN_TRANSFORM


_OF_RECORD = {
    "topic.field": ("record.topic", 'F.col("topic")'),
    "partition.field": ("record.partition", 'F.col("partition")'),
    "offset.field": ("record.offset", 'F.col("offset")'),
    "timestamp.field": ("record.timestamp", 'F.unix_millis("timestamp")'),
}


def _insert_field(one: _MessageTransform, chain: Chain) -> Answer:
    one.only(*_OF_RECORD, "static.field", "static.value")
    inserted = [
        (name.rstrip("?!"), expressions[0 if chain.form.is_json else 1])
        for setting, expressions in _OF_RECORD.items()
        if (name := one.settings.get(setting))
    ]
    if looks_secret(one.settings.get("static.value", "")):
        raise _NotTakenOverError("its static.value looks like a secret, and the module would have it in clear")
    if name := one.settings.get("static.field"):
        text = repr(one.settings.get("static.value", ""))
        inserted.append((name.rstrip("?!"), text if chain.form.is_json else f"F.lit({text})"))
    if chain.form.is_json:
        made = ", ".join(f"{name!r}: {expression}" for name, expression in inserted)
        chain.lines += ["if isinstance(value, dict):", f"    value = {{**value, {made}}}"]
    else:
        chain.lines += [f"value = value.withField({path_of(name)!r}, {expression})" for name, expression in inserted]
    return _IN_TRANSFORM


def _extract_value(one: _MessageTransform, chain: Chain) -> Answer:
    one.only("field")
    name = one.settings.get("field", "")
    if chain.form.is_json:
        chain.lines += ["if isinstance(value, dict):", f"    value = value.get({name!r})"]
    else:
        chain.lines.append(f"value = value[{name!r}]")
    return _IN_TRANSFORM


def _hoist_value(one: _MessageTransform, chain: Chain) -> Answer:
    one.only("field")
    name = one.settings.get("field", "")
    if chain.form.is_json:
        chain.lines += ["if value is not None:", f"    value = {{{name!r}: value}}"]
    else:
        chain.lines.append(f"value = F.when(value.isNotNull(), F.struct(value.alias({name!r})))")
    return _IN_TRANSFORM


def _flatten_value(one: _MessageTransform, chain: Chain) -> Answer:
    one.only("delimiter")
    if not chain.form.is_json:
        raise _NotTakenOverError(
            "the names of all columns are known only when a batch begins: write it into a transform"
        )
    chain.lines.append(f"value = _flat(value, {one.settings.get('delimiter', '.')!r})")
    return _IN_TRANSFORM


def _value_to_key(one: _MessageTransform, chain: Chain) -> Answer:
    one.only("fields")
    names = one.names("fields")
    if len(names) != 1:
        raise _NotTakenOverError("a key of several fields was no id to the connector; name the columns in ColumnIds")
    name = names[0]
    if chain.form.is_json:
        chain.lines += [
            "if isinstance(value, dict):",
            f"    key = value.get({name!r})",
            "    key = key if key is None or isinstance(key, str) else json.dumps(key)",
        ]
    else:
        chain.lines.append(f'key = value[{name!r}].cast("string")')
    chain.sets_key = True
    return _IN_TRANSFORM


def _extract_key(one: _MessageTransform, chain: Chain) -> Answer:
    one.only("field")
    name = one.settings.get("field", "")
    if chain.sets_key:
        return to("the transform module, which makes the key of this field alone")
    if chain.key_field is not None:
        raise _NotTakenOverError("it takes a field of a field of the key: write it into a transform")
    chain.key_field = name
    return to("the key's decoder, and KeyIds(), whose id is the field")


def _unwrap(one: _MessageTransform, chain: Chain) -> Answer:
    deletions = ("drop.tombstones", "delete.handling.mode", "delete.tombstone.handling.mode")
    one.only(*deletions, "add.fields", "add.fields.prefix", "add.headers", "add.headers.prefix", "operation.header")
    new = one.settings.get("delete.tombstone.handling.mode", "").lower()
    old = one.settings.get("delete.handling.mode", "").lower()
    rewrites = new.startswith("rewrite") or (not new and old == "rewrite")
    drops = new in ("drop", "rewrite") or (
        not new and old != "none" and one.settings.get("drop.tombstones", "").lower() == "true"
    )
    added = one.names("add.fields")
    chain.drops_deletions = drops
    if chain.form is Form.COLUMNS:
        if chain.lines or added or rewrites:
            raise _NotTakenOverError(
                "DebeziumDecoder gives the columns op, source and before beside the row: put them into the document in "
                "a transform"
            )
        chain.is_change_event = True
        return to("DebeziumDecoder(events=…)")
    prefix = one.settings.get("add.fields.prefix", "__")
    fields = "".join(f", {prefix + name.replace('.', '_')!r}: _at(event, {name!r})" for name in added)
    deleted = f", {prefix + 'deleted'!r}: " if rewrites else ""
    chain.lines += ["if isinstance(value, dict) and 'op' in value and 'source' in value:", "    event = value"]
    if rewrites:
        chain.lines.append("    is_deletion = event['op'] == 'd'")
        chain.lines.append("    value = event.get('before' if is_deletion else 'after')")
    else:
        chain.lines.append("    value = event.get('after')")
    if fields or deleted:
        flag = f"{deleted}'true' if is_deletion else 'false'" if rewrites else ""
        chain.lines += ["    if isinstance(value, dict):", f"        value = {{**value{fields}{flag}}}"]
    return to("the transform module; or DebeziumDecoder(fields=…), which also reads dates and decimals")


def path_of(name: str) -> str:
    """The name of a field in Spark's DDL, and for withField and dropFields, to which a dot is a level."""
    return name if re.fullmatch(r"\w+", name) else "`" + name.replace("`", "``") + "`"


_Handler = Callable[[_MessageTransform, Chain], Answer]
_HANDLERS: dict[str, _Handler] = {
    f"{_APACHE}ReplaceField$Value": _replace_field,
    f"{_APACHE}InsertField$Value": _insert_field,
    f"{_APACHE}ExtractField$Value": _extract_value,
    f"{_APACHE}HoistField$Value": _hoist_value,
    f"{_APACHE}Flatten$Value": _flatten_value,
    f"{_APACHE}ValueToKey": _value_to_key,
    FIELD_OF_KEY: _extract_key,
    "io.debezium.transforms.ExtractNewRecordState": _unwrap,
    "io.debezium.transforms.UnwrapFromEnvelope": _unwrap,
}
_KNOWN = frozenset((*_HANDLERS, *_WITHOUT_EFFECT, *_REFUSED, REGEX_ROUTER, TIMESTAMP_ROUTER))


def transform_module(chain: Chain, stream_name: str, *, key: str | None, version_header: str) -> str | None:
    """The text of the module with the stream's transform; None if it needs none.

    Args:
        chain: what the transforms come to.
        stream_name: the stream's, for the heading.
        key: the expression of the key, if the decoder does not give the id.
        version_header: the name of the header with the version; "" if the offset is it.
    """
    works_on_json = bool(chain.lines) and chain.form.is_json
    body = [*(_CALL_MADE if works_on_json else _on_columns(chain))]
    if chain.sets_key:
        made = 'F.col("made.key")' if works_on_json else "key"
        body.insert(-1, f'records = records.withColumn("key", {made})')
    if key is not None:
        body.append(f'records = records.withColumn("key", {key})')
    if version_header:
        quoted = version_header.replace("\\", "\\\\").replace("'", "\\'")
        found = f"try_element_at(filter(headers, header -> header.key = '{quoted}'), -1).value"
        expression = f"TRY_CAST(CAST({found} AS STRING) AS BIGINT)"
        body.append(f'records = records.withColumn("version", F.expr({expression!r}))')
    if not body:
        return None
    text = [f'"""What the connector did with each record of {stream_name}. Made by `headrace from-connect`."""', ""]
    text += ["import json", ""] if works_on_json else []
    text += ["from pyspark.sql import functions as F", "", "", "def documents(records):"]
    text += ['    """The records, with the documents as their values."""']
    text += [f"    {line}" for line in [*body, "return records"]]
    if works_on_json:
        text += ["", "", *_MADE, *(f"    {line}" for line in [*chain.lines, _MADE_RETURNS])]
        text += ["", "", *_FLAT] if any("_flat(" in line for line in chain.lines) else []
        text += ["", "", *_AT] if any("_at(" in line for line in chain.lines) else []
    return "\n".join([*text, ""])


def _on_columns(chain: Chain) -> list[str]:
    if not chain.lines:
        return []
    # The value last: a key is made of it as it was.
    return ['value = F.col("value")', *chain.lines, 'records = records.withColumn("value", value)']


_CALL_MADE = (
    'made = F.udf(_made, "STRUCT<key: STRING, value: STRING>")',
    'record = F.struct("topic", "partition", "offset", F.unix_millis("timestamp").alias("timestamp"))',
    'records = records.withColumn("made", made("value", record))',
    'records = records.withColumn("value", F.col("made.value"))',
    'records = records.drop("made")',
)
_MADE = (
    "def _made(text, record):",
    '    """(key, value) after the transforms. A text that is no JSON stays, and becomes a dead letter."""',
    "    if text is None:",
    "        return None, None",
    "    try:",
    "        value = json.loads(text)",
    "    except (ValueError, RecursionError):",
    '        return None, bytes(text).decode(errors="replace")',
    "    key = None",
)
_MADE_RETURNS = "return key, None if value is None else json.dumps(value)"
_FLAT = (
    "def _flat(value, delimiter):",
    "    if not isinstance(value, dict):",
    "        return value",
    "    fields = {}",
    "    for name, field in value.items():",
    "        if isinstance(field, dict):",
    "            fields |= {f'{name}{delimiter}{inner}': each for inner, each in _flat(field, delimiter).items()}",
    "        else:",
    "            fields[name] = field",
    "    return fields",
)
_AT = (
    "def _at(event, path):",
    '    """The field of the event at this path; one without a dot is of the event itself, or of its source."""',
    "    for name in path.split('.'):",
    "        event = event.get(name) if isinstance(event, dict) else None",
    "    return event",
)
