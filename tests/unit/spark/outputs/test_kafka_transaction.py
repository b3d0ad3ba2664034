"""What a Kafka output's clients are told, and what Kafka's errors mean.

Where it is kept what was sent: apart for each topic, and for each replay.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import KafkaError
from pyspark.sql.types import StructType

from headrace.batch.manifest import Manifest, ManifestBlock
from headrace.blocks import BlockHandle, OffsetRange, TopicPartition
from headrace.kafka.producers import (
    KafkaOutputError,
    KafkaRefusedError,
    MessageRefusedError,
    OwnTopicError,
    TopicMissingError,
    client_config,
    reported,
)
from headrace.ledger.batches.tables import BatchOrigin
from headrace.spark.outputs import kafka
from headrace.spark.outputs.kafka import KafkaWriter
from headrace.spark.outputs.kafka_transaction import BatchTransaction, Sent, SentRecords, TopicSenders
from headrace.spark.outputs.writer import WrittenBatch
from headrace.spark.records.transforms import BatchContext
from headrace.stream import KafkaInput, KafkaOutput, Stream
from headrace.wal.storage import open_storage

CONNECTION = {
    "conn_type": "kafka",
    "host": "broker",
    "port": 9092,
    "login": "me",
    "password": "hunter2",
    "extra": {
        "security.protocol": "SASL_SSL",
        "sasl.mechanism": "PLAIN",
        "group.id": "others",
        "fetch.min.bytes": 5,
        "client.id": "us",
    },
}


def test_a_connection_gives_security_and_not_what_is_a_consumers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIRFLOW_CONN_OUT", json.dumps(CONNECTION))
    expected = {
        "bootstrap.servers": "broker:9092",
        "sasl.username": "me",
        "sasl.password": "hunter2",
        "security.protocol": "SASL_SSL",
        "sasl.mechanism": "PLAIN",
        "client.id": "us",
        "allow.auto.create.topics": False,
    }
    assert client_config("out", None) == expected
    extra = {**CONNECTION["extra"], "transactional.id": "mine", "acks": "0", "enable.idempotence": False}
    monkeypatch.setenv("AIRFLOW_CONN_OUT", json.dumps({**CONNECTION, "extra": extra}))
    assert client_config("out", None) == expected


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
        (KafkaError._AUTHENTICATION, KafkaRefusedError, "log-in"),
        (KafkaError._TRANSPORT, KafkaOutputError, "the security settings of the connection"),
    ],
)
def test_errors_come_with_a_remedy(code: int, kind: type[KafkaOutputError], says: str) -> None:
    with pytest.raises(kind, match=says):
        raise reported(KafkaError(code), "clicks", message="the seventh")


T = 1_700_000_010_000


@pytest.fixture
def options(tmp_path: Path) -> Any:
    """The options of a write, by the output's id and the replay's name."""

    def options(
        output_id: str = "out",
        target: str = "",
        *,
        stream: str = "clicks",
        servers: str = "prod:9092",
        topic: str = "counts",
        former_steps: tuple[str, ...] = (),
        stream_steps: tuple[str, ...] = (),
    ) -> dict[str, str]:
        output = KafkaOutput(id=output_id, bootstrap_servers=servers, topic=topic)
        declared = Stream(
            name=stream,
            inputs=KafkaInput(bootstrap_servers="prod:9092", topics="clicks"),
            outputs=output,
            batch_interval="10 s",
            storage=str(tmp_path / "storage"),
            ledger=f"sqlite:///{tmp_path}/ledger.db",
        )
        batch = WrittenBatch(
            stream=declared,
            context=BatchContext.of(stream, T, 10_000, 1),
            batch_time_ms=T,
            attempt=1,
            manifest_uri="",
            from_kafka=False,
            target=target,
            out=io.StringIO(),
            progress=lambda _: None,
            former_steps=former_steps,
            stream_steps=stream_steps,
        )
        writer = KafkaWriter(output)
        return {**writer._options(batch), **writer._other_ids(batch)}

    return options


def records(options: dict[str, str]) -> SentRecords:
    return SentRecords(options["sent_folder"], options["sent_name"])


def test_a_replay_to_another_cluster_hides_nothing_of_the_stream(options: Any) -> None:
    """The topic's name is the same there, its id is not."""
    live, replay = records(options()), records(options(target="v2"))
    live.write(Sent("id/of+prod", 1, 5, 50))
    replay.write(Sent("id-of-staging", 1, 6, 60))
    assert live.find("id/of+prod") == Sent("id/of+prod", 1, 5, 50)
    assert replay.find("id-of-staging") == Sent("id-of-staging", 1, 6, 60)
    assert live.find("id-of-staging") is None


