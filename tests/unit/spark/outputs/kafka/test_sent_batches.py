"""Where it is kept what was sent: apart for each topic, and for each replay."""

from __future__ import annotations

import io
import itertools
from pathlib import Path
from typing import Any

import pytest

from headrace.spark.outputs.kafka import KafkaWriter
from headrace.spark.outputs.kafka_transaction import Sent, SentRecords
from headrace.spark.outputs.writer import WrittenBatch
from headrace.spark.transforms import BatchContext
from headrace.stream import KafkaInput, KafkaOutput, Stream

T = 1_700_000_010_000


@pytest.fixture
def options(tmp_path: Path) -> Any:
    """The options of a write, by the output's id and the replay's name."""

    def options(output_id: str = "out", target: str = "", *, stream: str = "clicks") -> dict[str, str]:
        output = KafkaOutput(id=output_id, bootstrap_servers="prod:9092", topic="counts")
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
        )
        return KafkaWriter(output)._options(batch)

    return options


def records(options: dict[str, str]) -> SentRecords:
    return SentRecords(options["sent_folder"], options["sent_name"])


def test_what_a_replay_sent_to_another_cluster_hides_nothing_of_the_streams_own(options: Any) -> None:
    """The topic's name is the same there, its id is not."""
    live, replay = records(options()), records(options(target="v2"))
    live.write(Sent("id/of+prod", 1, 5, 50))
    replay.write(Sent("id-of-staging", 1, 6, 60))
    assert live.find("id/of+prod") == Sent("id/of+prod", 1, 5, 50)
    assert replay.find("id-of-staging") == Sent("id-of-staging", 1, 6, 60)
    assert live.find("id-of-staging") is None


def test_replays_of_different_names_to_one_topic_do_not_hide_each_other(options: Any) -> None:
    first, second, live = records(options(target="v2")), records(options(target="v3")), records(options())
    first.write(Sent("id", 1, 5, 50))
    assert first.find("id") is not None
    assert second.find("id") is None
    assert live.find("id") is None


def test_a_topic_that_was_created_again_has_its_own_sent_record(options: Any) -> None:
    found = records(options())
    found.write(Sent("first", 1, 5, 50))
    found.write(Sent("second", 2, 6, 60))
    assert [found.find(topic_id).attempt for topic_id in ("first", "second")] == [1, 2]  # type: ignore[union-attr]


def test_transactions_of_different_outputs_and_replays_have_different_names(options: Any) -> None:
    wanted = [options(), options("out-v2"), options(target="v2"), options("v2", stream="clicks-out")]
    for one, other in itertools.combinations(wanted, 2):
        assert one["transaction"] != other["transaction"]
        assert (one["sent_folder"], one["sent_name"]) != (other["sent_folder"], other["sent_name"])
