"""Replays dead letters: indexes their documents again after the index was corrected, for example its mapping.

A replay never overwrites an existing id or a newer version, whatever the output's write method is: a letter's document
is older than everything indexed after it. So a replay can be stopped and repeated at any time. An indexed letter is
marked as replayed. A letter that is refused again gets the new reason and is otherwise unchanged. A letter that a batch
rewrote meanwhile is not changed.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import pyarrow as pa

from headrace.clock import Clock
from headrace.elasticsearch import columns
from headrace.elasticsearch.bulk_bodies import PreparedRows, prepare_rows
from headrace.elasticsearch.bulk_sender import BulkSender
from headrace.elasticsearch.counts import IndexingCounts
from headrace.elasticsearch.dead_letter_index import PAGE, DeadLetterIndex, StoredLetter
from headrace.elasticsearch.document_ids import Identities
from headrace.elasticsearch.options import IndexingOptions, WriteMethod
from headrace.elasticsearch.transport import Transport
from headrace.elasticsearch.verdicts import Reason


@dataclass(slots=True)
class ReplayCounts:
    """The outcomes of a replay, for letters and for their documents."""

    letters: int = 0
    replayed: int = 0
    """Letters marked as replayed: the document is in the index, in this version or a newer one."""
    refused: int = 0
    """Letters refused again; each now has the reason of this refusal."""
    written_anew: int = 0
    """Letters that a batch rewrote meanwhile, so they were not updated."""
    left: int = 0
    """Letters that were not tried, for the reasons in ``left_because``."""
    documents: IndexingCounts = field(default_factory=IndexingCounts)
    refused_because: Counter[str] = field(default_factory=Counter)
    left_because: Counter[str] = field(default_factory=Counter)

    def to_dict(self) -> dict[str, Any]:
        """The counts as JSON fields."""
        numbers = {name: getattr(self, name) for name in ("letters", "replayed", "refused", "written_anew", "left")}
        names = ("created", "updated", "repeated", "kept", "uncompared", "superseded", "deleted")
        documents = {name: getattr(self.documents, name) for name in (*names, "ignored_tombstones", "dropped")}
        reasons = {"refused_because": dict(self.refused_because), "left_because": dict(self.left_because)}
        return {**numbers, "documents": documents, **reasons}


class DeadLetterReplay:
    """Indexes the letters of one output again. ``options`` are the output's; they name the stream."""

    def __init__(
        self, transport: Transport, options: IndexingOptions, letters: DeadLetterIndex, *, clock: Clock
    ) -> None:
        self._letters = letters
        self._clock = clock
        # "create" is intended here even where ids recur. An existing document comes from an earlier replay, or from the
        # batch that was run again.
        self._options = replace(options, write_method=WriteMethod.CREATE, written_before=True)
        self._sender = BulkSender(transport, options.index, self._options, clock=clock, cancelled=threading.Event())

    def cannot(self, letter: StoredLetter) -> str | None:
        """The reason, in readable text, why this letter is not tried; None if it can be replayed."""
        index = letter.fields.get("index")
        if index != self._options.index:
            return f"its document belongs in index {index!r}: give that index with --index"
        if letter.document is None:
            return "it holds no document: it was rejected by a decoder or the transform, or is too large to be kept"
        if letter.fields.get("document_id") is None:
            return "its document has no id"
        return None

    def replay(self, letters: Iterable[StoredLetter]) -> ReplayCounts:
        """Index the letters and record the outcome in each.

        Raises:
            ElasticsearchRefusedError: the index or the credentials, not a document, are at fault.
            ElasticsearchUnavailableError: no progress for ``max_retry_seconds``; repeat the replay later.
        """
        counts = ReplayCounts()
        remaining = iter(letters)
        while page := list(islice(remaining, PAGE)):
            if not counts.letters:
                self._letters.prepare_notes()
            counts.letters += len(page)
            able = []
            for letter in page:
                why = self.cannot(letter)
                if why is None:
                    able.append(letter)
                else:
                    counts.left += 1
                    counts.left_because[why] += 1
            for group in _by_versioning(able):
                self._note(group, self._index(group, counts), counts)
        return counts

    def _index(self, letters: Sequence[StoredLetter], counts: ReplayCounts) -> dict[int, Reason]:
        """Send the documents. Returns the reasons of the refused letters, by their index."""
        rows, identities = _rows(letters)
        preparation = prepare_rows(rows, self._options, identities=identities)
        counts.documents.ignored_tombstones += preparation.ignored_tombstones
        refused = dict(preparation.rejected)
        if preparation.prepared is not None:
            refused |= self._send(preparation.prepared, counts)
        return refused

    def _send(self, prepared: PreparedRows, counts: ReplayCounts) -> dict[int, Reason]:
        refused: dict[int, Reason] = {}
        for lines in prepared.requests(self._options):
            sent = self._sender.send(prepared, lines)
            counts.documents.add(sent.counts)
            refused |= {prepared.row(line): reason for line, reason in sent.refused}
        return refused

    def _note(self, letters: Sequence[StoredLetter], refused: dict[int, Reason], counts: ReplayCounts) -> None:
        now_ms = self._clock.now_ms()
        notes: list[tuple[StoredLetter, dict[str, Any]]] = []
        for number, letter in enumerate(letters):
            reason = refused.get(number)
            if reason is None:
                notes.append((letter, {"replayed_at": now_ms}))
            else:
                notes.append((letter, {"reason": {"type": reason.type, "text": reason.text}}))
        anew = {letter.id for letter in self._letters.note(notes)}
        counts.written_anew += len(anew)
        for number, letter in enumerate(letters):
            if letter.id in anew:
                continue
            if number in refused:
                counts.refused += 1
                counts.refused_because[refused[number].type] += 1
            else:
                counts.replayed += 1


def _by_versioning(letters: Sequence[StoredLetter]) -> Iterator[list[StoredLetter]]:
    """The letters with and those without a version: the documents of one request either have versions or not."""
    for versioned in (False, True):
        group = [letter for letter in letters if (letter.fields.get("version") is not None) is versioned]
        if group:
            yield group


def _rows(letters: Sequence[StoredLetter]) -> tuple[pa.RecordBatch, Identities]:
    """One row for each letter, with the letters' own ids and versions."""
    documents = pa.array([letter.document for letter in letters], pa.large_binary())
    ids = pa.array([str(letter.fields["document_id"]) for letter in letters], pa.large_string())
    versions = [letter.fields.get("version") for letter in letters]
    numbers = None if versions[0] is None else pa.array(versions, pa.int64())
    return pa.record_batch({columns.DOCUMENT: documents}), Identities(ids, numbers, {})
