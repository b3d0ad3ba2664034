"""Assigns partitions to receivers: evenly, with as few moves as possible. Pure functions."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TypeVar

P = TypeVar("P")


def assign(partitions: Collection[P], receivers: Collection[int], current: Mapping[P, int]) -> dict[P, int]:
    """Assign each of ``partitions`` to one of the live ``receivers`` (indexes); their counts differ by at most one.

    ``current`` assignments stay as far as evenness allows, so the fewest possible partitions move. Deterministic.
    Without receivers the result is empty.
    """
    if not receivers:
        return {}
    ordered = sorted(partitions)  # type: ignore[type-var]
    held: dict[int, list[P]] = {receiver: [] for receiver in sorted(receivers)}
    for partition in ordered:
        owner = current.get(partition)
        if owner in held:
            held[owner].append(partition)
    least, with_one_more = divmod(len(ordered), len(held))
    # The receivers that hold most keep the larger shares, so the fewest partitions move.
    by_load = sorted(held, key=lambda receiver: (-len(held[receiver]), receiver))
    share = {receiver: least + (rank < with_one_more) for rank, receiver in enumerate(by_load)}
    result = {partition: receiver for receiver in held for partition in held[receiver][: share[receiver]]}
    open_places = [receiver for receiver in sorted(held) for _ in range(share[receiver] - len(held[receiver]))]
    waiting = [partition for partition in ordered if partition not in result]
    result.update(zip(waiting, _interleaved(open_places), strict=True))
    return result


def _interleaved(places: list[int]) -> list[int]:
    """Round robin over the receivers, so that neighbouring partitions of a topic go to different ones."""
    seen: dict[int, int] = {}
    turns = []
    for receiver in places:
        seen[receiver] = seen.get(receiver, 0) + 1
        turns.append((seen[receiver], receiver))
    return [receiver for _, receiver in sorted(turns)]
