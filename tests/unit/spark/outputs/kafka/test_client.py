"""What a Kafka output's clients are told, and what Kafka's errors mean."""

from __future__ import annotations

import json

import pytest
from confluent_kafka import KafkaError

from headrace.kafka.errors import ClientSettingError
from headrace.spark.outputs.kafka_transaction import (
    BatchTransaction,
    KafkaOutputError,
    KafkaRefusedError,
    MessageRefusedError,
    SentRecords,
    TopicMissingError,
    client_config,
    reported,
)

CONNECTION = {
    "conn_type": "kafka",
    "host": "broker",
    "port": 9092,
    "login": "me",
    "password": "hunter2",
    "extra": {"security.protocol": "SASL_SSL", "group.id": "others", "fetch.min.bytes": 5, "client.id": "us"},
}


def test_a_connection_gives_security_and_not_what_is_a_consumers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIRFLOW_CONN_OUT", json.dumps(CONNECTION))
    assert client_config("out", None) == {
        "bootstrap.servers": "broker:9092",
        "sasl.username": "me",
        "sasl.password": "hunter2",
        "security.protocol": "SASL_SSL",
        "client.id": "us",
        "allow.auto.create.topics": False,
    }
    monkeypatch.setenv("AIRFLOW_CONN_OUT", json.dumps({**CONNECTION, "extra": {"transactional.id": "mine"}}))
    with pytest.raises(ClientSettingError, match=r"transactional\.id"):
        client_config("out", None)


def test_the_password_is_not_shown() -> None:
    records = SentRecords("/sent", "1000.json")
    assert "hunter2" not in repr(BatchTransaction({"sasl.password": "hunter2"}, "t", "n", 1, 60, records))


@pytest.mark.parametrize(
    ("code", "kind", "says"),
    [
        (KafkaError.UNKNOWN_TOPIC_OR_PART, TopicMissingError, "There is no topic 'clicks'"),
        (KafkaError.TOPIC_AUTHORIZATION_FAILED, KafkaRefusedError, "Allow it WRITE"),
        (KafkaError.GROUP_AUTHORIZATION_FAILED, KafkaRefusedError, "READ and DELETE on the groups"),
        (KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED, KafkaRefusedError, "transactional ids that begin with"),
        (KafkaError.INVALID_TRANSACTION_TIMEOUT, KafkaRefusedError, r"transaction\.max\.timeout\.ms"),
        (KafkaError.MSG_SIZE_TOO_LARGE, MessageRefusedError, r"accept the seventh: .*max\.message\.bytes"),
        (KafkaError.INVALID_RECORD, MessageRefusedError, "compacted topic"),
        (KafkaError.NOT_ENOUGH_REPLICAS, KafkaOutputError, "NOT_ENOUGH_REPLICAS"),
    ],
)
def test_errors_come_with_a_remedy(code: int, kind: type[KafkaOutputError], says: str) -> None:
    with pytest.raises(kind, match=says):
        raise reported(KafkaError(code), "clicks", message="the seventh")
