"""Allocation: a batch time gets its blocks, once and for good (rules 4 and 5 of the design).

Sealing comes first and commits by itself: from then on no block can join the batch time, so its set of blocks is
final and can be written down without holding the ledger's lock during the disk's sync. The transaction that
follows counts the blocks again. A crash in between leaves a sealed time without a batch, and the next run of the
task draws up the same manifest.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from headrace.batching.manifest import Manifest, ManifestBlock
from headrace.ledger import Ledger
from headrace.ledger.rows import BatchInputRow, BatchRow, StoredBlock
from headrace.stream import Stream
from headrace.wal.errors import StoredFileExistsError
from headrace.wal.storage import LogStorage


@dataclass(frozen=True)
class Allocation:
    """An allocated batch. ``fresh``: this call allocated it; else it was found as it is."""

    batch: BatchRow
    inputs: tuple[BatchInputRow, ...]
    fresh: bool


def allocate(stream: Stream, ledger: Ledger, storage: LogStorage, batch_time_ms: int) -> Allocation:
    """Allocate the batch time's blocks, or give back the allocation that there is.

    Args:
        storage: the stream's storage at its root (``open_storage(stream.storage.url)``).
        batch_time_ms: the end of an interval, in milliseconds since the epoch.

    Raises:
        BatchTimeError: the time is no interval end, or has not come.
        StorageError: the manifest cannot be written; nothing is allocated then.
    """
    existing = ledger.batches.find(stream.name, batch_time_ms)
    batch = existing or _allocate(stream, ledger, storage, batch_time_ms)
    inputs = tuple(ledger.batches.inputs(stream.name, batch_time_ms))
    return Allocation(batch=batch, inputs=inputs, fresh=existing is None)


def _allocate(stream: Stream, ledger: Ledger, storage: LogStorage, batch_time_ms: int) -> BatchRow:
    ledger.batches.seal(stream.name, batch_time_ms)
    blocks = ledger.batches.blocks_of(stream.name, batch_time_ms)
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
    return ledger.batches.allocate(
        stream.name,
        batch_time_ms,
        manifest_uri=manifest.uri,
        manifest_sha256=sha256,
        blocks_expected=len(blocks),
    )


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
