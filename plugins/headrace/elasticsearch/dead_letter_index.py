"""Reads dead letters from their index, withdraws obsolete ones, and replays letters, also those of a topic.

A replay indexes their documents again after the index was corrected, for example its mapping. It never overwrites an
existing id or a newer version, whatever the output's write method is: a letter's document is older than everything
indexed after it. So a replay can be stopped and repeated at any time. An indexed letter is marked as replayed. A letter
that is refused again gets the new reason and is otherwise unchanged. A letter that a batch rewrote meanwhile is not
changed.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import json
import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any
from urllib.parse import quote

import numpy as np
import pyarrow as pa

from headrace.clock import Clock
from headrace.elasticsearch import columns
from headrace.elasticsearch.administration import Administration
from headrace.elasticsearch.bulk_bodies import PreparedRows, prepare_rows
from headrace.elasticsearch.bulk_sender import BulkSender
from headrace.elasticsearch.counts import IndexingCounts
from headrace.elasticsearch.dead_letters import MAPPINGS, OriginalRecord
from headrace.elasticsearch.document_ids import Identities
from headrace.elasticsearch.error_kinds import NO_TYPE
from headrace.elasticsearch.errors import DeadLetterMissingError, ElasticsearchRefusedError
from headrace.elasticsearch.open_target import bulk_items
from headrace.elasticsearch.options import IndexingOptions, WriteMethod
from headrace.elasticsearch.target import ConcreteIndex, RowTargets, Target
from headrace.elasticsearch.target_watch import check_creation
from headrace.elasticsearch.transport import Transport
from headrace.elasticsearch.verdicts import Item, Reason, item_reason, judge_item, refusal

PAGE = 100
"""Letters that are read or updated at once. Each may be as large as a Kafka message."""
IDS_PAGE = 1000
"""Ids that are read at once, and letters that are deleted at once."""
_REASONS_REPORTED = 100
# The types of 404 for one letter: it was deleted. The deletion of a missing one has no error.
_GONE = ("document_missing_exception", NO_TYPE)
_CONTENTS = ("key", "value", "value_text", "document_text", "headers")


@dataclass(frozen=True, slots=True)
class LetterFilter:
    """Selects dead letters. None or empty means no restriction. Times are batch times in epoch milliseconds.

    ``from_ms``, ``until_ms``, ``from_offset`` and ``until_offset`` are inclusive. ``replayed`` includes letters that
    were replayed.
    """

    ids: tuple[str, ...] = ()
    from_ms: int | None = None
    until_ms: int | None = None
    reason: str | None = None
    topic: str | None = None
    partition: int | None = None
    from_offset: int | None = None
    until_offset: int | None = None
    index: str | None = None
    replayed: bool = False

    def query(self, stream_name: str, output: str) -> dict[str, Any]:
        """The filter as an Elasticsearch query for the letters of one output."""
        terms = {
            "stream": stream_name,
            "output": output,
            "reason.type": self.reason,
            "topic": self.topic,
            "partition": self.partition,
            "index": self.index,
        }
        wanted: list[dict[str, Any]] = [{"term": {name: value}} for name, value in terms.items() if value is not None]
        ranges = {"batch_time": (self.from_ms, self.until_ms), "offset": (self.from_offset, self.until_offset)}
        for name, (first, last) in ranges.items():
            bounds = {word: value for word, value in (("gte", first), ("lte", last)) if value is not None}
            wanted += [{"range": {name: bounds}}] if bounds else []
        if self.ids:
            wanted.append({"ids": {"values": list(self.ids)}})
        without = [] if self.replayed else [{"exists": {"field": "replayed_at"}}]
        return {"bool": {"filter": wanted, "must_not": without}}

    def matches(self, id_: str, fields: Mapping[str, Any]) -> bool:
        """Whether the filter selects a letter of these fields: the same as `query`, where no index is asked."""
        terms = {"topic": self.topic, "partition": self.partition, "index": self.index}
        ranges = {"batch_time": (self.from_ms, self.until_ms), "offset": (self.from_offset, self.until_offset)}
        return (
            (not self.ids or id_ in self.ids)
            and all(value is None or fields.get(name) == value for name, value in terms.items())
            and self.reason in (None, fields["reason"]["type"])
            and all(_is_between(fields.get(name), *bounds) for name, bounds in ranges.items())
            and (self.replayed or fields.get("replayed_at") is None)
        )


@dataclass(frozen=True, slots=True)
class StoredLetter:
    """A dead letter as it was read.

    ``version`` identifies what was read of it: in an index its sequence number and primary term, in a topic the
    partition and the offset.
    """

    id: str
    version: tuple[int, int]
    fields: Mapping[str, Any]

    @property
    def reason(self) -> Reason:
        """The reason why its document was not indexed."""
        reason = self.fields.get("reason") or {}
        return Reason(str(reason.get("type", "unknown")), str(reason.get("text", "")))

    @property
    def coordinates(self) -> tuple[str, int, int, int] | None:
        """Topic, partition, offset and incarnation; None for a row that has no source record."""
        given = [self.fields.get(name) for name in ("topic", "partition", "offset")]
        if any(value is None for value in given):
            return None
        return str(given[0]), int(given[1] or 0), int(given[2] or 0), int(self.fields.get("incarnation") or 1)

    @property
    def document(self) -> bytes | None:
        """The exact bytes of the rejected document; None if the letter does not hold it."""
        if self.fields.get("value_is_document"):
            return self._bytes("value")
        text = self.fields.get("document_text")
        return None if text is None else str(text).encode()

    @property
    def record(self) -> OriginalRecord | None:
        """The record as read from Kafka; None if the letter does not hold all of it."""
        if self.coordinates is None or "headers" not in self.fields:
            return None
        value = self._bytes("value")
        if value is None and self.fields.get("value_bytes") is not None:
            return None
        headers = tuple((str(header["key"]), _decoded(header.get("value"))) for header in self.fields["headers"])
        return OriginalRecord(self._bytes("key"), value, headers, self.fields.get("timestamp"))

    def _bytes(self, name: str) -> bytes | None:
        return _decoded(self.fields.get(name))


@dataclass(frozen=True, slots=True)
class Settling:
    """Which letters of earlier attempts at its batch do not hold any more when an attempt of an output has succeeded.

    Those for its index, or its names. Where rows have an index each, before or now, also those for any other index:
    every row of the batch has been written, or has a letter, by the definition of now. But not those of another replay.
    An output that has one index, before and now, leaves those for another one: that index still lacks their documents.
    """

    index: str
    """The output's index as the definition has it."""
    replay: str
    """The name of the replay, "" for the stream's own output."""
    of_names: bool
    """Whether rows have an index each."""

    def settles(self, letter: Mapping[str, Any]) -> bool:
        """Whether it settles an earlier attempt's letter of these fields, of its output and batch."""
        names = letter.get("index_names")
        if self.index in (letter.get("index"), names):
            return True
        return (self.of_names or names is not None) and (letter.get("replay") or "") == self.replay


