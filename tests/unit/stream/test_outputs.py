"""Definitions of outputs: indices, document ids, dead letters, and outputs beside one another."""

from __future__ import annotations

from typing import Any

import pytest
from tests.unit.stream.definitions import HOSTS, fields

from headrace.elasticsearch.options import IndexingOptions
from headrace.elasticsearch.target import Target
from headrace.stream import (
    ColumnIds,
    ConsoleOutput,
    DeadLetterTopic,
    ElasticsearchOutput,
    KafkaInput,
    KafkaOutput,
    KeyIds,
    ParquetOutput,
    RecordIds,
    Stream,
    StreamDefinitionError,
)
from headrace.stream.outputs import RECORD_COLUMNS, OutputPlace
from headrace.wal.frame import RECORD_SCHEMA


def two_into_one_index(first: Any, second: Any, **more: Any) -> dict[str, Any]:
    both: list[dict[str, Any]] = [{"id": "a", "document_ids": first}, {"id": "b", "document_ids": second, **more}]
    return fields(outputs=[ElasticsearchOutput(**{"hosts": HOSTS, "index": "flights", **output}) for output in both])


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (RecordIds(), RecordIds()),
        (RecordIds(rows="line"), RecordIds(rows=("leg",))),
        (KeyIds(version_from="at"), KeyIds(version_from="seen")),
        (ColumnIds(columns=("carrier",)), ColumnIds(columns=("carrier",))),
        (KeyIds(), ColumnIds(columns=("key",), with_batch_time=False)),
        (ColumnIds(columns=("topic", "partition", "offset"), with_batch_time=False), RecordIds()),
    ],
)
def test_two_outputs_never_give_one_index_the_same_ids(first: Any, second: Any) -> None:
    with pytest.raises(
        StreamDefinitionError, match=r"outputs\.b\.index: flights is also the index of output a.*RecordIds"
    ):
        Stream(**two_into_one_index(first, second))


@pytest.mark.parametrize(
    ("first", "second", "more"),
    [
        (RecordIds(), RecordIds(rows="key"), {}),
        (RecordIds(), KeyIds(), {}),
        (ColumnIds(columns=("key",)), ColumnIds(columns=("key", "topic")), {}),
        (RecordIds(), RecordIds(), {"index": "others"}),
        (RecordIds(), RecordIds(), {"hosts": "http://other:9200"}),
        (RecordIds(), RecordIds(), {"hosts": (), "connection": "es"}),
    ],
)
def test_two_outputs_share_an_index_where_their_ids_differ(first: Any, second: Any, more: dict[str, Any]) -> None:
    Stream(**two_into_one_index(first, second, **more))


@pytest.mark.parametrize(
    "ids", [ColumnIds(columns=("carrier", "topic")), RecordIds(rows="carrier"), KeyIds(version_from="carrier")]
)
def test_ids_of_other_columns_than_a_records_need_a_transform(ids: Any) -> None:
    output = ElasticsearchOutput(hosts=HOSTS, index="flights", document_ids=ids)
    with pytest.raises(StreamDefinitionError, match=r"document_ids: names the column carrier, .* give the output a tr"):
        Stream(**fields(outputs=output))
    assert Stream(**fields(outputs=output, transform="m:f"))
    assert Stream(**fields(outputs=output.model_copy(update={"transform": "m:f"})))


def test_ids_of_a_records_own_columns_need_no_transform() -> None:
    output = ElasticsearchOutput(hosts=HOSTS, index="flights", document_ids=KeyIds(version_from="timestamp"))
    assert Stream(**fields(outputs=output))
    assert set(RECORD_SCHEMA.names) == RECORD_COLUMNS


def test_two_outputs_do_not_replace_each_others_files() -> None:
    first, second, other = (
        ParquetOutput(id=name, path=path)
        for name, path in (("a", "/data/flights"), ("b", "file:/data//flights/"), ("c", "/data/flights2"))
    )
    assert Stream(**fields(outputs=[first, other]))
    with pytest.raises(StreamDefinitionError, match=r"outputs\.b\.path: .* is also the folder of output a"):
        Stream(**fields(outputs=[first, second]))


@pytest.mark.parametrize(
    ("source", "topic", "server", "refused"),
    [
        ({"topics": "orders"}, "orders", "h:1", True),
        ({"topic_pattern": "orders.*"}, "orders-enriched", "g:1,h:1", True),
        ({"topic_pattern": "orders.*"}, "enriched-orders", "h:1", False),
        ({"topics": "orders"}, "orders", "other:1", False),
    ],
)
def test_a_stream_does_not_receive_what_it_sends(source: Any, topic: str, server: str, refused: bool) -> None:
    inputs = KafkaInput(bootstrap_servers="h:1", **source)
    definition = fields(inputs=inputs, outputs=KafkaOutput(bootstrap_servers=server, topic=topic))
    if not refused:
        assert Stream(**definition)
        return
    with pytest.raises(StreamDefinitionError, match=f"input records reads {topic}, so the stream would receive what"):
        Stream(**definition)


