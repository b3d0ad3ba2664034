"""Distributes a batch's blocks over Spark partitions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headrace.blocks import BlockHandle

# For fewer bytes a second task costs more than it saves: starting a task takes about 10 ms, and half a megabyte of
# compressed records takes Elasticsearch about 0.1 s.
MIN_GROUP_BYTES = 512 * 1024


@dataclass(frozen=True, slots=True)
class ListedBlock:
    """A block in a manifest. ``records`` is their number, ``payload_bytes`` the size as stored."""

    handle: BlockHandle
    records: int
    payload_bytes: int


def group_blocks(
    blocks: Sequence[ListedBlock], groups: int, *, min_group_bytes: int = MIN_GROUP_BYTES
) -> list[tuple[ListedBlock, ...]]:
    """Distribute the blocks over at most ``groups`` groups of about equal bytes.

    Each group has consecutive blocks, so it reads few segments in offset order. Blocks are never split. There are fewer
    groups if they would otherwise be smaller than ``min_group_bytes``.
    """
    if groups < 1:
        raise ValueError(f"blocks need at least one group, got {groups}")
    ordered = sorted(blocks, key=lambda block: block.handle)
    total = sum(block.payload_bytes for block in ordered)
    wanted = max(1, min(groups, len(ordered), total // max(min_group_bytes, 1) or 1))
    result: list[tuple[ListedBlock, ...]] = []
    current: list[ListedBlock] = []
    dealt = 0
    for position, block in enumerate(ordered):
        current.append(block)
        dealt += block.payload_bytes
        remaining = len(ordered) - position - 1
        missing = wanted - len(result) - 1
        # Close the group at its share of the whole, or when just enough blocks remain to fill the other groups.
        if missing and (dealt * wanted >= total * (len(result) + 1) or remaining == missing):
            result.append(tuple(current))
            current = []
    if current:
        result.append(tuple(current))
    return result
