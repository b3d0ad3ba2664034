"""Finds the record behind a transformed row in the log, by the batch's manifest, for its dead letter."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pyarrow.compute as pc

from headrace.batching.manifest import Manifest
from headrace.blocks import BlockHandle
from headrace.indexing.originals import OriginalRecord
from headrace.wal.reader import read_block
from headrace.wal.storage import open_storage

BLOCKS_KEPT = 4
"""Dead letters come in the order of their records, so the block of the last one is the likeliest next."""


class ManifestOriginalRecords:
    """The records of one batch. The manifest is read at the first call: most tasks have no dead letter."""

    def __init__(self, manifest_uri: str) -> None:
        self._manifest_uri = manifest_uri
        self._manifest: Manifest | None = None
        self._read = lru_cache(maxsize=BLOCKS_KEPT)(self._read_block)

    def fetch(self, topic: str, partition: int, offset: int, incarnation: int) -> OriginalRecord | None:
        """The record as Kafka gave it; None if the batch has no such record.

        Raises the log's own errors if the block cannot be read: a dead letter without its record is one too few.
        """
        handle = self._find(topic, partition, offset, incarnation)
        if handle is None:
            return None
        records = self._read(handle)
        here = pc.and_(
            pc.equal(records.column("offset"), offset),
            pc.and_(
                pc.equal(records.column("partition"), partition),
                pc.and_(
                    pc.equal(records.column("incarnation"), incarnation),
                    pc.equal(pc.cast(records.column("topic"), "string"), topic),
                ),
            ),
        )
        rows = pc.indices_nonzero(here).to_pylist()
        if not rows:
            return None
        (record,) = records.slice(rows[0], 1).select(["key", "value", "headers"]).to_pylist()
        headers = tuple((header["key"], header["value"]) for header in record["headers"] or ())
        return OriginalRecord(record["key"], record["value"], headers)

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
