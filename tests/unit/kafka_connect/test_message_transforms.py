"""The transform module does with a record what the connector's transforms did, in their order.

The records are after those of the tests of these transforms in Apache Kafka and Debezium. Spark runs the module in
tests/integration/spark/test_from_connect.py.
"""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from tests.unit.kafka_connect.made import AVRO, JSON, TEXTS, answer, defined, transform_of

APACHE = "org.apache.kafka.connect.transforms."
RECORD = SimpleNamespace(topic="orders", partition=3, offset=17, timestamp=1_700_000_000_000)


def chain(*transforms: dict[str, str], **more: Any) -> Any:
    """The definition with these transforms, which are named a, b, c and so on."""
    of = {"transforms": ",".join("abcdef"[: len(transforms)]), **more}
    for alias, settings in zip("abcdef", transforms, strict=False):
        of |= {f"transforms.{alias}.{name}": value for name, value in settings.items()}
    return defined(of=of)


def made(definition: Any, value: Any) -> tuple[str | None, Any]:
    """The key and the decoded document that the module makes of a value."""
    assert definition.to_decide == []
    text = value if isinstance(value, bytes | None) else json.dumps(value).encode()
    key, document = transform_of(definition)["_made"](text, RECORD)
    return key, None if document is None else json.loads(document)


def after(value: Any, *transforms: dict[str, str], **more: Any) -> Any:
    return made(chain(*transforms, **more), value)[1]


REPLACE = {"type": f"{APACHE}ReplaceField$Value"}
INSERT = {"type": f"{APACHE}InsertField$Value"}


def test_fields_are_left_out_kept_and_renamed() -> None:
    row = {"dont": "whatever", "abc": 42, "foo": True, "etc": None}
    replaced = {**REPLACE, "exclude": "dont", "renames": "abc:xyz, foo:bar"}
    assert after(row, replaced) == {"xyz": 42, "bar": True, "etc": None}
    assert after(row, {**REPLACE, "blacklist": "abc,foo"}) == {"dont": "whatever", "etc": None}
    assert after(row, {**REPLACE, "include": "abc"}) == {"abc": 42}
    assert after({"a": 1, "b": 2}, {**REPLACE, "renames": "a:b,b:a"}) == {"b": 1, "a": 2}


def test_fields_are_inserted() -> None:
    places = {"topic.field": "topic_field!", "partition.field": "partition_field", "offset.field": "offset_field?"}
    static = {"timestamp.field": "timestamp_field", "static.field": "instance_id", "static.value": "my-instance-id"}
    assert after({"magic": 42}, {**INSERT, **places, **static}) == {
        "magic": 42,
        "topic_field": "orders",
        "partition_field": 3,
        "offset_field": 17,
        "timestamp_field": 1_700_000_000_000,
        "instance_id": "my-instance-id",
    }


def test_a_field_is_extracted_and_a_value_hoisted() -> None:
    extract = {"type": f"{APACHE}ExtractField$Value", "field": "magic"}
    hoist = {"type": f"{APACHE}HoistField$Value", "field": "wand"}
    assert after({"magic": {"a": 1}}, extract) == {"a": 1}
    assert after({"other": 1}, extract) is None
    assert after({"magic": 42}, extract, hoist) == {"wand": 42}
    assert after({"other": 1}, extract, hoist) is None


def test_a_value_is_flattened() -> None:
    flatten = {"type": f"{APACHE}Flatten$Value"}
    nested = {"A": {"B": {"c": 1, "d": None}, "e": [{"f": 1}]}, "g": "x"}
    assert after(nested, flatten) == {"A.B.c": 1, "A.B.d": None, "A.e": [{"f": 1}], "g": "x"}
    assert after(nested, {**flatten, "delimiter": "#"}) == {"A#B#c": 1, "A#B#d": None, "A#e": [{"f": 1}], "g": "x"}


