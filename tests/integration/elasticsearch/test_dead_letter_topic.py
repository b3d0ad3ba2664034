"""Dead letters in a topic of a real Kafka, and their replay into a real Elasticsearch."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from confluent_kafka import Message
from confluent_kafka import TopicPartition as KafkaPartition
from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]
from tests.integration.dead_letter_shop import BATCHES, N_IS_A_LONG, Shop
from tests.integration.spark.kafka_output.conftest import read

from headrace.blocks import TopicPartition
from headrace.checks.connecting import check_elasticsearch
from headrace.checks.kafka_rights import check_kafka_rights
from headrace.clock import SystemClock
from headrace.elasticsearch.dead_letter_index import LetterFilter
from headrace.elasticsearch.dead_letter_topic import LetterRecord, LetterSender, TopicLetters
from headrace.elasticsearch.errors import DeadLettersRefusedError
from headrace.kafka.producers import topic_id
from headrace.lineage import datasets_of
from headrace.stream import ElasticsearchOutput
from headrace.views.trace import DocumentLookup
from headrace.views.traced import RecordPosition

REFUSED = b'{"n": "one"}'


def make_topic(admin: AdminClient, **config: str) -> str:
    name = f"letters-{uuid.uuid4().hex[:8]}"
    admin.create_topics([NewTopic(name, 3, 1, config=config)])[name].result()
    return name


@pytest.fixture
def topic(kafka_admin: AdminClient) -> str:
    return make_topic(kafka_admin)


@pytest.fixture
def make_shop(elasticsearch: str, kafka: str, topic: str, tmp_path: Path) -> Iterator[Any]:
    made: list[Shop] = []

    def make(**output: Any) -> Shop:
        letters = {"topic": topic, "bootstrap_servers": kafka, **output.pop("letters", {})}
        made.append(Shop(elasticsearch, tmp_path, output={"dead_letter_topic": letters, **output}))
        return made[-1]

    yield make
    for shop in made:
        shop.close()


@pytest.fixture
def shop(make_shop: Any) -> Shop:
    """Two batches, of whose records three were refused for the mapping and one is no JSON."""
    made: Shop = make_shop()
    made.write(b'{"n": 1}', REFUSED, b"junk", b'{"n": 4.0, "a": "two"}')
    made.write(b'{"n": "five"}', b'{"n": "six"}', batch_time_ms=BATCHES[1], first=10)
    return made


def of_offset(kafka: str, topic: str, offset: int) -> tuple[Message, list[tuple[str, bytes | None]]]:
    """The letter of the record at this offset, with its headers."""
    for message in read(kafka, topic):
        headers: Any = message.headers() or []
        if ("__connect.errors.offset", b"%d" % offset) in headers:
            return message, headers
    raise AssertionError(f"no letter of offset {offset}")


def test_a_letter_is_the_record_with_headers_as_of_kafka_connect(shop: Shop, kafka: str, topic: str) -> None:
    message, headers = of_offset(kafka, topic, 1)
    assert (message.key(), message.value()) == (b"key-1", REFUSED)
    assert message.timestamp()[1] > 1_750_000_000_000, "of an old record too, Kafka's retention counts from now"
    assert headers[0] == ("trace", b"\xff")
    own = {name: (value or b"").decode() for name, value in headers[1:]}
    text = own.pop("__connect.errors.exception.message")
    assert text.startswith("[1:7] failed to parse field [n] of type [long]")
    assert own == {
        "headrace.kind": "letter",
        "headrace.letter.id": shop.letter("clicks+0+1"),
        "headrace.stream": "shop",
        "headrace.output": "elasticsearch",
        "headrace.index": shop.index,
        "headrace.batch.time": str(BATCHES[0]),
        "headrace.began": "0",
        "headrace.incarnation": "1",
        "headrace.timestamp": "1700000000123",
        "headrace.document.id": "clicks+0+1",
        "headrace.value.bytes": str(len(REFUSED)),
        "headrace.value.is.document": "true",
        "headrace.record": "true",
        "__connect.errors.topic": "clicks",
        "__connect.errors.partition": "0",
        "__connect.errors.offset": "1",
        "__connect.errors.connector.name": "shop/elasticsearch",
        "__connect.errors.task.id": "0",
        "__connect.errors.stage": "TASK_PUT",
        "__connect.errors.class.name": "headrace.elasticsearch.indexer.Indexer",
        "__connect.errors.exception.class.name": "document_parsing_exception",
    }


def test_letters_of_a_topic_are_listed_and_counted(shop: Shop, topic: str) -> None:
    (reported,) = shop.reported("list")
    assert reported["reasons"] == {"document_parsing_exception": 3, "malformed_document": 1}
    newest_first = [shop.letter(f"clicks+0+{offset}") for offset in (10, 11, 1, 2)]
    assert [letter["id"] for letter in reported["letters"]] == newest_first
    assert (reported["index"], reported["topic"]) == (None, topic)
    assert "value" not in reported["letters"][0]
    text = shop.dead_letters("list", "--limit", "2").output
    assert f"4 dead letters of output elasticsearch, in topic {topic}: 3 document_parsing_exception" in text
    assert "These are 2 of them" in text


@pytest.mark.parametrize(
    ("narrowing", "offsets"),
    [
        ("--reason malformed_document", [2]),
        ("--batch 2023-11-14T22:13:40Z", [10, 11]),
        (f"--until {BATCHES[0]}", [1, 2]),
        ("--offset 2-10", [10, 2]),
        ("--topic clicks --partition 0", [10, 11, 1, 2]),
        ("--topic other", []),
        ("--partition 1", []),
    ],
)
def test_a_list_of_a_topic_is_restricted_by_the_same_options(shop: Shop, narrowing: str, offsets: list[int]) -> None:
    assert shop.listed(*narrowing.split()) == [f"clicks+0+{offset}" for offset in offsets]


def test_a_letter_of_a_topic_is_shown_with_all_it_holds(shop: Shop) -> None:
    text = shop.dead_letters("show", shop.letter("clicks+0+1")).output
    for part in ("2023-11-14T22:13:20.123Z", '{"n": "one"}', "key-1", "document_parsing_exception: ", "trace="):
        assert part in text
    letter = shop.reported("show", shop.letter("clicks+0+1"))
    assert base64.b64decode(letter["value"]) == REFUSED
    assert shop.dead_letters("show", shop.letter("clicks+0+2"), "--value").stdout_bytes == b"junk"
    assert "no dead letter 'nothing'" in shop.dead_letters("show", "nothing").output


def test_a_trace_finds_the_letters_of_a_record_in_a_topic(shop: Shop, topic: str) -> None:
    (output,) = shop.stream.outputs
    assert isinstance(output, ElasticsearchOutput)
    position = RecordPosition("records", TopicPartition("clicks", "topic-id", 0, 1), 10)
    with DocumentLookup.open(output, "shop") as lookup:
        (letter,) = lookup.letters(position, shop.index)
    assert (letter.id, letter.index) == (shop.letter("clicks+0+10"), f"topic {topic}")


def test_records_of_others_in_the_topic_are_no_letters_of_ours(make_shop: Any, kafka: str, topic: str) -> None:
    """Kafka Connect's, and notes of another output about the same batch."""
    shop = make_shop()
    shop.write(REFUSED, attempt=1)
    options = shop.options(batch_time_ms=BATCHES[0], attempt=9)
    sender = LetterSender.of(options)
    sender.withdraw(replace(options, target=options.target.of_output("other")))
    sender.send_notes([LetterRecord(b"k", b"v", [("__connect.errors.topic", b"clicks")])])
    assert shop.listed() == ["clicks+0+0"]


