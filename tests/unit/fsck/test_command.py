"""`headrace streams fsck`: what it prints, and its exit codes."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping

import pytest
from typer.testing import CliRunner, Result

from headrace.blocks import TopicPartition
from headrace.cli.main import app
from headrace.clock import time_text
from headrace.fsck import kafka
from headrace.kafka.errors import RangesUnreadableError
from headrace.kafka.offsets import Kept
from headrace.stream import KafkaInput

from .conftest import STREAM, TIMES, Shop


def fsck(shop: Shop, *options: str) -> Result:
    return CliRunner().invoke(app, ["streams", "fsck", STREAM, "--ledger", shop.stream.ledger, *options])


def test_a_clean_stream_is_0(shop: Shop) -> None:
    result = fsck(shop, "--no-kafka")
    assert result.exit_code == 0, result.output
    assert "nothing wrong, in 5 blocks, 3 batches" in result.stdout


def test_a_finding_is_1_and_says_what_it_means_and_what_to_do(shop: Shop) -> None:
    shop.folder.delete(f"manifests/{TIMES[2]}.json")
    result = fsck(shop, "--no-kafka")
    assert result.exit_code == 1
    lines = result.stdout.splitlines()
    assert lines[0].startswith("manifest_missing: The batch cannot be run again")
    assert lines[1].startswith(f"  {time_text(TIMES[2])}: ")
    assert lines[2].startswith("  What to do: Clear the task allocate_blocks of the batch's run")
    assert lines[-1].startswith(f"Stream {STREAM}: 1 findings")
    reported = json.loads(fsck(shop, "--no-kafka", "--json").stdout)
    assert reported["clean"] is False
    (finding,) = reported["findings"]
    assert (finding["problem"], finding["subject"]) == ("manifest_missing", time_text(TIMES[2]))
    assert finding["meaning"] and finding["remedy"] and finding["detail"]


def test_many_findings_of_a_kind_are_cut_for_people_only(shop: Shop) -> None:
    """A script gets all of them."""
    shop.replay(TIMES[0])
    shop.sql("DELETE FROM batch_outputs WHERE target = 'copy'")
    for number in range(29):
        shop.copy_row("replays", "target = 'copy'", target=f"copy-{number}")
    assert "and 10 more" in fsck(shop, "--no-kafka").stdout
    assert len(json.loads(fsck(shop, "--no-kafka", "--json").stdout)["findings"]) == 30


def test_what_cannot_be_checked_is_2(shop: Shop) -> None:
    assert CliRunner().invoke(app, ["streams", "fsck", "nosuch", "--ledger", shop.stream.ledger]).exit_code == 2
    missing = CliRunner().invoke(app, ["streams", "fsck", STREAM, "--ledger", "sqlite:////nosuch/ledger.db"])
    assert missing.exit_code == 2


class Silent:
    """A Kafka that does not answer."""

    def __init__(self, source: KafkaInput) -> None:
        self.source = source

    def close(self) -> None: ...

    def topic_ids(self, topics: Collection[str]) -> Mapping[str, str | None]:
        raise RangesUnreadableError("Kafka did not describe clicks within 10 s.")

    def kept(self, partitions: Collection[TopicPartition]) -> Mapping[TopicPartition, Kept | None]:
        raise AssertionError

    def timestamp_of_first(self, partition: TopicPartition, begin: int, until: int) -> int | None:
        raise AssertionError


def test_a_kafka_that_is_silent_is_2_but_what_was_found_counts(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(kafka.observe_kafka.__kwdefaults__, "offsets_of", Silent)
    result = fsck(shop)
    assert result.exit_code == 2
    assert "Not checked: Kafka, for input 'clicks'" in result.stdout
    assert json.loads(fsck(shop, "--json").stdout)["clean"] is False
    shop.sql(f"DELETE FROM batch_outputs WHERE batch_time_ms = {TIMES[0]}")
    assert fsck(shop).exit_code == 1