def test_the_key_is_made_of_the_value_as_it_is_then() -> None:
    to_key = {"type": f"{APACHE}ValueToKey", "fields": "id"}
    extract = {"type": f"{APACHE}ExtractField$Key", "field": "id"}
    without = {**REPLACE, "exclude": "id"}
    definition = chain(to_key, extract, without, **{"key.ignore": "false", "key.converter": TEXTS})
    assert made(definition, {"id": 12, "a": 1}) == ("12", {"a": 1})
    assert made(definition, {"id": "x", "a": 1}) == ("x", {"a": 1})
    assert made(definition, {"a": 1}) == (None, {"a": 1})
    assert "the key is made of the value" in answer(definition, "key.converter")


UNWRAP = {"type": "io.debezium.transforms.ExtractNewRecordState"}


def event(op: str, before: Any, row: Any) -> dict[str, Any]:
    return {"op": op, "before": before, "after": row, "source": {"ts_ms": 5, "db": "shop"}, "ts_ms": 6}


def test_change_events_become_rows() -> None:
    assert after(event("c", None, {"id": 1}), UNWRAP) == {"id": 1}
    assert after(event("d", {"id": 1}, None), UNWRAP) is None
    assert after({"id": 1}, UNWRAP) == {"id": 1}, "a record that is no change event stays"


def test_change_events_keep_what_is_added() -> None:
    added = {**UNWRAP, "add.fields": "op,source.db", "add.fields.prefix": "_"}
    assert after(event("u", None, {"id": 1}), added) == {"id": 1, "_op": "u", "_source_db": "shop"}
    rewritten = {**UNWRAP, "delete.handling.mode": "rewrite", "add.fields": "op"}
    assert after(event("d", {"id": 1}, None), rewritten) == {"id": 1, "__op": "d", "__deleted": "true"}
    assert after(event("c", None, {"id": 1}), rewritten) == {"id": 1, "__op": "c", "__deleted": "false"}


def test_a_payload_beside_its_schema_is_the_value() -> None:
    enveloped = {"value.converter.schemas.enable": "true"}
    assert after({"schema": {}, "payload": event("c", None, {"id": 1})}, UNWRAP, **enveloped) == {"id": 1}
    assert after({"schema": {}, "payload": None}, **enveloped) is None
    assert after({"schema": {}, "payload": {"a": 1.5}}, **enveloped) == {"a": 1.5}


def test_a_record_without_a_value_stays_without() -> None:
    assert made(chain({**REPLACE, "exclude": "a"}), None) == (None, None)


@pytest.mark.parametrize("value", [b"no JSON", b"\xff", b"[" * 100_000, b""])
def test_what_is_no_json_is_left_to_the_dead_letters(value: bytes) -> None:
    key, document = transform_of(chain({**REPLACE, "exclude": "a"}))["_made"](value, RECORD)
    assert (key, document) == (None, value.decode(errors="replace"))


@pytest.mark.parametrize("value", [1, "x", [1], None, True])
def test_values_that_are_no_objects_pass(value: Any) -> None:
    fields = [{**REPLACE, "exclude": "a"}, {**INSERT, "static.field": "x", "static.value": "y"}, UNWRAP]
    flatten, extract = {"type": f"{APACHE}Flatten$Value"}, {"type": f"{APACHE}ExtractField$Value", "field": "a"}
    assert after(value, *fields, flatten, extract) == value


MATCHES = f"{APACHE}predicates.TopicNameMatches"


@pytest.mark.parametrize(("pattern", "negate", "applied"), [("ord.*", "", 1), ("ord.*", "true", 0), ("ord", "", 0)])
def test_a_predicate_about_topics_is_asked_once(pattern: str, negate: str, applied: bool) -> None:
    conditional = {**REPLACE, "exclude": "a", "predicate": "p", **({"negate": negate} if negate else {})}
    definition = chain(
        conditional, **{"predicates": "p", "predicates.p.type": MATCHES, "predicates.p.pattern": pattern}
    )
    assert definition.to_decide == []
    assert (definition.transform is not None) == bool(applied)
    if not applied:
        assert "matches none of the topics" in answer(definition, "transforms.a.type")