def test_replays_of_two_names_to_one_topic_hide_no_other(options: Any) -> None:
    first, second, live = records(options(target="v2")), records(options(target="v3")), records(options())
    first.write(Sent("id", 1, 5, 50))
    assert first.find("id") is not None
    assert second.find("id") is None
    assert live.find("id") is None


def test_a_topic_that_was_created_again_has_its_own_sent_record(options: Any) -> None:
    sent = records(options())
    sent.write(Sent("first", 1, 5, 50))
    sent.write(Sent("second", 2, 6, 60))
    assert [sent.find(topic_id).attempt for topic_id in ("first", "second")] == [1, 2]  # type: ignore[union-attr]


def test_each_output_and_replay_has_its_own_transactions_name(options: Any) -> None:
    wanted = [options(), options("out-v2"), options(target="v2"), options("v2", stream="clicks-out")]
    for one, other in itertools.combinations(wanted, 2):
        assert one["transaction"] != other["transaction"]
        assert (one["sent_folder"], one["sent_name"]) != (other["sent_folder"], other["sent_name"])


@pytest.mark.parametrize("read_by", ["the batch", "its window"])
@pytest.mark.parametrize(("sent_to", "refused"), [("id-read", True), ("id-elsewhere", False)])
def test_a_topic_the_batch_was_read_from_otherwise_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sent_to: str, read_by: str, *, refused: bool
) -> None:
    """The stream would receive what it sends. A topic of the same name in another cluster has another id."""
    output = KafkaOutput(bootstrap_servers="kafka.internal:9092", topic="clicks")
    stream = Stream(
        name="clicks",
        inputs=KafkaInput(bootstrap_servers="localhost:9092", topics=["clicks", "views"]),
        outputs=output,
        batch_interval="10 s",
        storage=str(tmp_path / "storage"),
        ledger=f"sqlite:///{tmp_path}/ledger.db",
    )
    taken = [
        OffsetRange(TopicPartition(topic, f"id-{of}", 0), 0, 5, 5)
        for topic, of in (("clicks", "read"), ("views", "elsewhere"))
    ]
    block = ManifestBlock(BlockHandle("a.seg", 0, 10), 10, 100, tuple(taken))
    manifest = Manifest("clicks", T, 10_000, {stream.inputs[0].id: (block,)}, stream.folder_url)
    written = manifest.write(open_storage(stream.folder_url))
    own, earlier = manifest, tuple[BatchOrigin, ...]()
    if read_by == "its window":
        own = Manifest("clicks", T + 10_000, 10_000, {}, stream.folder_url)
        own.write(open_storage(stream.folder_url))
        earlier = (BatchOrigin(T, manifest.uri, written, "log"),)
    batch = WrittenBatch(
        stream=stream,
        context=BatchContext.of("clicks", T, 10_000, 1),
        batch_time_ms=T,
        attempt=1,
        manifest_uri=own.uri,
        from_kafka=False,
        target="",
        out=io.StringIO(),
        progress=lambda _: None,
        earlier=earlier,
    )
    monkeypatch.setattr(kafka, "topic_id", lambda *_: sent_to)
    source = kafka.KafkaDataSource({**KafkaWriter(output)._options(batch), "report": "r"})
    with pytest.raises(OwnTopicError, match="records of topic 'clicks'") if refused else contextlib.nullcontext():
        source.writer(StructType(), overwrite=False)


def test_the_batch_of_a_transforms_test_has_no_manifest(options: Any) -> None:
    assert options(servers="staging:9092", topic="clicks")["read_topics"] == "[]"