@pytest.mark.parametrize("number", [float("inf"), float("nan")])
def test_numbers_are_finite(number: float) -> None:
    for field in ("max_retry_seconds", "request_timeout_seconds"):
        with pytest.raises(StreamDefinitionError, match=f"{field} must be a finite number"):
            ElasticsearchOutput(hosts=HOSTS, index="flights", **{field: number})
    with pytest.raises(StreamDefinitionError, match="finite number"):
        Stream(**fields(parameters={"share": number}))


@pytest.mark.parametrize("length", [float("inf"), "99999999999999 d"])
def test_a_duration_has_an_end(length: Any) -> None:
    with pytest.raises(StreamDefinitionError, match="batch_interval is too long"):
        Stream(**fields(batch_interval=length))


def test_a_renamed_output_is_recorded_under_its_first_id() -> None:
    old, new = ConsoleOutput(id="old", renamed_from="first"), ConsoleOutput(id="new")
    stream = Stream(**fields(outputs=(old, new)))
    assert stream.steps == ("first", "new")
    assert stream.output_of_step("first") is stream.output("old")
    # Two that swap their ids.
    swapped = (ConsoleOutput(id="b", renamed_from="a"), ConsoleOutput(id="a", renamed_from="b"))
    assert Stream(**fields(outputs=swapped)).steps == ("a", "b")
    with pytest.raises(StreamDefinitionError, match="its records are those of old, since both have the first id"):
        Stream(**fields(outputs=(old, ConsoleOutput(id="first"))))
    with pytest.raises(StreamDefinitionError, match="is that of the state's update"):
        Stream(**fields(outputs=ConsoleOutput(renamed_from="state")))


def test_tombstones_follow_the_ids() -> None:
    by_record = ElasticsearchOutput(hosts="http://h:1", index="a")
    by_key = ElasticsearchOutput(hosts="http://h:1", index="a", document_ids=KeyIds())
    assert (by_record.tombstone_action, by_key.tombstone_action) == ("dead_letter", "delete")
    assert by_record.dead_letters == "a-dead-letters"
    with pytest.raises(StreamDefinitionError, match="by key"):
        ElasticsearchOutput(hosts="http://h:1", index="a", tombstones="delete")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"index": "a b"}, "it has blanks"),
        ({"index": "Flights"}, "capital letters"),
        ({"index": ""}, "is empty"),
        ({"index": "_flights"}, "begins with _"),
        ({"index": "flights,other"}, "it has ,"),
        ({"index": "flights-*"}, r"it has \*"),
        ({"index": "<flights-{now/d}>"}, "date mathematics, for which nothing is filled in"),
        ({"dead_letter_index": "letters-{{ds}}"}, "placeholder"),
        ({"index": "flights\t"}, "cannot be printed"),
        ({"index": ".."}, "folder"),
        ({"index": "é" * 128}, "256 bytes"),
        ({"index": "f" * 243}, "256 bytes and more than 255; name another"),
        ({"dead_letter_index": "flights"}, "dead_letter_index is the index itself"),
        ({"dead_letter_index": "Letters"}, "capital letters"),
        ({"hosts": "ftp://h:1"}, "no http or https URL"),
        ({"hosts": "http://h:99999"}, "no http or https URL"),
        ({"hosts": "http://"}, "no http or https URL"),
        ({"bulk_bytes": 101 * 1024 * 1024}, "bulk_bytes"),
        ({"bulk_actions": 100_001}, "bulk_actions"),
        ({"requests_in_flight": 65}, "requests_in_flight"),
    ],
)
def test_what_the_target_would_always_refuse_is_refused(changes: dict[str, Any], words: str) -> None:
    """The index or the sink would refuse it in every batch."""
    with pytest.raises(StreamDefinitionError, match=words):
        ElasticsearchOutput(**({"hosts": "http://h:1", "index": "flights"} | changes))


def test_the_longest_names_of_indices_are_taken() -> None:
    assert ElasticsearchOutput(hosts="h:1", index="f" * 242).dead_letters == f"{'f' * 242}-dead-letters"
    assert ElasticsearchOutput(hosts="h:1", index="f" * 255, dead_letter_index="letters").dead_letters == "letters"


def test_dead_letters_do_not_go_into_the_index_of_another_output() -> None:
    named = ElasticsearchOutput(id="a", hosts="http://h:1", index="a", dead_letter_index="b")
    derived = ElasticsearchOutput(id="a", hosts=("http://g:1", "h:1/"), index="a")
    for letters, index in ((named, "b"), (derived, "a-dead-letters")):
        with pytest.raises(StreamDefinitionError, match=rf"outputs\.a\.dead_letter_index: {index} is the index of out"):
            Stream(**fields(outputs=[letters, ElasticsearchOutput(id="b", hosts="http://h:1", index=index)]))
        assert Stream(**fields(outputs=[letters, ElasticsearchOutput(id="b", hosts="http://z:1", index=index)]))
    shared = [ElasticsearchOutput(id=id_, connection="es", index=id_, dead_letter_index="c") for id_ in ("a", "b")]
    assert Stream(**fields(outputs=shared)), "several outputs may share a dead-letter index"


LETTERS = DeadLetterTopic(topic="letters", connection="kafka_dlq")