@pytest.mark.parametrize(
    ("transform", "more", "why"),
    [
        ({"type": f"{APACHE}TimestampRouter", "timestamp.format": "yyyy-'W'ww"}, {}, "has 'ww'"),
        ({"type": f"{APACHE}TimestampRouter", "timestamp.format": "yyyyMMdd'%d'"}, {}, "has \"'%d'\""),
        ({"type": f"{APACHE}TimestampRouter", "timestamp.format": "yyyy'"}, {}, 'has "\'"'),
        ({"type": f"{APACHE}TimestampRouter", "timestamp.format": "YYYYMMdd"}, {}, "has 'YYYY'"),
        ({"type": "io.confluent.connect.transforms.ExtractTopic$Header"}, {}, "{header.NAME}"),
        ({"type": "io.confluent.connect.transforms.ExtractTopic$Value"}, {}, "make a column of it"),
        ({"type": f"{APACHE}Cast$Value", "spec": "a:int8"}, {}, "does not know Cast$Value"),
        ({"type": "com.acme.ReplaceField$Value"}, {}, "does not know ReplaceField$Value"),
        ({"field": "x"}, {}, "a transform without a type"),
        ({**REPLACE, "exclude": "a", "nested": "true"}, {}, "its setting nested"),
        ({**REPLACE, "renames": "a"}, {}, "no list of old:new"),
        ({**REPLACE, "exclude": "a", "predicate": "p"}, {}, "asked for each record"),
        ({**REPLACE, "exclude": "a"}, {"value.converter": TEXTS}, "gives no fields"),
        ({"type": f"{APACHE}Flatten$Value"}, {"value.converter": AVRO}, "only when a batch begins"),
        ({**REPLACE, "renames": "a:b,b:a"}, {"value.converter": AVRO}, "renamed too"),
        ({"type": f"{APACHE}ValueToKey", "fields": "a,b"}, {}, "several fields"),
        ({"type": f"{APACHE}RegexRouter", "regex": "(", "replacement": ""}, {}, "does not read the regular expression"),
        ({"type": f"{APACHE}RegexRouter", "regex": r"\p{L}+", "replacement": ""}, {}, "does not read as Java"),
        ({"type": f"{APACHE}RegexRouter", "regex": "o(.*)", "replacement": "$2"}, {}, "group"),
    ],
)
def test_a_transform_without_a_counterpart_says_why(transform: dict[str, str], more: dict[str, str], why: str) -> None:
    definition = chain(transform, **more)
    (left,) = definition.to_decide
    assert why in str(left)


@pytest.mark.parametrize(
    ("regex", "replacement", "index"),
    [
        ("(.*)", "x-$1", "x-orders"),
        ("ord(.)(.*)", "$2$1", "rse"),
        ("ord(.*)", r"\$1", "$1"),
        ("other", "x", "orders"),
        ("o.*", "$0-1", "orders-1"),
        ("(o).*", "$12", "o2"),
    ],
)
def test_topics_are_renamed_as_java_does(regex: str, replacement: str, index: str) -> None:
    router = {"type": f"{APACHE}RegexRouter", "regex": regex, "replacement": replacement}
    definition = chain(router, **{"key.ignore": "false", "key.converter": TEXTS})
    assert f'index="{index}"' in definition.text


BY_KEY = {"key.ignore": "false", "key.converter": TEXTS}
BY_DAY = {"type": f"{APACHE}TimestampRouter"}
ROUTER = {"type": f"{APACHE}RegexRouter", "regex": "orders.*", "replacement": "x"}


@pytest.mark.parametrize(
    ("router", "index"),
    [
        ({}, "orders-{timestamp:%Y%m%d}"),
        ({"topic.format": "Logs-${topic}", "timestamp.format": "yyyy"}, "logs-orders"),
        ({"topic.format": "${timestamp}.${topic}", "timestamp.format": "yyyy-DDD"}, "{timestamp:%Y-%j}.orders"),
        ({"timestamp.format": "yyyy.MM.dd'T'HH"}, "orders-{timestamp:%Y.%m.%dt%H}"),
    ],
)
def test_a_time_in_an_index_is_as_java_writes_it(router: dict[str, str], index: str) -> None:
    definition = chain({**BY_DAY, **router}, **BY_KEY)
    assert definition.to_decide == []
    assert f'index="{index}"' in definition.text


