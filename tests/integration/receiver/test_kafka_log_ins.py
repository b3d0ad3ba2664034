"""Each way to log in to a real broker: receiving, reading again, writing, and what is reported when it is refused."""

from __future__ import annotations

import dataclasses
import json
import pickle
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import typer
from confluent_kafka.admin import AclOperation, ResourceType
from cryptography.hazmat.primitives.asymmetric import rsa
from tests.integration.receiver.secure_kafka import (
    CERTIFICATE_USER,
    PASSWORD,
    PLAIN_USER,
    USER,
    SecureKafka,
    token_by_http,
)
from tests.support.token_server import CLIENT_ID, CLIENT_SECRET

from headrace.blocks import TopicPartition
from headrace.checks.connecting import check_part
from headrace.checks.kafka_rights import check_kafka_rights
from headrace.cli.streams import check
from headrace.connections import ALLOWLIST_VARIABLE, variable_name
from headrace.kafka.errors import RangesUnreadableError
from headrace.kafka.producers import KafkaRefusedError, client_config
from headrace.kafka.range_reader import KafkaRangeReader, RangeClients, check_ranges
from headrace.kafka.ranges import RecordedRange, joined
from headrace.spark.outputs.kafka_transaction import BatchTransaction, SentRecords
from headrace.stream import ConsoleOutput, KafkaInput, KafkaOutput, Stream

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

CONNECTION = "kafka_log_in"
GOOD = f"{__name__}.good_token"
SEALED = f"{__name__}.sealed"
FORGED = f"{__name__}.forged"


def good_token(url: str | None) -> tuple[str, float]:
    return token_by_http(url)


def sealed(_: str | None) -> tuple[str, float]:
    raise RuntimeError("the vault is sealed")


forgers: list[SecureKafka] = []


def forged(_: str | None) -> tuple[str, float]:
    """A token of another issuer's key."""
    return forgers[0].tokens.token(rsa.generate_private_key(public_exponent=65537, key_size=2048))


USERS = {
    "scram": USER,
    "plain": PLAIN_USER,
    "certificate": CERTIFICATE_USER,
    "oidc": CLIENT_ID,
    "callback": CLIENT_ID,
}
PRINCIPALS = {
    "scram": f"User:{USER} (SCRAM-SHA-512)",
    "plain": f"User:{PLAIN_USER} (PLAIN)",
    "certificate": f"User:{CERTIFICATE_USER} (certificate)",
    "oidc": f"what the token server names for the client '{CLIENT_ID}' (OAUTHBEARER)",
    "callback": f"User:{CLIENT_ID} (OAUTHBEARER)",
}


def connection_of(kafka: SecureKafka, way: str) -> str:
    ways = {
        "scram": kafka.connection,
        "plain": kafka.by_plain,
        "certificate": kafka.by_certificate,
        "oidc": kafka.by_oidc,
        "callback": lambda: kafka.by_callback(GOOD),
    }
    return ways[way]()


