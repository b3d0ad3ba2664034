"""Reads the manifests of a stream's folder, and keeps what a rebuild needs of each.

In the default history of 30 days, batches of 10 s have 260,000 manifests. One of 50 blocks with 4 partitions takes
42 kB of memory, and what is kept of it 2 kB: most blocks are in segments that were deleted long ago.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from headrace.batch.manifest import FOLDER, Manifest, ManifestError, manifest_time
from headrace.blocks import BlockHandle, TopicPartition
from headrace.ledger.rebuild import FoundInput
from headrace.wal.storage import LogStorage

Place = tuple[str, TopicPartition]
"""An input's id and a partition that it reads."""
Span = tuple[int, int]
"""The offsets ``[start, until)`` of a partition."""

# An object store takes 10 ms or more for each file.
_READERS = 16
_AT_ONCE = 1_000
_REPORTED_EVERY = 10_000


@dataclass(frozen=True, slots=True)
class FoundManifest:
    """What a rebuild needs of a manifest file; ``path`` is below the stream's folder.

    ``spans`` are the offsets of its blocks, adjacent ones as one. ``segments`` are those of all its ``blocks``, and
    ``in_log`` its blocks in segments that still exist, in the manifest's order. ``is_built``: it holds ranges of Kafka.
    """

    path: str
    sha256: str
    batch_time_ms: int
    interval_ms: int
    inputs: tuple[FoundInput, ...]
    spans: tuple[tuple[Place, Span], ...]
    blocks: int
    payload_bytes: int
    segments: tuple[str, ...]
    in_log: tuple[BlockHandle, ...]
    is_built: bool

    @property
    def records(self) -> int:
        """The number of records of all inputs; built ranges count their offsets."""
        return sum(each.records for each in self.inputs)


@dataclass(frozen=True)
class FoundManifests:
    """The valid manifests by batch time, and what is wrong with the damaged ones, by path."""

    by_time: Mapping[int, Sequence[FoundManifest]]
    damaged: Mapping[str, str]


def read_manifests(
    folder: LogStorage,
    segments: Collection[str],
    *,
    is_removed: Callable[[int], bool],
    progress: Callable[[str], None],
) -> FoundManifests:
    """Read the manifests of all batches but the removed ones.

    Args:
        segments: the paths of the log's segments.
        is_removed: whether the batch of a batch time was removed from the history.

    Raises:
        ManifestError: a manifest is of another version.
    """
    paths = [path for path in folder.paths(FOLDER) if path.endswith(".json") and not _is_removed(path, is_removed)]
    found: dict[int, list[FoundManifest]] = defaultdict(list)
    damaged: dict[str, str] = {}
    kept = _Kept(segments)
    for number, (path, data) in enumerate(_contents(folder, paths)):
        if number % _REPORTED_EVERY == 0:
            progress(f"reading the manifests: {number} of {len(paths)}")
        try:
            manifest = Manifest.from_bytes(data, f"{folder.url}/{path}")
        except ManifestError as error:
            if "version" in str(error.what):
                raise
            damaged[path] = error.what
        else:
            found[manifest.batch_time_ms].append(kept.of(manifest, path, hashlib.sha256(data).hexdigest()))
    return FoundManifests(found, damaged)


def listed_spans(manifests: Mapping[int, Sequence[FoundManifest]]) -> dict[Place, list[Span]]:
    """The offsets that manifests list, in order, adjacent ones as one: all of them were accepted."""
    spans: dict[Place, list[Span]] = defaultdict(list)
    for of_time in manifests.values():
        for found in of_time:
            for place, span in found.spans:
                spans[place].append(span)
    return {place: _merged(each) for place, each in spans.items()}


def _is_removed(path: str, is_removed: Callable[[int], bool]) -> bool:
    batch_time_ms = manifest_time(path)
    return batch_time_ms is not None and is_removed(batch_time_ms)


def _contents(folder: LogStorage, paths: Sequence[str]) -> Iterator[tuple[str, bytes]]:
    with ThreadPoolExecutor(_READERS) as pool:
        for first in range(0, len(paths), _AT_ONCE):
            part = paths[first : first + _AT_ONCE]
            yield from zip(part, pool.map(folder.read, part), strict=True)


class _Kept:
    """Makes the `FoundManifest` of a manifest. What recurs in many manifests is kept once."""

    def __init__(self, segments: Collection[str]) -> None:
        self._exists = frozenset(segments)
        self._places: dict[Place, Place] = {}
        self._names: dict[str, str] = {}

    def of(self, manifest: Manifest, path: str, sha256: str) -> FoundManifest:
        spans: dict[Place, list[Span]] = defaultdict(list)
        records: dict[Place, int] = defaultdict(int)
        for input_id, blocks in manifest.inputs.items():
            for block in blocks:
                for r in block.ranges:
                    place = self._place(input_id, r.partition)
                    spans[place].append((r.from_offset, r.until_offset))
                    records[place] += r.records
        inputs = [
            FoundInput(*place, min(of_place)[0], max(until for _, until in of_place), records[place], len(of_place))
            for place, of_place in spans.items()
        ]
        built = [
            FoundInput(*self._place(input_id, r.partition), r.from_offset, r.until_offset, r.weight, 0)
            for input_id, ranges in manifest.built.items()
            for r in ranges
        ]
        listed = [block for blocks in manifest.inputs.values() for block in blocks]
        return FoundManifest(
            path=path,
            sha256=sha256,
            batch_time_ms=manifest.batch_time_ms,
            interval_ms=manifest.interval_ms,
            inputs=(*inputs, *built),
            spans=tuple((place, span) for place, of_place in spans.items() for span in _merged(of_place)),
            blocks=len(listed),
            payload_bytes=sum(block.payload_bytes for block in listed),
            segments=tuple(self._name(segment) for segment in {block.handle.segment: None for block in listed}),
            in_log=tuple(block.handle for block in listed if block.handle.segment in self._exists),
            is_built=bool(built),
        )

    def _place(self, input_id: str, partition: TopicPartition) -> Place:
        return self._places.setdefault((input_id, partition), (input_id, partition))

    def _name(self, segment: str) -> str:
        return self._names.setdefault(segment, segment)


def _merged(spans: Iterable[Span]) -> list[Span]:
    merged: list[Span] = []
    for start, until in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], until))
        else:
            merged.append((start, until))
    return merged
