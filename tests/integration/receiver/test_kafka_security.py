"""A broker with TLS, SCRAM and ACLs: credentials come from the connection, and rights change while a stream runs."""

from __future__ import annotations

import json
import logging
import subprocess
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka.admin import (
    AclBinding,
    AclBindingFilter,
    AclOperation,
    AclPermissionType,
    AdminClient,
    ResourcePatternType,
    ResourceType,
    ScramCredentialInfo,
    ScramMechanism,
    UserScramCredentialUpsertion,
)

from headrace.connections import variable_name
from headrace.devstack.jars import find_java
from headrace.devstack.kafka import KafkaServer
from headrace.devstack.server import LOOPBACK, free_port
from headrace.ledger import PartitionState
from headrace.stream import ConsoleOutput, KafkaInput, Stream

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

USER = "headrace"
PASSWORD = "correct horse battery staple"
STORE_PASSWORD = "changeit"
CONNECTION = "kafka_secure"


class SecureKafka:
    """A broker with a second listener, for which a user, a password and a certificate are needed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        self.ca = folder / "ca.pem"
        self.store = folder / "broker.p12"
        self._make_certificate()
        plain, controller = free_port({self.port}), free_port({self.port})
        while controller == plain:
            controller = free_port({self.port, plain})
        self.server = KafkaServer(
            folder / "kafka", port=plain, controller_port=controller, properties=self._properties(plain, controller)
        )

    def _make_certificate(self) -> None:
        keytool = str(find_java().executable.with_name("keytool"))
        common = ["-keystore", str(self.store), "-storepass", STORE_PASSWORD, "-alias", "broker"]
        made = ["-genkeypair", *common, "-storetype", "PKCS12", "-keyalg", "RSA", "-validity", "2"]
        made += ["-dname", "CN=localhost", "-ext", f"SAN=DNS:localhost,IP:{LOOPBACK}"]
        subprocess.run([keytool, *made], check=True, capture_output=True)
        subprocess.run(
            [keytool, "-exportcert", "-rfc", *common, "-file", str(self.ca)], check=True, capture_output=True
        )

    def _properties(self, plain: int, controller: int) -> dict[str, str]:
        listeners = f"PLAINTEXT://{LOOPBACK}:{plain},SECURE://{LOOPBACK}:{self.port}"
        return {
            "listeners": f"{listeners},CONTROLLER://{LOOPBACK}:{controller}",
            "advertised.listeners": listeners,
            "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,SECURE:SASL_SSL,CONTROLLER:PLAINTEXT",
            "inter.broker.listener.name": "PLAINTEXT",
            "listener.name.secure.sasl.enabled.mechanisms": "SCRAM-SHA-512",
            "listener.name.secure.scram-sha-512.sasl.jaas.config": (
                "org.apache.kafka.common.security.scram.ScramLoginModule required;"
            ),
            "listener.name.secure.ssl.keystore.location": str(self.store),
            "listener.name.secure.ssl.keystore.password": STORE_PASSWORD,
            "listener.name.secure.ssl.keystore.type": "PKCS12",
            "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
            # The plain listener is the tests' own; only users of the other one need rights.
            "super.users": "User:ANONYMOUS",
        }

    @cached_property
    def admin(self) -> AdminClient:
        return AdminClient({"bootstrap.servers": self.server.bootstrap_servers})

    def set_password(self, password: str) -> None:
        info = ScramCredentialInfo(ScramMechanism.SCRAM_SHA_512, 4096)
        changed = self.admin.alter_user_scram_credentials([UserScramCredentialUpsertion(USER, info, password.encode())])
        changed[USER].result()

    def allow(self, kind: ResourceType, prefix: str, *operations: AclOperation) -> None:
        bindings = [
            AclBinding(
                kind, prefix, ResourcePatternType.PREFIXED, f"User:{USER}", "*", operation, AclPermissionType.ALLOW
            )
            for operation in operations
        ]
        for created in self.admin.create_acls(bindings).values():
            created.result()

    def withdraw(self, kind: ResourceType, operation: AclOperation) -> None:
        every = AclBindingFilter(
            kind, None, ResourcePatternType.ANY, f"User:{USER}", None, operation, AclPermissionType.ANY
        )
        for deleted in self.admin.delete_acls([every]).values():
            assert deleted.result()

    def connection(self, **changes: str) -> str:
        """The Airflow connection as the processes of a stream get it."""
        extra = {
            "bootstrap.servers": f"{LOOPBACK}:{self.port}",
            "security.protocol": "SASL_SSL",
            "sasl.mechanism": "SCRAM-SHA-512",
            "sasl.username": USER,
            "sasl.password": PASSWORD,
            "ssl.ca.location": str(self.ca),
            **changes,
        }
        return json.dumps({"conn_type": "kafka", "extra": extra})


@pytest.fixture(scope="module")
def secure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecureKafka]:
    kafka = SecureKafka(tmp_path_factory.mktemp("secure"))
    with kafka.server:
        kafka.set_password(PASSWORD)
        yield kafka


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


def test_records_are_received_over_tls_and_the_secrets_stay_in_the_connection(
    rig: Any, caplog: pytest.LogCaptureFixture
) -> None:
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


def test_a_right_that_is_withdrawn_and_given_again_costs_no_record(rig: Any, secure: SecureKafka) -> None:
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
def test_a_connection_that_kafka_refuses_is_named_without_its_secret(
    rig: Any, secure: SecureKafka, monkeypatch: pytest.MonkeyPatch, changes: dict[str, str], told: str
) -> None:
    monkeypatch.setenv(variable_name(CONNECTION), secure.connection(**changes))
    rig.begin(stream_of(rig))
    rig.eventually(lambda: told in asked(rig))
    assert PASSWORD not in asked(rig) and "wrong" not in asked(rig)
    rig.end()
