"""A batch's manifest: an immutable file that lists the blocks of the log that were allocated to the batch.

It is written once, beside the log, and is durable before the ledger commits the allocation (rule 5 of the design). So
Spark reads this file and needs neither the ledger nor its credentials. The same allocation gives the same bytes, so two
allocators of one batch time write the same file. If their manifests differ, for example by the times they absorb, no
file is overwritten: the second name also contains a hash of the contents, and the ledger says which one counts.

On disk it is a document with a checksum, as checkpoints and result files are (`encode_document`): one line with a JSON
object, one with ``crc32c:`` and eight hex digits, computed over the first line. The checksum detects a truncated,
corrupted or overwritten file. The object holds ``version``, ``stream``, ``batch_time_ms``, ``interval_ms``,
``segments`` (paths below the log's root) and ``inputs``, by id: ``partitions`` as [topic, topic id, partition,
incarnation] and ``blocks`` as [segment's index, offset, length, records, payload bytes, [[partition's index, from,
until, records, leader epoch if known], …]].

A batch that was built from Kafka by timestamps (`headrace.batch.build_from_kafka`) has no blocks: its inputs hold
``ranges`` as [partition's index, from, until], whose records are not counted.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import google_crc32c

from headrace.blocks import BlockHandle, OffsetRange, TopicPartition
from headrace.errors import Failure, HeadraceError
from headrace.kafka.ranges import RecordedRange
from headrace.wal.errors import StoredFileExistsError, StoredFileMissingError
from headrace.wal.log_storage import LogStorage
from headrace.wal.storage import open_storage

VERSION = 1
FOLDER = "manifests"
LOG_FOLDER = "log"
_RESTORE = (
    "Run the batch's allocate_blocks: it writes the manifest, and the same again while the ledger has the batch's "
    "blocks and the stream its inputs. Else restore the file from a copy; the batch must not be run by another one."
)


class ManifestError(HeadraceError):
    """A manifest is missing, damaged, of another version, or does not list what was asked for."""

    failure = Failure.FINAL


class ManifestVersionError(ManifestError):
    """A manifest is of a version that this headrace does not read."""


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

    ``folder_url`` is the stream's folder, derived from the URI that the manifest was read from. ``built`` holds the
    offset ranges by input of a batch that was built from Kafka. ``name_taken``: another
    manifest has the plain name, so this one is named by its contents.
    """

    stream: str
    batch_time_ms: int
    interval_ms: int
    inputs: Mapping[str, tuple[ManifestBlock, ...]]
    folder_url: str
    built: Mapping[str, tuple[RecordedRange, ...]] = field(default_factory=dict)
    name_taken: bool = field(default=False, compare=False)

    @property
    def log_root(self) -> str:
        """The URL of the log that the handles point into."""
        return f"{self.folder_url}/{LOG_FOLDER}"

    @property
    def uri(self) -> str:
        """The manifest's URI."""
        return f"{self.folder_url}/{self.path}"

    @property
    def path(self) -> str:
        """The path below the stream's folder.

        Each manifest of ranges has its own file, named by its contents, and the ledger says which one counts: Kafka may
        give other ranges at another time, and a built batch may replace an empty one.
        """
        if not self._is_named_by_contents:
            return manifest_path(self.batch_time_ms)
        name = f"{self.batch_time_ms}-built" if any(self.built.values()) else str(self.batch_time_ms)
        return f"{FOLDER}/{name}-{hashlib.sha256(self.to_bytes()).hexdigest()[:16]}.json"

    @property
    def _is_named_by_contents(self) -> bool:
        return self.name_taken or any(self.built.values())

    @property
    def records(self) -> int:
        """The number of records of all inputs; built ranges count their offsets, which is an upper bound."""
        received = sum(block.records for blocks in self.inputs.values() for block in blocks)
        return received + sum(recorded.weight for ranges in self.built.values() for recorded in ranges)

    def ranges(self, input_id: str) -> list[RecordedRange]:
        """The offset ranges of one input's blocks, or its built ranges; used to read the batch again from Kafka."""
        of_blocks = [
            RecordedRange(
                taken.partition, taken.from_offset, taken.until_offset, taken.records, leader_epoch=taken.leader_epoch
            )
            for block in self.inputs.get(input_id, ())
            for taken in block.ranges
        ]
        return [*of_blocks, *self.built.get(input_id, ())]

    def blocks(self, input_id: str) -> list[tuple[BlockHandle, int, int]]:
        """(handle, records, payload bytes) of one input's blocks; an input without any gives an empty list.

        Raises:
            ManifestError: the batch was built from Kafka, so the input's records are in no block.
        """
        if self.built.get(input_id):
            raise ManifestError(
                f"The batch of the manifest {self.uri} was built from Kafka: its records are in no log.",
                remedy='Read it by the data source "kafka_ranges".',
            )
        return [(block.handle, block.records, block.payload_bytes) for block in self.inputs.get(input_id, ())]

    def without(self, handles: Collection[BlockHandle]) -> Manifest:
        """This manifest without some of its blocks."""
        inputs = {
            input_id: tuple(block for block in blocks if block.handle not in handles)
            for input_id, blocks in self.inputs.items()
        }
        return replace(self, inputs=inputs)

    def to_bytes(self) -> bytes:
        """The file's bytes, the same for the same allocation."""
        segments = sorted({block.handle.segment for blocks in self.inputs.values() for block in blocks})
        place = {segment: index for index, segment in enumerate(segments)}
        return encode_document(
            {
                "version": VERSION,
                "stream": self.stream,
                "batch_time_ms": self.batch_time_ms,
                "interval_ms": self.interval_ms,
                "segments": segments,
                "inputs": {
                    name: _input_to_json(self.inputs.get(name, ()), self.built.get(name, ()), place)
                    for name in sorted({*self.inputs, *self.built})
                },
            }
        )

    @classmethod
    def from_bytes(cls, data: bytes, uri: str) -> Manifest:
        """Parse the bytes of `to_bytes`, which were read from ``uri``.

        Raises:
            ManifestError: the bytes are damaged, not a manifest, or of a version that this headrace does not read.
        """
        try:
            fields = read_document(data, VERSION, f"The manifest {uri}", ManifestVersionError)
        except DocumentDamagedError as error:
            raise ManifestError(
                f"The manifest {uri} is damaged: {error}.",
                remedy=_RESTORE,
            ) from None
        try:
            return cls._of(fields, uri)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            # The checksum matches, so other software wrote the file.
            raise ManifestError(
                f"The manifest {uri} is not of the form of version {fields['version']}: {error!r}.", remedy=_RESTORE
            ) from error

    @classmethod
    def _of(cls, fields: Mapping[str, Any], uri: str) -> Manifest:
        return cls(
            stream=fields["stream"],
            batch_time_ms=fields["batch_time_ms"],
            interval_ms=fields["interval_ms"],
            inputs={name: _blocks_from_json(part, fields["segments"]) for name, part in fields["inputs"].items()},
            folder_url=uri.rsplit("/", 2)[0],
            built={name: ranges for name, part in fields["inputs"].items() if (ranges := _ranges_from_json(part))},
            name_taken=not uri.endswith(f"/{manifest_path(fields['batch_time_ms'])}"),
        )

    @classmethod
    def load(cls, uri: str, *, sha256: str | None = None) -> Manifest:
        """Read the manifest at this URI. Checks its SHA-256 against ``sha256``, the ledger's, if the caller has it.

        Raises:
            ManifestError: the file is missing, cannot be used, or has another checksum.
        """
        folder, _, name = uri.rpartition("/")
        try:
            data = open_storage(folder).read(name)
        except StoredFileMissingError:
            missing = ManifestError(f"The manifest {uri} does not exist.", remedy=_RESTORE)
            # A retry may succeed: the file system may be mounted again, or the file restored from a copy.
            missing.failure = Failure.PASSING
            raise missing from None
        if sha256 is not None and hashlib.sha256(data).hexdigest() != sha256:
            raise ManifestError(
                f"The manifest {uri} is not the one that the batch was allocated by: its SHA-256 is not the ledger's.",
                remedy=_RESTORE,
            )
        return cls.from_bytes(data, uri)

    def write(self, storage: LogStorage, *, replace: bool = False) -> str:
        """Write the manifest durably into the stream's folder; returns the SHA-256 of its bytes in hex.

        If a file is named by its contents and its contents differ, it is damaged and is overwritten.

        Raises:
            StoredFileExistsError: another manifest has the name, and ``replace`` is false.
        """
        data, path = self.to_bytes(), self.path
        try:
            storage.write_atomically(path, data, exclusive=True)
        except StoredFileExistsError:
            try:
                content = storage.read(path)
            except StoredFileMissingError:
                # Its allocator deleted it meanwhile, because another manifest counts.
                return self.write(storage, replace=replace)
            if content != data:
                if not (replace or self._is_named_by_contents):
                    raise
                storage.write_atomically(path, data)
        return hashlib.sha256(data).hexdigest()


