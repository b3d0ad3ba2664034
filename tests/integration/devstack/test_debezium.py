"""The tests' own Debezium does what they rely on: what it sends, in which bytes, and where it goes on."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from confluent_kafka import Consumer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic
from sqlalchemy import make_url
from tests.support.debezium import Converter, Debezium

from headrace.devstack.postgres import PostgresServer
from headrace.devstack.registry import RegistryServer


@pytest.fixture
def make(
    kafka: str, kafka_admin: AdminClient, postgres: str, postgres_server: PostgresServer, server_folder: Path
) -> Callable[..., Debezium]:
    """Makes a Debezium of the test's database, which has a table `orders` with a row."""

    def make(prefix: str, **options: Any) -> Debezium:
        database = make_url(postgres).database
        debezium = Debezium(
            server_folder, kafka=kafka, postgres=postgres_server, database=str(database), prefix=prefix, **options
        )
        with debezium.connect() as connection:
            connection.execute("CREATE TABLE orders (id int PRIMARY KEY, name text)")
            connection.execute("INSERT INTO orders VALUES (1, 'first')")
        # Debezium makes topics, but a consumer may ask for them before that.
        for made in kafka_admin.create_topics([_topic(prefix)]).values():
            made.result(30)
        return debezium

    return make


def _topic(prefix: str) -> NewTopic:
    return NewTopic(f"{prefix}.public.orders", 1, 1)


def _values(kafka: str, prefix: str, count: int) -> list[bytes]:
    consumer = Consumer({"bootstrap.servers": kafka, "group.id": "debezium", "enable.auto.commit": "false"})
    consumer.assign([TopicPartition(_topic(prefix).topic, 0, 0)])
    try:
        messages = consumer.consume(count, timeout=90)
    finally:
        consumer.close()
    assert len(messages) == count
    return [message.value() or b"" for message in messages]


def test_debezium_goes_on_after_a_stop_and_a_kill(make: Callable[..., Debezium], kafka: str) -> None:
    with make("going-on") as debezium, debezium.connect() as connection:
        debezium.wait_until_streaming()
        connection.execute("UPDATE orders SET name = 'second'")
        assert len(_values(kafka, "going-on", 2)) == 2
        debezium.stop()
        connection.execute("UPDATE orders SET name = 'third'")
        debezium.start()
        assert len(_values(kafka, "going-on", 3)) == 3
        debezium.kill()
        connection.execute("UPDATE orders SET name = 'fourth'")

        debezium.start().wait_until_streaming()

        events = [json.loads(value) for value in _values(kafka, "going-on", 4)]
        assert [event["op"] for event in events] == ["r", "u", "u", "u"]
        assert [event["after"]["name"] for event in events][:3] == ["first", "second", "third"]


@pytest.mark.parametrize(("converter", "flattened"), [("json-schema-part", False), ("json", True)])
def test_debezium_writes_json_in_its_forms(
    make: Callable[..., Debezium], kafka: str, converter: Converter, *, flattened: bool
) -> None:
    prefix = f"forms-{converter}-{flattened}"
    with make(prefix, converter=converter, flattened=flattened):
        event = json.loads(_values(kafka, prefix, 1)[0])
    if converter == "json-schema-part":
        assert event["schema"]["type"] == "struct"
        assert event["payload"]["after"] == {"id": 1, "name": "first"}
    else:
        assert (event["name"], event["__op"], event["__deleted"]) == ("first", "r", "false")


def test_debezium_writes_confluents_wire_format(
    make: Callable[..., Debezium], kafka: str, registry: RegistryServer
) -> None:
    with make("wire", converter="avro", registry=registry):
        (value,) = _values(kafka, "wire", 1)
    assert value[0] == 0
    answer = httpx.get(f"{registry.url}/schemas/ids/{int.from_bytes(value[1:5], 'big')}", timeout=60)
    assert json.loads(answer.raise_for_status().json()["schema"])["name"] == "Envelope"
    assert b"first" in value[5:]
