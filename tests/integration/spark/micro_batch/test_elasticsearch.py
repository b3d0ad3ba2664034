"""A batch's documents and dead letters in a real Elasticsearch."""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.request
import uuid
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]
from pyspark.sql import SparkSession
from tests.integration.spark.micro_batch.conftest import Make, Records, run

from headrace.batch.places import accept, place_of
from headrace.elasticsearch.dead_letter_index import LetterFilter
from headrace.elasticsearch.dead_letters import OriginalRecord
from headrace.elasticsearch.errors import TargetChangedError, TooManyDeadLettersError
from headrace.elasticsearch.target import ConcreteIndex
from headrace.ledger import BatchState, EventKind
from headrace.stream import (
    ColumnIds,
    ConsoleOutput,
    DeadLetterLimit,
    DeadLetterTopic,
    ElasticsearchOutput,
    JsonDecoder,
    KafkaInput,
    KeyIds,
    Utf8Decoder,
)
from headrace.views.dead_letters import DeadLettersOf


def documents(url: str, index: str) -> dict[str, Any]:
    urllib.request.urlopen(f"{url}/{index}/_refresh", data=b"").read()  # noqa: S310
    with urllib.request.urlopen(f"{url}/{index}/_search?size=100") as answer:  # noqa: S310
        return {hit["_id"]: hit["_source"] for hit in json.load(answer)["hits"]["hits"]}


def test_decoded_records_are_indexed_and_others_dead_letters(
    spark: SparkSession, elasticsearch: str, make_batch_ledger: Make, make_records: Records
) -> None:
    index = f"clicks-{uuid.uuid4().hex}"
    batch = make_batch_ledger(
        inputs=KafkaInput(
            bootstrap_servers="localhost:9092", topics="clicks", value_decoder=JsonDecoder(fields="id INT")
        ),
        outputs=(ElasticsearchOutput(hosts=elasticsearch, index=index), ConsoleOutput()),
    )
    batch.add(make_records([b'{"id": 1, "more": true}', b'{"id": "one"}', b"\xff\xfe"]))
    result, printed = run(spark, batch)
    assert documents(elasticsearch, index) == {"clicks+0+0": {"id": 1, "more": True}}, "the value's own bytes"
    letters = documents(elasticsearch, f"{index}-dead-letters")
    ours = f"{batch.stream.name}/elasticsearch/{index}"
    assert set(letters) == {f"{ours}/clicks+0+1", f"{ours}/clicks+0+2"}
    assert {letter["value"] for letter in letters.values()} == {"eyJpZCI6ICJvbmUifQ==", "//4="}
    reasons = [letter["reason"] for letter in letters.values()]
    assert {reason["type"] for reason in reasons} == {"rejected"}
    assert all("value" in reason["text"] for reason in reasons)
    counts = result.outputs["elasticsearch"]
    assert (counts["rows"], counts["indexed"], counts["dead_lettered"], counts["undecodable"]) == (3, 1, 2, 2)
    assert "Row(id=1)" in printed
    assert not list((Path(batch.stream.folder_url) / "reports").glob("*")), "reports are read and gone"


def test_excess_dead_letters_fail_a_batch_and_stay_until_indexed(
    spark: SparkSession, elasticsearch: str, make_batch_ledger: Make, make_records: Records
) -> None:
    """Twelve that the mapping refuses and six that do not decode: the limit is over both, and over all tasks."""
    index = f"clicks-{uuid.uuid4().hex}"
    letters = f"{index}-dead-letters"
    limit = DeadLetterLimit(tolerated=15)
    output = ElasticsearchOutput(hosts=elasticsearch, index=index, dead_letter_limit=limit)
    decoder = JsonDecoder(fields="id STRING")
    source = KafkaInput(bootstrap_servers="localhost:9092", topics="clicks", value_decoder=decoder)
    batch = make_batch_ledger(inputs=source, outputs=output)
    make_index(elasticsearch, index, "long")
    for first in (0, 11):
        values = [b'{"id": "x"}'] * 6 + [b'{"id": "1"}'] * 2 + [b"junk"] * 3
        batch.add(make_records(values, first_offset=first))
    with pytest.raises(
        TooManyDeadLettersError, match=r"22 rows .* 18 are dead letters, more than the 50% of dead_letter_limit"
    ) as error:
        run(spark, batch, partitions=2)
    assert re.search(r"For example clicks, partition 0, offset \d+: ", str(error.value))
    time_ms = batch.ledger.batches.page(batch.stream.name)[0].batch_time_ms
    assert batch.ledger.batches.get(batch.stream.name, time_ms).state is not BatchState.COMPLETED
    assert len(documents(elasticsearch, letters)) == 18
    raised = output.model_copy(update={"dead_letter_limit": DeadLetterLimit(share=1)})
    stream = batch.stream.model_copy(update={"outputs": (raised,)})
    counts = batch.run(spark, batch.begin(time_ms), stream=stream).outputs["elasticsearch"]
    assert (counts["dead_lettered"], counts["repeated"], counts["letters_withdrawn"]) == (18, 4, 0)
    assert len(documents(elasticsearch, letters)) == 18
    make_index(elasticsearch, index, "keyword")
    with pytest.raises(TargetChangedError, match="deleted and created again"):
        batch.run(spark, batch.begin(time_ms, force=True))
    accept(batch.ledger, batch.stream.name, place_of(output, ConcreteIndex(index, None)), by="test")
    counts = batch.run(spark, batch.begin(time_ms, force=True)).outputs["elasticsearch"]
    assert (counts["dead_lettered"], counts["indexed"], counts["letters_withdrawn"]) == (6, 16, 12)
    left = documents(elasticsearch, letters).values()
    assert {letter["value_text"] for letter in left} == {"junk"}
    assert len(left) == 6


