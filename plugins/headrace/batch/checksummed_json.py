"""The file format of manifests, checkpoints and history files: one line with a JSON object, one with its CRC32C.

The second line is ``crc32c:`` and eight hex digits, computed over the first line. The checksum detects a truncated,
corrupted or overwritten file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import google_crc32c


class DocumentDamagedError(ValueError):
    """The checksum does not match, or the document is not a JSON object."""


def encode_document(document: Mapping[str, Any]) -> bytes:
    """The document's bytes with their checksum; the same document gives the same bytes."""
    body = json.dumps(document, separators=(",", ":")).encode()
    return body + b"\n" + _checksum(body)


def decode_document(data: bytes) -> dict[str, Any]:
    """Read what `encode_document` wrote.

    Raises:
        DocumentDamagedError: the data is not what was written.
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
