"""A connector's file is read as Kafka Connect reads it, and each property of each reference has an answer.

The names in references/ are those of the connectors' own references: ElasticsearchSinkConnectorConfig of
confluentinc/kafka-connect-elasticsearch (15.2, and what older versions had); the templates of Confluent Cloud's
connectors; ElasticsearchSinkConnectorConfig of Aiven-Open/elasticsearch-connector-for-apache-kafka (7.1); the options
of Aiven-Open/opensearch-connector-for-apache-kafka (4.1); ConnectorConfig and SinkConnectorConfig of Kafka 4.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from headrace.kafka_connect.connector import (
    CLIENT_NAMES,
    CONNECT,
    CONSUMER,
    CONVERTERS,
    FAMILY_OF_CLASS,
    Answer,
    AnswerKind,
    ConnectorError,
    Family,
    answer_of,
    read_connector,
)
from headrace.stream.inputs import CLIENT_SETTINGS


def names_of(reference: str) -> list[str]:
    """The names in one of the files."""
    return Path(__file__).with_name("references").joinpath(f"{reference}.txt").read_text().split()


CONFLUENT, CLOUD, OF_CONNECT = names_of("confluent"), names_of("cloud"), names_of("connect")
REFERENCES = {
    Family.CONFLUENT: CONFLUENT,
    Family.CONFLUENT_CLOUD: [*(name for name in CONFLUENT if "https" not in name), *CLOUD],
    Family.CONFLUENT_CLOUD_V2: [*names_of("cloud_v2"), *CLOUD],
    # It has no elastic.https.…, which the others of the cloud have.
    Family.CONFLUENT_CLOUD_OPENSEARCH: [
        *names_of("cloud_opensearch"),
        *(name for name in CLOUD if "https" not in name),
    ],
    Family.AIVEN: names_of("aiven"),
    Family.AIVEN_OPENSEARCH: names_of("aiven_opensearch"),
}
TABLES = [*(family.properties for family in Family), CONNECT, CONVERTERS, CONSUMER]


@pytest.mark.parametrize("family", Family)
def test_each_property_of_a_reference_has_an_answer(family: Family) -> None:
    names = [*REFERENCES[family], *OF_CONNECT]
    assert [name for name in names if answer_of(family, name, "x").kind is AnswerKind.UNKNOWN] == []


@pytest.mark.parametrize("family", Family)
def test_the_table_of_a_family_has_no_other_property(family: Family) -> None:
    """But for names with a ``*``, and those of Confluent's own connector, which its cloud has too."""
    known = {name.lower() for name in (*REFERENCES[family], *CONFLUENT, *CLOUD)}
    of_cloud = {"connector.class", "input.key.format", "kafka.endpoint", "kafka.region"}
    more = {"type.name"} if family is Family.AIVEN_OPENSEARCH else set()
    assert {name for name in family.properties if "*" not in name} - known - of_cloud - more == set()


def test_answers_by_value_have_one_for_all_other_values() -> None:
    rows = [row for table in TABLES for row in table.values()]
    assert all(isinstance(row, Answer) or "*" in row for row in rows)
    assert any(isinstance(row, Mapping) for row in rows)


def test_answers_say_where_a_counterpart_is_or_why_there_is_none() -> None:
    assert str(answer_of(Family.CONFLUENT, "batch.size", "10")) == "bulk_actions, at most 100,000"
    assert str(answer_of(Family.CONFLUENT, "write.method", "INSERT")).startswith("the same by default: ")
    assert str(answer_of(Family.CONFLUENT, "linger.ms", "1")).startswith("no counterpart, because a batch has all")
    login = answer_of(Family.AIVEN, "connection.username", "me")
    assert str(login) == "connection elasticsearch_default, login"
    upsert = answer_of(Family.AIVEN_OPENSEARCH, "index.write.method", "upsert")
    assert upsert.kind is AnswerKind.UNDECIDED
    assert "no counterpart, because an upsert merges" in str(upsert)


def test_an_unknown_property_names_the_nearest() -> None:
    unknown = answer_of(Family.CONFLUENT, "conection.url", "http://x")
    assert unknown.is_open
    assert "did you mean connection.url?" in str(unknown)
    assert answer_of(Family.AIVEN, "flush.synchronously", "true").kind is AnswerKind.UNKNOWN