def test_a_corrected_mapping_takes_the_letters_of_a_topic(shop: Shop) -> None:
    """The letter without a document is refused again and stays."""
    shop.correct_mapping()
    assert shop.reported("replay")["to_replay"] == 4
    assert len(shop.documents()) == 2
    result = shop.dead_letters("replay", "--yes")
    assert result.exit_code == 1
    assert "3 of 4 dead letters are replayed" in result.output
    assert "1 were refused again: 1 malformed_document" in result.output
    assert shop.documents()["clicks+0+11"] == {"n": "six"}
    assert len(shop.documents()) == 5
    assert shop.listed() == ["clicks+0+2"]
    assert len(shop.listed("--replayed")) == 4
    reported = shop.reported("replay", "--yes")
    assert (reported["letters"], reported["refused"]) == (1, 1), "what was replayed is not replayed again"


def test_a_letter_of_a_topic_gets_the_reason_of_the_replay(make_shop: Any) -> None:
    shop = make_shop()
    shop.write(REFUSED)
    shop.ask("DELETE", f"/{shop.index}")
    shop.ask("PUT", f"/{shop.index}", {"mappings": {"dynamic": "strict"}})
    shop.reported("replay", "--yes")
    (reported,) = shop.reported("list")
    assert reported["reasons"] == {"strict_dynamic_mapping_exception": 1}
    assert shop.listed("--reason", "document_parsing_exception") == []