class KeptLetters(ABC):
    """The dead letters of one stream's output, wherever they are kept."""

    where: str
    """The name of the index or topic."""

    def __init__(self, target: Target) -> None:
        self._target = target

    @abstractmethod
    def reasons(self, letters: LetterFilter) -> dict[str, int]:
        """The number of letters by type of reason, the most frequent first; empty if there are none."""

    @abstractmethod
    def find(self, letters: LetterFilter, limit: int | None = None, *, contents: bool = True) -> Iterator[StoredLetter]:
        """Yield the letters, newest batch first. Without ``contents`` they lack the record's key, value, headers and
        document."""

    @abstractmethod
    def prepare_notes(self) -> None:
        """Make ready for the first `note`."""

    @abstractmethod
    def note(self, notes: Sequence[tuple[StoredLetter, Mapping[str, Any]]]) -> list[StoredLetter]:
        """Record what a replay has found: the ``replayed_at``, or the new ``reason``, of letters. Returns those left
        unchanged because they were rewritten or deleted since."""

    def get(self, id_: str) -> StoredLetter:
        """One letter by its id.

        Raises:
            DeadLetterMissingError: it does not exist, or belongs to another stream or output.
        """
        every = LetterFilter(ids=(id_,), replayed=True)
        for letter in self.find(every, limit=1):
            return letter
        raise DeadLetterMissingError(
            f"There is no dead letter {id_!r} of output {self._target.owner.output_id!r} in {self.where!r}.",
            remedy="See `headrace dead-letters list --replayed`.",
        )