@pytest.fixture
def letter_topic(kafka: str, kafka_admin: AdminClient) -> DeadLetterTopic:
    topic = f"letters-{uuid.uuid4().hex}"
    kafka_admin.create_topics([NewTopic(topic, 3, 1)])[topic].result()
    return DeadLetterTopic(topic=topic, bootstrap_servers=kafka)


def test_a_later_attempt_settles_the_letters_of_a_topic(
    spark: SparkSession,
    elasticsearch: str,
    letter_topic: DeadLetterTopic,
    make_batch_ledger: Make,
    make_records: Records,
) -> None:
    """Two that do not decode and one that the mapping refuses, with the records' own bytes."""
    index = f"clicks-{uuid.uuid4().hex}"
    output = ElasticsearchOutput(hosts=elasticsearch, index=index, dead_letter_topic=letter_topic)
    decoder = JsonDecoder(fields="id STRING")
    source = KafkaInput(bootstrap_servers="localhost:9092", topics="clicks", value_decoder=decoder)
    batch = make_batch_ledger(inputs=source, outputs=output)
    make_index(elasticsearch, index, "long")
    batch.add(make_records([b'{"id": "x"}', b'{"id": "1"}', b"junk", b"\xff\xfe"]))
    result, _ = run(spark, batch)
    counts = result.outputs["elasticsearch"]
    assert (counts["rows"], counts["indexed"], counts["dead_lettered"]) == (4, 1, 3)
    letters = DeadLettersOf(batch.stream.name, output, max_retry_seconds=20)
    assert {(letter.offset, letter.error_type) for letter in letters.page(10).letters} == {
        (0, "document_parsing_exception"),
        (2, "rejected"),
        (3, "rejected"),
    }
    with letters.opened() as kept:
        (of_bytes,) = kept.find(LetterFilter(from_offset=3))
    assert of_bytes.record == OriginalRecord(b"key-3", b"\xff\xfe", (("trace", b"\x00\xff"),), 1_700_000_000_126)
    make_index(elasticsearch, index, "keyword")
    accept(batch.ledger, batch.stream.name, place_of(output, ConcreteIndex(index, None)), by="test")
    time_ms = batch.ledger.batches.page(batch.stream.name)[0].batch_time_ms
    counts = batch.run(spark, batch.begin(time_ms, force=True)).outputs["elasticsearch"]
    assert (counts["dead_lettered"], counts["indexed"]) == (2, 2)
    assert {letter.offset for letter in letters.page(10).letters} == {2, 3}
    assert letters.replay(LetterFilter()).to_dict()["replayed"] == 0
    assert set(documents(elasticsearch, index)) == {"clicks+0+0", "clicks+0+1"}