def test_a_batch_that_runs_again_has_each_letter_once(make_shop: Any, kafka: str, topic: str) -> None:
    shop = make_shop()
    for attempt in (1, 2):
        shop.write(REFUSED, b"junk", attempt=attempt, began_ms=attempt)
        shop.settle(attempt)
    assert shop.listed() == ["clicks+0+0", "clicks+0+1"]
    ids = [dict(message.headers() or ()).get("headrace.letter.id") for message in read(kafka, topic)]
    assert len([id_ for id_ in ids if id_]) == 4, "the topic has them twice, with the same ids"
    assert len(set(ids) - {None}) == 2


def test_a_letter_that_a_later_attempt_lacks_is_not_replayed(make_shop: Any) -> None:
    shop = make_shop()
    shop.write(REFUSED, b"junk", b'{"n": "two"}', attempt=1, began_ms=1)
    shop.write(b"junk", first=1, attempt=2, began_ms=2)
    assert len(shop.listed()) == 3, "attempt 2 has not succeeded yet"
    shop.settle(2, batch_time_ms=BATCHES[1])
    assert len(shop.listed()) == 3, "another batch's success says nothing of these"
    shop.settle(2)
    assert shop.listed() == ["clicks+0+1"]
    shop.correct_mapping()
    assert shop.reported("replay", "--yes")["letters"] == 1
    assert shop.documents() == {}


def test_letters_of_an_index_for_each_record_are_replayed(make_shop: Any) -> None:
    """A later attempt settles those of every index, and of the record whose topic names none that is legal."""
    name = f"each-{uuid.uuid4().hex[:8]}"
    shop = make_shop(index=name + "-{topic}")
    # So that the shop asks for, and deletes, the index of the records.
    shop.ask("DELETE", f"/{shop.index}")
    shop.index = f"{name}-clicks"
    shop.ask("PUT", f"/{shop.index}", N_IS_A_LONG)
    shop.write(REFUSED, b"junk", attempt=1, began_ms=1)
    shop.write(b"{}", first=5, attempt=1, began_ms=1, topic=["Big"])
    indices = [letter["index"] for letter in shop.reported("list")[0]["letters"]]
    assert sorted(indices) == [*[shop.index] * 2, name + "-{topic}"]
    shop.write(REFUSED, attempt=2, began_ms=2)
    shop.settle(2)
    assert shop.listed() == shop.listed("--index", shop.index) == ["clicks+0+0"]
    shop.correct_mapping()
    assert shop.reported("replay", "--yes")["replayed"] == 1
    assert shop.documents() == {"clicks+0+0": {"n": "one"}}


def test_a_letter_of_an_attempt_that_was_replaced_does_not_hold(make_shop: Any) -> None:
    """Its task has written on after a later attempt had succeeded."""
    shop = make_shop()
    shop.write(b"junk", first=1, attempt=2, began_ms=2)
    shop.settle(2)
    shop.write(REFUSED, b"junk", attempt=1, began_ms=1)
    assert shop.listed() == ["clicks+0+1"]
    assert [letter["attempt"] for letter in shop.reported("list")[0]["letters"]] == [2]


