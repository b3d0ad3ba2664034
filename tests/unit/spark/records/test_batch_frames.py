"""Which outputs send the log's records as they are.

Records of an input that is no Kafka input are read from the log or not at all.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headrace.batch.manifest import Manifest, ManifestBlock
from headrace.blocks import BlockHandle, OffsetRange, TopicPartition
from headrace.errors import Failure
from headrace.ledger.batches.tables import BatchOrigin
from headrace.spark.attempts.batch_plan import OutputPlan
from headrace.spark.records.batch_frames import ReadAgainError, refuse_reading_again, sends_blocks
from headrace.stream import (
    ColumnIds,
    ConsoleOutput,
    ElasticsearchOutput,
    JsonDecoder,
    KafkaInput,
    KeyIds,
    Output,
    ReceiverInput,
    RecordIds,
    Stream,
    Utf8Decoder,
)
from headrace.wal.storage import open_storage

LOG = BatchOrigin(10_000, "file:///m", "", "log")
KAFKA = BatchOrigin(20_000, "file:///n", "", "kafka")


def elasticsearch(**fields: Any) -> ElasticsearchOutput:
    return ElasticsearchOutput(hosts="http://h:1", index="clicks", **fields)


def plan(folder: Path, output: Output, origins: tuple[BatchOrigin, ...] = (LOG,), **fields: Any) -> Any:
    source = {name: fields.pop(name) for name in ("key_decoder", "value_decoder") if name in fields}
    stream = Stream(
        name="shop",
        inputs=KafkaInput(bootstrap_servers="h:1", topics="clicks", **source),
        outputs=output,
        batch_interval="10 s",
        storage=folder,
        ledger=f"sqlite:///{folder}/ledger.db",
        **fields,
    )
    return sends_blocks(stream, OutputPlan(stream.outputs[0], origins, origins))


@pytest.mark.parametrize("ids", [RecordIds(), KeyIds()])
@pytest.mark.parametrize("origins", [(LOG,), (LOG, LOG), (KAFKA,), (KAFKA, KAFKA)])
def test_an_output_of_records_with_ids_of_the_log_sends_blocks(
    tmp_path: Path, ids: Any, origins: tuple[BatchOrigin, ...]
) -> None:
    output = elasticsearch(document_ids=ids)
    assert plan(tmp_path, output, origins)


@pytest.mark.parametrize(
    ("output", "fields"),
    [
        (elasticsearch(), {"transform": "json:loads"}),
        (elasticsearch(transform="json:loads"), {}),
        (elasticsearch(), {"value_decoder": JsonDecoder(fields="id STRING")}),
        (elasticsearch(), {"key_decoder": Utf8Decoder()}),
        (elasticsearch(), {"origins": (LOG, KAFKA)}),
        (elasticsearch(document_ids=ColumnIds(columns=("key",))), {}),
        (elasticsearch(document_ids=KeyIds(version_from="timestamp")), {}),
        (elasticsearch(document_ids=RecordIds(rows="timestamp")), {}),
        (ConsoleOutput(), {}),
    ],
)
def test_any_other_output_needs_spark_to_read_the_records(
    tmp_path: Path, output: Output, fields: dict[str, Any]
) -> None:
    assert not plan(tmp_path, output, **fields)


LINES = ReceiverInput(id="lines", receiver="shop:Lines")


def test_what_only_kafka_could_have_of_another_input_is_no_block(tmp_path: Path) -> None:
    stream = Stream(
        name="text",
        inputs=LINES,
        outputs=elasticsearch(),
        batch_interval="1 s",
        storage=tmp_path,
        ledger=f"sqlite:///{tmp_path}/ledger.db",
    )
    for origins, sends in (((LOG,), True), ((KAFKA,), False)):
        assert sends_blocks(stream, OutputPlan(stream.outputs[0], origins, origins)) is sends


def manifest_of(folder: Path, blocks: tuple[ManifestBlock, ...]) -> str:
    storage = open_storage(str(folder))
    manifest = Manifest(
        stream="text",
        batch_time_ms=1_700_000_000_000,
        interval_ms=1_000,
        inputs={"lines": blocks},
        folder_url=str(folder),
    )
    manifest.write(storage)
    return manifest.uri


def test_a_batch_whose_log_is_gone_is_refused_with_what_to_do(tmp_path: Path) -> None:
    """The error has the batch's time and the input too."""
    partition = TopicPartition("lines", LINES.topic_id, 0)
    block = ManifestBlock(BlockHandle("lines/0/1", 0, 10), 3, 10, (OffsetRange(partition, 0, 3, 3),))
    with pytest.raises(ReadAgainError, match=r"2023-11-14.*input 'lines'.*raise the stream's remember") as refused:
        refuse_reading_again(LINES, [manifest_of(tmp_path, (block,))])
    assert refused.value.failure is Failure.FINAL


def test_a_batch_without_records_of_the_input_needs_none_of_it(tmp_path: Path) -> None:
    refuse_reading_again(LINES, [manifest_of(tmp_path, ())])
