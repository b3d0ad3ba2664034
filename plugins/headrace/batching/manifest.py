"""The manifest of a batch: which blocks of the log it was allocated, for good.

It is written once, beside the log, and is durable before the ledger knows of the allocation (rule 5 of the
design), so Spark reads this file and needs neither the ledger nor its credentials. The same allocation gives the
same bytes, so two allocators of one batch time write the same file.

On disk it is a sealed document (`headrace.batching.sealed_document`) that holds ``version`` 1, ``stream``,
``batch_time_ms``, ``interval_ms``, ``segments`` (paths below the log's root) and ``inputs``, by id: ``partitions``
as [topic, topic id, partition, incarnation] and ``blocks`` as [segment's index, offset, length, records, payload
bytes, [[partition's index, from, until, records], …]].
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from headrace.batching.sealed_document import DocumentDamagedError, seal, unseal
from headrace.blocks import BlockHandle, OffsetRange, TopicPartition
from headrace.errors import HeadraceError
from headrace.wal.errors import StoredFileExistsError, StoredFileMissingError
from headrace.wal.storage import LogStorage, open_storage

VERSION = 1
FOLDER = "manifests"
LOG_FOLDER = "log"


class ManifestError(HeadraceError):
    """A manifest is missing, damaged, of another version, or does not list what was asked for."""


@dataclass(frozen=True, slots=True)
class ManifestBlock:
    """A block as a manifest lists it."""

    handle: BlockHandle
    records: int
    payload_bytes: int
    ranges: tuple[OffsetRange, ...]


@dataclass(frozen=True)
class Manifest:
    """A batch's blocks by input, each in the order in which they were added to the ledger.

    ``folder_url`` is the stream's folder, found from where the manifest was read.
    """

    stream: str
    batch_time_ms: int
    interval_ms: int
    inputs: Mapping[str, tuple[ManifestBlock, ...]]
    folder_url: str

    @property
    def log_root(self) -> str:
        """The URL of the log that the handles point into."""
        return f"{self.folder_url}/{LOG_FOLDER}"

    @property
    def uri(self) -> str:
        """Where the manifest stands."""
        return f"{self.folder_url}/{manifest_path(self.batch_time_ms)}"

    @property
    def records(self) -> int:
        """Records of all inputs."""
        return sum(block.records for blocks in self.inputs.values() for block in blocks)

    def blocks(self, input_id: str) -> list[tuple[BlockHandle, int, int]]:
        """(handle, records, payload bytes) of one input's blocks; an input without any gives an empty list."""
        return [(block.handle, block.records, block.payload_bytes) for block in self.inputs.get(input_id, ())]

    def find(self, partition: TopicPartition, offset: int) -> BlockHandle | None:
        """The block that holds this offset, if the batch has it."""
        for blocks in self.inputs.values():
            for block in blocks:
                for taken in block.ranges:
                    if taken.partition == partition and taken.from_offset <= offset < taken.until_offset:
                        return block.handle
        return None

    def to_bytes(self) -> bytes:
        """The file's bytes, the same for the same allocation."""
        segments = sorted({block.handle.segment for blocks in self.inputs.values() for block in blocks})
        place = {segment: index for index, segment in enumerate(segments)}
        return seal(
            {
                "version": VERSION,
                "stream": self.stream,
                "batch_time_ms": self.batch_time_ms,
                "interval_ms": self.interval_ms,
                "segments": segments,
                "inputs": {name: _input_to_json(blocks, place) for name, blocks in sorted(self.inputs.items())},
            }
        )

    @classmethod
    def from_bytes(cls, data: bytes, uri: str) -> Manifest:
        """Read what `to_bytes` wrote; ``uri`` says where it stood.

        Raises:
            ManifestError: the bytes are damaged or of a version that this headrace does not read.
        """
        try:
            fields = unseal(data)
        except DocumentDamagedError as error:
            raise ManifestError(
                f"The manifest {uri} is damaged: {error}.",
                remedy="Restore the file, or delete it and allocate the batch again while the ledger has its blocks.",
            ) from None
        if fields.get("version") != VERSION:
            raise ManifestError(
                f"The manifest {uri} is of version {fields.get('version')}, this headrace reads version {VERSION}.",
                remedy="Run the batch with the headrace that allocated it, or a newer one.",
            )
        return cls(
            stream=fields["stream"],
            batch_time_ms=fields["batch_time_ms"],
            interval_ms=fields["interval_ms"],
            inputs={name: _input_from_json(part, fields["segments"]) for name, part in fields["inputs"].items()},
            folder_url=uri.rsplit("/", 2)[0],
        )

    @classmethod
    def load(cls, uri: str, *, sha256: str | None = None) -> Manifest:
        """Read the manifest at this URI; ``sha256`` is what the ledger says of it, for who can ask.

        Raises:
            ManifestError: there is none, it cannot be used, or it is another one.
        """
        folder, _, name = uri.rpartition("/")
        try:
            data = open_storage(folder).read(name)
        except StoredFileMissingError:
            raise ManifestError(
                f"The manifest {uri} does not exist.", remedy="Run the batch's allocate_blocks first."
            ) from None
        if sha256 is not None and hashlib.sha256(data).hexdigest() != sha256:
            raise ManifestError(
                f"The manifest {uri} is not the one that the batch was allocated by: its SHA-256 is not the ledger's.",
                remedy="Restore the file; the batch must not be run by another one.",
            )
        return cls.from_bytes(data, uri)

    def write(self, storage: LogStorage, *, replace: bool = False) -> str:
        """Write the manifest into the stream's folder, durable on return; gives the SHA-256 of its bytes in hex.

        Raises:
            StoredFileExistsError: there is another one, and not ``replace``.
        """
        data = self.to_bytes()
        path = manifest_path(self.batch_time_ms)
        try:
            storage.write_atomically(path, data, exclusive=True)
        except StoredFileExistsError:
            if storage.read(path) != data:
                if not replace:
                    raise
                storage.write_atomically(path, data)
        return hashlib.sha256(data).hexdigest()


def manifest_path(batch_time_ms: int) -> str:
    """The manifest's path below the stream's folder."""
    return f"{FOLDER}/{batch_time_ms}.json"


def _input_to_json(blocks: Iterable[ManifestBlock], place: Mapping[str, int]) -> dict[str, Any]:
    partitions: dict[TopicPartition, int] = {}
    listed = []
    for block in blocks:
        ranges = [
            [partitions.setdefault(r.partition, len(partitions)), r.from_offset, r.until_offset, r.records]
            for r in block.ranges
        ]
        handle = block.handle
        listed.append([place[handle.segment], handle.offset, handle.length, block.records, block.payload_bytes, ranges])
    return {
        "partitions": [[p.topic, p.topic_id, p.partition, p.incarnation] for p in partitions],
        "blocks": listed,
    }


def _input_from_json(part: Mapping[str, Any], segments: list[str]) -> tuple[ManifestBlock, ...]:
    partitions = [TopicPartition(*fields) for fields in part["partitions"]]
    return tuple(
        ManifestBlock(
            handle=BlockHandle(segments[segment], offset, length),
            records=records,
            payload_bytes=payload_bytes,
            ranges=tuple(OffsetRange(partitions[index], start, until, count) for index, start, until, count in ranges),
        )
        for segment, offset, length, records, payload_bytes, ranges in part["blocks"]
    )