def test_consumer_settings_have_the_names_of_inputs() -> None:
    assert set(CLIENT_NAMES.values()) <= CLIENT_SETTINGS
    assert CLIENT_NAMES.keys() <= CONSUMER.keys()


CONFIG = {"connector.class": "ElasticsearchSink", "topics": "a"}


@pytest.mark.parametrize(
    "text",
    [
        json.dumps(CONFIG),
        json.dumps({"name": "n", "config": CONFIG}),
        json.dumps({"name": "n", "config": CONFIG, "tasks": [{"connector": "n", "task": 0}], "type": "sink"}),
        "connector.class=ElasticsearchSink\ntopics=a\n",
        "# a comment\n! another\n\n  connector.class : ElasticsearchSink\ntopics a",
        "connector.class=Elastic\\\n    searchSink\r\ntopics=\\u0061",
    ],
)
def test_a_file_is_read_in_each_form(text: str) -> None:
    connector = read_connector(text, name="n")
    assert (connector.name, connector.family) == ("n", Family.CONFLUENT_CLOUD)
    assert {**connector.properties, "name": ""} == {**CONFIG, "name": ""}


def test_a_properties_file_has_escapes_and_further_lines() -> None:
    text = "connector.class=ElasticsearchSink\ntopics=a,\\\n  b,\\\n\\\n  c\npath=C\\:\\\\x\\ty\nempty\nlast=x\\\\"
    assert read_connector(text).properties == {
        **{"connector.class": "ElasticsearchSink", "topics": "a,b,c", "path": "C:\\x\ty", "empty": "", "last": "x\\"},
    }


def test_values_of_json_are_texts() -> None:
    text = json.dumps({**CONFIG, "tasks.max": 3, "key.ignore": True, "proxy.host": None})
    assert read_connector(text).properties == {**CONFIG, "tasks.max": "3", "key.ignore": "true"}


WORKER = """
group.id=connect
bootstrap.servers=kafka:9092
key.converter=org.apache.kafka.connect.storage.StringConverter
value.converter=org.apache.kafka.connect.json.JsonConverter
value.converter.schemas.enable=false
consumer.fetch.min.bytes=5
consumer.max.poll.records=7
"""


def test_a_worker_counts_where_the_connector_says_nothing() -> None:
    text = json.dumps(
        {
            **CONFIG,
            "value.converter": "V",
            "consumer.override.fetch.min.bytes": "9",
            "key.converter.schemas.enable": "x",
        }
    )
    assert read_connector(text, worker=WORKER).properties == {
        **CONFIG,
        "value.converter": "V",
        "key.converter": "org.apache.kafka.connect.storage.StringConverter",
        "key.converter.schemas.enable": "x",
        "consumer.override.bootstrap.servers": "kafka:9092",
        "consumer.override.fetch.min.bytes": "9",
        "consumer.override.max.poll.records": "7",
    }


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("{", "no JSON at line 1"),
        ('{"password": "hunter2hunter2"', "no JSON at line 1"),
        ("{}", "no property connector.class"),
        ("", "no property connector.class"),
        ('{"connector.class": "io.acme.S3Sink"}', "'io.acme.S3Sink', which is no sink"),
        ('{"connector.class": "ElasticsearchSink", "topics": ["a"]}', "'topics' is no text"),
        ('{"config": {"connector.class": {}}}', "'connector.class' is no text"),
    ],
)
def test_another_text_is_refused_with_the_reason(text: str, error: str) -> None:
    with pytest.raises(ConnectorError) as refused:
        read_connector(text)
    assert error in str(refused.value)
    assert "hunter2" not in str(refused.value)


def test_classes_are_found_in_any_spelling() -> None:
    for name in ("OpensearchSinkConnector", "OpenSearchSinkConnector"):
        found = read_connector(json.dumps({"connector.class": f"io.aiven.kafka.connect.opensearch.{name}"}))
        assert found.family is Family.AIVEN_OPENSEARCH
    assert set(FAMILY_OF_CLASS.values()) == set(Family)