class DeadLetterIndex(KeptLetters):
    """The dead letters in an index."""

    def __init__(self, administration: Administration, target: Target) -> None:
        super().__init__(target)
        self.where = target.dead_letter_index
        self._administration = administration

    def reasons(self, letters: LetterFilter) -> dict[str, int]:
        """The number of letters by type of reason, the most frequent first; empty if there is no index.

        Raises:
            ElasticsearchRefusedError: the request is not allowed.
            ElasticsearchUnavailableError: there was no answer within ``max_retry_seconds``.
        """
        self._refresh()
        counted = {"reasons": {"terms": {"field": "reason.type", "size": _REASONS_REPORTED}}}
        answer = self._search(size=0, query=self._query(letters), aggs=counted)
        if answer is None or "aggregations" not in answer:
            return {}
        return {bucket["key"]: bucket["doc_count"] for bucket in answer["aggregations"]["reasons"]["buckets"]}

    def find(self, letters: LetterFilter, limit: int | None = None, *, contents: bool = True) -> Iterator[StoredLetter]:
        """Yield the letters, newest batch first. Raises the same errors as ``reasons``.

        The set of letters is fixed at the start; each letter has its state at the time when its page is read, and is
        left out if it does not match the filter then. Without ``contents`` the letters lack the record's key, value,
        headers and document. All ids (about 100 bytes each) are read first, so nothing is kept open in Elasticsearch
        while the caller handles the letters.
        """
        self._refresh()
        for ids in _pages(self._ids(letters, limit), PAGE):
            answer = self._search(
                size=len(ids),
                query=self._query(replace(letters, ids=ids)),
                seq_no_primary_term=True,
                _source=True if contents else {"excludes": list(_CONTENTS)},
            )
            hits = {} if answer is None else {hit["_id"]: hit for hit in answer["hits"]["hits"]}
            for hit in (hits[id_] for id_ in ids if id_ in hits):
                yield StoredLetter(hit["_id"], (hit["_seq_no"], hit["_primary_term"]), hit["_source"])

    def _ids(self, letters: LetterFilter, limit: int | None) -> list[str]:
        sort = [{"batch_time": "desc"}, {"topic": "asc"}, {"partition": "asc"}, {"offset": "asc"}]
        size = IDS_PAGE if limit is None else min(limit, IDS_PAGE)
        search = {"query": self._query(letters), "sort": sort, "size": size}
        return self._administration.ids(self._purpose, self.where, search, limit)

    def withdraw(self, batch_time_ms: int, attempt: int, *, of_names: bool = False) -> int:
        """Delete the letters of the batch that attempts before ``attempt`` wrote, as far as it settles them
        (`Settling`).

        ``of_names``: the target has the text of the names of several indices.
        A letter that is rewritten meanwhile stays. Returns the number deleted. Raises the same errors as ``reasons``.
        """
        batch = LetterFilter(from_ms=batch_time_ms, until_ms=batch_time_ms, replayed=True)
        settling = Settling(self._target.name, self._target.owner.replay, of_names=of_names)
        withdrawn = 0
        left = (
            letter
            for letter in self.find(batch, contents=False)
            # Filtered here and not by a query: with a custom mapping the attempt may not be searchable.
            if isinstance(letter.fields.get("attempt"), int) and letter.fields["attempt"] < attempt
            # Here too: an index of letters from before has no mapping of what it looks at.
            if settling.settles(letter.fields)
        )
        while some := list(islice(left, IDS_PAGE)):
            actions = [{"delete": _as_read(letter)} for letter in some]
            withdrawn += len(some) - len(self._changed_since(some, actions, refresh=False))
        return withdrawn

    def prepare_notes(self) -> None:
        """Add the mappings of the replay's fields, which an index of an earlier version lacks."""
        names = ("document_id", "version", "value_is_document", "timestamp", "replayed_at")
        properties = {name: MAPPINGS["properties"][name] for name in names}
        self._ask("PUT", "_mapping", json.dumps({"properties": properties}).encode())

    def note(self, notes: Sequence[tuple[StoredLetter, Mapping[str, Any]]]) -> list[StoredLetter]:
        """Update fields of letters. Returns the letters left unchanged because they were rewritten or deleted since."""
        if not notes:
            return []
        lines: list[dict[str, Any]] = []
        for letter, changed in notes:
            lines += [{"update": _as_read(letter)}, {"doc": changed}]
        return self._changed_since([letter for letter, _ in notes], lines, refresh=True)

    def _changed_since(
        self, letters: Sequence[StoredLetter], lines: Sequence[dict[str, Any]], *, refresh: bool
    ) -> list[StoredLetter]:
        """Send one action, of as many lines, for each letter. Returns the letters that were rewritten or deleted since
        they were read."""
        moved: list[StoredLetter] = []
        length = len(lines) // len(letters)
        left = [(letter, lines[number * length : (number + 1) * length]) for number, letter in enumerate(letters)]

        def operations() -> bytes:
            return "".join(f"{json.dumps(line)}\n" for _, of_letter in left for line in of_letter).encode()

        def unanswered(body: Any) -> str | None:
            """Keep what Elasticsearch cannot do at the moment, and say why."""
            again, why = [], None
            items = bulk_items(body, len(left))
            if items is None or [item.get("_id", letter.id) for item, (letter, _) in zip(items, left, strict=True)] != [
                letter.id for letter, _ in left
            ]:
                return f"an answer that is no bulk answer: {str(body)[:200]!r}"
            for entry, item in zip(left, items, strict=True):
                status, reason = item["status"], item_reason(item)
                verdict = judge_item(status, item)
                if status == 409 or (status == 404 and reason.type in _GONE):
                    moved.append(entry[0])
                elif verdict in (Item.NOT_NOW, Item.SUSPECT):
                    again.append(entry)
                    why = f"{status} {reason}"
                elif status >= 300:
                    raise refusal(status, reason, self.where)
            left[:] = again
            return why

        self._ask("POST", f"_bulk?refresh={str(refresh).lower()}", operations, incomplete=unanswered)
        return moved

    def _query(self, letters: LetterFilter) -> dict[str, Any]:
        return letters.query(self._target.owner.stream_name, self._target.owner.output_id)

    def _refresh(self) -> None:
        # Without the privilege to refresh, letters written in the last second may be missing.
        with contextlib.suppress(ElasticsearchRefusedError):
            self._ask("POST", "_refresh", missing_is_none=True)

    def _search(self, **search: Any) -> Any:
        """The search's answer; None if there is no such index. A shard that does not answer is an error."""
        path = "_search?allow_partial_search_results=false"
        return self._ask("POST", path, json.dumps(search).encode(), missing_is_none=True)

    def _ask(self, method: str, path: str, body: bytes | Callable[[], bytes] | None = None, **how: Any) -> Any:
        """Ask for ``path`` of the letters' index."""
        path = f"/{quote(self.where, safe='')}/{path}"
        return self._administration.ask(self._purpose, self.where, method, path, body, **how)

    @property
    def _purpose(self) -> str:
        return f"Asking for the dead letters in {self.where!r}"


