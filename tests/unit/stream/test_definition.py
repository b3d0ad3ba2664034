"""What Spark's StreamingContext refuses at start is refused at definition, with the field and the remedy.

What "module:attribute" may lead to, and how its absence is told.
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel
from tests.unit.stream.definitions import fields

from headrace.receiver.tracked_receiver import HANG_SECONDS
from headrace.stream import (
    ColumnIds,
    ConsoleOutput,
    ElasticsearchOutput,
    JsonDecoder,
    KafkaInput,
    KeyIds,
    Limits,
    LocalCopies,
    ReceiverInput,
    SparkSettings,
    StartingOffsets,
    StartingTimestamp,
    State,
    Storage,
    Stream,
    StreamDefinitionError,
)
from headrace.stream.model import is_reference, load_reference
from headrace.stream.settings import _NAMES_HERE


def test_defaults_are_filled_in() -> None:
    stream = Stream(**fields())
    assert stream.block_interval == timedelta(milliseconds=200)
    assert stream.checkpoint_interval_ms == stream.remember_ms == stream.batch_interval_ms == 10_000
    assert stream.group_of(stream.inputs[0]) == "headrace-flights-records"
    assert stream.folder_url == "/data/headrace/flights"


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
        ({"batch_interval": "\u0661\u0660 s"}, "batch_interval", '"10 s"'),
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
        ({"spark": {"job": "shared"}}, "spark", 'such as master="local[24]"'),
        ({"spark": {"job": "@shared", "master": "local[9]"}}, "spark.job", "must start with a letter"),
        ({"name": "Flights!"}, "name", "must start with a letter"),
        ({"surprise": 1}, "surprise", "is no field"),
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


def test_local_copies_are_of_a_log_in_an_object_store() -> None:
    copies = LocalCopies(max_bytes=1 << 30, folder="/scratch")
    stream = Stream(**fields(storage=Storage(url="s3://bucket/headrace", local_copies=copies)))
    assert Stream.from_json(stream.to_json()).storage.local_copies == copies
    assert Storage(url="s3://bucket/headrace").local_copies is None
    for url in ("/mnt/nfs", "file:///mnt/nfs"):
        with pytest.raises(StreamDefinitionError, match="local_copies is for a log in an object store"):
            Storage(url=url, shared=True, local_copies=copies)


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"folder": "scratch"}, "must be an absolute path"), ({"max_bytes": 1000}, "greater than or equal to 1048576")],
)
def test_wrong_local_copies_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(StreamDefinitionError, match=words):
        LocalCopies(**changes)


def test_a_store_timeout_ends_before_the_tracker_gives_up() -> None:
    """The tracker would give the receiver up."""
    assert Limits().store_timeout == timedelta(seconds=30)
    longest = timedelta(seconds=45)
    assert Limits(store_timeout=longest).store_timeout < timedelta(seconds=HANG_SECONDS)
    with pytest.raises(StreamDefinitionError, match="store_timeout"):
        Limits(store_timeout="46 s")


def test_errors_do_not_repeat_secrets() -> None:
    with pytest.raises(StreamDefinitionError) as refused:
        Stream(**fields(ledger="postgresql://me:hunter2@db/ledger"))
    assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"fields": "word STRING, count"}, "it ends where a type should be"),
        ({"fields": ""}, "it is empty"),
        ({"keys": "user"}, "keys user are none of the fields word, count"),
        ({"fields": "word STRING, count BIGINT, removed BOOLEAN"}, "cannot hold a column removed"),
        ({"fields": "word STRING, _headrace_x INT"}, "cannot hold a column _headrace_x"),
        ({"fields": "word STRING, Removed BOOLEAN"}, "cannot hold a column Removed"),
        ({"fields": "word STRING, n INT, N INT"}, "has n, N, which are one name to Spark"),
        ({"fields": "word STRING, `user.id` INT"}, "has user.id: Spark takes a . for a field within a column"),
        ({"fields": "word ARRAY<MAP<STRING, INT>>, count BIGINT"}, "Spark compares no maps"),
        ({"fields": "word CHAR(3), count BIGINT"}, "word CHAR, of which Spark makes no table"),
    ],
)
def test_a_state_that_makes_no_table_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(StreamDefinitionError, match=words):
        State(**({"update": "m:f", "fields": "word STRING, count BIGINT", "keys": "word"} | changes))


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


def test_the_fields_named_for_settings_of_spark_streaming_exist() -> None:
    for names in _NAMES_HERE.values():
        for path in names.split(" and "):
            model: type[BaseModel] = Stream
            for name in path.split("."):
                annotation = model.model_fields[name].annotation
                model = annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else model


def test_one_machine_gets_a_slot_for_each_receiver() -> None:
    master = SparkSettings().master_url(receivers=3)
    assert int(master.removeprefix("local[").removesuffix("]")) >= 4


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"delivry": "at_most_once"}, r"delivry is no field \(did you mean delivery\?\)"),
        ({"quux": 1}, r"defined: quux is no field\."),
        ({"name": None}, "name must be a valid string"),
        ({"delivery": "twice"}, "delivery must be 'exactly_once', 'at_least_once' or 'at_most_once'"),
        ({"limits": {"max_queued_blocks": 0}}, "limits.max_queued_blocks must be greater than"),
    ],
)
def test_a_wrong_field_has_a_sentence(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(StreamDefinitionError, match=words):
        Stream(**fields(**changes))


def test_a_missing_field_is_required() -> None:
    given = fields()
    del given["name"]
    with pytest.raises(StreamDefinitionError, match="name is required"):
        Stream(**given)


@pytest.mark.parametrize("delivery", ["at_least_once", "at_most_once"])
@pytest.mark.parametrize(
    "storage", ["s3://bucket/headrace", Storage(url="/mnt/headrace", shared=True)], ids=["object store", "shared"]
)
def test_a_log_synced_anyway_or_seen_elsewhere_must_be_synced(delivery: str, storage: Any) -> None:
    with pytest.raises(StreamDefinitionError, match=f"delivery: {delivery} saves only the sync of a local disk"):
        Stream(**fields(delivery=delivery, storage=storage))
    assert Stream(**fields(delivery=delivery)).delivery == delivery


def test_at_least_once_needs_a_source_that_can_be_read_again() -> None:
    lines = ReceiverInput(id="lines", receiver="shop:Lines")
    with pytest.raises(StreamDefinitionError, match="input lines is no Kafka input"):
        Stream(**fields(delivery="at_least_once", inputs=lines))
    assert Stream(**fields(delivery="at_most_once", inputs=lines)).delivery == "at_most_once"


def test_a_reference_is_a_module_and_one_name() -> None:
    assert is_reference("flights.clean:to_document")
    assert not any(map(is_reference, ("flights", "flights:", ":f", "a b:c", "a:b.c", "a:b()", "../a:b")))


def test_what_cannot_be_imported_is_reported_in_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "raising_module.py").write_text("raise TypeError('no such option')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert load_reference("os.path:join", "transform")
    for reference, reported in (
        ("no_such_module:f", "No module named"),
        ("raising_module:f", "its module raises TypeError: no such option"),
        ("os.path:no_such_name", "has no 'no_such_name' to be the transform"),
    ):
        with pytest.raises(StreamDefinitionError, match=reported):
            load_reference(reference, "transform")
