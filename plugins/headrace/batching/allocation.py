"""Allocation: a batch time gets its blocks, once and for good (rules 4 and 5 of the design).

Sealing comes first and commits by itself: from then on no block can join the batch time, so its set of blocks is
final and can be written down without holding the ledger's lock during the disk's sync. The transaction that
follows counts the blocks again. A crash in between leaves a sealed time without a batch, and the next run of the
task draws up the same manifest.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from dataclasses import dataclass

from headrace.batching.manifest import Manifest, ManifestBlock
from headrace.ledger import Ledger
from headrace.ledger.errors import AllocationConflictError
from headrace.ledger.rows import BatchInputRow, BatchRow, StoredBlock
from headrace.ledger.states import BatchState
from headrace.stream import Stream
from headrace.wal.errors import StoredFileExistsError
from headrace.wal.storage import LogStorage

# Each means that another run has claimed one of the times to absorb, so that fewer are left to quarrel about.
_CONFLICTS = 20


@dataclass(frozen=True)
class Allocation:
    """An allocated batch. ``fresh``: this call allocated it; else it was found as it is."""

    batch: BatchRow
    inputs: tuple[BatchInputRow, ...]
    fresh: bool


def allocate(stream: Stream, ledger: Ledger, storage: LogStorage, batch_time_ms: int) -> Allocation:
    """Allocate the batch time's blocks, or give back the allocation that there is.

    A stream that coalesces takes over every earlier time that has blocks and no batch. A time that another batch has
    absorbed stays as it is, and takes nothing.

    Args:
        storage: the stream's storage at its root (``open_storage(stream.storage.url)``).
        batch_time_ms: the end of an interval, in milliseconds since the epoch.

    Raises:
        BatchTimeError: the time is no interval end, or has not come.
        AllocationConflictError: other runs claimed the times to absorb, again and again.
        StorageError: the manifest cannot be written; nothing is allocated then.
    """
    existing = ledger.batches.find(stream.name, batch_time_ms)
    batch = existing or _allocate(stream, ledger, storage, batch_time_ms)
    inputs = tuple(ledger.batches.inputs(stream.name, batch_time_ms))
    return Allocation(batch=batch, inputs=inputs, fresh=existing is None)


def _allocate(stream: Stream, ledger: Ledger, storage: LogStorage, batch_time_ms: int) -> BatchRow:
    ledger.batches.seal(stream.name, batch_time_ms)
    for _ in range(_CONFLICTS):
        absorb = ledger.batches.unclaimed_before(stream.name, batch_time_ms) if stream.coalesces else []
        try:
            return _take(stream, ledger, storage, batch_time_ms, absorb)
        except AllocationConflictError as error:
            # Another run has claimed one of the times to absorb since they were read.
            conflict = error
    raise conflict


def _take(stream: Stream, ledger: Ledger, storage: LogStorage, batch_time_ms: int, absorb: list[int]) -> BatchRow:
    blocks = ledger.batches.blocks_of(stream.name, batch_time_ms, absorb=absorb)
    manifest = draw_up(stream, batch_time_ms, blocks)
    folder = storage.below(stream.name)
    try:
        sha256 = manifest.write(folder)
    except StoredFileExistsError:
        # Left by an allocation that crashed before the ledger heard of it, under another definition say; or made by
        # one that overtook this one, and then it is the batch's for good (rule 5 of the design).
        existing = ledger.batches.find(stream.name, batch_time_ms)
        if existing is not None:
            return existing
        sha256 = manifest.write(folder, replace=True)
    batch = ledger.batches.allocate(
        stream.name,
        batch_time_ms,
        manifest_uri=manifest.uri,
        manifest_sha256=sha256,
        blocks_expected=len(blocks),
        absorb=absorb,
    )
    if batch.state is not BatchState.ABSORBED and batch.manifest_sha256 != sha256:
        _put_back(stream, ledger, folder, batch)
    return batch


def _put_back(stream: Stream, ledger: Ledger, folder: LogStorage, batch: BatchRow) -> None:
    """Write the manifest of an allocation that overtook this one, over which this one's may have been written."""
    manifest = draw_up(stream, batch.batch_time_ms, ledger.batches.blocks_of(stream.name, batch.batch_time_ms))
    if hashlib.sha256(manifest.to_bytes()).hexdigest() == batch.manifest_sha256:
        manifest.write(folder, replace=True)


def draw_up(stream: Stream, batch_time_ms: int, blocks: list[StoredBlock]) -> Manifest:
    """The manifest of these blocks; every input of the stream is in it, also one without blocks."""
    by_input: dict[str, list[ManifestBlock]] = defaultdict(list)
    for block in blocks:
        info = block.info
        by_input[info.receiver.input_id].append(
            ManifestBlock(info.handle, info.records, info.payload_bytes, info.ranges)
        )
    ids = [source.id for source in stream.inputs]
    # An input that was taken out of the definition may have left blocks: they stay in the batch, visibly.
    ids += [name for name in by_input if name not in ids]
    return Manifest(
        stream=stream.name,
        batch_time_ms=batch_time_ms,
        interval_ms=stream.batch_interval_ms,
        inputs={name: tuple(by_input[name]) for name in ids},
        folder_url=stream.folder_url,
    )