def test_a_router_after_that_of_the_time_is_to_decide() -> None:
    for second, why in ((ROUTER, "changes names that have"), (BY_DAY, "has put the record's time")):
        (left,) = chain(BY_DAY, second, **BY_KEY).to_decide
        assert left.name == "transforms.b.type"
        assert why in str(left)
    assert chain(ROUTER, BY_DAY, **BY_KEY).to_decide == []


def test_a_predicate_asks_for_the_name_that_a_router_made() -> None:
    named = {"predicates": "p", "predicates.p.type": MATCHES, "predicates.p.pattern": "x", **BY_KEY}
    assert 'index="x-{timestamp:%Y%m%d}"' in chain(ROUTER, {**BY_DAY, "predicate": "p"}, **named).text
    assert 'index="orders-{timestamp:%Y%m%d}"' in chain({**BY_DAY, "predicate": "p", "negate": "true"}, **named).text
    (left,) = chain(BY_DAY, {**REPLACE, "exclude": "a", "predicate": "p"}, **named).to_decide
    assert "asked for each record" in str(left)


def test_deletions_from_an_index_of_the_day_are_to_decide() -> None:
    (left,) = chain(BY_DAY, **BY_KEY, **{"behavior.on.null.values": "delete"}).to_decide
    assert left.name == "behavior.on.null.values"
    assert "needs an index by topic or key: a record without a value has another {timestamp:%Y%m%d}" in str(left)


@pytest.mark.parametrize(
    ("router", "why"),
    [
        ({**ROUTER, "replacement": r"\$1"}, "has '$1', as a placeholder of another tool"),
        ({**BY_DAY, "topic.format": "${topic} ${timestamp}"}, "it has blanks"),
        ({**BY_DAY, "timestamp.format": "yyyy/MM"}, "it has /"),
    ],
)
def test_a_name_that_is_not_legal_is_to_decide(router: dict[str, str], why: str) -> None:
    (left,) = chain(router, **BY_KEY, **{"behavior.on.null.values": "delete"}).to_decide
    assert left.name == "topics"
    assert why in str(left)


def test_ids_in_an_index_of_the_day_are_to_decide() -> None:
    for topics in ({}, {"topics": None, "topics.regex": "o.*"}):
        (left,) = chain(BY_DAY, **topics).to_decide
        assert left.name == "transforms.a.type"
        assert "ids begin with the topic" in str(left)


def test_a_pattern_has_an_index_by_topic_and_time() -> None:
    router = {**BY_DAY, "topic.format": "logs-${topic}-${timestamp}"}
    for pattern, left in (("_x.*", ["transforms.a.type"]), ("X.*", ["topics.regex", "transforms.a.type"])):
        definition = chain(router, **{"topics": None, "topics.regex": pattern})
        assert 'index="logs-{topic}-{timestamp:%Y%m%d}"' in definition.text
        assert [each.name for each in definition.to_decide] == left


def test_transforms_of_unused_keys_and_headers_do_nothing() -> None:
    key = {"type": f"{APACHE}ExtractField$Key", "field": "id"}
    header = {"type": f"{APACHE}InsertHeader", "header": "h", "value.literal": "x"}
    schema = {"type": f"{APACHE}SetSchemaMetadata$Value", "schema.name": "x"}
    definition = chain(key, header, schema)
    assert definition.to_decide == []
    assert definition.transform is None
    assert "keys are in no id" in answer(definition, "transforms.a.field")


def test_a_transform_that_is_not_listed_is_not_read() -> None:
    definition = defined(of={"transforms": "a", "transforms.a.type": f"{APACHE}DropHeaders", "transforms.b.type": "x"})
    assert definition.to_decide == []
    assert "Connect does not read it" in answer(definition, "transforms.b.type")


def test_columns_of_a_registry_are_changed_by_expressions() -> None:
    """Spark runs them in tests/integration/spark/test_from_connect.py."""
    definition = chain({**REPLACE, "exclude": "a.b"}, **{"value.converter": AVRO})
    assert definition.transform is not None
    assert "value = value.dropFields('`a.b`')" in definition.transform
    assert "json" not in definition.transform
    assert JSON not in definition.text
