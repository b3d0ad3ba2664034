"""Resolves 409 conflicts: finds out which document the index holds under the id.

A 409 only says that the id exists. Counting another record's document as a repetition would lose this record silently.

=============  =====================================================================================================
repeated       the index holds the same document
superseded     the index holds a newer version; or a document of another source with the same version or id, where
               ids and versions come from columns (``version_from``, column ids without the batch time)
kept           the id implies the source, the contents differ, and this batch may have written the document before:
               in an earlier attempt, or in an earlier try of this request with an unknown outcome. The contents differ
               because the transform was another one, is not deterministic, or an ingest pipeline changed them
foreign        the same, but this batch cannot have written it before: it is another record's document
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
from headrace.elasticsearch.retry_budget import RetryBudget, request_with_retries
from headrace.elasticsearch.transport import Transport
from headrace.elasticsearch.verdicts import Reason, current_version, refusal

_FETCHED_AT_ONCE = 500


class VersionConflicts:
    """The conflicts of one request."""

    def __init__(self, transport: Transport, index: str, options: IndexingOptions, counts: IndexingCounts) -> None:
        """``counts`` is updated by each conflict."""
        self._transport = transport
        self._index = index
        self._options = options
        self._counts = counts
        # The lines to settle, each with whether an earlier try of this request may have written its document.
        self._undecided: dict[int, bool] = {}

    def take(self, prepared: PreparedRows, line: int, reason: Reason, *, may_be_ours: bool) -> None:
        """Count this line's conflict if the answer alone decides it; otherwise keep it for ``settle``.

        ``may_be_ours``: an earlier try of the request may have written the document, although no answer confirmed it.
        """
        sent, held = prepared.version(line), current_version(reason)
        if sent is not None and held is not None and held != sent:
            self._counts.superseded += 1
        else:
            self._undecided[line] = may_be_ours

    def settle(self, prepared: PreparedRows, retry_budget: RetryBudget) -> None:
        """Fetch the existing documents, a bounded number at a time, and count the conflicts that ``take`` kept."""
        for lines in self._portions(prepared):
            self._settle(prepared, retry_budget, lines)
        self._undecided = {}

    def _settle(self, prepared: PreparedRows, retry_budget: RetryBudget, lines: list[int]) -> None:
        fields = "docs._version,docs.found,docs._source,docs._id,docs.error"
        path = f"/{quote(self._index, safe='')}/_mget?filter_path={fields}"
        while lines:
            body = json.dumps({"ids": [prepared.id(line) for line in lines]}).encode()
            response = request_with_retries(self._transport, retry_budget, "POST", path, body)
            parsed = response.json()
            found = parsed.get("docs") if isinstance(parsed, dict) else None
            if response.status != 200 or not isinstance(found, list) or len(found) != len(lines):
                raise refusal(response.status, Reason(*response.error()), self._index)
            # With status 200, since other shards may have answered: a shard that is not ready after a restart. Such an
            # entry does not say that there is no document.
            failed = [line for line, there in zip(lines, found, strict=True) if "found" not in there]
            for line, there in zip(lines, found, strict=True):
                if "found" in there:
                    self._count(prepared, line, there)
            if len(failed) < len(lines):
                retry_budget.progressed()
            if failed:
                error = next(there.get("error") for there in found if "found" not in there)
                why = f"{error.get('type')}: {error.get('reason')}" if isinstance(error, dict) else str(error)
                retry_budget.wait(f"{len(failed)} of {len(lines)} documents cannot be fetched: {why}")
            lines = failed

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
            # Elasticsearch remembers a deleted document's version, not the document.
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
        # The index does not store _source, so the documents cannot be compared.
        return True
    try:
        return bool(json.loads(document) == there["_source"])
    except ValueError:
        return False