@pytest.mark.parametrize(("sent_to", "refused"), [("id", True), ("id-of-staging", False)])
def test_a_replay_sends_no_batch_again_to_the_streams_own_topic(
    options: Any, monkeypatch: pytest.MonkeyPatch, sent_to: str, *, refused: bool
) -> None:
    """Its definition may name the cluster otherwise than the stream's."""
    records(options()).write(Sent("id", 1, 5, 50))
    monkeypatch.setattr(kafka, "topic_id", lambda *_: sent_to)
    with pytest.raises(OwnTopicError, match="itself has sent the batch") if refused else contextlib.nullcontext():
        kafka.KafkaDataSource({**options(target="v2"), "report": "r"}).writer(StructType(), overwrite=False)
    kafka.KafkaDataSource({**options(), "report": "r"}).writer(StructType(), overwrite=False)


def transaction(options: dict[str, str], monkeypatch: pytest.MonkeyPatch, sent_to: str = "id") -> BatchTransaction:
    monkeypatch.setattr(kafka, "topic_id", lambda *_: sent_to)
    return kafka.KafkaDataSource({**options, "report": "r"}).writer(StructType(), overwrite=False)._transaction


@pytest.mark.parametrize("target", ["", "v2"])
def test_an_output_with_a_new_id_takes_over_the_formers_record(
    options: Any, monkeypatch: pytest.MonkeyPatch, target: str
) -> None:
    """A batch that was sent to a topic is not sent there again, whatever the output is named now."""
    former = records(options("out", target))
    former.write(Sent("id", 1, 5, 50))
    renamed = options("enriched", target, former_steps=("out",))
    sending = transaction(renamed, monkeypatch)
    assert [(each.name, each.records) for each in sending.former] == [(options("out", target)["transaction"], former)]
    assert sending._recorded("id-of-staging") is None
    assert sending._recorded("id") == Sent("id", 1, 5, 50)
    assert records(renamed).find("id") == Sent("id", 1, 5, 50)
    assert former.find("id") is None, "it stands for one output only"


def test_a_replay_by_another_id_does_not_send_a_batch_again(options: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The batch was sent to the stream's own topic before."""
    records(options()).write(Sent("id", 1, 5, 50))
    replay = options("fixed", "v2", stream_steps=("out",))
    with pytest.raises(OwnTopicError, match="itself has sent the batch"):
        transaction(replay, monkeypatch)
    transaction(replay, monkeypatch, sent_to="id-of-staging")


def test_the_folder_knows_which_former_outputs_have_sent(options: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ledger may be older than the topic, so that it has no attempt of the former output."""
    for target in ("", "v2"):
        transaction(options("out", target), monkeypatch, sent_to=f"id{target}")
    records(options("out")).write(Sent("id", 1, 5, 50))
    sending = transaction(options("enriched"), monkeypatch)
    assert [each.name for each in sending.former] == [options("out")["transaction"]]
    assert sending._recorded("id") == Sent("id", 1, 5, 50)
    (of_replay,) = transaction(options("enriched", "v2"), monkeypatch, sent_to="idv2").former
    assert of_replay.name == options("out", "v2")["transaction"]
    assert transaction(options("enriched"), monkeypatch, sent_to="id-of-staging").former == ()
    named = transaction(options("enriched", former_steps=("out",)), monkeypatch)
    assert len(named.former) == 1, "the ledger knows it too"


def test_an_output_once_beside_another_is_not_its_former_id(tmp_path: Path) -> None:
    both = TopicSenders(str(tmp_path / "senders"), "a", ("a", "b"))
    both.note("id")
    assert replace(both, name="b", present=("b",)).former("id") == []
    assert replace(both, name="c", present=("c",)).former("id") == ["a"]
    assert replace(both, name="c", present=("c", "d")).former("id") == [], "which of the two is it?"
    replace(both, present=("a", "c")).note("id")
    assert replace(both, name="c", present=("c",)).former("id") == []
    assert replace(both, name="b", present=("b",)).former("id") == [], "what was beside it before stays known"