def manifest_path(batch_time_ms: int) -> str:
    """The path, below the stream's folder, of the manifest of a batch of blocks."""
    return f"{FOLDER}/{batch_time_ms}.json"


def manifest_time(path: str) -> int | None:
    """The batch time of the manifest at this path below the stream's folder; None if it is not a manifest."""
    digits = path.removeprefix(f"{FOLDER}/").removesuffix(".json").partition("-")[0]
    return int(digits) if digits.isdigit() else None


def _input_to_json(
    blocks: Iterable[ManifestBlock], built: Iterable[RecordedRange], place: Mapping[str, int]
) -> dict[str, Any]:
    partitions: dict[TopicPartition, int] = {}
    listed = []
    for block in blocks:
        ranges = [
            [
                partitions.setdefault(r.partition, len(partitions)),
                *r.numbers,
            ]
            for r in block.ranges
        ]
        handle = block.handle
        listed.append([place[handle.segment], handle.offset, handle.length, block.records, block.payload_bytes, ranges])
    given = [
        [partitions.setdefault(recorded.partition, len(partitions)), recorded.from_offset, recorded.until_offset]
        for recorded in built
    ]
    return {
        "partitions": [[p.topic, p.topic_id, p.partition, p.incarnation] for p in partitions],
        "blocks": listed,
        **({"ranges": given} if given else {}),
    }


