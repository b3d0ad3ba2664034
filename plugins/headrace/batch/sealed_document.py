"""How manifests and checkpoints stand on disk: a JSON object in a line, then a line with its CRC32C.

``crc32c:`` and eight hex digits over the first line. A file that was cut, flipped or overwritten shows it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import google_crc32c


class DocumentDamagedError(ValueError):
    """The checksum does not match."""


def seal(document: Mapping[str, Any]) -> bytes:
    """The document's bytes with their checksum; the same document gives the same bytes."""
    body = json.dumps(document, separators=(",", ":")).encode()
    return body + b"\n" + _checksum(body)


def unseal(data: bytes) -> dict[str, Any]:
    """Read what `seal` wrote.

    Raises:
        DocumentDamagedError: it is not what was written.
    """
    body, _, checksum = data.partition(b"\n")
    if checksum != _checksum(body):
        raise DocumentDamagedError("its checksum does not match")
    try:
        document = json.loads(body)
    except (ValueError, RecursionError):
        document = None
    if not isinstance(document, dict):
        raise DocumentDamagedError("it holds no JSON object")
    return document


def _checksum(body: bytes) -> bytes:
    return b"crc32c:%08x\n" % google_crc32c.value(body)
