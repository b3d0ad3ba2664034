"""Allocation: assign a batch time its blocks, once and permanently (rules 4 and 5 of the design).

1. Seal the batch time, in its own transaction. After that no block can join the batch time, so its set of blocks is
   final.
2. Write the manifest. This needs no lock in the ledger during the disk's sync.
3. Allocate the batch in a second transaction, which counts the blocks again.

A crash after step 1 leaves a sealed time without a batch, and the next run of the task writes the same manifest.
"""

from __future__ import annotations

import hashlib
import logging
from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

from headrace.batch.manifest import Manifest, ManifestBlock, ManifestError
from headrace.batch.results import FOLDER as RESULTS
from headrace.batch.results import result_name
from headrace.batch.set_back import open_for_writing
from headrace.clock import readable_seconds, time_text
from headrace.kafka.ranges import RecordedRange
from headrace.ledger.batches.run_batch_times import CLOCKS_DIFFER_MS
from headrace.ledger.batches.tables import BatchInputRow, BatchRow
from headrace.ledger.errors import AllocationConflictError, BatchTimeError
from headrace.ledger.receiving.tables import StoredBlock
from headrace.ledger.states import BatchState
from headrace.stream import Stream
from headrace.stream_context import StreamContext
from headrace.stream_folder import set_back
from headrace.wal.errors import StorageError, StoredFileExistsError, StoredFileMissingError
from headrace.wal.log_storage import LogStorage

# Maximum tries. Each conflict leaves fewer times to absorb, because another run has claimed one of them.
_CONFLICTS = 20

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Allocation:
    """An allocated batch. ``fresh``: this call allocated it; otherwise it was allocated before."""

    batch: BatchRow
    inputs: tuple[BatchInputRow, ...]
    fresh: bool


def allocate(
    context: StreamContext, batch_time_ms: int, *, takes_over: bool = False, known_ms: Collection[int] = ()
) -> Allocation:
    """Allocate the batch time's blocks, or return the existing allocation.

    A time that another batch has absorbed stays absorbed, and takes no blocks. If the manifest of an allocated batch is
    missing or damaged, it is written again, provided that the ledger still gives the same bytes.

    Args:
        batch_time_ms: the end of an interval, in milliseconds since the epoch.
        takes_over: absorb the batch times since the previous batch that have blocks and no batch.
        known_ms: times that other clocks than this host's have reached, such as that of Airflow's scheduler.

    Raises:
        BatchTimeError: the time is not an interval end, or is in the future: by the ledger's clock, or by all others.
        BatchRemovedError: the batch was removed with the stream's history.
        AllocationConflictError: other runs claimed the times to absorb, in every try.
        StorageError: the manifest cannot be written; nothing is allocated then.
    """
    open_for_writing(context)
    batches = context.ledger.batches
    existing = batches.find(context.name, batch_time_ms)
    if existing is not None:
        restore_manifest(context, existing)
    else:
        _refuse_time_ahead(context, batch_time_ms, known_ms)
    batch = existing or _allocate(context, batch_time_ms, takes_over=takes_over)
    if existing is None:
        context.storage.mark.leave()
    inputs = tuple(batches.inputs(context.name, batch_time_ms))
    return Allocation(batch=batch, inputs=inputs, fresh=existing is None)


def _refuse_time_ahead(context: StreamContext, batch_time_ms: int, known_ms: Collection[int]) -> None:
    """Refuse a batch time that only the ledger's clock has reached: no block could join a batch until then."""
    latest_ms = max((context.clock.now_ms(), *known_ms))
    if batch_time_ms > latest_ms + CLOCKS_DIFFER_MS:
        ahead = readable_seconds((batch_time_ms - latest_ms) / 1000)
        raise BatchTimeError(
            f"Batch time {time_text(batch_time_ms)} of stream {context.name!r} has come by the ledger's clock alone: "
            f"by this host's and Airflow's it is {ahead} in the future.",
            remedy="Correct the clock of the ledger's database, or of all others if that one is right. Nothing is "
            "allocated, and the next run takes the records.",
        )


def _allocate(context: StreamContext, batch_time_ms: int, *, takes_over: bool) -> BatchRow:
    batches = context.ledger.batches
    context.ledger.allocations.seal(context.name, batch_time_ms)
    tried: list[Manifest] = []
    for _ in range(_CONFLICTS):
        absorb = batches.absorbable(context.name, batch_time_ms) if takes_over else []
        blocks = context.ledger.allocations.blocks_of(context.name, batch_time_ms, absorb=absorb)
        tried.append(make_manifest(context.stream, batch_time_ms, blocks))
        try:
            batch = _write_and_allocate(context, tried[-1], blocks=len(blocks), absorb=absorb)
        except AllocationConflictError as error:
            conflict = error
        else:
            _delete_others(context.storage, tried, batch)
            return batch
    raise conflict


def _write_and_allocate(context: StreamContext, manifest: Manifest, *, blocks: int, absorb: list[int]) -> BatchRow:
    written, sha256 = write_manifest(context, manifest)
    return context.ledger.allocations.allocate(
        context.name,
        manifest.batch_time_ms,
        manifest_uri=written.uri,
        manifest_sha256=sha256,
        blocks_expected=blocks,
        absorb=absorb,
    )


