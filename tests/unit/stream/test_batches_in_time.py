"""Windows, state, order, triggers and several outputs, as a stream declares them."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from headrace.stream import (
    BatchTrigger,
    ColumnIds,
    ConsoleOutput,
    ElasticsearchOutput,
    ForeachBatchOutput,
    KafkaInput,
    KafkaOutput,
    KeyIds,
    Limits,
    ParquetOutput,
    RecordIds,
    State,
    Stream,
    StreamDefinitionError,
    Window,
)

COUNTS = State(update="words:count", fields="word STRING, count BIGINT", keys="word")


def elasticsearch(**changes: Any) -> ElasticsearchOutput:
    return ElasticsearchOutput(**({"hosts": "http://127.0.0.1:9200", "index": "words"} | changes))


def stream(**changes: Any) -> Stream:
    fields = {
        "name": "words",
        "inputs": KafkaInput(bootstrap_servers="127.0.0.1:9092", topics="words"),
        "outputs": elasticsearch(),
        "batch_interval": "10 s",
        "storage": "/data/headrace",
        "ledger": "sqlite:////data/headrace/ledger.db",
    }
    return Stream(**(fields | changes))


def test_a_windows_batch_times_are_those_of_its_length_up_to_it() -> None:
    window = Window(length="30 s", slide="20 s")
    assert list(window.batch_times_ms(100_000, 10_000)) == [80_000, 90_000, 100_000]
    assert window.is_due(100_000, 10_000)
    assert not window.is_due(90_000, 10_000)
    assert Window(length="30 s").is_due(90_000, 10_000)


def test_the_log_is_kept_for_the_longest_window_and_an_interval() -> None:
    windows = [
        elasticsearch(id="short", window=Window(length="30 s")),
        elasticsearch(id="long", index="long", window=Window(length="5 min")),
    ]
    assert stream(outputs=windows).remember_ms == 310_000
    assert stream(outputs=windows, remember="1 h").remember_ms == 3_600_000
    assert stream(remember="20 s").remember_ms == 20_000
    apart = elasticsearch(window=Window(length="30 s", slide="1 min"))
    assert stream(outputs=apart).remember_ms == 70_000, "what lies between two windows is looked at too"
    counting = COUNTS.model_copy(update={"window": timedelta(minutes=1)})
    assert stream(state=counting).remember_ms == 70_000


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"outputs": elasticsearch(window=Window(length="15 s"))}, "outputs.elasticsearch.window.length"),
        ({"outputs": elasticsearch(window=Window(length="30 s", slide="5 s"))}, "outputs.elasticsearch.window.slide"),
        ({"state": State(update="a:b", fields="a INT", keys="a", window="15 s")}, "state.window"),
        ({"state": State(update="a:b", fields="a INT", keys="a", timeout="1 s", returns="changes")}, "state.timeout"),
        ({"state": COUNTS, "limits": Limits(max_concurrent_batches=2)}, "limits.max_concurrent_batches"),
        (
            {"coalesce": True, "outputs": elasticsearch(window=Window(length="30 s", slide="30 s"))},
            "outputs.elasticsearch.window.slide",
        ),
        (
            {
                "trigger": BatchTrigger(min_records=10, max_delay="1 min"),
                "outputs": elasticsearch(window=Window(length="30 s", slide="20 s")),
            },
            "outputs.elasticsearch.window.slide",
        ),
        ({"state": COUNTS, "outputs": ConsoleOutput(id="state")}, "outputs"),
    ],
)
def test_what_cannot_work_is_refused_with_its_field(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(StreamDefinitionError, match=rf"defined: {field}: "):
        stream(**changes)


@pytest.mark.parametrize(
    ("changes", "ordered"),
    [
        ({}, False),
        ({"ordered": True}, True),
        ({"coalesce": True}, False),
        ({"trigger": BatchTrigger(min_records=10, max_delay="1 min")}, False),
        ({"state": COUNTS}, True),
        ({"outputs": elasticsearch(window=Window(length="30 s"))}, True),
        ({"outputs": elasticsearch(document_ids=RecordIds())}, False),
        ({"outputs": elasticsearch(document_ids=KeyIds())}, True),
        ({"outputs": elasticsearch(document_ids=KeyIds(), tombstones="ignore")}, False),
        ({"outputs": elasticsearch(document_ids=ColumnIds(columns=("key",)))}, False),
        ({"outputs": elasticsearch(document_ids=ColumnIds(columns=("key",), with_batch_time=False))}, True),
    ],
)
def test_batches_are_ordered_where_a_later_builds_on_an_earlier(changes: dict[str, Any], ordered: bool) -> None:
    """They are ordered too where a later batch replaces an earlier one."""
    assert stream(**changes).is_ordered is ordered


@pytest.mark.parametrize(
    ("changes", "coalesces"),
    [
        ({}, True),
        ({"coalesce": False}, False),
        ({"batch_by": "timestamp"}, False),
        ({"batch_by": "timestamp", "coalesce": True}, True),
        ({"batch_by": "timestamp", "trigger": BatchTrigger(min_records=10, max_delay="1 min")}, True),
        ({"state": COUNTS}, True),
        # A window that should end at a time that was taken over would never be written.
        ({"outputs": elasticsearch(window=Window(length="30 s"))}, False),
        ({"outputs": elasticsearch(window=Window(length="30 s")), "coalesce": True}, True),
    ],
)
def test_batch_times_are_taken_over_by_arrival_without_windows(changes: dict[str, Any], coalesces: bool) -> None:
    """The windows meant are those that end at the batch times."""
    assert stream(**changes).coalesces is coalesces


@pytest.mark.parametrize("slide", [None, "10 s"])
def test_a_stream_that_coalesces_has_windows_at_every_batch(slide: str | None) -> None:
    window = Window(length="30 s", slide=slide)
    assert stream(coalesce=True, outputs=elasticsearch(window=window)).outputs[0].window == window


def test_a_run_tries_for_half_a_minute_or_three_intervals() -> None:
    assert stream().retry_for_ms == 30_000
    assert stream(batch_interval="1 min").retry_for_ms == 180_000
    assert stream(limits=Limits(retry_for="5 s")).retry_for_ms == 5_000


def test_an_outputs_transform_is_its_own_or_the_streams() -> None:
    declared = stream(
        transform="words:count",
        outputs=[elasticsearch(), ConsoleOutput(transform="words:show")],
    )
    assert [declared.transform_of(output) for output in declared.outputs] == ["words:count", "words:show"]


def test_several_inputs_need_a_transform_for_every_output() -> None:
    inputs = [KafkaInput(id=name, bootstrap_servers="127.0.0.1:9092", topics=name) for name in ("a", "b")]
    with pytest.raises(StreamDefinitionError, match="needs one"):
        stream(inputs=inputs, outputs=[elasticsearch(transform="words:join"), ConsoleOutput()])
    assert stream(inputs=inputs, outputs=elasticsearch(transform="words:join")).outputs[0].transform == "words:join"


def test_the_states_update_is_the_first_step() -> None:
    assert stream(state=COUNTS, outputs=[elasticsearch(), ConsoleOutput()]).steps == (
        "state",
        "elasticsearch",
        "console",
    )


@pytest.mark.parametrize(
    "make",
    [
        lambda: ParquetOutput(path="relative/folder"),
        lambda: ParquetOutput(path="file:///data/words#1"),
        lambda: KafkaOutput(topic="words"),
        lambda: KafkaOutput(topic="words", connection="kafka", bootstrap_servers="127.0.0.1:9092"),
        lambda: KafkaOutput(topic="no topic", connection="kafka"),
        lambda: KafkaOutput(topic="words", bootstrap_servers="me:secret@127.0.0.1:9092"),
        lambda: ForeachBatchOutput(function="no reference"),
        lambda: elasticsearch(transform="no reference"),
        lambda: State(update="no reference", fields="a INT", keys="a"),
        lambda: State(update="a:b", fields="a INT", keys=()),
        lambda: BatchTrigger(min_records=0, max_delay="1 s"),
        lambda: Window(length="0 s"),
    ],
)
def test_parts_are_checked_by_themselves(make: Any) -> None:
    with pytest.raises(StreamDefinitionError):
        make()


def test_json_carries_all_of_it() -> None:
    declared = stream(
        outputs=[
            elasticsearch(window=Window(length="1 min", slide="10 s"), transform="words:count"),
            ParquetOutput(path="/data/words/"),
            KafkaOutput(topic="words.counted", connection="kafka_default"),
            ForeachBatchOutput(function="words:mail"),
        ],
        state=COUNTS,
        batch_by="timestamp",
        allowed_lateness="3 s",
        trigger=BatchTrigger(min_records=10, max_delay="1 min"),
        parameters={"threshold": 3, "names": ["a"]},
    )
    assert Stream.from_json(declared.to_json()) == declared
    assert declared.allowed_lateness_ms == 3_000
    assert declared.connection_ids == ("kafka_default",)
    assert declared.output("parquet") == ParquetOutput(path="/data/words")
    with pytest.raises(KeyError, match="elasticsearch, parquet"):
        declared.output("csv")