def test_letters_of_a_stream_that_is_made_again_are_not_hidden(make_shop: Any) -> None:
    """Its attempts count from 1 again."""
    shop = make_shop()
    shop.write(REFUSED, attempt=3, began_ms=3)
    shop.settle(4)
    assert shop.listed() == []
    shop.write(REFUSED, attempt=1, began_ms=SystemClock().now_ms() + 60_000)
    assert shop.listed() == ["clicks+0+0"]


def test_a_replayed_letter_that_a_batch_sends_again_is_open(make_shop: Any) -> None:
    shop = make_shop()
    shop.write(REFUSED, attempt=1, began_ms=1)
    shop.correct_mapping()
    assert shop.reported("replay", "--yes")["replayed"] == 1
    assert shop.listed() == []
    shop.ask("DELETE", f"/{shop.index}")
    shop.ask("PUT", f"/{shop.index}", {"mappings": {"properties": {"n": {"type": "long"}}}})
    shop.write(REFUSED, attempt=2, began_ms=2)
    assert shop.listed() == ["clicks+0+0"]


KILLED = """
import os, sys
from pathlib import Path
from tests.integration.dead_letter_shop import Shop
from headrace.elasticsearch.transport import Cluster, ElasticsearchTransport
from headrace.stream import Stream

shop = Shop.__new__(Shop)
shop.stream = Stream.from_json(Path(sys.argv[1]).read_text())
shop.transport = ElasticsearchTransport(Cluster.of(shop.stream.outputs[0]), connections=2, timeout_seconds=30)
shop.write(b'{"n": 1}', b'{"n": "one"}', b"junk", attempt=1, began_ms=1)
os.kill(os.getpid(), 9)
"""


def test_a_kill_after_the_letters_doubles_no_letter(make_shop: Any, tmp_path: Path, kafka: str, topic: str) -> None:
    """The output of attempt 1 was not recorded, so the batch runs again. Meanwhile the mapping was corrected."""
    shop = make_shop()
    (tmp_path / "stream.json").write_text(shop.stream.to_json())
    command = [sys.executable, "-c", KILLED, str(tmp_path / "stream.json")]
    done = subprocess.run(command, check=False, timeout=120, env={**os.environ, "PYTHONPATH": str(Path.cwd())})
    assert done.returncode == -signal.SIGKILL
    assert len(read(kafka, topic)) == 2, "the letters are durable"
    shop.correct_mapping()
    shop.write(b'{"n": 1}', REFUSED, b"junk", attempt=2, began_ms=2)
    shop.settle(2)
    assert shop.listed() == ["clicks+0+2"]
    before = shop.documents()
    reported = shop.reported("replay", "--yes")
    assert (reported["letters"], reported["refused"]) == (1, 1)
    assert shop.documents() == before == {"clicks+0+0": {"n": 1}, "clicks+0+1": {"n": "one"}}


def test_the_document_of_a_transform_is_kept_and_replayed(make_shop: Any, kafka: str, topic: str) -> None:
    """Its row has no record any more, as of an aggregate."""
    shop = make_shop(document_ids={"kind": "columns", "columns": ["id"]}, transform="shop:with_id")
    rows = pa.record_batch({"id_0": ["x"], "document": pa.array([b'{"n": "a"}'], pa.binary())})
    shop.index_rows(rows)
    (message,) = read(kafka, topic)
    assert (message.key(), message.value()) == (None, None)
    assert dict(message.headers() or ())["headrace.document"] == b'{"n": "a"}'
    letter = shop.reported("show", shop.reported("list")[0]["letters"][0]["id"])
    assert (letter["document_text"], letter["document_id"]) == ('{"n": "a"}', f"x+{BATCHES[0]}")
    assert "key" not in letter
    shop.correct_mapping()
    assert shop.reported("replay", "--yes")["replayed"] == 1
    assert shop.documents() == {f"x+{BATCHES[0]}": {"n": "a"}}


