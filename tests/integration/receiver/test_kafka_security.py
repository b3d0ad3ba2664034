"""A broker with TLS, SCRAM and ACLs: credentials come from the connection, and rights change while a stream runs."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
from confluent_kafka.admin import AclOperation, ResourceType
from tests.integration.receiver.secure_kafka import PASSWORD, SecureKafka

from headrace.connections import variable_name
from headrace.ledger import PartitionState
from headrace.stream import ConsoleOutput, KafkaInput, Stream

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

CONNECTION = "kafka_secure"


@pytest.fixture
def rig(secure: SecureKafka, make_rig: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Produces over the plain listener; the stream has the connection, and rights for its topics and its group."""
    monkeypatch.setenv(variable_name(CONNECTION), secure.connection())
    rig = make_rig(secure.server.bootstrap_servers)
    rig.create(partitions=2)
    secure.allow(ResourceType.TOPIC, rig.prefix, AclOperation.READ, AclOperation.DESCRIBE)
    secure.allow(ResourceType.GROUP, rig.prefix, AclOperation.READ)
    return rig


def stream_of(rig: Any) -> Stream:
    plain: Stream = rig.define()
    source = KafkaInput(connection=CONNECTION, topics=rig.topic, group=f"{rig.prefix}-group")
    return plain.model_copy(update={"inputs": (source,), "outputs": (ConsoleOutput(id="console"),)})


def test_records_arrive_over_tls_and_secrets_stay_in_connections(rig: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    rig.produce(100)
    rig.begin(stream_of(rig))
    rig.await_positions({(rig.topic, 0): 100, (rig.topic, 1): 0})
    rig.eventually(lambda: rig.health()["error"] is None)
    rig.end()
    assert rig.offsets() == {(rig.topic, 0): list(range(100))}
    kept = [path for path in rig.folder.rglob("*") if path.is_file()]
    assert any(path.name == "ledger.db" for path in kept)
    assert not [path for path in kept if PASSWORD.encode() in path.read_bytes()]
    assert PASSWORD not in caplog.text
    assert PASSWORD not in rig.stream.to_json()


def test_a_right_withdrawn_and_given_again_costs_no_record(rig: Any, secure: SecureKafka) -> None:
    rig.produce(100)
    rig.begin(stream_of(rig))
    rig.await_positions({(rig.topic, 0): 100, (rig.topic, 1): 0})
    secure.withdraw(ResourceType.TOPIC, AclOperation.READ)
    # The request that waits at the broker for records was allowed.
    rig.eventually(lambda: "authoriz" in str(rig.stats().get("troubled", "")).lower())
    rig.produce(50, tag="meanwhile")
    assert rig.positions()[rig.topic, 0] == 100
    secure.allow(ResourceType.TOPIC, rig.prefix, AclOperation.READ)
    rig.await_positions({(rig.topic, 0): 150, (rig.topic, 1): 0})
    assert all(row.state is PartitionState.ACTIVE for row in rig.ledger.positions.all("air"))
    (row,) = rig.ledger.receivers.all("air")
    assert row.restarts == 0
    rig.eventually(lambda: not rig.stats().get("troubled"))
    rig.end()
    assert rig.offsets() == {(rig.topic, 0): list(range(150))}


def asked(rig: Any) -> str:
    """What the receiver job says of asking Kafka about the input; nothing before its first answer."""
    job = rig.ledger.jobs.current("air")
    return str(job.attributes.get("inputs"))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"sasl.password": "wrong"}, "uthentication failed"),
        ({"ssl.ca.location": "/etc/hostname"}, "ssl.ca.location"),
        ({"security.protocol": "PLAINTEXT"}, "cannot be asked"),
    ],
    ids=["password", "certificate", "protocol"],
)
def test_a_refused_connection_is_named_without_its_secret(
    rig: Any, secure: SecureKafka, monkeypatch: pytest.MonkeyPatch, changes: dict[str, str], told: str
) -> None:
    monkeypatch.setenv(variable_name(CONNECTION), secure.connection(**changes))
    rig.begin(stream_of(rig))
    rig.eventually(lambda: told in asked(rig))
    assert PASSWORD not in asked(rig) and "wrong" not in asked(rig)
    rig.end()
