"""Where dead letters get their records from: the log or Kafka, by the manifests of their batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Protocol, Self

import pyarrow as pa
import pyarrow.compute as pc

from headrace.batch.manifest import Manifest
from headrace.blocks import BlockHandle
from headrace.elasticsearch.dead_letters import OriginalRecord, OriginalRecords
from headrace.kafka.errors import RangesGoneError
from headrace.kafka.ranges import RangeRun, RecordedRange
from headrace.wal.reader import read_block
from headrace.wal.storage import open_storage

if TYPE_CHECKING:
    from headrace.kafka.range_reader import KafkaRangeReader, RangeClients
    from headrace.stream.inputs import KafkaInput


BLOCKS_KEPT = 4
"""Dead letters come in the order of their records, so the next record is probably in the block of the last one."""


OFFSETS_AT_ONCE = 500
"""The number of offsets read from Kafka for one record: the neighbours of a rejected record are often rejected too."""


class BatchOriginalRecords(OriginalRecords, Protocol):
    """The records of one batch, for one task. Must be closed."""

    def close(self) -> None:
        """Close what was opened."""
        ...


class ManifestOriginalRecords:
    """Reads records from the log. The manifest is read at the first call, because most tasks have no dead letters."""

    def __init__(self, manifest_uri: str) -> None:
        self._manifest_uri = manifest_uri
        self._manifest: Manifest | None = None
        self._read = lru_cache(maxsize=BLOCKS_KEPT)(self._read_block)

    def close(self) -> None:
        """Do nothing: nothing is kept open."""

    def fetch(self, topic: str, partition: int, offset: int, incarnation: int) -> OriginalRecord | None:
        """The record as Kafka gave it; None if the batch has no such record.

        Raises the log's errors if the block cannot be read: a dead letter must not be written without its record.
        """
        handle = self._find(topic, partition, offset, incarnation)
        if handle is None:
            return None
        records = self._read(handle)
        here = pc.and_(
            pc.equal(records.column("partition"), partition),
            pc.and_(
                pc.equal(records.column("incarnation"), incarnation),
                pc.equal(pc.cast(records.column("topic"), "string"), topic),
            ),
        )
        return _record_at(records, pc.and_(pc.equal(records.column("offset"), offset), here))

    def _find(self, topic: str, partition: int, offset: int, incarnation: int) -> BlockHandle | None:
        if self._manifest is None:
            self._manifest = Manifest.load(self._manifest_uri)
        for blocks in self._manifest.inputs.values():
            for block in blocks:
                for taken in block.ranges:
                    where = taken.partition
                    if (where.topic, where.partition, where.incarnation) == (topic, partition, incarnation) and (
                        taken.from_offset <= offset < taken.until_offset
                    ):
                        return block.handle
        return None

    def _read_block(self, handle: BlockHandle) -> Any:
        manifest = self._manifest or Manifest.load(self._manifest_uri)
        _, records = read_block(open_storage(manifest.log_root), handle)
        return records


class WindowOriginalRecords:
    """Searches several batches in the given order."""

    def __init__(self, batches: Sequence[BatchOriginalRecords]) -> None:
        self._batches = batches

    def close(self) -> None:
        """Close all of them."""
        for batch in self._batches:
            batch.close()

    def fetch(self, topic: str, partition: int, offset: int, incarnation: int) -> OriginalRecord | None:
        """The record from the first batch that has it; None if no batch has it. Raises the errors of the batches."""
        for batch in self._batches:
            record = batch.fetch(topic, partition, offset, incarnation)
            if record is not None:
                return record
        return None


class KafkaOriginalRecords:
    """Reads records from Kafka by the manifest's ranges, if the log no longer has the batch or never had it.

    ``clients`` has the settings of the stream's inputs by their ids. Nothing is opened before the first call.
    """

    def __init__(self, manifest_uri: str, clients: Mapping[str, RangeClients]) -> None:
        self._manifest_uri = manifest_uri
        self._clients = clients
        self._ranges: list[tuple[str, RecordedRange]] | None = None
        self._readers: dict[str, KafkaRangeReader] = {}
        self._held: tuple[RecordedRange, pa.RecordBatch | None] | None = None

    @classmethod
    def clients_of(cls, inputs: list[KafkaInput]) -> dict[str, RangeClients]:
        """The inputs' settings, with connections resolved in this process's environment.

        Raises ClientSettingError, ConnectionNotFoundError or ConnectionFormatError.
        """
        from headrace.kafka.range_reader import RangeClients

        return {source.id: RangeClients.of(source).for_offsets(OFFSETS_AT_ONCE) for source in inputs}

    def close(self) -> None:
        """Close the readers."""
        for reader in self._readers.values():
            reader.close()
        self._readers = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def fetch(self, topic: str, partition: int, offset: int, incarnation: int) -> OriginalRecord | None:
        """The record as Kafka gives it; None if the batch has no such offset.

        Raises RangesUnreadableError and RangesGoneError, also if compaction has removed the record since the batch read
        it: a dead letter must not be written without its record.
        """
        location = self._find(topic, partition, offset, incarnation)
        if location is None:
            return None
        input_id, taken = location
        if self._held is None or not _holds(self._held[0], taken, offset):
            self._held = self._read(input_id, taken, offset)
        records = self._held[1]
        record = None if records is None else _record_at(records, pc.equal(records.column("offset"), offset))
        if record is None:
            raise RangesGoneError(
                f"Kafka no longer has the record at offset {offset} of {topic}-{partition}, which the batch read: "
                "compaction removed it.",
                remedy="Its dead letter cannot be written. Correct the transform or the output, so that the record is "
                "accepted, and run the batch again; it reads what Kafka has.",
            )
        return record

    def _find(self, topic: str, partition: int, offset: int, incarnation: int) -> tuple[str, RecordedRange] | None:
        if self._ranges is None:
            manifest = Manifest.load(self._manifest_uri)
            ids = sorted({*manifest.inputs, *manifest.built})
            self._ranges = [(input_id, recorded) for input_id in ids for recorded in manifest.ranges(input_id)]
        for input_id, recorded in self._ranges:
            where = recorded.partition
            if (where.topic, where.partition, where.incarnation) == (topic, partition, incarnation) and (
                recorded.from_offset <= offset < recorded.until_offset
            ):
                return input_id, recorded
        return None

    def _read(self, input_id: str, taken: RecordedRange, offset: int) -> tuple[RecordedRange, pa.RecordBatch | None]:
        """Read the first records from ``offset`` on. Returns them with the offset range that they cover."""
        from headrace.kafka.range_reader import KafkaRangeReader

        until = min(taken.until_offset, offset + OFFSETS_AT_ONCE)
        run = RangeRun.of([RecordedRange(taken.partition, offset, until, None, taken.leader_epoch)])
        reader = self._readers.get(input_id)
        if reader is None:
            reader = self._readers[input_id] = KafkaRangeReader(self._clients[input_id])
        reading = reader.read([run])
        # Only the first batch, which is bounded in bytes; the rest of the run is not read.
        records = next(reading, None)
        reading.close()
        if records is not None:
            until = records.column("offset")[-1].as_py() + 1
        return RecordedRange(taken.partition, offset, until, None), records


def _holds(held: RecordedRange, taken: RecordedRange, offset: int) -> bool:
    return held.partition == taken.partition and held.from_offset <= offset < held.until_offset


def _record_at(records: pa.RecordBatch, here: Any) -> OriginalRecord | None:
    rows = pc.indices_nonzero(here).to_pylist()
    if not rows:
        return None
    row = records.slice(rows[0], 1)
    (record,) = row.select(["key", "value", "headers"]).to_pylist()
    headers = tuple((header["key"], header["value"]) for header in record["headers"] or ())
    timestamp_ms = pc.cast(row.column("timestamp"), "int64")[0].as_py()
    return OriginalRecord(record["key"], record["value"], headers, timestamp_ms)
