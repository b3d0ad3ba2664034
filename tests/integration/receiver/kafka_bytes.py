"""Kafka's record batches as bytes: to send what no client library would, and to damage what a broker has on disk."""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

Headers = Sequence[tuple[bytes, bytes]]

# Produce, version 7: the first with record batches of this form that every broker of today takes.
_PRODUCE, _VERSION = 0, 7


def _table() -> list[int]:
    table = []
    for byte in range(256):
        value = byte
        for _ in range(8):
            value = (value >> 1) ^ (0x82F63B78 if value & 1 else 0)
        table.append(value)
    return table


_CRC32C = _table()


def crc32c(data: bytes) -> int:
    """The checksum over a batch from its attributes on."""
    value = 0xFFFFFFFF
    for byte in data:
        value = _CRC32C[(value ^ byte) & 255] ^ (value >> 8)
    return value ^ 0xFFFFFFFF


def _varint(number: int) -> bytes:
    rest = ((number << 1) ^ (number >> 63)) & ((1 << 64) - 1)
    encoded = bytearray()
    while rest > 127:
        encoded.append(rest & 127 | 128)
        rest >>= 7
    encoded.append(rest)
    return bytes(encoded)


def _sized(value: bytes) -> bytes:
    return _varint(len(value)) + value


def record_batch(values: Sequence[tuple[bytes, Headers]], timestamp_ms: int = 1_700_000_000_000) -> bytes:
    """A batch of records without keys, whose headers' names may be any bytes."""
    records = b""
    for number, (value, headers) in enumerate(values):
        body = b"\0" + _varint(0) + _varint(number) + _varint(-1) + _sized(value) + _varint(len(headers))
        records += _sized(body + b"".join(_sized(name) + _sized(content) for name, content in headers))
    count = len(values)
    checked = struct.pack(">hiqqqhii", 0, count - 1, timestamp_ms, timestamp_ms, -1, -1, -1, count) + records
    return struct.pack(">qiibI", 0, len(checked) + 9, -1, 2, crc32c(checked)) + checked


# Of a partition that has just been made: its leader does not know of it yet.
_SOON = {3, 5, 6}


def send(bootstrap: str, topic: str, partition: int, batch: bytes) -> int:
    """Produce the batch; its first offset."""
    until = time.monotonic() + 60
    while True:
        error, offset = _produce(bootstrap, topic, partition, batch)
        if error not in _SOON or time.monotonic() > until:
            assert error == 0, f"Kafka refused the batch: {error}"
            return offset
        time.sleep(0.1)


def _produce(bootstrap: str, topic: str, partition: int, batch: bytes) -> tuple[int, int]:
    """The broker's error code and the first offset."""

    def text(value: str) -> bytes:
        return struct.pack(">h", len(value)) + value.encode()

    head = struct.pack(">hhi", _PRODUCE, _VERSION, 1) + text("bytes") + struct.pack(">hhi", -1, 1, 30_000)
    request = head + struct.pack(">i", 1) + text(topic) + struct.pack(">iii", 1, partition, len(batch)) + batch
    host, port = bootstrap.split(":")
    with socket.create_connection((host, int(port)), timeout=30) as connection, connection.makefile("rb") as answers:
        connection.sendall(struct.pack(">i", len(request)) + request)
        (length,) = struct.unpack(">i", answers.read(4))
        # The correlation, one topic, its name, one partition.
        answer = answers.read(length)[4 + 4 + 2 + len(topic) + 4 :]
    _, error, offset = struct.unpack(">ihq", answer[:14])
    return int(error), int(offset)


@dataclass(frozen=True)
class BatchOnDisk:
    """A batch in a segment's file, at ``[begin, end)`` of it."""

    base_offset: int
    begin: int
    end: int


def batches_of(segment: Path) -> list[BatchOnDisk]:
    """The batches in a segment's file, in order."""
    data, begin, found = segment.read_bytes(), 0, []
    while begin + 12 <= len(data):
        base_offset, length = struct.unpack(">qi", data[begin : begin + 12])
        if length <= 0:
            break
        found.append(BatchOnDisk(base_offset, begin, begin + 12 + length))
        begin += 12 + length
    return found


def cut_off(log: Path, offset: int) -> None:
    """Cut a partition's only segment off before the batch at ``offset``, as an election of a broker that lagged behind
    does it: the broker must be down."""
    (segment,) = log.glob("*.log")
    (batch,) = [each for each in batches_of(segment) if each.base_offset == offset]
    segment.write_bytes(segment.read_bytes()[: batch.begin])
    for stale in (*log.glob("*index"), *log.glob("*.snapshot")):
        stale.unlink()
