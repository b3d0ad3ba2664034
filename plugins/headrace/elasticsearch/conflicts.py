"""A 409 says that the id is there; this finds out by which document, since to take another record's for a repetition of
this one would be to lose it in silence.

=============  =====================================================================================================
repeated       the same document is there
superseded     the index holds a newer version; or a document of another source that had the same version or id where
               ids and versions come from columns (``version_from``, column ids without the batch time)
kept           the id implies the source, the contents are others, and an earlier attempt at the batch, or an earlier
               try of this request of which nobody knows the outcome, may have written them: by another transform, or
               one that gives other values each time, or through an ingest pipeline
foreign        the same, but nobody can have written it for this batch before: it is another record's
=============  =====================================================================================================
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

from headrace.elasticsearch.bulk_bodies import PreparedRows
from headrace.elasticsearch.counts import EXAMPLES, IndexingCounts
from headrace.elasticsearch.options import IndexingOptions
from headrace.elasticsearch.retrying import RetryBudget, request_with_retries
from headrace.elasticsearch.transport import Transport
from headrace.elasticsearch.verdicts import Reason, current_version, refusal

_FETCHED_AT_ONCE = 500


class Conflicts:
    """The conflicts of one request."""

    def __init__(self, transport: Transport, index: str, options: IndexingOptions, counts: IndexingCounts) -> None:
        """Counts into ``counts``."""
        self._transport = transport
        self._index = index
        self._options = options
        self._counts = counts
        # Each line kept, and whether its document may be our own.
        self._undecided: dict[int, bool] = {}

    def take(self, prepared: PreparedRows, line: int, reason: Reason, *, may_be_ours: bool) -> None:
        """Count this line's conflict if the answer says what it is, or keep it for ``settle``.

        ``may_be_ours``: an earlier try of the request may have written, although no answer said so.
        """
        sent, held = prepared.version(line), current_version(reason)
        if sent is not None and held is not None and held != sent:
            self._counts.superseded += 1
        else:
            self._undecided[line] = may_be_ours

    def settle(self, prepared: PreparedRows, retry_budget: RetryBudget) -> None:
        """Fetch the documents that are there, a bounded number at once, and count the conflicts kept."""
        path = f"/{quote(self._index, safe='')}/_mget?filter_path=docs._version,docs.found,docs._source,docs._id"
        for lines in self._portions(prepared):
            body = json.dumps({"ids": [prepared.id(line) for line in lines]}).encode()
            response = request_with_retries(self._transport, retry_budget, "POST", path, body)
            parsed = response.json()
            found = parsed.get("docs") if isinstance(parsed, dict) else None
            if response.status != 200 or not isinstance(found, list) or len(found) != len(lines):
                raise refusal(response.status, Reason(*response.error()), self._index)
            for line, there in zip(lines, found, strict=True):
                self._count(prepared, line, there)
        self._undecided = {}

    def _portions(self, prepared: PreparedRows) -> Iterator[list[int]]:
        portion: list[int] = []
        size = 0
        for line in self._undecided:
            length = prepared.length(line)
            if portion and (len(portion) >= _FETCHED_AT_ONCE or size + length > self._options.bulk_bytes):
                yield portion
                portion, size = [], 0
            portion.append(line)
            size += length
        if portion:
            yield portion

    def _count(self, prepared: PreparedRows, line: int, there: dict[str, Any]) -> None:
        counts, options = self._counts, self._options
        sent, document = prepared.version(line), prepared.document(line)
        if not there.get("found"):
            # A tombstone's version is remembered, its document is not.
            if document is None:
                counts.repeated += 1
            else:
                counts.superseded += 1
        elif sent is not None and there.get("_version") != sent:
            counts.superseded += 1
        elif document is not None and _is_same(document, there):
            counts.repeated += 1
        elif not options.ids_imply_source:
            counts.superseded += 1
        elif options.written_before or self._undecided[line]:
            counts.kept += 1
        else:
            counts.foreign += 1
            if len(counts.foreign_ids) < EXAMPLES:
                counts.foreign_ids.append(prepared.id(line))


def _is_same(document: bytes, there: dict[str, Any]) -> bool:
    if "_source" not in there:
        # The index does not keep it.
        return True
    try:
        return bool(json.loads(document) == there["_source"])
    except ValueError:
        return False