def test_a_letter_too_large_for_the_topic_has_no_value(make_shop: Any, kafka_admin: AdminClient, kafka: str) -> None:
    """Only this one: those that were sent beside it are complete."""
    topic = make_topic(kafka_admin, **{"max.message.bytes": "4000"})
    shop = make_shop(letters={"topic": topic})
    noise = base64.b64encode(os.urandom(6000)).decode()
    counts = shop.write(REFUSED, json.dumps({"n": noise}).encode(), b'{"n": "three"}')
    assert counts.dead_lettered == 3
    large = shop.reported("show", shop.letter("clicks+0+1"))
    assert (large["value_bytes"], "value" in large, "value_text" in large) == (8009, False, False)
    shop.correct_mapping()
    reported = shop.reported("replay", "--yes")
    assert (reported["replayed"], reported["left"]) == (2, 1)


def test_a_missing_topic_fails_the_batch_and_the_check(make_shop: Any) -> None:
    shop = make_shop(letters={"topic": "absent"})
    with pytest.raises(DeadLettersRefusedError, match=r"no topic 'absent'.*headrace does not create topics"):
        shop.write(REFUSED)
    assert shop.write(b'{"n": 1}').created == 1, "a batch without letters needs none"
    (output,) = shop.stream.outputs
    failed = [checked for checked in check_elasticsearch(output) if checked.error]
    assert [(each.name, each.error) for each in failed] == [
        ("output elasticsearch, dead letters, topic absent", "The topic does not exist.")
    ]


def test_a_compacted_topic_is_refused(make_shop: Any, kafka_admin: AdminClient) -> None:
    topic = make_topic(kafka_admin, **{"cleanup.policy": "compact"})
    shop = make_shop(letters={"topic": topic})
    with pytest.raises(DeadLettersRefusedError, match=rf"'{topic}' is compacted.*cleanup.policy to delete"):
        shop.write(REFUSED)
    (output,) = shop.stream.outputs
    assert any("is compacted" in (checked.error or "") for checked in check_elasticsearch(output))


def test_a_usable_topic_passes_the_checks(shop: Shop, topic: str) -> None:
    (output,) = shop.stream.outputs
    checked = list(check_elasticsearch(output))
    assert [each.error for each in checked] == [None] * 3
    assert checked[-1].name == f"output elasticsearch, dead letters, topic {topic}"
    rights = [each for each in check_kafka_rights(shop.stream) if "dead letters" in each.name]
    assert [(each.name, each.error) for each in rights][-1] == (
        f"output elasticsearch, dead letters, rights on topic {topic}",
        None,
    )


def test_letters_never_go_to_a_topic_that_the_batch_has_read(make_shop: Any, kafka: str, topic: str) -> None:
    """By another connection it may be the input's own cluster."""
    shop = make_shop()
    read_topics = [topic_id({"bootstrap.servers": kafka}, topic)]
    options = shop.options(batch_time_ms=BATCHES[0], read_topics=read_topics)
    with pytest.raises(DeadLettersRefusedError, match="would receive its own letters, without end"):
        LetterSender.of(options)


def test_letters_are_read_by_a_connection_of_airflow(
    make_shop: Any, kafka: str, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(
        "AIRFLOW_CONN_KAFKA_DLQ", json.dumps({"conn_type": "kafka", "extra": {"bootstrap.servers": kafka}})
    )
    shop = make_shop(letters={"bootstrap_servers": None, "connection": "kafka_dlq"})
    shop.write(REFUSED)
    assert shop.listed() == ["clicks+0+0"]
    (output,) = shop.stream.outputs
    assert isinstance(output, ElasticsearchOutput)
    names = [dataset.name for dataset in datasets_of(output, {"created": 0, "dead_lettered": 1})]
    assert names == [shop.index, topic]


def test_letters_that_retention_removes_meanwhile_are_left_out(
    make_shop: Any, kafka_admin: AdminClient, topic: str
) -> None:
    shop = make_shop()
    shop.write(REFUSED, b"junk")
    options = shop.options(batch_time_ms=BATCHES[0])
    with contextlib.closing(TopicLetters(options.letter_topic, options.target, timeout_seconds=20)) as kept:
        assert sum(kept.reasons(LetterFilter()).values()) == 2
        for asked in kafka_admin.delete_records([KafkaPartition(topic, number, -1) for number in range(3)]).values():
            asked.result()
        assert list(kept.find(LetterFilter())) == []
