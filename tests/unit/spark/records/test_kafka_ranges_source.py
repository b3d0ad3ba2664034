"""What the "kafka_ranges" source is told, and where its secrets are, without Spark and Kafka."""

from __future__ import annotations

import json
import pickle

import pytest

from headrace.connections import ConnectionNotFoundError
from headrace.spark.records.kafka_ranges_source import KafkaRangesDataSource, KafkaRangesReader, SourceOptionError
from headrace.spark.records.wal_source import RECORD_SCHEMA
from headrace.stream import KafkaInput
from headrace.stream.model import StreamDefinitionError

SOURCE = KafkaInput(connection="replayed_kafka", topics="clicks")


def reader(**options: str) -> KafkaRangesReader:
    given = {"manifests": "[]", "input": "records", "stream": SOURCE.model_dump_json(), **options}
    return KafkaRangesDataSource(given).reader(RECORD_SCHEMA)


def test_the_connection_is_looked_up_where_the_read_is_planned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its secret is in no plan."""
    extra = {"bootstrap.servers": "127.0.0.1:1", "sasl.username": "me", "sasl.password": "hunter2"}
    monkeypatch.setenv("AIRFLOW_CONN_REPLAYED_KAFKA", json.dumps({"conn_type": "kafka", "extra": extra}))
    made = reader()
    monkeypatch.delenv("AIRFLOW_CONN_REPLAYED_KAFKA")
    assert b"hunter2" in pickle.dumps(made), "executors have no connections"
    assert "hunter2" not in repr(made)
    partitions = made.partitions()
    assert len(partitions) == 1, "Spark takes no plan without a partition"
    assert b"hunter2" not in pickle.dumps(partitions)
    assert list(made.read(partitions[0])) == []
    with pytest.raises(ConnectionNotFoundError):
        reader()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stream": ""}, r'"kafka_ranges" data source needs the option\(s\) stream'),
        ({"manifests": ""}, r"needs the option\(s\) manifests"),
        ({"manifests": "[1]"}, "a JSON list of URIs"),
        ({"stream": "junk"}, "is not a valid input"),
        ({"stream": '{"topics": ["clicks"]}'}, "KafkaInput cannot be used as it is defined: name either connection"),
        ({"numPartitions": "0"}, "numPartitions"),
        ({"stallSeconds": "0"}, "stallSeconds"),
        ({"stallSeconds": "soon"}, "stallSeconds"),
    ],
)
def test_wrong_options_are_refused_with_their_names(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, str], message: str
) -> None:
    monkeypatch.setenv("AIRFLOW_CONN_REPLAYED_KAFKA", '{"conn_type": "kafka", "host": "127.0.0.1"}')
    with pytest.raises((SourceOptionError, StreamDefinitionError), match=message):
        reader(**options)
