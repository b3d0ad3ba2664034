"""A 409 says that the id is there; this tells whether by this very record (repeated) or by another (superseded).

A record's id is its own, and so is a key's offset as version: nothing to ask. But two rows may have the same named
columns, or the same ``version_from``; then the document that is there is fetched and compared, since to take another
record's document for a repetition of this one would be to lose it in silence.
"""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import quote

from headrace.indexing.bulk_bodies import PreparedRows
from headrace.indexing.counts import IndexingCounts
from headrace.indexing.options import DocumentIdKind, IndexingOptions
from headrace.indexing.retrying import Patience, request_patiently
from headrace.indexing.transport import Transport
from headrace.indexing.verdicts import Reason, current_version, refusal

_FETCHED_AT_ONCE = 500


class Conflicts:
    """The conflicts of one request."""

    def __init__(self, transport: Transport, index: str, options: IndexingOptions, counts: IndexingCounts) -> None:
        """Counts into ``counts``."""
        self._transport = transport
        self._index = index
        self._counts = counts
        self._ids_tell = options.document_id is DocumentIdKind.RECORD
        self._versions_tell = options.document_id is DocumentIdKind.KEY and options.version_from is None
        self._undecided: list[int] = []

    def take(self, prepared: PreparedRows, line: int, reason: Reason) -> None:
        """Count this line's conflict if the answer tells what it is, or keep it for ``settle``."""
        sent, held = prepared.version(line), current_version(reason)
        if sent is None and self._ids_tell:
            self._counts.repeated += 1
        elif sent is not None and held is not None and held != sent:
            self._counts.superseded += 1
        elif sent is not None and held is not None and self._versions_tell:
            self._counts.repeated += 1
        else:
            self._undecided.append(line)

    def settle(self, prepared: PreparedRows, patience: Patience) -> None:
        """Look at the documents that are there, and count the conflicts kept."""
        path = f"/{quote(self._index, safe='')}/_mget?filter_path=docs._version,docs.found,docs._source,docs._id"
        for first in range(0, len(self._undecided), _FETCHED_AT_ONCE):
            lines = self._undecided[first : first + _FETCHED_AT_ONCE]
            body = json.dumps({"ids": [prepared.id(line) for line in lines]}).encode()
            response = request_patiently(self._transport, patience, "POST", path, body)
            parsed = response.json()
            found = parsed.get("docs") if isinstance(parsed, dict) else None
            if response.status != 200 or not isinstance(found, list) or len(found) != len(lines):
                raise refusal(response.status, Reason(*response.error()), self._index)
            for line, there in zip(lines, found, strict=True):
                if self._is_same(prepared, line, there):
                    self._counts.repeated += 1
                else:
                    self._counts.superseded += 1
        self._undecided = []

    def _is_same(self, prepared: PreparedRows, line: int, there: dict[str, Any]) -> bool:
        sent = prepared.version(line)
        document = prepared.document(line)
        if not there.get("found"):
            # A tombstone's version is remembered, its document is not.
            return document is None
        if document is None or (sent is not None and there.get("_version") != sent):
            return False
        if self._versions_tell or "_source" not in there:
            return True
        try:
            return bool(json.loads(document) == there["_source"])
        except ValueError:
            return False
