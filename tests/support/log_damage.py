"""Damages a log's files at random, as disks do, and repeatably."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from headrace.wal.frame import MAGIC
from headrace.wal.log_storage import LogStorage

SECTOR_BYTES = 512


@dataclass(frozen=True, slots=True)
class Damage:
    """A description of the damage done to a file."""

    kind: str
    path: str
    reported: str

    def __str__(self) -> str:
        return f"{self.kind} of {self.path}: {self.reported}"


def damage_file(storage: LogStorage, path: str, kind: str, random: Random, *, others: list[str]) -> Damage:
    """Do damage of one ``kind`` (of ``KINDS``) to the file at ``path``; stale content comes from one of ``others``."""
    before = storage.read(path)
    after, reported = KINDS[kind](before, random, lambda: storage.read(random.choice(others or [path])))
    if kind == "delete":
        storage.delete(path)
    else:
        storage.write_atomically(path, after)
    return Damage(kind, path, reported)


Change = Callable[[bytes, Random, Callable[[], bytes]], tuple[bytes, str]]


def _place(data: bytes, random: Random) -> int:
    """A random offset in the file; half of the time, the start of a frame."""
    if random.random() < 0.5:
        starts = [match.start() for match in re.finditer(MAGIC, data)]
        if starts:
            return random.choice(starts)
    return random.randrange(max(1, len(data)))


def _range(data: bytes, random: Random) -> tuple[int, int]:
    """A random offset and a length from there, from one byte to the rest of the file."""
    at = _place(data, random)
    most = max(1, len(data) - at)
    return at, min(most, random.choice((1, 8, 64, SECTOR_BYTES, 4096, random.randint(1, most))))


def _flip(data: bytes, random: Random, _stale: Callable[[], bytes]) -> tuple[bytes, str]:
    changed = bytearray(data)
    bits = [random.randrange(len(data) * 8) for _ in range(random.choice((1, 1, 1, 2, 8)))] if data else []
    for bit in bits:
        changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed), f"bits {bits}"


def _cut(data: bytes, random: Random, _stale: Callable[[], bytes]) -> tuple[bytes, str]:
    length = _place(data, random)
    return data[:length], f"to {length} of {len(data)} bytes"


def _zero(data: bytes, random: Random, _stale: Callable[[], bytes]) -> tuple[bytes, str]:
    at, length = _range(data, random)
    if random.random() < 0.7:
        at -= at % SECTOR_BYTES
        length = min(len(data) - at, SECTOR_BYTES * random.randint(1, 8))
    return data[:at] + bytes(length) + data[at + length :], f"[{at}, {at + length})"


def _garbage(data: bytes, random: Random, _stale: Callable[[], bytes]) -> tuple[bytes, str]:
    at, length = _range(data, random)
    return data[:at] + random.randbytes(length) + data[at + length :], f"[{at}, {at + length})"


def _duplicate(data: bytes, random: Random, _stale: Callable[[], bytes]) -> tuple[bytes, str]:
    """Copy a range to another place, overwriting the bytes there or pushing them back."""
    at, length = _range(data, random)
    to = _place(data, random)
    over = random.choice((0, length))
    return data[:to] + data[at : at + length] + data[to + over :], f"[{at}, {at + length}) to {to}, over {over} bytes"


def _swap(data: bytes, random: Random, _stale: Callable[[], bytes]) -> tuple[bytes, str]:
    """Swap two ranges, which may be adjacent."""
    a, b, c, d = sorted(_place(data, random) for _ in range(4))
    return data[:a] + data[c:d] + data[b:c] + data[a:b] + data[d:], f"[{a}, {b}) and [{c}, {d})"


def _stale(data: bytes, random: Random, stale: Callable[[], bytes]) -> tuple[bytes, str]:
    """Replace a range by another file's bytes at the same offset, as if the disk's old blocks were not overwritten."""
    at, length = _range(data, random)
    old = stale()[at : at + length]
    return data[:at] + old + data[at + len(old) :], f"[{at}, {at + len(old)})"


def _remove(data: bytes, random: Random, _stale: Callable[[], bytes]) -> tuple[bytes, str]:
    """Remove a range, so that all bytes after it move forward."""
    at, length = _range(data, random)
    return data[:at] + data[at + length :], f"[{at}, {at + length})"


def _extend(data: bytes, random: Random, stale: Callable[[], bytes]) -> tuple[bytes, str]:
    """Append bytes: zeros, as in a file that was extended before it was filled, garbage, or another file's bytes."""
    more = random.choice((bytes(random.randint(1, 5000)), random.randbytes(random.randint(1, 600)), stale()))
    return data + more, f"by {len(more)} bytes"


def _replace(data: bytes, _random: Random, stale: Callable[[], bytes]) -> tuple[bytes, str]:
    """Replace the file by another one."""
    other = stale()
    return other, f"of {len(data)} bytes by one of {len(other)}"


def _delete(data: bytes, _random: Random, _stale: Callable[[], bytes]) -> tuple[bytes, str]:
    return b"", f"of {len(data)} bytes"


KINDS: dict[str, Change] = {
    "flip": _flip,
    "cut": _cut,
    "zero": _zero,
    "garbage": _garbage,
    "duplicate": _duplicate,
    "swap": _swap,
    "stale": _stale,
    "remove": _remove,
    "extend": _extend,
    "replace": _replace,
    "delete": _delete,
}
