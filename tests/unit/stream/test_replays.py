"""A stream as a replay writes it."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.stream import (
    ColumnIds,
    ConsoleOutput,
    DeadLetterTopic,
    ElasticsearchOutput,
    KafkaInput,
    KafkaOutput,
    Limits,
    ParquetOutput,
    State,
    Stream,
    StreamDefinitionError,
    Utf8Decoder,
)
from headrace.stream.stream import replayed


def stream(**changes: Any) -> Stream:
    fields: dict[str, Any] = {
        "name": "flights",
        "inputs": KafkaInput(bootstrap_servers="127.0.0.1:9092", topics="flights"),
        "outputs": [
            ElasticsearchOutput(hosts="http://127.0.0.1:9200", index="flights", transform="flights:to_document"),
            ParquetOutput(path="/data/flights"),
            KafkaOutput(topic="flights.seen", connection="kafka"),
            ConsoleOutput(),
        ],
        "batch_interval": "10 s",
        "storage": "/data/headrace",
        "ledger": "sqlite:////data/headrace/ledger.db",
    }
    return Stream(**(fields | changes))


def test_only_the_named_outputs_are_written_with_what_differs() -> None:
    live = stream()
    replay = replayed(live, {"elasticsearch": {"index": "flights-v2"}, "console": {}}, transform="flights:fixed")
    assert [output.id for output in replay.outputs] == ["elasticsearch", "console"]
    index, console = replay.outputs
    assert isinstance(index, ElasticsearchOutput)
    assert (index.index, index.transform, console.transform) == ("flights-v2", "flights:fixed", "flights:fixed")
    assert (replay.name, replay.inputs, replay.batch_interval) == (live.name, live.inputs, live.batch_interval)
    assert Stream.from_json(replay.to_json()) == replay


def test_without_another_transform_the_outputs_keep_their_own() -> None:
    (index,) = replayed(stream(), {"elasticsearch": {"index": "flights-v2"}}).outputs
    assert index.transform == "flights:to_document"


def test_what_a_replay_does_not_change_stays_of_its_kind() -> None:
    inputs = KafkaInput(bootstrap_servers="127.0.0.1:9092", topics="flights", value_decoder=Utf8Decoder())
    index = ElasticsearchOutput(
        hosts="http://127.0.0.1:9200", index="flights", document_ids=ColumnIds(columns=("key",))
    )
    live = stream(inputs=inputs, outputs=index, limits=Limits(max_concurrent_batches=2))
    replay = replayed(live, {"elasticsearch": {"index": "flights-v2"}})
    assert (replay.inputs, replay.limits) == (live.inputs, live.limits)
    assert replay.outputs == (index.model_copy(update={"index": "flights-v2"}),)


def test_a_replay_sends_no_letters_to_the_topic_of_the_stream() -> None:
    letters = DeadLetterTopic(topic="letters", connection="kafka_dlq")
    live = stream(outputs=ElasticsearchOutput(hosts="http://h:1", index="flights", dead_letter_topic=letters))
    with pytest.raises(StreamDefinitionError, match="would write to topic 'letters', as the stream does"):
        replayed(live, {"elasticsearch": {"index": "v2"}})
    (output,) = replayed(live, {"elasticsearch": {"index": "v2", "dead_letter_topic": None}}).elasticsearch_outputs
    assert output.dead_letters == "v2-dead-letters"


@pytest.mark.parametrize(
    ("outputs", "reported"),
    [
        ({"elasticsearch": {"document_ids": {"kind": "key"}}}, "index 'flights'"),
        (
            {"elasticsearch": {"index": "v2", "dead_letter_index": "flights-dead-letters"}},
            "index 'flights-dead-letters'",
        ),
        ({"parquet": {}}, "folder '/data/flights'"),
        ({"parquet": {"path": "file:///data/./flight%73/"}}, "folder '/data/flights'"),
        ({"kafka": {}}, "topic 'flights.seen'"),
        ({"csv": {}}, "names csv"),
        ({}, "names no output"),
        ({"elasticsearch": {"index": "Not An Index"}}, "is no name for an index"),
        ({"elasticsearch": {"index": "v2", "colour": "red"}}, "colour"),
    ],
)
def test_a_replay_never_writes_where_the_stream_does(outputs: dict[str, Any], reported: str) -> None:
    with pytest.raises(StreamDefinitionError, match=reported):
        replayed(stream(), outputs)


def test_state_belongs_to_the_streams_own_batches() -> None:
    counting = stream(state=State(update="flights:count", fields="carrier STRING, n BIGINT", keys="carrier"))
    with pytest.raises(StreamDefinitionError, match="cannot be replayed"):
        replayed(counting, {"elasticsearch": {"index": "flights-v2"}})