def test_an_alias_lost_between_batches_is_an_error_and_no_index(
    spark: SparkSession, elasticsearch: str, make_batch_ledger: Make, make_records: Records
) -> None:
    alias = f"clicks-{uuid.uuid4().hex}"
    ask(elasticsearch, "PUT", f"{alias}-1", {"aliases": {alias: {}}})
    batch = make_batch_ledger(outputs=ElasticsearchOutput(hosts=elasticsearch, index=alias))
    batch.add(make_records([b'{"id": 1}']))
    result, _ = run(spark, batch)
    assert result.outputs["elasticsearch"]["index"] == f"{alias}-1"
    ask(elasticsearch, "DELETE", f"{alias}-1/_alias/{alias}")
    batch.add(make_records([b'{"id": 2}'], first_offset=1))
    with pytest.raises(TargetChangedError, match=rf"{alias}' any more.*Make it an alias of '{alias}-1' again"):
        run(spark, batch)
    time_ms = batch.ledger.batches.page(batch.stream.name)[0].batch_time_ms
    with pytest.raises(urllib.error.HTTPError, match="404"):
        ask(elasticsearch, "GET", alias)
    ask(elasticsearch, "PUT", f"{alias}-1/_alias/{alias}")
    assert batch.run(spark, batch.begin(time_ms)).outputs["elasticsearch"]["created"] == 1


def ask(elasticsearch: str, method: str, path: str, body: Any = None) -> None:
    data = None if body is None else json.dumps(body).encode()
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(f"{elasticsearch}/{path}", method=method, data=data, headers=headers)  # noqa: S310
    urllib.request.urlopen(request, timeout=30).close()  # noqa: S310


def make_index(elasticsearch: str, index: str, id_type: str) -> None:
    """Make the index anew, with its field id of this type."""
    ask(elasticsearch, "DELETE", f"{index}?ignore_unavailable=true")
    ask(elasticsearch, "PUT", index, {"mappings": {"properties": {"id": {"type": id_type}}}})


def test_versions_not_received_are_an_event_without_kafka(
    spark: SparkSession, elasticsearch: str, make_batch_ledger: Make, make_records: Records
) -> None:
    """There is no Kafka at the input's address."""
    index = f"clicks-{uuid.uuid4().hex}"
    ask(elasticsearch, "PUT", f"{index}/_doc/key-0?version=1000&version_type=external", {"id": "from elsewhere"})
    batch = make_batch_ledger(
        inputs=KafkaInput(bootstrap_servers="127.0.0.1:1", topics="clicks"),
        outputs=ElasticsearchOutput(hosts=elasticsearch, index=index, document_ids=KeyIds()),
    )
    batch.add(make_records([b'{"id": 1}']))
    result, _ = run(spark, batch)
    counts = result.outputs["elasticsearch"]
    assert (counts["superseded"], "held" in counts) == (1, False)
    (event,) = batch.ledger.events.latest(batch.stream.name, [EventKind.VERSIONS_BEYOND_POSITION])
    assert "holds version 1,000 of document 'key-0'" in event.payload["what"]


def test_the_same_batch_again_changes_nothing(
    spark: SparkSession, elasticsearch: str, make_batch_ledger: Make, make_records: Records
) -> None:
    index = f"clicks-{uuid.uuid4().hex}"
    batch = make_batch_ledger(outputs=ElasticsearchOutput(hosts=elasticsearch, index=index))
    batch.add(make_records([b'{"id": 1}', b'{"id": 2}']))
    run(spark, batch)
    before = documents(elasticsearch, index)
    again = batch.run(spark, batch.begin(10_000, force=True))
    counts = again.outputs["elasticsearch"]
    assert (again.attempt, counts["indexed"], counts["repeated"]) == (2, 0, 2)
    assert documents(elasticsearch, index) == before


def test_an_aggregate_goes_to_column_ids(
    spark: SparkSession, elasticsearch: str, make_batch_ledger: Make, make_records: Records, transforms: Any
) -> None:
    index = f"words-{uuid.uuid4().hex}"
    lines = KafkaInput(id="lines", bootstrap_servers="localhost:9092", topics="clicks", value_decoder=Utf8Decoder())
    output = ElasticsearchOutput(hosts=elasticsearch, index=index, document_ids=ColumnIds(columns=("word",)))
    batch = make_batch_ledger(inputs=lines, outputs=output, **transforms("words"))
    batch.add(make_records([b"a b a", b"\xff"]), input_id="lines")
    result, _ = run(spark, batch)
    found = documents(elasticsearch, index)
    assert sorted((document["word"], document["count"]) for document in found.values()) == [("a", 2), ("b", 1)]
    letter = f"{batch.stream.name}/elasticsearch/{index}/clicks+0+1"
    assert set(documents(elasticsearch, f"{index}-dead-letters")) == {letter}
    assert result.outputs["elasticsearch"]["dead_lettered"] == 1
