"""Replays dead letters: indexes them again after the mapping or the transform was corrected.

A replay never overwrites an existing id or a newer version, whatever the output's write method is: a letter's document
is older than everything indexed after it. So a replay can be stopped and repeated at any time. An indexed letter is
marked as replayed. A letter that is refused again gets the new reason and is otherwise unchanged. A letter that a batch
rewrote meanwhile is not changed.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Protocol

import pyarrow as pa

from headrace.clock import Clock
from headrace.elasticsearch import columns
from headrace.elasticsearch.bulk_bodies import prepare_rows
from headrace.elasticsearch.bulk_sender import BulkSender
from headrace.elasticsearch.collisions import CollisionCheck
from headrace.elasticsearch.counts import IndexingCounts
from headrace.elasticsearch.dead_letter_index import PAGE, DeadLetterIndex, StoredLetter
from headrace.elasticsearch.document_ids import Identities, identify
from headrace.elasticsearch.options import IndexingOptions, WriteMethod
from headrace.elasticsearch.transport import Transport
from headrace.elasticsearch.verdicts import Reason


@dataclass(frozen=True, slots=True)
class LetterRows:
    """The documents of some letters, in the shape of ``columns``.

    Letters are identified by their index in ``letters``. ``owners`` has the letter of each row; a letter may have
    several rows, or none if the transform drops its record. ``identities``: the rows' ids and versions, if they are not
    computed from the columns. ``rejected``: the letters that could not be made rows. ``same_record`` maps a letter to
    an earlier one of the same record; the outcome of that letter's rows applies to both.
    """

    letters: Sequence[StoredLetter]
    rows: pa.RecordBatch
    owners: Sequence[int]
    identities: Identities | None = None
    rejected: dict[int, Reason] = field(default_factory=dict)
    same_record: dict[int, int] = field(default_factory=dict)


class LetterReader(Protocol):
    """Turns dead letters into documents."""

    def cannot(self, letter: StoredLetter) -> str | None:
        """The reason, in readable text, why this letter cannot become a document; None if it can."""
        ...

    def read(self, letters: Sequence[StoredLetter]) -> Iterable[LetterRows]:
        """The documents of these letters, in groups. Each letter is in exactly one group."""
        ...


@dataclass(slots=True)
class ReplayCounts:
    """The outcomes of a replay, for letters and for the documents made from them."""

    letters: int = 0
    replayed: int = 0
    """Letters marked as replayed: all documents of the record are in the index, in this version or a newer one."""
    without_documents: int = 0
    """Replayed letters for which the transform made no document."""
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
        whole = ("letters", "replayed", "without_documents", "refused", "written_anew", "left")
        numbers = {name: getattr(self, name) for name in whole}
        names = ("created", "updated", "repeated", "kept", "superseded", "deleted", "ignored_tombstones")
        documents = {name: getattr(self.documents, name) for name in names}
        reasons = {"refused_because": dict(self.refused_because), "left_because": dict(self.left_because)}
        return {**numbers, "documents": documents, **reasons}


class AsTheyWere:
    """Reads letters as the documents that were rejected: for a cause that was corrected in Elasticsearch."""

    def cannot(self, letter: StoredLetter) -> str | None:
        """The reason why not: the letter has no document, or no id for it. None if it can be replayed."""
        if letter.document is None:
            return "it holds no document: it was rejected by a decoder or the transform, or is too large to be kept"
        if letter.fields.get("document_id") is None:
            return "its document has no id"
        return None

    def read(self, letters: Sequence[StoredLetter]) -> Iterator[LetterRows]:
        """One row for each letter; letters with and without a version are in separate groups."""
        versions = [letter.fields.get("version") for letter in letters]
        for versioned in (False, True):
            places = [place for place, version in enumerate(versions) if (version is not None) is versioned]
            if not places:
                continue
            chosen = [letters[place] for place in places]
            documents = pa.array([letter.document for letter in chosen], pa.large_binary())
            ids = pa.array([str(letter.fields["document_id"]) for letter in chosen], pa.large_string())
            numbers = pa.array([versions[place] for place in places], pa.int64()) if versioned else None
            rows = pa.record_batch({columns.DOCUMENT: documents})
            yield LetterRows(chosen, rows, range(len(chosen)), Identities(ids, numbers, {}))


class DeadLetterReplay:
    """Indexes the letters of one output again. ``options`` are the output's; they name the stream."""

    def __init__(
        self,
        transport: Transport,
        options: IndexingOptions,
        letters: DeadLetterIndex,
        reader: LetterReader,
        *,
        clock: Clock,
    ) -> None:
        self._letters = letters
        self._reader = reader
        self._clock = clock
        # model_copy does not validate: "create" is intended here even where ids recur and the options refuse it. An
        # existing document comes from an earlier replay, or from the batch that was run again.
        self._options = options.model_copy(update={"write_method": WriteMethod.CREATE, "written_before": True})
        self._sender = BulkSender(transport, options.index, self._options, clock=clock, cancelled=threading.Event())

    def cannot(self, letter: StoredLetter) -> str | None:
        """The reason, in readable text, why this letter is not tried; None if it can be replayed."""
        index = letter.fields.get("index")
        if index != self._options.index:
            return f"it was to be in index {index!r}: name that with --index"
        return self._reader.cannot(letter)

    def replay(self, letters: Iterable[StoredLetter]) -> ReplayCounts:
        """Index the letters and record the outcome in each.

        Raises:
            ElasticsearchRefusedError: the index or the credentials, not a document, are at fault.
            ElasticsearchUnavailableError: no progress for ``max_retry_seconds``; repeat the replay later.
            CollidingIdsError: the transform makes several rows of a record, and the output has no id rule for them.
        """
        counts = ReplayCounts()
        coming = iter(letters)
        while some := list(islice(coming, PAGE)):
            if not counts.letters:
                self._letters.prepare_notes()
            counts.letters += len(some)
            able = []
            for letter in some:
                why = self.cannot(letter)
                if why is None:
                    able.append(letter)
                else:
                    counts.left += 1
                    counts.left_because[why] += 1
            for group in self._reader.read(able) if able else ():
                self._note(group, self._index(group, counts), counts)
        return counts

    def _index(self, group: LetterRows, counts: ReplayCounts) -> dict[int, Reason]:
        """Send the rows. Returns the letters, by index, that have a refused row."""
        refused = dict(group.rejected)
        if not group.rows.num_rows:
            return refused
        identities = group.identities
        if identities is None:
            identities = identify(group.rows, self._options)
            CollisionCheck(self._options, 0).take(group.rows, identities)
        preparation = prepare_rows(group.rows, self._options, identities=identities)
        counts.documents.ignored_tombstones += preparation.ignored_tombstones
        for row, reason in sorted(preparation.rejected.items()):
            refused.setdefault(group.owners[row], reason)
        prepared = preparation.prepared
        if prepared is None:
            return refused
        for lines in prepared.requests(self._options):
            sent = self._sender.send(prepared, lines)
            counts.documents.add(sent.counts)
            for line, reason in sent.rejected:
                refused.setdefault(group.owners[prepared.row(line)], reason)
        return refused

    def _note(self, group: LetterRows, refused: dict[int, Reason], counts: ReplayCounts) -> None:
        now_ms = self._clock.now_ms()
        notes: list[tuple[StoredLetter, dict[str, Any]]] = []
        owners = [group.same_record.get(place, place) for place in range(len(group.letters))]
        for owner, letter in zip(owners, group.letters, strict=True):
            reason = refused.get(owner)
            if reason is None:
                notes.append((letter, {"replayed_at": now_ms}))
            else:
                notes.append((letter, {"reason": {"type": reason.type, "text": reason.text}}))
        anew = {letter.id for letter in self._letters.note(notes)}
        counts.written_anew += len(anew)
        for owner, letter in zip(owners, group.letters, strict=True):
            if letter.id in anew:
                continue
            if owner in refused:
                counts.refused += 1
                counts.refused_because[refused[owner].type] += 1
            else:
                counts.replayed += 1
                counts.without_documents += owner not in group.owners
