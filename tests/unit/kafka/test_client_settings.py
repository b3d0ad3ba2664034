"""What librdkafka is told, by whom."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import IsolationLevel

from headrace.connections import ConnectionTypeError
from headrace.kafka import client
from headrace.kafka.client import admin_config, check_client_settings, consumer_config, isolation_level
from headrace.kafka.errors import ClientSettingError
from headrace.stream import DeadLetterTopic, ElasticsearchOutput, KafkaInput, KafkaOutput, Limits, Stream


def config(
    monkeypatch: pytest.MonkeyPatch, extra: dict[str, Any], tuning: dict[str, Any] | None = None, **connection: Any
):
    monkeypatch.setenv("AIRFLOW_CONN_BROKERS", json.dumps({"conn_type": "kafka", "extra": extra, **connection}))
    source = KafkaInput(connection="brokers", topics=("a",), client=tuning or {})
    return consumer_config(source, group="g", limits=Limits(prefetch_bytes=64 << 20))


def test_delivery_is_headraces_own(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    extra = {
        "bootstrap.servers": "b:1",
        "enable.auto.commit": True,
        "group.id": "theirs",
        "auto.offset.reset": "latest",
    }
    with caplog.at_level(logging.WARNING):
        made = config(monkeypatch, extra)
    assert made["enable.auto.commit"] is False
    assert made["auto.offset.reset"] == "error"
    assert made["enable.partition.eof"] is True
    assert made["isolation.level"] == "read_committed"
    assert made["group.id"] == "g"
    assert made["queued.max.messages.kbytes"] == 64 * 1024
    assert made["queued.min.messages"] == (64 << 20) // 512
    assert "enable.auto.commit=false in the 'brokers' connection; got True" in caplog.text


@pytest.mark.parametrize(
    ("rate", "messages", "partition_bytes"), [(None, 131_072, 1 << 20), (0.5, 1, 65_536), (1_000, 1_000, 256_000)]
)
def test_a_partition_with_a_rate_is_prefetched_for_a_second(
    rate: float | None, messages: int, partition_bytes: int
) -> None:
    source = KafkaInput(bootstrap_servers="b:1", topics=("a",))
    made = consumer_config(source, group="g", limits=Limits(prefetch_bytes=64 << 20, max_rate_per_partition=rate))
    assert (made["queued.min.messages"], made["max.partition.fetch.bytes"]) == (messages, partition_bytes)


def test_secrets_come_from_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    made = config(
        monkeypatch,
        {"security.protocol": "SASL_SSL", "sasl.mechanism": "PLAIN"},
        host="b",
        port=9,
        login="me",
        password="hush",
    )
    assert made["bootstrap.servers"] == "b:9"
    assert (made["sasl.username"], made["sasl.password"]) == ("me", "hush")


def test_the_clients_own_settings_win_over_the_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    assert config(monkeypatch, {"bootstrap.servers": "b:1"}, {"fetch.wait.max.ms": 7})["fetch.wait.max.ms"] == 7


def test_longest_waits_below_headraces_first_one_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    from confluent_kafka import Consumer

    made = config(monkeypatch, {"bootstrap.servers": "localhost:1", "reconnect.backoff.max.ms": 500})
    Consumer({**made, "log_level": 0}).close()


@pytest.mark.parametrize(
    ("extra", "client", "level"),
    [
        (None, None, IsolationLevel.READ_COMMITTED),
        (None, "read_uncommitted", IsolationLevel.READ_UNCOMMITTED),
        ("READ_UNCOMMITTED", None, IsolationLevel.READ_UNCOMMITTED),
        ("read_uncommitted", "read_committed", IsolationLevel.READ_COMMITTED),
    ],
)
def test_kafka_is_asked_for_what_the_inputs_consumer_sees(
    monkeypatch: pytest.MonkeyPatch, extra: str | None, client: str | None, level: IsolationLevel
) -> None:
    setting = {"bootstrap.servers": "b:1", "isolation.level": extra}
    monkeypatch.setenv("AIRFLOW_CONN_BROKERS", json.dumps({"conn_type": "kafka", "extra": setting}))
    own = {} if client is None else {"isolation.level": client}
    assert isolation_level(KafkaInput(connection="brokers", topics=("a",), client=own)) is level


def test_callbacks_of_airflows_provider_are_left_aside(monkeypatch: pytest.MonkeyPatch) -> None:
    made = config(monkeypatch, {"bootstrap.servers": "b:1", "error_cb": "os.system", "stats_cb": "os.system"})
    assert not {"error_cb", "stats_cb"} & set(made)


def test_a_connection_of_another_type_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConnectionTypeError, match="'brokers' is of type 'elasticsearch'"):
        config(monkeypatch, {"bootstrap.servers": "b:1"}, conn_type="elasticsearch")


ORDINARY = {
    "acks": "all",
    "allow.auto.create.topics": True,
    "auto.commit.interval.ms": 1000,
    "batch.num.messages": 100,
    "client.dns.lookup": "use_all_dns_ips",
    "compression.type": "zstd",
    "connections.max.idle.ms": 1000,
    "debug": "all",
    "enable.auto.offset.store": True,
    "enable.idempotence": True,
    "group.id": "theirs",
    "group.instance.id": "theirs",
    # It would accept any token; it concerns the log-in, and is not passed on.
    "enable.sasl.oauthbearer.unsecure.jwt": True,
    "group.protocol": "consumer",
    "heartbeat.interval.ms": 3000,
    "linger.ms": 5,
    "log_level": 7,
    "max.in.flight": 5,
    "message.max.bytes": 1000,
    "partition.assignment.strategy": "cooperative-sticky",
    "queue.buffering.max.messages": 1000,
    "request.timeout.ms": 1000,
    "retries": 5,
    "session.timeout.ms": 45000,
    "throttle_cb": "os.system",
    "transactional.id": "theirs",
}


def test_settings_not_for_reading_are_left_aside_and_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    client._leave_aside.cache_clear()
    alone = config(monkeypatch, {"bootstrap.servers": "b:1"})
    with caplog.at_level(logging.INFO):
        assert config(monkeypatch, {"bootstrap.servers": "b:1", **ORDINARY}) == alone
        config(monkeypatch, {"bootstrap.servers": "b:1", **ORDINARY})
    (line,) = [record.getMessage() for record in caplog.records if "left aside" in record.getMessage()]
    assert "'brokers'" in line
    assert all(name in line for name in ORDINARY)


@pytest.mark.parametrize(
    "name",
    [
        "plugin.library.paths",
        "sasl.kerberos.kinit.cmd",
        "ssl.engine.id",
        "ssl.engine.location",
        "ssl.providers",
    ],
)
def test_a_connection_brings_no_code(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    with pytest.raises(ClientSettingError, match=f"{name}, by which Kafka's client would run code") as raised:
        config(monkeypatch, {"bootstrap.servers": "b:1", "debug": "all", name: "secret-value"})
    assert "secret-value" not in str(raised.value)


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("security.protocl", "Did you mean security.protocol in place of security.protocl?"),
        ("sasl.user.name", "Did you mean sasl.username in place of sasl.user.name?"),
        ("key.deserializer", "Kafka's Java client has others"),
        ("sasl.jaas.config", "Kafka's Java client has others"),
        ("schema.registry.url", "The names are those of librdkafka"),
    ],
)
def test_a_name_that_librdkafka_does_not_know_is_refused(
    monkeypatch: pytest.MonkeyPatch, name: str, remedy: str
) -> None:
    with pytest.raises(ClientSettingError, match=f"sets {name}, which librdkafka does not know") as raised:
        config(monkeypatch, {"bootstrap.servers": "b:1", name: "secret-value"})
    assert "secret-value" not in str(raised.value)
    assert remedy in str(raised.value.remedy)


def test_the_check_of_a_stream_names_what_is_left_aside(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stream = Stream(
        name="shop",
        inputs=KafkaInput(connection="brokers", topics="clicks"),
        outputs=KafkaOutput(connection="brokers", topic="paid"),
        batch_interval="10 s",
        storage=tmp_path,
        ledger=f"sqlite:///{tmp_path}/ledger.db",
    )
    extra = {"bootstrap.servers": "b:1", "linger.ms": 5, "acks": "all"}
    monkeypatch.setenv("AIRFLOW_CONN_BROKERS", json.dumps({"conn_type": "kafka", "extra": extra}))
    (note,) = check_client_settings(stream)
    assert note.startswith("Connection 'brokers': acks, linger.ms is left aside")


def test_the_connection_of_dead_letters_is_looked_at_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    letters = DeadLetterTopic(topic="letters", connection="kafka_dlq")
    stream = Stream(
        name="shop",
        inputs=KafkaInput(bootstrap_servers="b:1", topics="clicks"),
        outputs=ElasticsearchOutput(hosts="http://h:1", index="shop", dead_letter_topic=letters),
        batch_interval="10 s",
        storage=tmp_path,
        ledger=f"sqlite:///{tmp_path}/ledger.db",
    )
    monkeypatch.setenv("AIRFLOW_CONN_KAFKA_DLQ", json.dumps({"conn_type": "kafka", "extra": {}}))
    with pytest.raises(ClientSettingError, match=r"'kafka_dlq' connection has neither bootstrap\.servers nor"):
        check_client_settings(stream)


def test_a_connection_without_servers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ClientSettingError, match=r"bootstrap\.servers"):
        config(monkeypatch, {})


def test_the_admin_client_gets_only_the_connection() -> None:
    assert set(admin_config(KafkaInput(bootstrap_servers="b:1", topics=("a",)))) == {
        "bootstrap.servers",
        "client.id",
        "allow.auto.create.topics",
        # Without brokers it would try 18 times a second.
        "reconnect.backoff.ms",
        # A cut link shall not be waited for.
        "socket.connection.setup.timeout.ms",
        "socket.timeout.ms",
        # Which broker to ask goes out of date.
        "topic.metadata.refresh.interval.ms",
    }


def test_a_request_that_a_cut_link_lost_is_given_up_within_20_s(monkeypatch: pytest.MonkeyPatch) -> None:
    source = KafkaInput(bootstrap_servers="b:1", topics=("a",))
    for made in (consumer_config(source, group="g", limits=Limits()), admin_config(source)):
        assert int(made["socket.timeout.ms"]) + int(made.get("reconnect.backoff.max.ms", 5_000)) <= 20_000
        assert made["socket.connection.setup.timeout.ms"] == 10_000
    # A connection's own times count, for both clients.
    own = {"bootstrap.servers": "b:1", "socket.timeout.ms": 90_000}
    assert config(monkeypatch, own)["socket.timeout.ms"] == 90_000
    assert admin_config(KafkaInput(connection="brokers", topics=("a",)))["socket.timeout.ms"] == 90_000


def test_a_broker_that_hangs_is_left_before_the_next_fetch_is() -> None:
    # The questions for topics' ids then go to another broker while the consumer still waits for the one that hangs.
    source = KafkaInput(bootstrap_servers="b:1", topics=("a",))
    fetch_ms = int(consumer_config(source, group="g", limits=Limits())["socket.timeout.ms"])
    made = admin_config(source)
    assert int(made["socket.timeout.ms"]) + int(made["topic.metadata.refresh.interval.ms"]) < fetch_ms


def test_a_long_wait_for_records_is_within_the_time_of_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    from confluent_kafka import Consumer

    made = config(monkeypatch, {"bootstrap.servers": "localhost:1"}, {"fetch.wait.max.ms": 30_000})
    Consumer({**made, "log_level": 0}).close()


def test_librdkafka_knows_every_setting() -> None:
    from confluent_kafka import Consumer
    from confluent_kafka.admin import AdminClient

    source = KafkaInput(bootstrap_servers="localhost:1", topics=("a",))
    Consumer({**consumer_config(source, group="g", limits=Limits()), "log_level": 0}).close()
    AdminClient({**admin_config(source), "log_level": 0})


@pytest.mark.parametrize(
    ("extra", "reason"),
    [
        ({"security.protocol": "SASL_SSL", "sasl.mechanism": "GSSAPI"}, r"logs in by GSSAPI \(Kerberos\)"),
        ({"security.protocol": "sasl_plaintext", "sasl.mechanisms": "gssapi"}, r"logs in by GSSAPI \(Kerberos\)"),
        # librdkafka's default.
        ({"security.protocol": "SASL_SSL"}, r"sets no sasl\.mechanism, which means GSSAPI"),
    ],
)
def test_kerberos_is_refused_if_the_client_was_built_without_it(
    monkeypatch: pytest.MonkeyPatch, extra: dict[str, Any], reason: str
) -> None:
    monkeypatch.setattr(client, "has_kerberos", lambda: False)
    with pytest.raises(ClientSettingError, match=reason) as refused:
        config(monkeypatch, {"bootstrap.servers": "b:1", **extra})
    assert "librdkafka with GSSAPI" in str(refused.value.remedy)


def test_kerberos_is_left_to_a_client_that_was_built_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "has_kerberos", lambda: True)
    kerberos = {
        "security.protocol": "SASL_SSL",
        "sasl.mechanism": "GSSAPI",
        "sasl.kerberos.principal": "headrace/host.example.com@EXAMPLE.COM",
        "sasl.kerberos.keytab": "/etc/krb5/headrace.keytab",
    }
    assert config(monkeypatch, {"bootstrap.servers": "b:1", **kerberos})["sasl.mechanism"] == "GSSAPI"


def test_kerberos_names_hold_no_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "has_kerberos", lambda: True)
    kerberos = {"security.protocol": "SASL_SSL", "sasl.kerberos.principal": "me; touch /tmp/x"}
    with pytest.raises(ClientSettingError, match=r"sasl\.kerberos\.principal has other characters") as refused:
        config(monkeypatch, {"bootstrap.servers": "b:1", **kerberos})
    assert "touch" not in str(refused.value)


def test_the_client_itself_says_whether_it_has_kerberos() -> None:
    from confluent_kafka import Consumer, KafkaException

    kerberos = {"group.id": "g", "security.protocol": "SASL_PLAINTEXT", "sasl.mechanism": "GSSAPI", "log_level": 0}
    try:
        Consumer({**kerberos, "bootstrap.servers": "127.0.0.1:1"}).close()
    except KafkaException as error:
        assert "GSSAPI" in str(error)
        assert not client.has_kerberos()
    else:
        assert client.has_kerberos()


def test_the_streams_check_refuses_the_log_in_of_its_connections(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(client, "has_kerberos", lambda: False)
    stream = Stream(
        name="shop",
        inputs=KafkaInput(connection="unknown_here", topics="clicks"),
        outputs=KafkaOutput(connection="brokers", topic="paid"),
        batch_interval="10 s",
        storage=tmp_path,
        ledger=f"sqlite:///{tmp_path}/ledger.db",
    )
    check_client_settings(stream)
    extra = {"bootstrap.servers": "b:1", "security.protocol": "SASL_SSL", "sasl.mechanism": "GSSAPI"}
    monkeypatch.setenv("AIRFLOW_CONN_BROKERS", json.dumps({"conn_type": "kafka", "extra": extra}))
    with pytest.raises(ClientSettingError, match="'brokers' connection logs in by GSSAPI"):
        check_client_settings(stream)
