"""Definitions of inputs: topics, servers, positions, and inputs beside one another.

Definitions of inputs that a custom receiver reads.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.unit.stream.definitions import fields

from headrace.stream import (
    ElasticsearchOutput,
    JsonDecoder,
    KafkaInput,
    KeyIds,
    ReceiverInput,
    SparkSettings,
    StartingOffsets,
    Stream,
    StreamDefinitionError,
)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"bootstrap_servers": None}, "connection"),
        ({"connection": "also"}, "either connection"),
        ({"topics": ()}, "topics or topic_pattern"),
        ({"topic_pattern": "x.*"}, "topics or topic_pattern"),
        ({"topics": "__consumer_offsets"}, "internal"),
        ({"topics": (), "topic_pattern": "("}, "regular expression"),
        ({"client": {"enable.auto.commit": True}}, "enable.auto.commit cannot be set here"),
        ({"client": {"sasl.password": "hunter2"}}, "Kafka connection"),
        ({"receivers": 0}, "receivers"),
        ({"starting_offsets": "somewhere"}, "starting_offsets"),
        ({"starting_offsets": StartingOffsets(offsets={"other": {0: 7}})}, "names other, which this input does not"),
        ({"topics": ("flights", "my topic")}, "holds 'my topic'"),
        ({"topics": "flights.*"}, "goes into topic_pattern"),
        ({"topics": "f" * 250}, "1 to 249"),
        ({"topics": ".."}, "1 to 249"),
        ({"topics": ("flights", "flights")}, "names flights twice"),
        ({"bootstrap_servers": ""}, "are not addresses"),
        ({"bootstrap_servers": "a:9092 b:9092"}, "are not addresses"),
        ({"bootstrap_servers": "a:9092,"}, "are not addresses"),
        ({"bootstrap_servers": "a:port"}, "are not addresses"),
        ({"value_decoder": {"kind": "json", "fields": "n INTEGERR"}}, "is INTEGER meant"),
        ({"key_decoder": {"kind": "json", "fields": "n MAP<INT, INT>"}}, "keys are not STRING"),
        (
            {"value_decoder": {"kind": "json", "fields": "n ARRAY<VARCHAR(3)>"}},
            "VARCHAR, which JSON is not decoded into",
        ),
        ({"key_decoder": {"kind": "json", "fields": "n ARRAY<STRUCT<a INT, a INT>>"}}, "STRUCT that names a twice"),
        ({"value_decoder": {"kind": "json", "fields": '`a"b` INT'}}, "a name has no quotes"),
        ({"value_decoder": {"kind": "json", "fields": "n MAP<STRING, STRUCT<`a\\b` INT>>"}}, "a name has no quotes"),
        ({"value_decoder": {"kind": "json", "fields": "`a\tb` INT"}}, "a name has no quotes"),
    ],
)
def test_inputs_are_checked(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(StreamDefinitionError, match=words):
        KafkaInput(**({"bootstrap_servers": "127.0.0.1:9092", "topics": "flights"} | changes))


@pytest.mark.parametrize(
    "servers", ["a", "a:9092", "a.b-c:9092, 10.0.0.1:9092", "[::1]:9092", "SASL_SSL://a:9093", "broker_1:1"]
)
def test_servers_are_addresses_as_librdkafka_takes_them(servers: str) -> None:
    assert KafkaInput(bootstrap_servers=servers, topics="flights").bootstrap_servers == servers


def test_negative_partitions_have_no_starting_offset() -> None:
    with pytest.raises(StreamDefinitionError, match="greater than or equal to 0"):
        StartingOffsets(offsets={"flights": {-1: 7}})


@pytest.mark.parametrize(
    ("first", "second", "refused"),
    [
        ({"topics": ("a", "b")}, {"topics": "b"}, "both read b"),
        ({"topics": "clicks.eu"}, {"topic_pattern": "clicks.*"}, "both read clicks.eu"),
        ({"topic_pattern": "clicks.*"}, {"topic_pattern": "clicks.*"}, "both read clicks"),
        ({"topics": "a"}, {"topics": "a", "bootstrap_servers": "other:1"}, None),
        ({"topics": "a"}, {"topics": "a", "bootstrap_servers": "g:1,h:1"}, "both read a"),
        ({"topics": "a"}, {"topics": "b"}, None),
        ({"id": "clicks-eu", "topics": "a"}, {"id": "clicks_eu", "topics": "b"}, "clicks_eu is used twice"),
    ],
)
def test_two_inputs_read_different_topics(first: Any, second: Any, refused: str | None) -> None:
    inputs = [
        KafkaInput(**({"id": id_, "bootstrap_servers": "h:1"} | given)) for id_, given in (("x", first), ("y", second))
    ]
    if refused is None:
        assert Stream(**fields(inputs=inputs, transform="m:f"))
    else:
        with pytest.raises(StreamDefinitionError, match=refused):
            Stream(**fields(inputs=inputs, transform="m:f"))


@pytest.mark.parametrize(
    ("pattern", "topic", "matches"),
    [
        ("clicks.*", "clicks.eu", True),
        ("clicks", "clicks.eu", False),
        (".*", "__consumer_offsets", False),
        (".*", "__transaction_state", False),
        (".*", "_schemas", False),
        (".*", "_mine", True),
    ],
)
def test_a_pattern_matches_whole_names_and_never_internal_topics(pattern: str, topic: str, matches: bool) -> None:
    assert KafkaInput(bootstrap_servers="h:1", topic_pattern=pattern).matches(topic) is matches


LINES = ReceiverInput(id="lines", receiver="shop:Lines", arguments={"host": "localhost", "port": 9999})


@pytest.mark.parametrize(
    "given", ["Id INT, id INT", "a STRUCT<Id: INT, ID: INT, b: INT>", "a ARRAY<MAP<STRING, STRUCT<iD: INT, Id: INT>>>"]
)
@pytest.mark.parametrize("column", ["key_decoder", "value_decoder"])
def test_fields_that_differ_in_case_are_refused_for_a_transform(given: str, column: str) -> None:
    """Their names differ in nothing else."""
    source = KafkaInput(bootstrap_servers="h:1", topics="t", **{column: JsonDecoder(fields=given)})  # type: ignore[arg-type]
    assert Stream(**fields(inputs=source))
    with pytest.raises(StreamDefinitionError, match=rf"inputs.records.{column}.fields: [iI][dD] and [iI][dD] differ"):
        Stream(**fields(inputs=source, transform="shop:join"))
    sensitive = SparkSettings(conf={"spark.sql.caseSensitive": "true"})
    assert Stream(**fields(inputs=source, transform="shop:join", spark=sensitive))


def test_one_name_in_two_structs_is_no_problem() -> None:
    decoder = JsonDecoder(fields="id INT, a STRUCT<Id: INT>, b STRUCT<ID: INT, ib: INT>")
    source = KafkaInput(bootstrap_servers="h:1", topics="t", value_decoder=decoder)
    assert Stream(**fields(inputs=source, transform="shop:join"))


def test_a_definition_with_both_kinds_of_inputs_travels_as_json() -> None:
    kafka = KafkaInput(bootstrap_servers="127.0.0.1:9092", topics="flights")
    stream = Stream(**fields(inputs=(LINES, kafka), transform="shop:join"))
    assert Stream.from_json(stream.to_json()) == stream
    assert stream.kafka_inputs == (kafka,)
    assert stream.receivers == 2


def test_an_input_without_a_kind_is_kafkas() -> None:
    definition = json.loads(Stream(**fields()).to_json())
    del definition["inputs"][0]["kind"]
    assert isinstance(Stream(**definition).inputs[0], KafkaInput)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"receiver": "Lines"}, 'must be "module:Class"'),
        ({"receiver": None}, "receiver"),
        ({"arguments": {"socket": object()}}, "arguments.socket"),
        ({"arguments": {"url": "amqp://shop:hunter2@queue/"}}, "an Airflow connection"),
        ({"receivers": 2, "preferred_hosts": ("a", "b", "c")}, "one for each of the 2 receivers"),
        ({"id": "No Id"}, "id must start"),
        ({"topics": "lines"}, "topics"),
    ],
)
def test_an_input_that_cannot_be_used_is_refused(changes: dict[str, Any], words: str) -> None:
    given: dict[str, Any] = {"id": "lines", "receiver": "shop:Lines"}
    with pytest.raises(StreamDefinitionError, match=words) as refused:
        ReceiverInput(**(given | changes))
    assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"batch_by": "timestamp"}, "input lines is no Kafka input"),
        (
            {
                "inputs": (LINES, KafkaInput(bootstrap_servers="a:1", topic_pattern="l.*")),
                "transform": "shop:join",
            },
            "lines is also a topic that another input reads",
        ),
        (
            {
                "inputs": LINES.model_copy(update={"receivers": 2}),
                "outputs": ElasticsearchOutput(hosts="http://a:9200", index="a", document_ids=KeyIds()),
            },
            "need one receiver",
        ),
        ({"inputs": {"kind": "files"}}, r"none of headrace.s \(kafka, receiver\)"),
    ],
)
def test_a_stream_that_its_custom_input_does_not_fit_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(StreamDefinitionError, match=words):
        Stream(**(fields(inputs=LINES) | changes))


def test_the_connection_of_a_receiver_is_given_to_its_class() -> None:
    """It is one of the stream's connections."""
    source = LINES.model_copy(update={"connection": "queue"})
    assert Stream(**fields(inputs=source)).connection_ids == ("queue",)
    assert source.keywords == {"host": "localhost", "port": 9999, "connection": "queue"}
