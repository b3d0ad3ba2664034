"""Finds the blocks of a batch that a power failure took from a log that is not synced (`Stream.delivery`).

A vanished block is in the ledger, and its bytes never reached the disk. A process that is killed loses none: the kernel
has its bytes. So only segments of receivers that have ended are checked, by reading their blocks of the batch.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace

from headrace.batch.manifest import Manifest, ManifestBlock
from headrace.clock import time_text
from headrace.ledger.batch_tables import BatchOrigin
from headrace.stream_context import StreamContext
from headrace.wal.errors import DamagedFrameError
from headrace.wal.frame import SegmentName
from headrace.wal.reader import read_block
from headrace.wal.storage import LogStorage, open_storage

logger = logging.getLogger(__name__)

# Of a receiver: its input, its index, and the epoch of its instance.
_Instance = tuple[str, int, int]


def without_vanished(context: StreamContext, origins: Mapping[int, BatchOrigin]) -> dict[int, BatchOrigin]:
    """The origins of batches, by batch time, without blocks that have vanished.

    With ``delivery="at_least_once"``, a batch that lacks a block is read from Kafka. With ``"at_most_once"`` its other
    blocks are read, and the offsets of the vanished ones are recorded as gaps.

    Raises:
        ManifestError: a manifest is missing or damaged, or is not the recorded one.
        WalError: the log cannot be read.
    """
    if context.stream.delivery == "exactly_once":
        return dict(origins)
    now_ms = context.ledger.now_ms()
    live = {
        (row.receiver_id.input_id, row.receiver_id.index, row.epoch)
        for row in context.ledger.receivers.all(context.name)
        if row.alive(now_ms)
    }
    return {time_ms: _checked(context, origin, live) for time_ms, origin in origins.items()}


def _checked(context: StreamContext, origin: BatchOrigin, live: set[_Instance]) -> BatchOrigin:
    if origin.source != "log":
        return origin
    manifest = Manifest.load(origin.manifest_uri, sha256=origin.manifest_sha256)
    log = open_storage(manifest.log_root)
    vanished = [
        (input_id, block)
        for input_id, blocks in manifest.inputs.items()
        for block in blocks
        if _instance_of(block) not in live and _is_vanished(log, block)
    ]
    if not vanished:
        return origin
    delivery, records = context.stream.delivery, sum(block.records for _, block in vanished)
    logger.warning(
        "Batch %s: the log has lost %d blocks of %d records before they reached the disk (delivery %s).",
        time_text(origin.batch_time_ms), len(vanished), records, delivery,
    )  # fmt: skip
    if delivery == "at_least_once":
        return replace(origin, source="kafka")
    lost = [(input_id, offset_range) for input_id, block in vanished for offset_range in block.ranges]
    context.ledger.gaps.add_vanished(context.name, origin.batch_time_ms, lost)
    return replace(origin, vanished=frozenset(block.handle for _, block in vanished))


def _instance_of(block: ManifestBlock) -> _Instance | None:
    name = SegmentName.parse(block.handle.segment)
    return None if name is None else (name.input_id, name.index, name.epoch)


def _is_vanished(log: LogStorage, block: ManifestBlock) -> bool:
    try:
        read_block(log, block.handle)
    except DamagedFrameError:
        return True
    return False