def write_manifest(context: StreamContext, manifest: Manifest) -> tuple[Manifest, str]:
    """Write a manifest into the stream's folder, under another name if its own is taken by a different manifest.

    The different manifest was left by an allocation that crashed before its transaction (for example under another
    definition), or belongs to an allocation that still runs: the ledger may name it at any moment.

    Returns the manifest as it was written, and its SHA-256.

    Raises:
        LedgerSetBackError: the different manifest is that of a batch that the ledger has lost.
    """
    folder = context.storage
    try:
        return manifest, manifest.write(folder)
    except StoredFileExistsError:
        _refuse_if_of_lost_batch(context, manifest)
        renamed = replace(manifest, name_taken=True)
        return renamed, renamed.write(folder)


def _refuse_if_of_lost_batch(context: StreamContext, manifest: Manifest) -> None:
    """Refuse to put a manifest beside one that lists blocks which the ledger does not have, or whose batch was run."""
    name, folder, time_ms = context.name, context.storage, manifest.batch_time_ms
    try:
        other = Manifest.from_bytes(folder.read(manifest.path), manifest.uri)
    except (ManifestError, StoredFileMissingError):
        return
    listed = {block.handle for blocks in other.inputs.values() for block in blocks}
    known = {
        block.info.handle
        for segment in {handle.segment for handle in listed}
        for block in context.ledger.blocks.of_segment(name, segment)
    }
    ran = context.ledger.batches.find(name, time_ms) is None and any(
        named is not None and named[0] == time_ms for named in map(result_name, folder.paths(RESULTS))
    )
    if ran or not listed <= known:
        why = "its batch was run" if ran else "it lists blocks that the ledger does not have"
        raise set_back(name, context.stream.storage.url, manifest.uri, why)


def _delete_others(folder: LogStorage, tried: Iterable[Manifest], batch: BatchRow) -> None:
    """Delete this time's manifests that the batch's row does not name: a row never changes its manifest."""
    paths = {path for manifest in tried for path in (manifest.path, replace(manifest, name_taken=True).path)}
    for path in sorted(paths):
        # Compare names only: the same folder may have another URL.
        if path.rpartition("/")[2] == batch.manifest_uri.rpartition("/")[2]:
            continue
        try:
            folder.delete(path)
        except StorageError as error:
            logger.warning("The unused manifest %s/%s could not be deleted: %s", folder.url, path, error)


def restore_manifest(context: StreamContext, batch: BatchRow) -> bool:
    """Write the batch's manifest again if its file is missing or damaged and the ledger still gives the same bytes.

    Returns whether the file is valid now.
    """
    stream, ledger, folder = context.stream, context.ledger, context.storage
    path = batch.manifest_uri.removeprefix(f"{stream.folder_url}/")
    if batch.state is BatchState.ABSORBED or path == batch.manifest_uri:
        return True
    try:
        if hashlib.sha256(folder.read(path)).hexdigest() == batch.manifest_sha256:
            return True
    except StoredFileMissingError:
        pass
    manifest = make_manifest(
        stream, batch.batch_time_ms, ledger.allocations.blocks_of(stream.name, batch.batch_time_ms)
    )
    if batch.built:
        manifest = replace(manifest, built=_built_ranges(ledger.batches.inputs(stream.name, batch.batch_time_ms)))
    data = replace(manifest, interval_ms=batch.interval_ms).to_bytes()
    if hashlib.sha256(data).hexdigest() != batch.manifest_sha256:
        logger.warning(
            "The manifest %s is missing or damaged, and cannot be written again, because the ledger has changed since. "
            "Restore it from a copy.", batch.manifest_uri,
        )  # fmt: skip
        return False
    folder.write_atomically(path, data)
    logger.warning("The manifest %s was missing or damaged, and is written again", batch.manifest_uri)
    return True


def _built_ranges(inputs: Iterable[BatchInputRow]) -> dict[str, tuple[RecordedRange, ...]]:
    built: dict[str, list[RecordedRange]] = defaultdict(list)
    for row in sorted(inputs, key=lambda row: row.partition):
        built[row.input_id].append(RecordedRange(row.partition, row.from_offset, row.until_offset, None))
    return {input_id: tuple(ranges) for input_id, ranges in built.items()}


def make_manifest(stream: Stream, batch_time_ms: int, blocks: list[StoredBlock]) -> Manifest:
    """Make the manifest of these blocks. It has every input of the stream, also inputs without blocks."""
    by_input: dict[str, list[ManifestBlock]] = defaultdict(list)
    for block in blocks:
        info = block.info
        by_input[info.receiver.input_id].append(
            ManifestBlock(info.handle, info.records, info.payload_bytes, info.ranges)
        )
    ids = [source.id for source in stream.inputs]
    # An input that was removed from the definition may have left blocks: they stay in the batch, under its id.
    ids += [name for name in by_input if name not in ids]
    return Manifest(
        stream=stream.name,
        batch_time_ms=batch_time_ms,
        interval_ms=stream.batch_interval_ms,
        inputs={name: tuple(by_input[name]) for name in ids},
        folder_url=stream.folder_url,
    )