@pytest.fixture
def log_in(secure: SecureKafka, make_rig: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes a rig whose stream logs in with a connection, and gives a user rights for its topics and its group."""
    monkeypatch.setenv(ALLOWLIST_VARIABLE, f"{GOOD},{SEALED},{FORGED}")

    def make(connection: str, user: str = CLIENT_ID) -> Any:
        monkeypatch.setenv(variable_name(CONNECTION), connection)
        rig = make_rig(secure.server.bootstrap_servers)
        rig.create(partitions=1)
        secure.allow(ResourceType.TOPIC, rig.prefix, AclOperation.READ, AclOperation.DESCRIBE, user=user)
        secure.allow(ResourceType.GROUP, rig.prefix, AclOperation.READ, user=user)
        return rig

    yield make
    secure.tokens.life_seconds = 300


def source_of(rig: Any) -> KafkaInput:
    return KafkaInput(connection=CONNECTION, topics=rig.topic, group=f"{rig.prefix}-group")


def stream_of(rig: Any) -> Stream:
    plain: Stream = rig.define()
    return plain.model_copy(update={"inputs": (source_of(rig),), "outputs": (ConsoleOutput(id="console"),)})


def range_of(rig: Any, records: int) -> RecordedRange:
    topic_id = RangeClients.of(KafkaInput(bootstrap_servers=rig.bootstrap, topics=rig.topic)).questions()
    ids = topic_id.topic_ids([rig.topic])
    return RecordedRange(TopicPartition(rig.topic, str(ids[rig.topic]), 0), 0, records, records)


@pytest.mark.parametrize("way", USERS)
def test_each_log_in_receives_reads_again_and_is_named(way: str, secure: SecureKafka, log_in: Any) -> None:
    rig = log_in(connection_of(secure, way), USERS[way])
    rig.produce(50)
    rig.begin(stream_of(rig))
    rig.await_positions({(rig.topic, 0): 50})
    rig.end()
    assert rig.offsets() == {(rig.topic, 0): list(range(50))}
    assert rig.read_again() == 50
    assert [answer.error for answer in check_part(source_of(rig))] == [None, None]
    answers = list(check_kafka_rights(rig.stream))
    assert [str(answer) for answer in answers] == [
        f"input records, principal: {PRINCIPALS[way]}",
        f"input records, rights on topic {rig.topic}: DESCRIBE, READ",
        f"input records, rights on group {rig.prefix}-group: READ",
    ]


def test_a_token_is_renewed_in_time_and_the_receiver_goes_on(secure: SecureKafka, log_in: Any) -> None:
    secure.tokens.life_seconds = 6
    rig = log_in(connection_of(secure, "callback"))
    rig.produce(10)
    rig.begin(stream_of(rig))
    rig.await_positions({(rig.topic, 0): 10})
    asked, began = len(secure.tokens.asked), time.monotonic()
    # The clients of the tracker and of the receiver each renew theirs twice in this time.
    for part in range(1, 8):
        rig.produce(10, tag=f"part-{part}")
        rig.await_positions({(rig.topic, 0): 10 + 10 * part})
        while time.monotonic() < began + 2 * part:
            assert "token" not in f"{rig.stats()} {rig.health()}"
            time.sleep(0.1)
    assert len(secure.tokens.asked) >= asked + 4
    (row,) = rig.ledger.receivers.all("air")
    assert row.restarts == 0
    rig.end()
    assert rig.offsets() == {(rig.topic, 0): list(range(80))}


REFUSED = {
    "secret": (lambda kafka: kafka.by_oidc(**{"sasl.oauthbearer.client.secret": "not it"}), "the client is not known"),
    "raises": (lambda kafka: kafka.by_callback(SEALED), "RuntimeError: the vault is sealed"),
    "forged": (lambda kafka: kafka.by_callback(FORGED), "invalid_token"),
    "forbidden": (lambda kafka: kafka.by_callback("os.getcwd"), "callback_allowlist"),
    "certificate": (
        lambda kafka: kafka.by_certificate(
            **{"ssl.certificate.location": str(kafka.ca), "ssl.key.location": "/nowhere/key.pem"}
        ),
        "ssl.key.location",
    ),
}


@pytest.fixture(params=REFUSED)
def refused(request: pytest.FixtureRequest, secure: SecureKafka, log_in: Any) -> tuple[Any, str]:
    """A rig whose log-in is refused, and what has to be reported."""
    forgers[:] = [secure]
    connection, reported = REFUSED[request.param]
    return log_in(connection(secure)), reported  # type: ignore[no-untyped-call]


def test_a_refused_log_in_is_reported_with_its_reason_everywhere(refused: tuple[Any, str], tmp_path: Path) -> None:
    rig, reported = refused
    rig.produce(3)
    # `streams check --connect`.
    began = time.monotonic()
    checked, *_ = check_part(source_of(rig))
    assert reported in str(checked.error) + str(checked.remedy)
    # The receiver job.
    rig.begin(stream_of(rig))
    rig.eventually(lambda: reported in str(rig.ledger.jobs.current("air").attributes.get("inputs")), seconds=60)
    rig.end()
    # A batch that reads Kafka again, and one that writes to it.
    with pytest.raises(Exception, match=reported) as again:
        check_ranges(RangeClients.of(source_of(rig)), joined([range_of(rig, 3)]))
    with pytest.raises(Exception, match=reported) as written:
        transaction_of(rig, tmp_path).send(iter([]))
    assert time.monotonic() - began < 120
    for error in (checked, again.value, written.value):
        assert CLIENT_SECRET not in str(error) and PASSWORD not in str(error) and "not it" not in str(error)


def transaction_of(rig: Any, folder: Path) -> BatchTransaction:
    return BatchTransaction(
        config=client_config(CONNECTION, None),
        topic=rig.topic,
        name=f"{rig.prefix}-headrace-air.copy-1000",
        attempt=1,
        timeout_seconds=30,
        records=SentRecords(str(folder / "sent"), "1000.json"),
    )


def test_a_log_in_refused_while_reading_ranges_ends_in_seconds(secure: SecureKafka, log_in: Any) -> None:
    forgers[:] = [secure]
    rig = log_in(secure.by_callback(FORGED))
    rig.produce(3)
    began = time.monotonic()
    with (
        KafkaRangeReader(RangeClients.of(source_of(rig)), stall_seconds=300) as reader,
        pytest.raises(RangesUnreadableError, match=r"Kafka refuses the log-in: .*invalid_token"),
    ):
        list(reader.read(joined([range_of(rig, 3)])))
    assert time.monotonic() - began < 60


def test_an_executor_without_airflow_reads_with_pickled_settings(secure: SecureKafka, log_in: Any) -> None:
    rig = log_in(connection_of(secure, "callback"))
    rig.produce(20)
    code = """
import pickle, sys
sys.modules["airflow"] = None
clients, runs = pickle.load(sys.stdin.buffer)
from headrace.kafka.range_reader import KafkaRangeReader
with KafkaRangeReader(clients) as reader:
    print(sum(batch.num_rows for batch in reader.read(runs)))
"""
    given = pickle.dumps((RangeClients.of(source_of(rig)), joined([range_of(rig, 20)])))
    run = subprocess.run([sys.executable, "-c", code], input=given, capture_output=True, check=False, env={})
    assert run.stdout.split() == [b"20"], run.stderr.decode()
    # Where the function's module is missing, the error names it.
    there = dataclasses.replace(RangeClients.of(source_of(rig)))
    there.consumer["oauth_cb"] = dataclasses.replace(there.consumer["oauth_cb"], argument="acme.kafka.token")
    given = pickle.dumps((there, joined([range_of(rig, 20)])))
    run = subprocess.run([sys.executable, "-c", code], input=given, capture_output=True, check=False, env={})
    assert b"No module named 'acme'" in run.stderr and run.returncode == 1


@pytest.mark.parametrize("way", ["oidc", "callback"])
def test_a_batch_is_written_with_tokens(way: str, secure: SecureKafka, log_in: Any, tmp_path: Path) -> None:
    rig = log_in(connection_of(secure, way))
    secure.allow(ResourceType.TOPIC, rig.prefix, AclOperation.WRITE, user=CLIENT_ID)
    secure.allow(ResourceType.GROUP, rig.prefix, AclOperation.DELETE, user=CLIENT_ID)
    secure.allow(ResourceType.TRANSACTIONAL_ID, rig.prefix, AclOperation.WRITE, user=CLIENT_ID)
    rows = pa.record_batch({"value": pa.array([b"a", b"b", None], pa.binary()), "_end": [False, False, True]})
    sent, before = transaction_of(rig, tmp_path).send(iter([rows]))
    assert (sent.messages, before) == (2, False)


def test_a_refused_writer_has_an_error_of_its_own(secure: SecureKafka, log_in: Any, tmp_path: Path) -> None:
    rig = log_in(secure.connection(**{"sasl.password": "not it"}), USER)
    with pytest.raises(KafkaRefusedError, match="uthentication failed"):
        transaction_of(rig, tmp_path).send(iter([]))


def test_the_rights_that_are_missing_are_named(
    secure: SecureKafka, log_in: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rig = log_in(connection_of(secure, "oidc"))
    copied = f"{rig.prefix}-copied"
    rig.create(copied, partitions=1)
    stream = stream_of(rig)
    stream = stream.model_copy(
        update={
            "inputs": (stream.inputs[0].model_copy(update={"group": "another"}),),
            "outputs": (KafkaOutput(id="copy", connection=CONNECTION, topic=copied),),
        }
    )
    answers = {answer.name: answer for answer in check_kafka_rights(stream)}
    assert answers[f"input records, rights on topic {rig.topic}"].error is None
    assert "GROUP_AUTHORIZATION_FAILED" in str(answers["input records, rights on group another"].error)
    assert "an ACL that allows READ on group another" in str(answers["input records, rights on group another"].remedy)
    written = answers[f"output copy, rights on topic {copied}"]
    assert written.error == "The principal may not WRITE."
    assert written.remedy == f"Give the principal an ACL that allows WRITE on topic {copied}."
    (tmp_path / "air.json").write_text(stream.to_json())
    with pytest.raises(typer.Exit):
        check(str(tmp_path / "air.json"), connect=True)
    printed = capsys.readouterr().out
    assert f"ok     input records, principal: {PRINCIPALS['oidc']}" in printed
    assert f"FAILED {written}" in printed
    group = "headrace-air.copy-0"
    secure.allow(ResourceType.GROUP, group, AclOperation.READ, user=CLIENT_ID)
    answers = {answer.name: answer for answer in check_kafka_rights(stream)}
    assert answers[f"output copy, rights on group {group}"].error == "The principal may not DELETE."


def test_entra_is_asked_for_a_token_by_client_credentials(secure: SecureKafka, log_in: Any) -> None:
    # The connection of docs/guides/kafka-log-ins.md for Azure Event Hubs, with the addresses of this test.
    secure.tokens.asked.clear()
    scope = "https://flights.servicebus.windows.net/.default"
    rig = log_in(secure.by_oidc(**{"sasl.oauthbearer.scope": scope}))
    assert [answer.error for answer in check_part(source_of(rig))] == [None, None]
    asked = secure.tokens.asked[0]
    assert (asked["grant_type"], asked["scope"]) == ("client_credentials", scope)
    assert json.loads(secure.by_oidc())["extra"]["sasl.oauthbearer.client.secret"] == CLIENT_SECRET