def _ranges_from_json(part: Mapping[str, Any]) -> tuple[RecordedRange, ...]:
    partitions = [TopicPartition(*fields) for fields in part["partitions"]]
    return tuple(RecordedRange(partitions[index], start, until, None) for index, start, until in part.get("ranges", ()))


def _blocks_from_json(part: Mapping[str, Any], segments: list[str]) -> tuple[ManifestBlock, ...]:
    partitions = [TopicPartition(*fields) for fields in part["partitions"]]
    return tuple(
        ManifestBlock(
            handle=BlockHandle(segments[segment], offset, length),
            records=records,
            payload_bytes=payload_bytes,
            ranges=tuple(OffsetRange(partitions[index], *numbers) for index, *numbers in ranges),
        )
        for segment, offset, length, records, payload_bytes, ranges in part["blocks"]
    )


class DocumentDamagedError(ValueError):
    """The checksum does not match, or the document is not a JSON object."""


def encode_document(document: Mapping[str, Any]) -> bytes:
    """The document's bytes with their checksum; the same document gives the same bytes."""
    body = json.dumps(document, separators=(",", ":")).encode()
    return body + b"\n" + _checksum(body)


def decode_document(data: bytes) -> dict[str, Any]:
    """Read what `encode_document` wrote.

    Raises:
        DocumentDamagedError: the data is not what was written.
    """
    body, _, checksum = data.partition(b"\n")
    if checksum != _checksum(body):
        raise DocumentDamagedError("its checksum does not match")
    try:
        document = json.loads(body)
    except (ValueError, RecursionError):
        document = None
    if not isinstance(document, dict):
        raise DocumentDamagedError("it holds no JSON object")
    return document


def read_document(data: bytes, version: int, what: str, other: type[HeadraceError]) -> dict[str, Any]:
    """Read a document of this version.

    Raises:
        DocumentDamagedError: the data is not what was written.
        HeadraceError: of the class ``other``: it is of another version. The message calls it ``what``.
    """
    document = decode_document(data)
    if document.get("version") != version:
        raise other(
            f"{what} is of version {document.get('version')}, this headrace reads version {version}.",
            remedy="Use the headrace that wrote it, or a newer one.",
        )
    return document


def _checksum(body: bytes) -> bytes:
    return b"crc32c:%08x\n" % google_crc32c.value(body)
