"""Resolves 409 conflicts: finds out which document the index holds under the id.

A 409 only says that the id exists. Counting another record's document as a repetition would lose this record silently.

=============  =====================================================================================================
repeated       the index holds the same document
superseded     the index holds a newer version; or a document of another source with the same version or id, where
               ids and versions come from columns (``version_from``, column ids without the batch time)
kept           the id implies the source, the contents differ, and this batch may have written the document before:
               in an earlier attempt, or in an earlier try of this request with an unknown outcome. The contents differ
               because the transform was another one, is not deterministic, or an ingest pipeline changed them
uncompared     the index holds a document, but it cannot be read, or its mapping does not keep what was sent: a mapping
               may leave fields out of ``_source``, or all of it (`StoredSource`)
foreign        the contents differ, and this batch cannot have written it before: it is another record's document
=============  =====================================================================================================

One document that cannot be read must not keep the others from being settled, nor its batch from ending: an answer that
fails as a whole is asked for in halves.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import quote

from headrace.elasticsearch.bulk_bodies import PreparedRows
from headrace.elasticsearch.counts import EXAMPLES, HeldVersion, IndexingCounts
from headrace.elasticsearch.error_kinds import ErrorKind, is_size
from headrace.elasticsearch.open_target import OpenTarget
from headrace.elasticsearch.options import IndexingOptions
from headrace.elasticsearch.retry_budget import RETRIED_STATUSES, RetryBudget
from headrace.elasticsearch.stored_source import UNPARSED
from headrace.elasticsearch.target import Target
from headrace.elasticsearch.throttle import is_throttled
from headrace.elasticsearch.transport import NoAnswerError, Response, Transport, error_of
from headrace.elasticsearch.verdicts import Reason, current_version, kind_of_unread, refusal

_FETCHED_AT_ONCE = 500
_SERVER_ERROR = 500
_ANSWER = b'{"docs":['
# Before a document in an answer. In an id these quotes would be escaped.
_SOURCE = b',"_source":'


class VersionConflicts:
    """The conflicts of one request."""

    def __init__(
        self,
        transport: Transport,
        options: IndexingOptions,
        counts: IndexingCounts,
        opened: Callable[[Target], OpenTarget],
    ) -> None:
        """``counts`` is updated by each conflict. ``opened`` gives what is known of a line's target."""
        self._transport = transport
        self._options = options
        self._counts = counts
        self._opened = opened
        # The lines to settle, each with whether an earlier try of this request may have written its document.
        self._undecided: dict[int, bool] = {}
        self._gone: list[int] = []
        self._sent_again: set[int] = set()

    def take(self, prepared: PreparedRows, line: int, reason: Reason, *, may_be_ours: bool) -> None:
        """Count this line's conflict if the answer alone decides it; otherwise keep it for ``settle``.

        ``may_be_ours``: an earlier try of the request may have written the document, although no answer confirmed it.
        """
        sent, held = prepared.version(line), current_version(reason)
        if sent is not None and held is not None and held != sent:
            self._supersede(prepared, line, held)
        else:
            self._undecided[line] = may_be_ours

    def settle(self, prepared: PreparedRows, retry_budget: RetryBudget) -> list[int]:
        """Fetch the existing documents, a bounded number at a time, and count the conflicts that ``take`` kept.

        Returns the lines to send again: their documents were deleted after the conflict.
        """
        pending = deque(self._portions(prepared))
        while pending:
            lines = pending.popleft()
            documents = self._fetch(prepared, retry_budget, lines)
            if documents is None:
                half = len(lines) // 2
                pending.extendleft((lines[half:], lines[:half]))
                continue
            later = [
                line
                for line, there in zip(lines, documents, strict=True)
                if not self._settled(prepared, line, there, retry_budget)
            ]
            if len(later) < len(lines):
                retry_budget.progressed()
            if later:
                error = Reason(*error_of(next(there for there in documents if "found" not in there), "no reason"))
                retry_budget.wait(f"{len(later)} of {len(lines)} documents cannot be fetched: {error}")
                pending.appendleft(later)
        self._undecided = {}
        gone, self._gone = self._gone, []
        self._sent_again.update(gone)
        return gone

    def _fetch(
        self, prepared: PreparedRows, retry_budget: RetryBudget, lines: list[int]
    ) -> list[dict[str, Any]] | None:
        """Elasticsearch's answers about these lines' documents; None if one of them makes the whole answer fail."""
        # No filter_path: with it Elasticsearch would write the documents again instead of copying them, and fail for
        # one that is nested too deep.
        index = prepared.target(lines[0]).name
        path = f"/{quote(index, safe='')}/_mget"
        body = json.dumps({"ids": [prepared.id(line) for line in lines]}).encode()
        while (response := self._answer(path, body, retry_budget)) is None:
            pass
        parsed = response.json()
        documents = parsed.get("docs") if isinstance(parsed, dict) else None
        if response.status == 200 and isinstance(documents, list):
            if _ids_of(documents) == [prepared.id(line) for line in lines]:
                return documents
            raise refusal(
                None,
                Reason("wrong_answer", f"an answer about {len(documents)} documents, not about those asked for"),
                index,
                f"to show {len(lines)} documents",
            )
        if response.status == _SERVER_ERROR or _by_size(response) or response.body.startswith(_ANSWER):
            if len(lines) > 1:
                return None
            return [_unread(response)]
        raise refusal(response.status, Reason(*response.error()), index)

    def _answer(self, path: str, body: bytes, retry_budget: RetryBudget) -> Response | None:
        try:
            response = self._transport.request("POST", path, body)
        except NoAnswerError as error:
            retry_budget.wait(str(error))
            return None
        if response.status not in RETRIED_STATUSES:
            return response
        kind, reason = response.error()
        if response.status == _SERVER_ERROR and kind_of_unread(kind) is not ErrorKind.PASSING:
            return response
        if _by_size(response) and len(json.loads(body)["ids"]) > 1:
            return response
        if is_throttled(response.status, kind):
            retry_budget.wait_throttled(f"{response.status} {kind} {reason}", at_least=response.retry_after_seconds)
        else:
            retry_budget.wait(f"{response.status} {kind} {reason}")
        return None

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

    def _settled(self, prepared: PreparedRows, line: int, there: dict[str, Any], retry_budget: RetryBudget) -> bool:
        """Count the line's conflict. False: its document is to be asked for again."""
        if "found" in there:
            self._count(prepared, line, there, retry_budget)
            return True
        reason = Reason(*error_of(there, "no reason"))
        kind = kind_of_unread(reason.type, self._options.error_kinds)
        if kind is ErrorKind.PASSING:
            return False
        if kind is not ErrorKind.DOCUMENT:
            # No statement about the document: it may be another record's, and this record in no index.
            index = prepared.target(line).name
            raise refusal(None, reason, index, f"to show {prepared.describe(line)}, which exists,")
        self._counts.uncompared += 1
        return True

    def _count(self, prepared: PreparedRows, line: int, there: dict[str, Any], retry_budget: RetryBudget) -> None:
        counts, options = self._counts, self._options
        sent, document = prepared.version(line), prepared.document(line)
        if not there["found"]:
            self._count_absent(line, versioned=sent is not None, deletes=prepared.deletes(line))
            return
        if sent is not None and there.get("_version") != sent:
            self._supersede(prepared, line, there.get("_version"))
            return
        stored = self._opened(prepared.target(line)).stored
        same = document is not None and stored.same(document, there, retry_budget)
        if same:
            counts.repeated += 1
        elif same is None:
            counts.uncompared += 1
        elif not options.ids_imply_source:
            counts.superseded += 1
        elif options.written_before or self._undecided[line]:
            counts.kept += 1
        else:
            counts.foreign += 1
            if len(counts.foreign_ids) < EXAMPLES:
                counts.foreign_ids.append(prepared.id(line))

    def _supersede(self, prepared: PreparedRows, line: int, held: int | None) -> None:
        """Count the line. Of the versions that the index holds, the highest shows whether they count the same as ours
        (``headrace.batch.held_versions``)."""
        self._counts.superseded += 1
        place = prepared.version_place(line, self._options)
        if held is not None and place is not None:
            self._counts.meets(place, HeldVersion(held, prepared.id(line)))

    def _count_absent(self, line: int, *, versioned: bool, deletes: bool) -> None:
        if deletes:
            self._counts.repeated += 1
        elif versioned:
            # Elasticsearch remembers a deleted document's version, not the document.
            self._counts.superseded += 1
        elif line in self._sent_again:
            # It is in another shard, by the routing that an ingest pipeline has set.
            self._counts.uncompared += 1
        else:
            self._gone.append(line)


def _ids_of(documents: list[Any]) -> list[Any]:
    return [there.get("_id") if isinstance(there, dict) else None for there in documents]


def _by_size(response: Response) -> bool:
    """Whether fewer documents may be answered."""
    return response.status != 200 and is_size(*response.error())


def _unread(response: Response) -> dict[str, Any]:
    """The entry of an answer that cannot be parsed, about one document: with the bytes from its document on."""
    head, separator, source = response.body.partition(_SOURCE)
    if response.status == _SERVER_ERROR or not separator:
        kind, reason = response.error()
        return {"error": {"type": kind, "reason": reason}}
    return {**json.loads(head + b"}]}")["docs"][0], UNPARSED: source}