def _as_read(letter: StoredLetter) -> dict[str, Any]:
    """The metadata of an action that applies only while the letter is as it was read."""
    seq_no, primary_term = letter.version
    return {"_id": letter.id, "if_seq_no": seq_no, "if_primary_term": primary_term}


def _decoded(text: Any) -> bytes | None:
    try:
        return None if text is None else base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError, TypeError):
        return None


def _is_between(value: int | None, first: int | None, last: int | None) -> bool:
    if value is None:
        return first is None and last is None
    return (first is None or first <= value) and (last is None or value <= last)


def _pages(ids: list[str], size: int) -> Iterator[tuple[str, ...]]:
    return (tuple(ids[first : first + size]) for first in range(0, len(ids), size))


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
    """Indexes the letters of one output again. ``options`` are the output's."""

    def __init__(
        self,
        transport: Transport,
        options: IndexingOptions,
        letters: KeptLetters,
        *,
        clock: Clock,
        concrete_index: Callable[[str], ConcreteIndex | None] = lambda _: None,
    ) -> None:
        """``concrete_index`` is asked for each index before its first letter. It raises UnsuitableTargetError."""
        self._letters = letters
        self._concrete_index = concrete_index
        self._known: set[str] = set()
        self._clock = clock
        # "create" is intended here even where ids recur. An existing document comes from an earlier replay, or from the
        # batch that was run again.
        self._options = replace(options, write_method=WriteMethod.CREATE, written_before=True)
        self._sender = BulkSender(transport, self._options, clock=clock, cancelled=threading.Event())

    def cannot(self, letter: StoredLetter) -> str | None:
        """The reason, in readable text, why this letter is not tried; None if it can be replayed."""
        index, names = letter.fields.get("index"), letter.fields.get("index_names")
        if names is not None and index == names:
            return "it has no index: correct the definition or the transform, and run its batch again"
        if not self._takes(letter):
            return f"its document belongs in index {index!r}: give that index with --index"
        if letter.document is None:
            return "it holds no document: it was rejected by a decoder or the transform, or is too large to be kept"
        if letter.fields.get("document_id") is None:
            return "its document has no id"
        return None

    def _takes(self, letter: StoredLetter) -> bool:
        """Whether the letter's index is one that its row may have by the definition of now."""
        index, names, topic = letter.fields.get("index"), self._options.names, letter.fields.get("topic")
        if names is None:
            return index == self._options.target.name
        if letter.fields.get("index_names") == names.text:
            return True
        return (names if topic is None else names.of_topics([topic])).may_be(str(index))

    def replay(self, letters: Iterable[StoredLetter]) -> ReplayCounts:
        """Index the letters and record the outcome in each.

        Raises:
            ElasticsearchRefusedError: the index or the credentials, not a document, are at fault.
            ElasticsearchUnavailableError: no progress for ``max_retry_seconds``; repeat the replay later.
            UnsuitableTargetError: an index is not one concrete index any more, or is missing and may not be created.
        """
        counts = ReplayCounts()
        remaining = iter(letters)
        while page := list(islice(remaining, PAGE)):
            self._check_targets(page)
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

    def _check_targets(self, letters: Sequence[StoredLetter]) -> None:
        for letter in letters:
            name = self._target_of(letter).name
            if name not in self._known and self.cannot(letter) is None:
                if self._concrete_index(name) is None:
                    check_creation([name], self._options)
                self._known.add(name)

    def _target_of(self, letter: StoredLetter) -> Target:
        target = self._options.target
        return target if self._options.names is None else target.at(str(letter.fields.get("index")))

    def _index(self, letters: Sequence[StoredLetter], counts: ReplayCounts) -> dict[int, Reason]:
        """Send the documents. Returns the reasons of the refused letters, by their index."""
        rows, identities = _rows(letters, [self._target_of(letter) for letter in letters], self._options.target)
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


def _rows(
    letters: Sequence[StoredLetter], targets: Sequence[Target], whole: Target
) -> tuple[pa.RecordBatch, Identities]:
    """One row for each letter, with the letters' own ids and versions."""
    documents = pa.array([letter.document for letter in letters], pa.large_binary())
    ids = pa.array([str(letter.fields["document_id"]) for letter in letters], pa.large_string())
    versions = [letter.fields.get("version") for letter in letters]
    numbers = None if versions[0] is None else pa.array(versions, pa.int64())
    several = tuple(dict.fromkeys(targets))
    of_rows = RowTargets(whole, several, np.array([several.index(target) for target in targets], np.int64))
    return pa.record_batch({columns.DOCUMENT: documents}), Identities(ids, numbers, {}, of_rows)
