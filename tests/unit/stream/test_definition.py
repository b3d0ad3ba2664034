"""What Spark's StreamingContext refuses at start is refused at definition, with the field and the remedy."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from headrace.stream import (
    ColumnIds,
    ConsoleOutput,
    ElasticsearchOutput,
    JsonDecoder,
    KafkaInput,
    KeyIds,
    RecordIds,
    SparkSettings,
    StartingOffsets,
    StartingTimestamp,
    State,
    Storage,
    Stream,
    StreamDefinitionError,
)
from headrace.stream.spark import _NAMES_HERE


def fields(**changes: Any) -> dict[str, Any]:
    return {
        "name": "flights",
        "inputs": KafkaInput(bootstrap_servers="127.0.0.1:9092", topics="flights"),
        "outputs": ElasticsearchOutput(hosts="http://127.0.0.1:9200", index="flights"),
        "batch_interval": "10 s",
        "storage": "/data/headrace",
        "ledger": "sqlite:////data/headrace/ledger.db",
    } | changes


def test_defaults_are_filled_in() -> None:
    stream = Stream(**fields())
    assert stream.block_interval == timedelta(milliseconds=200)
    assert stream.checkpoint_interval_ms == stream.remember_ms == stream.batch_interval_ms == 10_000
    assert stream.group_of(stream.inputs[0]) == "headrace-flights-records"
    assert stream.folder_url == "/data/headrace/flights"


HOSTS = "http://127.0.0.1:9200"


def two_into_one_index(first: Any, second: Any, **more: Any) -> dict[str, Any]:
    both: list[dict[str, Any]] = [{"id": "a", "document_ids": first}, {"id": "b", "document_ids": second, **more}]
    return fields(outputs=[ElasticsearchOutput(**{"hosts": HOSTS, "index": "flights", **each}) for each in both])


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (RecordIds(), RecordIds()),
        (RecordIds(rows="line"), RecordIds(rows=("leg",))),
        (KeyIds(version_from="at"), KeyIds(version_from="seen")),
        (ColumnIds(columns=("carrier",)), ColumnIds(columns=("carrier",))),
    ],
)
def test_two_outputs_do_not_give_documents_of_one_index_the_same_ids(first: Any, second: Any) -> None:
    with pytest.raises(
        StreamDefinitionError, match=r"outputs\.b\.index: flights is also the index of output a.*RecordIds"
    ):
        Stream(**two_into_one_index(first, second))


@pytest.mark.parametrize(
    ("first", "second", "more"),
    [
        (RecordIds(), RecordIds(rows="line"), {}),
        (RecordIds(), KeyIds(), {}),
        (ColumnIds(columns=("carrier",)), ColumnIds(columns=("carrier", "origin")), {}),
        (RecordIds(), RecordIds(), {"index": "others"}),
        (RecordIds(), RecordIds(), {"hosts": "http://other:9200"}),
        (RecordIds(), RecordIds(), {"hosts": (), "connection": "es"}),
    ],
)
def test_two_outputs_share_an_index_where_their_ids_differ(first: Any, second: Any, more: dict[str, Any]) -> None:
    Stream(**two_into_one_index(first, second, **more))


def test_json_gives_the_same_stream_elsewhere() -> None:
    stream = Stream(
        **fields(
            inputs=[
                KafkaInput(
                    id="clicks",
                    connection="kafka_default",
                    topic_pattern=r"clicks\..*",
                    receivers=2,
                    value_decoder=JsonDecoder(fields="user STRING, at TIMESTAMP"),
                    starting_offsets=StartingTimestamp(timestamp_ms=1_700_000_000_000),
                    client={"fetch.min.bytes": 1},
                ),
                KafkaInput(
                    id="views",
                    bootstrap_servers="127.0.0.1:9092",
                    topics=("views",),
                    starting_offsets=StartingOffsets(offsets={"views": {0: 7}}),
                ),
            ],
            outputs=[
                ElasticsearchOutput(
                    connection="es", index="clicks", document_ids=ColumnIds(columns=("user",)), tombstones="ignore"
                ),
                ConsoleOutput(rows=3),
            ],
            transform="shop.clicks:join",
            checkpoint_interval=timedelta(minutes=1),
            spark=SparkSettings(master="local[8]", conf={"spark.driver.memory": "2g"}, py_files=("/jobs/shop.py",)),
        )
    )
    assert Stream.from_json(stream.to_json()) == stream
    assert stream.connection_ids == ("kafka_default", "es")


def test_load_reads_a_file_and_a_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Stream(**fields())
    (tmp_path / "flights.json").write_text(stream.to_json())
    assert Stream.load(str(tmp_path / "flights.json")) == stream
    (tmp_path / "my_streams.py").write_text(
        f"from headrace.stream import Stream\nflights = Stream.from_json({stream.to_json()!r})\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert Stream.load("my_streams:flights") == stream
    with pytest.raises(StreamDefinitionError, match="no 'flight'"):
        Stream.load("my_streams:flight")


@pytest.mark.parametrize(
    ("changes", "field", "remedy"),
    [
        ({"inputs": []}, "inputs", "name a KafkaInput"),
        ({"outputs": []}, "outputs", "name one, such as"),
        ({"outputs": [ConsoleOutput(), ConsoleOutput()]}, "outputs", "give each its own id"),
        ({"batch_interval": "0 s"}, "batch_interval", "longer than zero"),
        ({"batch_interval": "-1 s"}, "batch_interval", '"10 s"'),
        ({"batch_interval": "300 ms"}, "batch_interval", "no multiple of block_interval"),
        ({"block_interval": 0}, "block_interval", "longer than zero"),
        ({"block_interval": timedelta(microseconds=1500)}, "block_interval", "whole number of milliseconds"),
        ({"checkpoint_interval": "15 s"}, "checkpoint_interval", "no multiple of batch_interval"),
        ({"storage": "log"}, "storage.url", "must be an absolute path or a URL"),
        ({"storage": "s3://key:secret@bucket/x"}, "storage.url", "own environment"),
        ({"ledger": "postgresql://me:pw@db/ledger"}, "ledger", "Airflow connection"),
        ({"ledger": "mysql://db/ledger"}, "ledger", "sqlite:///"),
        ({"ledger": "sqlite:///ledger.db"}, "ledger", "absolute path"),
        ({"transform": "just_a_name"}, "transform", "module:function"),
        ({"spark": SparkSettings(master="spark://host:7077")}, "storage", "shared=True"),
        ({"spark": SparkSettings(master="local[1]")}, "spark.master", "at least 2 cores"),
        ({"spark": SparkSettings(master="local")}, "spark.master", "at least 2 cores"),
        ({"name": "Flights!"}, "name", "must start with a letter"),
        ({"surprise": 1}, "surprise", "not permitted"),
        (
            {
                "inputs": [
                    KafkaInput(id="a", bootstrap_servers="h:1", topics="a"),
                    KafkaInput(id="b", bootstrap_servers="h:1", topics="b"),
                ]
            },
            "transform",
            "needs one",
        ),
        (
            {
                "inputs": KafkaInput(bootstrap_servers="h:1", topics=("a", "b")),
                "outputs": ElasticsearchOutput(hosts="http://h:1", index="a", document_ids=KeyIds()),
            },
            "document_ids",
            "version_from",
        ),
    ],
)
def test_what_cannot_run_is_refused(changes: dict[str, Any], field: str, remedy: str) -> None:
    with pytest.raises(StreamDefinitionError) as refused:
        Stream(**fields(**changes))
    assert field in str(refused.value)
    assert remedy in str(refused.value)


def test_a_missing_storage_or_interval_is_named() -> None:
    for name in ("storage", "batch_interval", "ledger", "outputs"):
        given = fields()
        del given[name]
        with pytest.raises(StreamDefinitionError, match=name):
            Stream(**given)


def test_shared_storage_and_stores_are_allowed_on_a_cluster() -> None:
    cluster = SparkSettings(master="spark://host:7077")
    assert Stream(**fields(spark=cluster, storage=Storage(url="/mnt/nfs", shared=True)))
    assert Stream(**fields(spark=cluster, storage="s3://bucket/headrace"))


def test_errors_do_not_repeat_secrets() -> None:
    with pytest.raises(StreamDefinitionError) as refused:
        Stream(**fields(ledger="postgresql://me:hunter2@db/ledger"))
    assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"bootstrap_servers": None}, "connection"),
        ({"connection": "also"}, "either connection"),
        ({"topics": ()}, "topics or topic_pattern"),
        ({"topic_pattern": "x.*"}, "topics or topic_pattern"),
        ({"topics": "__consumer_offsets"}, "internal"),
        ({"topics": (), "topic_pattern": "("}, "regular expression"),
        ({"client": {"enable.auto.commit": True}}, "enable.auto.commit cannot be set here"),
        ({"client": {"sasl.password": "hunter2"}}, "Kafka connection"),
        ({"receivers": 0}, "receivers"),
        ({"starting_offsets": "somewhere"}, "starting_offsets"),
        ({"starting_offsets": StartingOffsets(offsets={"other": {0: 7}})}, "names other, which this input does not"),
        ({"topics": ("flights", "my topic")}, "holds 'my topic'"),
        ({"topics": "flights.*"}, "goes into topic_pattern"),
        ({"topics": "f" * 250}, "1 to 249"),
        ({"topics": ".."}, "1 to 249"),
        ({"topics": ("flights", "flights")}, "names flights twice"),
        ({"bootstrap_servers": ""}, "are not addresses"),
        ({"bootstrap_servers": "a:9092 b:9092"}, "are not addresses"),
        ({"bootstrap_servers": "a:9092,"}, "are not addresses"),
        ({"bootstrap_servers": "a:port"}, "are not addresses"),
        ({"value_decoder": {"kind": "json", "fields": "n INTEGERR"}}, "is INTEGER meant"),
        ({"key_decoder": {"kind": "json", "fields": "n MAP<INT, INT>"}}, "keys are not STRING"),
        ({"value_decoder": {"kind": "json", "fields": "n ARRAY<VARCHAR(3)>"}}, "VARCHAR, which Spark does not read"),
    ],
)
def test_inputs_are_checked(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(StreamDefinitionError, match=words):
        KafkaInput(**({"bootstrap_servers": "127.0.0.1:9092", "topics": "flights"} | changes))


@pytest.mark.parametrize(
    "servers", ["a", "a:9092", "a.b-c:9092, 10.0.0.1:9092", "[::1]:9092", "SASL_SSL://a:9093", "broker_1:1"]
)
def test_servers_are_addresses_as_librdkafka_takes_them(servers: str) -> None:
    assert KafkaInput(bootstrap_servers=servers, topics="flights").bootstrap_servers == servers


def test_negative_partitions_have_no_starting_offset() -> None:
    with pytest.raises(StreamDefinitionError, match="greater than or equal to 0"):
        StartingOffsets(offsets={"flights": {-1: 7}})


@pytest.mark.parametrize(
    ("first", "second", "refused"),
    [
        ({"topics": ("a", "b")}, {"topics": "b"}, "both read b"),
        ({"topics": "clicks.eu"}, {"topic_pattern": "clicks.*"}, "both read clicks.eu"),
        ({"topic_pattern": "clicks.*"}, {"topic_pattern": "clicks.*"}, "both read clicks"),
        ({"topics": "a"}, {"topics": "a", "bootstrap_servers": "other:1"}, None),
        ({"topics": "a"}, {"topics": "a", "bootstrap_servers": "g:1,h:1"}, "both read a"),
        ({"topics": "a"}, {"topics": "b"}, None),
        ({"id": "clicks-eu", "topics": "a"}, {"id": "clicks_eu", "topics": "b"}, "clicks_eu is used twice"),
    ],
)
def test_two_inputs_read_different_topics(first: Any, second: Any, refused: str | None) -> None:
    inputs = [
        KafkaInput(**({"id": id_, "bootstrap_servers": "h:1"} | given)) for id_, given in (("x", first), ("y", second))
    ]
    if refused is None:
        assert Stream(**fields(inputs=inputs, transform="m:f"))
    else:
        with pytest.raises(StreamDefinitionError, match=refused):
            Stream(**fields(inputs=inputs, transform="m:f"))


@pytest.mark.parametrize(
    ("pattern", "topic", "matches"),
    [
        ("clicks.*", "clicks.eu", True),
        ("clicks", "clicks.eu", False),
        (".*", "__consumer_offsets", False),
        (".*", "__transaction_state", False),
        (".*", "_schemas", False),
        (".*", "_mine", True),
    ],
)
def test_a_pattern_matches_whole_names_and_never_internal_topics(pattern: str, topic: str, matches: bool) -> None:
    assert KafkaInput(bootstrap_servers="h:1", topic_pattern=pattern).matches(topic) is matches


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
        ({"index": "<flights-{now/d}>"}, "it has /, <, >"),
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
def test_what_the_index_or_the_sink_would_refuse_in_every_batch_is_refused(changes: dict[str, Any], words: str) -> None:
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


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"fields": "word STRING, count"}, "it ends where a type should be"),
        ({"fields": ""}, "it is empty"),
        ({"keys": "user"}, "keys user are none of the fields word, count"),
        ({"fields": "word STRING, count BIGINT, removed BOOLEAN"}, "cannot hold a column removed"),
        ({"fields": "word STRING, _headrace_x INT"}, "cannot hold a column _headrace_x"),
        ({"fields": "word ARRAY<MAP<STRING, INT>>, count BIGINT"}, "Spark compares no maps"),
        ({"fields": "word CHAR(3), count BIGINT"}, "word CHAR, of which Spark makes no table"),
    ],
)
def test_a_state_that_makes_no_table_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(StreamDefinitionError, match=words):
        State(**({"update": "m:f", "fields": "word STRING, count BIGINT", "keys": "word"} | changes))


def test_ids_that_recur_are_not_created() -> None:
    with pytest.raises(StreamDefinitionError, match="write_method"):
        ElasticsearchOutput(
            hosts="http://h:1",
            index="a",
            document_ids=ColumnIds(columns=("user",), with_batch_time=False),
            write_method="create",
        )


def test_a_cluster_is_named_once() -> None:
    with pytest.raises(StreamDefinitionError, match="give master or connection, not both"):
        SparkSettings(master="spark://host:7077", connection="spark_default")


def test_conf_that_headrace_decides_is_refused() -> None:
    with pytest.raises(StreamDefinitionError, match=r"spark\.connect\.authenticate\.token"):
        SparkSettings(conf={"spark.connect.authenticate.token": "x"})
    with pytest.raises(StreamDefinitionError, match="not a Spark setting"):
        SparkSettings(conf={"--class": "Evil"})


@pytest.mark.parametrize(
    ("setting", "reported"),
    [
        (
            "spark.streaming.receiver.maxRate",
            r"spark\.streaming\.receiver\.maxRate \(set the stream's limits\.max_rate",
        ),
        ("spark.streaming.backpressure.pid.minRate", r"limits\.backpressure instead"),
        ("spark.streaming.ui.retainedBatches", r"spark\.streaming\.ui\.retainedBatches: headrace reads no setting"),
    ],
)
def test_a_setting_of_spark_streaming_is_not_ignored_in_silence(setting: str, reported: str) -> None:
    with pytest.raises(StreamDefinitionError, match=reported):
        SparkSettings(conf={setting: "1"})


def test_the_names_told_for_settings_of_spark_streaming_are_fields_of_a_stream() -> None:
    for fields in _NAMES_HERE.values():
        for path in fields.split(" and "):
            model: type[BaseModel] = Stream
            for name in path.split("."):
                annotation = model.model_fields[name].annotation
                model = annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else model


def test_one_machine_gets_a_slot_for_each_receiver() -> None:
    master = SparkSettings().master_url(receivers=3)
    assert int(master.removeprefix("local[").removesuffix("]")) >= 4
