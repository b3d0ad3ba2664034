"""Definitions of inputs that a custom receiver reads."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.unit.stream.definitions import fields

from headrace.stream import (
    ElasticsearchOutput,
    KafkaInput,
    KeyIds,
    ReceiverInput,
    Stream,
    StreamDefinitionError,
)

LINES = ReceiverInput(id="lines", receiver="shop:Lines", arguments={"host": "localhost", "port": 9999})


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
        ({"inputs": {"kind": "files"}}, 'neither "kafka" nor "receiver"'),
    ],
)
def test_a_stream_that_its_custom_input_does_not_fit_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(StreamDefinitionError, match=words):
        Stream(**(fields(inputs=LINES) | changes))


def test_the_connection_of_a_receiver_is_one_of_the_streams_and_given_to_its_class() -> None:
    source = LINES.model_copy(update={"connection": "queue"})
    assert Stream(**fields(inputs=source)).connection_ids == ("queue",)
    assert source.keywords == {"host": "localhost", "port": 9999, "connection": "queue"}
