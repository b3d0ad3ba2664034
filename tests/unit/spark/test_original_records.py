"""Dead letters' records, where Kafka no longer has what the batch read."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tests.support.records import make_block

from headrace.batch.manifest import Manifest
from headrace.blocks import TopicPartition
from headrace.elasticsearch.dead_letters import OriginalRecord
from headrace.kafka.errors import RangesGoneError
from headrace.kafka.ranges import RangeRun, RecordedRange
from headrace.spark.elasticsearch_sink import KafkaOriginalRecords
from headrace.wal.storage import open_storage

PARTITION = TopicPartition("clicks", "id-1", 0, 1)


class Compacted:
    """Kafka with every offset below 10 but 3; one record a batch."""

    def __init__(self, _: Any) -> None:
        pass

    def read(self, runs: list[RangeRun]) -> Generator[pa.RecordBatch, None, None]:
        kept = [offset for offset in range(runs[0].from_offset, min(10, runs[0].until_offset)) if offset != 3]
        for offset in kept[:1]:
            yield make_block([b"%d" % offset], from_offset=offset)[0]

    def check_topics(self, runs: list[RangeRun]) -> None:
        pass

    def close(self) -> None:
        pass


def test_a_record_that_compaction_removed_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.kafka.range_reader.KafkaRangeReader", Compacted)
    folder = f"{tmp_path}/shop"
    ranges = (RecordedRange(PARTITION, 0, 20, None),)
    manifest = Manifest("shop", 10_000, 10_000, {"clicks": ()}, folder, {"clicks": ranges})
    manifest.write(open_storage(folder))
    records: Any = {"clicks": None}
    with KafkaOriginalRecords(manifest.uri, records) as kafka:
        assert kafka.fetch("clicks", 0, 2, 1) == OriginalRecord(None, b"2", timestamp_ms=1_700_000_000_000)
        for gone in (3, 15):
            with pytest.raises(RangesGoneError, match=f"offset {gone} of clicks-0"):
                kafka.fetch("clicks", 0, gone, 1)
        assert kafka.fetch("clicks", 0, 20, 1) is None, "another batch's"
