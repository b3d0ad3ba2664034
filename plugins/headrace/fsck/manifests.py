"""Checks the manifests: each batch's file has the checksum in the ledger, and lists the blocks in the ledger."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from headrace.batch.manifest import Manifest, ManifestError
from headrace.clock import time_text
from headrace.fsck.coverage import partition_text
from headrace.fsck.findings import Finding, Problem
from headrace.ledger.models import BatchRow, StoredBlock
from headrace.ledger.snapshots import StreamSnapshot
from headrace.ledger.states import BatchState
from headrace.wal.errors import StoredFileMissingError
from headrace.wal.storage import open_storage


@dataclass(frozen=True, slots=True)
class _Unusable:
    """A manifest file that cannot be used, with the URI and checksum that the ledger had for it."""

    uri: str
    sha256: str
    problem: Problem
    detail: str


@dataclass
class ManifestObservation:
    """Manifests that do not agree with the ledger, by batch time; ``files`` counts the manifests checked."""

    unusable: dict[int, _Unusable] = field(default_factory=dict)
    differing: dict[int, Manifest] = field(default_factory=dict)
    files: int = 0

    def judge(self, snapshot: StreamSnapshot) -> Iterator[Finding]:
        """The findings by this snapshot. Skips files that no batch names any more: an empty batch may be built anew."""
        for batch_time_ms, found in self.unusable.items():
            batch = snapshot.batch.get(batch_time_ms)
            if batch is not None and (batch.manifest_uri, batch.manifest_sha256) == (found.uri, found.sha256):
                yield Finding(found.problem, time_text(batch_time_ms), found.detail)
        for batch_time_ms, manifest in self.differing.items():
            batch = snapshot.batch.get(batch_time_ms)
            if batch is not None and batch.manifest_uri == manifest.uri:
                for what in differences(snapshot, batch, manifest):
                    yield Finding(Problem.MANIFEST_DIFFERS, time_text(batch_time_ms), f"{manifest.uri}: {what}")


def observe_manifests(snapshot: StreamSnapshot) -> ManifestObservation:
    """Read the manifest of every batch, and compare it with an earlier snapshot.

    Raises:
        StorageError: the store cannot be read.
    """
    found = ManifestObservation()
    for batch in snapshot.batches:
        if batch.state is BatchState.ABSORBED:
            # Its blocks are in the manifest of the batch that absorbed it.
            continue
        found.files += 1
        try:
            manifest = Manifest.load(batch.manifest_uri, sha256=batch.manifest_sha256)
        except ManifestError as error:
            problem = Problem.MANIFEST_DAMAGED if _exists(batch.manifest_uri) else Problem.MANIFEST_MISSING
            unusable = _Unusable(batch.manifest_uri, batch.manifest_sha256, problem, error.what)
            found.unusable[batch.batch_time_ms] = unusable
        else:
            if any(differences(snapshot, batch, manifest)):
                found.differing[batch.batch_time_ms] = manifest
    return found


def _exists(uri: str) -> bool:
    folder, _, name = uri.rpartition("/")
    try:
        return open_storage(folder).exists(name)
    except StoredFileMissingError:
        return False


def differences(snapshot: StreamSnapshot, batch: BatchRow, manifest: Manifest) -> Iterator[str]:
    """The differences between a valid manifest and the ledger, in words."""
    reported = (manifest.stream, manifest.batch_time_ms, manifest.interval_ms)
    wanted = (batch.stream, batch.batch_time_ms, batch.interval_ms)
    if reported != wanted:
        yield f"it is of {reported[0]}, batch {time_text(reported[1])}, interval {reported[2]} ms."
    listed = [
        (input_id, block.handle, block.records, block.payload_bytes, block.ranges)
        for input_id, blocks in manifest.inputs.items()
        for block in blocks
    ]
    if (len(listed), manifest.records) != (batch.blocks, batch.records):
        yield (
            f"it lists {len(listed)} blocks with {manifest.records} records, "
            f"the ledger {batch.blocks} with {batch.records}."
        )
    rows = snapshot.blocks_by_batch.get(batch.batch_time_ms, [])
    if len(rows) == batch.blocks and sorted(map(_as_listed, rows)) != sorted(listed):
        yield "it lists other blocks than the ledger has for the batch, or says other things of them."
    yield from _other_ranges(snapshot, batch, manifest)


def _as_listed(row: StoredBlock) -> Any:
    info = row.info
    return info.receiver.input_id, info.handle, info.records, info.payload_bytes, info.ranges


def _other_ranges(snapshot: StreamSnapshot, batch: BatchRow, manifest: Manifest) -> Iterator[str]:
    reported: dict[Any, tuple[int, int]] = {}
    for input_id in {*manifest.inputs, *manifest.built}:
        for each in manifest.ranges(input_id):
            start, until = reported.get((input_id, each.partition), (each.from_offset, each.until_offset))
            reported[input_id, each.partition] = min(start, each.from_offset), max(until, each.until_offset)
    wanted = {
        (row.input_id, row.partition): (row.from_offset, row.until_offset)
        for row in snapshot.inputs_by_batch.get(batch.batch_time_ms, ())
    }
    for key in sorted({*reported, *wanted}):
        if reported.get(key) != wanted.get(key):
            yield f"of {partition_text(key)} it has {reported.get(key)}, the ledger {wanted.get(key)}."
