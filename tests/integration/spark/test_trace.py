"""`headrace trace`: records from a real Kafka, through a receiver job and a batch, into a real Elasticsearch."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from confluent_kafka import Producer
from tests.integration.spark.conftest import Application, new_application
from typer.testing import CliRunner

from headrace.cli.main import app
from headrace.hooks.ledger import register
from headrace.stream import ElasticsearchOutput, JsonDecoder, SparkSettings, Stream

# Offset 0 becomes a document, 1 does not fit the index, 2 is left out by the transform, 3 does not decode.
VALUES = (b'{"item": "cup", "n": "1"}', b'{"item": "pot", "n": "many"}', b'{"item": null, "n": "2"}', b"junk")
CODE = "def sold(records):\n    return records.select('value.item', 'value.n', 'topic', 'partition', 'offset')" + (
    ".where('item IS NOT NULL')\n"
)


@dataclass
class Traced:
    """The stream after its first batch, with one record in Kafka that nobody has received."""

    application: Application
    stream: Stream
    client: httpx.Client
    index: str
    batch_time_ms: int

    def trace(self, *arguments: str) -> Any:
        given = ["trace", self.stream.name, *arguments, "--ledger", self.stream.ledger]
        result = CliRunner().invoke(app, [*given, "--json"])
        assert result.exit_code == 0, result.output
        assert CliRunner().invoke(app, given).exit_code == 0
        return json.loads(result.stdout)

    def record(self, offset: int) -> Any:
        return self.trace(self.topic, "0", str(offset))

    @property
    def topic(self) -> str:
        return self.stream.inputs[0].topics[0]


@pytest.fixture(scope="module")
def traced(kafka: str, elasticsearch: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Traced]:
    folder = tmp_path_factory.mktemp("traced")
    code, index = f"transform_{uuid.uuid4().hex}", f"sales-{uuid.uuid4().hex[:8]}"
    (folder / "code").mkdir()
    (folder / "code" / f"{code}.py").write_text(CODE)
    application = new_application(
        kafka,
        folder,
        outputs=ElasticsearchOutput(hosts=elasticsearch, index=index),
        transform=f"{code}:sold",
        spark=SparkSettings(master="local[3]", py_files=(str(folder / "code"),)),
    )
    decoder = JsonDecoder(fields="item STRING, n STRING")
    inputs = application.stream.inputs[0].model_copy(update={"value_decoder": decoder})
    application.stream = application.stream.model_copy(update={"inputs": (inputs,)})
    register(application.ledger, application.stream)
    client = httpx.Client(base_url=elasticsearch, timeout=120)
    client.put(f"/{index}", json={"mappings": {"properties": {"n": {"type": "long"}}}}).raise_for_status()
    try:
        application.running_job(application.start_job())
        produce(application, *VALUES)
        application.until("the records", lambda: positions(application) == len(VALUES))
        time_ms = application.allocate_next()
        done = application.run_batch(time_ms)
        assert done.returncode == 0, done.stdout + done.stderr
        stop = ["streams", "stop", application.stream.name, "--wait", "120", "--ledger", application.stream.ledger]
        assert CliRunner().invoke(app, stop).exit_code == 0, application.log("receiver")
        produce(application, b'{"item": "jug", "n": "3"}')
        yield Traced(application, application.stream, client, index, time_ms)
    finally:
        application.close()
        client.close()


def produce(application: Application, *values: bytes) -> None:
    producer = Producer({"bootstrap.servers": application.bootstrap_servers})
    for number, value in enumerate(values):
        topic = application.stream.inputs[0].topics[0]
        producer.produce(topic, value=value, key=b"key-%d" % number, headers={"trace": b"abc"})
    assert producer.flush(60) == 0


def positions(application: Application) -> int:
    return sum(row.next_offset for row in application.ledger.positions.all(application.stream.name))


def test_a_document_is_traced_by_its_record_and_by_its_id(traced: Traced) -> None:
    found = traced.record(0)
    assert (found["state"], found["record"]["value"]) == ("in_batch", VALUES[0].decode())
    assert found["record"]["headers"] == [{"key": "trace", "value": "abc"}]
    assert found["batch"]["batch_time_ms"] == traced.batch_time_ms
    assert found["block"]["in_log"] and found["block"]["from_offset"] == 0
    assert [each["state"] for each in found["attempts"]] == ["completed"]
    (output,) = found["outputs"]
    assert (output["outcome"], output["document"]["found"]) == ("document", True)
    assert output["document"]["index"] == traced.index
    assert output["document"]["source"]["item"] == "cup"
    stored = traced.client.get(f"/{traced.index}/_doc/{output['document']['id']}").json()
    assert stored["_source"] == output["document"]["source"]
    by_id = traced.trace(output["document"]["id"])
    assert by_id["position"] == found["position"]
    assert by_id["outputs"][0]["document"] == output["document"]


@pytest.mark.parametrize(("offset", "reason"), [(1, "many"), (3, "no JSON object")])
def test_a_refused_record_is_traced_to_its_dead_letters_reason(traced: Traced, offset: int, reason: str) -> None:
    (output,) = traced.record(offset)["outputs"]
    assert output["outcome"] == "dead_letter"
    (letter,) = output["letters"]
    assert reason in letter["reason"]
    assert (letter["batch_time_ms"], letter["attempt"]) == (traced.batch_time_ms, 1)


def test_a_record_that_the_transform_left_out_is_neither(traced: Traced) -> None:
    found = traced.record(2)
    assert found["state"] == "in_batch"
    assert [(each["outcome"], each["letters"]) for each in found["outputs"]] == [("neither", [])]


def test_a_record_that_is_only_in_kafka_is_shown_from_there(traced: Traced) -> None:
    found = traced.record(len(VALUES))
    assert (found["state"], found["batch"], found["outputs"]) == ("not_received", None, [])
    assert json.loads(found["record"]["value"])["item"] == "jug"


def test_records_are_found_by_their_key(traced: Traced) -> None:
    found = traced.trace("--key", "key-1")
    assert [(each["position"]["offset"], each["batch_time_ms"]) for each in found["matches"]] == [
        (1, traced.batch_time_ms)
    ]
    assert found["complete"]
    assert traced.trace("--key", "nobody")["matches"] == []


def test_a_deleted_document_is_missed(traced: Traced) -> None:
    (output,) = traced.record(0)["outputs"]
    traced.client.delete(f"/{traced.index}/_doc/{output['document']['id']}?refresh=true").raise_for_status()
    (output,) = traced.record(0)["outputs"]
    assert output["outcome"] == "neither"
    assert not output["document"]["found"]