def test_a_topic_for_dead_letters_takes_the_place_of_the_index() -> None:
    output = ElasticsearchOutput(connection="es", index="a", dead_letter_topic=LETTERS)
    assert (output.dead_letters, output.letters_place) == ("", "topic letters")
    assert output.connection_ids == ("es", "kafka_dlq")
    assert output.places == (OutputPlace("es", "index", "a"), OutputPlace("kafka_dlq", "topic", "letters"))
    assert ElasticsearchOutput(connection="es", index="a").letters_place == "a-dead-letters"
    assert Stream(**fields(outputs=output)).connection_ids == ("es", "kafka_dlq")
    of_each = ElasticsearchOutput(connection="es", index="a-{topic}", dead_letter_topic=LETTERS)
    assert (of_each.dead_letters, of_each.places[1:]) == ("", output.places[1:])
    assert of_each.at("a") == output
    assert IndexingOptions.of(of_each, Target.of(of_each, "s"), batch_time_ms=0).letters_names == frozenset()
    long = ElasticsearchOutput(hosts="h:1", index="f" * 255, dead_letter_topic=LETTERS)
    assert Stream.from_json(Stream(**fields(outputs=long)).to_json()).outputs == (long,)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"dead_letter_index": "b"}, "name either dead_letter_index or dead_letter_topic"),
        ({"dead_letter_topic": {"topic": "letters"}}, "name either connection .* or bootstrap_servers"),
        ({"dead_letter_topic": {"topic": "a b", "connection": "kafka_dlq"}}, r"dead_letter_topic\.topic"),
        ({"dead_letter_topic": {"topic": "${topic}", "connection": "kafka_dlq"}}, "placeholder"),
        ({"dead_letter_topic": {"topic": "x", "bootstrap_servers": "u:p@h:1"}}, "hold a login"),
    ],
)
def test_a_topic_for_dead_letters_that_cannot_be_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(StreamDefinitionError, match=words):
        ElasticsearchOutput(**{"hosts": "http://h:1", "index": "a", "dead_letter_topic": LETTERS, **changes})


def test_dead_letters_do_not_go_into_a_topic_that_has_records() -> None:
    output = ElasticsearchOutput(hosts="http://h:1", index="a", dead_letter_topic=LETTERS)
    source = KafkaInput(connection="kafka_dlq", topic_pattern="let.*")
    own = r"dead_letter_topic: input records reads letters, so the stream would receive what it sends, without end"
    with pytest.raises(StreamDefinitionError, match=own):
        Stream(**fields(inputs=source, outputs=output))
    assert Stream(**fields(inputs=source.model_copy(update={"connection": "other"}), outputs=output))
    sender = KafkaOutput(connection="kafka_dlq", topic="letters")
    with pytest.raises(StreamDefinitionError, match="dead_letter_topic: letters is the topic of output kafka"):
        Stream(**fields(outputs=[output, sender]))
    both = [ElasticsearchOutput(id=id_, connection="es", index=id_, dead_letter_topic=LETTERS) for id_ in ("a", "b")]
    assert Stream(**fields(outputs=both)), "several outputs may share a topic"


def test_ids_that_recur_are_not_created() -> None:
    with pytest.raises(StreamDefinitionError, match="write_method"):
        ElasticsearchOutput(
            hosts="http://h:1",
            index="a",
            document_ids=ColumnIds(columns=("user",), with_batch_time=False),
            write_method="create",
        )


@pytest.mark.parametrize(
    "placeholder",
    [
        *("${topic}", "%{type}", "{{service}}", "$tag", "%y.%m.%d", "%Y%m%d", "%{+yyyy.MM.dd}", "{a b"),
        *("<x-{now/d}>", "@{x}", "$(x)", "[yyyy.MM]", "yyyy.MM.dd"),
    ],
)
def test_placeholders_of_other_tools_are_refused_in_every_place(placeholder: str) -> None:
    for make in (
        lambda name: ElasticsearchOutput(hosts="http://h:1", index=name),
        lambda name: ElasticsearchOutput(hosts="http://h:1", index="i", dead_letter_index=name),
        lambda name: KafkaOutput(bootstrap_servers="h:1", topic=name),
        lambda name: ParquetOutput(path=f"/data/{name}"),
        lambda name: Stream(**fields(storage=f"/data/{name}")),
    ):
        with pytest.raises(StreamDefinitionError, match="nothing is filled in"):
            make(f"logs-{placeholder}")


@pytest.mark.parametrize("name", ["logs-2026.11.28", "logs_a-b.c", "logs%20", "cost$", "日志"])
def test_a_name_without_a_placeholder_is_taken(name: str) -> None:
    assert ElasticsearchOutput(hosts="http://h:1", index=name).index == name


@pytest.mark.parametrize(("mine", "other"), [("https://h", "https://h:443/"), ("http://h", "h:80")])
def test_two_spellings_of_one_address_are_one_cluster(mine: str, other: str) -> None:
    outputs = [ElasticsearchOutput(hosts=host, index="i") for host in (mine, other)]
    assert outputs[0].shares_cluster(outputs[1])
