"""Indexes one task's rows: one thread prepares bodies while others wait for Elasticsearch's answers.

Rows of one batch with the same document id are found, since all but one of them would be lost. Rows that a task holds
at the same time are compared exactly, before they are sent. For the comparison over all rows and tasks of a batch, each
id is represented by a digest of 64 bits: each task returns its digests, and the code that ends the write compares them.
A million rows need 8 MB. Two different ids among a million have the same digest about once in ten million such batches.
The next attempt uses other digests, so it succeeds.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headrace.clock import Clock, SystemClock
from headrace.elasticsearch import columns
from headrace.elasticsearch.bulk_bodies import PreparedRows, line_offsets, prepare_rows, rejected_before
from headrace.elasticsearch.bulk_sender import MAX_OFFENDERS, BulkSender, SentRequest
from headrace.elasticsearch.counts import EXAMPLES, IndexingCounts
from headrace.elasticsearch.dead_letters import DeadLetterWriter, LetterPlace, OriginalRecords
from headrace.elasticsearch.document_ids import MAX_ID_BYTES, Identities, identify
from headrace.elasticsearch.errors import DuplicateIdsError
from headrace.elasticsearch.open_target import OpenTarget
from headrace.elasticsearch.options import DocumentIdKind, IndexingOptions, VersionSource
from headrace.elasticsearch.transport import Transport
from headrace.elasticsearch.verdicts import Reason, refusal, usual_of_processors

_REQUESTS_IN_MEMORY = 4
MAX_REQUESTS_WITHOUT_PASSING = 16
"""The number of requests that may end with documents in doubt and none that passed; one more fails the task."""


class Indexer:
    """Indexes batches of rows with the columns of ``headrace.elasticsearch.columns``.

    It holds at most ``requests_in_flight`` + 1 bodies and the same number of batches.
    """

    def __init__(
        self,
        transport: Transport,
        options: IndexingOptions,
        *,
        originals: OriginalRecords | None = None,
        clock: Clock | None = None,
        seed: int = 0,
    ) -> None:
        """``seed`` must be equal for all tasks of the write (see ``DuplicateIdCheck``)."""
        self._options = options
        self._cancelled = threading.Event()
        clock = clock or SystemClock()
        self._sender = BulkSender(transport, options, clock=clock, cancelled=self._cancelled)
        self._dead_letter_writer = DeadLetterWriter(
            self._sender.transport, self._sender, options, originals, _letter_topic
        )
        self._counts = IndexingCounts()
        self._duplicates = DuplicateIdCheck(options, seed)
        self._in_flight: dict[Future[SentRequest], PreparedRows] = {}
        # Requests with documents that were refused for a reason that may be the index's, by the name of their target,
        # while no document has passed there.
        self._doubtful: dict[str, list[tuple[PreparedRows, SentRequest]]] = {}

    def index(self, batches: Iterable[pa.RecordBatch]) -> IndexingCounts:
        """Index all rows. Returns the counts when every row has its outcome and the dead letters are written.

        Foreign documents are only counted here; the code that ends the write fails because of them. Raises an
        IndexingError if some row cannot get an outcome. Some rows are then indexed; indexing all rows again is
        harmless.
        """
        started = time.monotonic()
        with ThreadPoolExecutor(self._options.requests_in_flight, thread_name_prefix="bulk") as pool:
            try:
                for batch in regroup(batches, self._options):
                    self._index_batch(batch, pool)
                while self._in_flight:
                    self._collect()
                self._settle_doubtful(self._doubtful)
                self._dead_letter_writer.flush(self._counts)
            except BaseException:
                # Ends the threads that wait to retry; the pool's exit waits for them.
                self._cancelled.set()
                raise
        self._counts.seconds = time.monotonic() - started
        self._counts.throttled_seconds, self._counts.ceiling_seconds = self._sender.waited_seconds
        self._counts.check()
        return self._counts

    def digests(self) -> Any:
        """The digests of all rows' ids, for ``repeated_digests`` (uint64 array)."""
        return self._duplicates.digests()

    def _index_batch(self, batch: pa.RecordBatch, pool: ThreadPoolExecutor) -> None:
        self._options.check_columns(batch.schema.names)
        identities = identify(batch, self._options)
        self._duplicates.take(batch, identities)
        preparation = prepare_rows(batch, self._options, identities=identities)
        self._counts.rows += batch.num_rows
        self._counts.ignored_tombstones += preparation.ignored_tombstones
        self._counts.superseded += preparation.superseded
        self._counts.ignored_events += preparation.ignored_events
        self._counts.truncates += len(preparation.truncates)
        self._counts.truncated_below = max(self._counts.truncated_below, *preparation.truncates, 0)
        self._dead_letter_writer.take(batch, sorted(preparation.rejected.items()), self._counts)
        prepared = preparation.prepared
        if prepared is None:
            return
        for lines in prepared.requests(self._options):
            while len(self._in_flight) >= self._options.requests_in_flight:
                self._collect()
            self._in_flight[pool.submit(self._sender.send, prepared, lines)] = prepared

    def _collect(self) -> None:
        """Wait for at least one request and record the outcomes; raises the errors of the requests."""
        done, _ = wait(self._in_flight, return_when=FIRST_COMPLETED)
        for future in done:
            prepared = self._in_flight.pop(future)
            sent = future.result()
            self._counts.add(sent.counts)
            if self._options.names is not None:
                self._counts.by_index[sent.opened.target.name] += sent.counts.indexed
            self._reject(prepared, sent.rejected)
            if sent.doubtful:
                self._doubtful.setdefault(sent.opened.target.name, []).append((prepared, sent))
        self._settle_doubtful(
            name
            for name, requests in self._doubtful.items()
            if requests[0][1].opened.passed or len(requests) > MAX_REQUESTS_WITHOUT_PASSING
        )

    def _reject(self, prepared: PreparedRows, lines: Iterable[tuple[int, Reason]]) -> None:
        rejected = [(prepared.row(line), reason) for line, reason in lines]
        self._dead_letter_writer.take(prepared.source, rejected, self._counts)

    def _settle_doubtful(self, names: Iterable[str]) -> None:
        """Make dead letters of the documents in doubt if others of their target have passed; else raise
        ElasticsearchRefusedError."""
        for name in list(names):
            requests = self._doubtful.pop(name)
            opened = requests[0][1].opened
            doubts = [(prepared, *doubt) for prepared, sent in requests for doubt in sent.doubtful]
            reasons = [reason for *_, reason in doubts]
            if not opened.passed and not self._are_documents_at_fault(opened, reasons):
                prepared, line, status, reason = doubts[0]
                documents = f"all {len(doubts)} documents that were sent, such as {prepared.describe(line)},"
                raise refusal(status, reason, name, documents)
            for prepared, sent in requests:
                self._reject(prepared, [(line, reason) for line, _, reason in sent.doubtful])

    def _are_documents_at_fault(self, opened: OpenTarget, reasons: list[Reason]) -> bool:
        """Whether the documents in doubt are at fault, not the index: they are few, and the index has taken others."""
        return (
            len(reasons) <= MAX_OFFENDERS
            and all(map(usual_of_processors, reasons))
            and opened.holds_documents(self._sender.retry_budget(opened.target))
        )


def _letter_topic(options: IndexingOptions) -> LetterPlace:
    # Few tasks have letters, and few outputs a topic for them, so others do not import this.
    from headrace.elasticsearch.dead_letter_topic import LetterSender

    return LetterSender.of(options)


def regroup(batches: Iterable[pa.RecordBatch], options: IndexingOptions) -> Iterator[pa.RecordBatch]:
    """Combine small batches until they fill a request, and split batches whose lines could need too much memory.

    Of rows with several targets, a batch fills a few requests, since each target has requests of its own.
    """
    held: list[pa.RecordBatch] = []
    rows = size = 0
    few = max(1, min(_REQUESTS_IN_MEMORY, len(options.watched)))
    for batch in batches:
        for part in _split(batch, options):
            held.append(part)
            rows += part.num_rows
            size += part.nbytes
            if rows >= few * options.bulk_actions or size >= few * options.bulk_bytes:
                yield _concatenated(held)
                held, rows, size = [], 0, 0
    if rows:
        yield _concatenated(held)


def _split(batch: pa.RecordBatch, options: IndexingOptions) -> Iterator[pa.RecordBatch]:
    # The joined lines are a copy of the batch, so a part holds only a few requests' bytes.
    parts = max(1, batch.nbytes // max(_REQUESTS_IN_MEMORY * options.bulk_bytes, 1))
    step = max(1, -(-batch.num_rows // parts))
    for first in range(0, batch.num_rows, step):
        yield batch.slice(first, step)


def _concatenated(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    if len(batches) == 1:
        return batches[0]
    merged: Any = pa.Table.from_batches(batches).combine_chunks()
    return merged.to_batches()[0]


class DuplicateIdCheck:
    """Checks the rows of one task. ``seed`` (below 2**64) is equal for all tasks of a write and new for each write."""

    def __init__(self, options: IndexingOptions, seed: int) -> None:
        self._options = options
        steps = np.arange(1, MAX_ID_BYTES + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        self._weights = _mixed(np.uint64(seed) + steps)
        self._digests: list[np.ndarray[Any, Any]] = []

    def take(self, batch: pa.RecordBatch, identities: Identities) -> None:
        """Add rows that are about to be sent.

        With record ids, rows that a decoder or the transform rejected are included: their dead letters have the same
        ids.

        Raises:
            DuplicateIdsError: two of these rows have the same id (and version, where ids are versioned by the record).
        """
        _, ids, numbers = compared_rows(batch, identities, self._options)
        if len(pc.unique(ids)) < len(ids):
            self._refuse_equal(ids, numbers)
        digests = _digests(ids, self._weights)
        for column in numbers:
            digests = _mixed(digests ^ _mixed(column.to_numpy(zero_copy_only=False).view(np.uint64)))
        self._digests.append(digests)

    def digests(self) -> np.ndarray[Any, Any]:
        """The digests of all rows added (uint64 array)."""
        return np.concatenate(self._digests) if self._digests else np.empty(0, np.uint64)

    def _refuse_equal(self, ids: Any, numbers: list[Any]) -> None:
        names = ["id", *(f"n{place}" for place in range(len(numbers)))]
        counted = pa.table([ids, *numbers], names=names).group_by(names).aggregate([([], "count_all")])
        duplicates = counted.filter(pc.greater(counted.column("count_all"), 1))
        if duplicates.num_rows:
            raise duplicate_ids_error(
                self._options.target.name, self._options.document_id, duplicates.column("id").to_pylist()
            )


def compared_rows(
    batch: pa.RecordBatch, identities: Identities, options: IndexingOptions
) -> tuple[Any, Any, list[Any]]:
    """The rows that must differ from each other: their numbers in ``batch``, their ids, and columns (int64) in which
    rows of the same id may differ."""
    left_out = set(identities.rejected)
    if options.document_id is not DocumentIdKind.RECORD:
        left_out |= rejected_before(batch).keys()
    rows = pa.array(np.delete(np.arange(batch.num_rows), sorted(left_out)))
    ids, numbers = identities.ids, _distinguishing(batch, identities, options)
    if left_out:
        ids, numbers = ids.take(rows), [column.take(rows) for column in numbers]
    return rows, ids, numbers


def _distinguishing(batch: pa.RecordBatch, identities: Identities, options: IndexingOptions) -> list[Any]:
    # One id in two indices is two documents.
    targets = identities.targets.numbers()
    numbers = [] if targets is None else [pa.array(targets)]
    if options.document_id is DocumentIdKind.RECORD or options.version in (None, VersionSource.BATCH_TIME):
        return numbers
    numbers.append(identities.versions)
    if options.version is VersionSource.COLUMN and all(name in batch.schema.names for name in columns.COORDINATES):
        # Two records may have the same version; two rows of one record may not have the same key.
        numbers += [batch.column(columns.PARTITION), batch.column(columns.OFFSET), _topic_numbers(batch)]
        if columns.INCARNATION in batch.schema.names:
            numbers.append(batch.column(columns.INCARNATION))
    return [pc.fill_null(pc.cast(column, pa.int64()), -1) for column in numbers]


def _topic_numbers(batch: pa.RecordBatch) -> Any:
    """A number (int64) for each row's topic, equal in all tasks: mirrored topics have equal keys, versions and
    offsets."""
    topics = batch.column(columns.TOPIC)
    encoded = topics if pa.types.is_dictionary(topics.type) else topics.dictionary_encode()
    digests = [hashlib.sha256(str(name).encode()).digest()[:8] for name in encoded.dictionary.to_pylist()]
    numbers = [int.from_bytes(digest, signed=True) for digest in digests]
    return pa.array(numbers, pa.int64()).take(encoded.indices)


def repeated_digests(parts: Sequence[np.ndarray[Any, Any]]) -> int:
    """The number of rows whose digest another row before them has."""
    every = np.sort(np.concatenate(parts)) if parts else np.empty(0, np.uint64)
    return int((every[1:] == every[:-1]).sum())


def duplicate_ids_error(index: str, kind: DocumentIdKind, examples: Sequence[str]) -> DuplicateIdsError:
    """The error that fails the batch. ``examples`` are ids that several rows share, as far as they are known."""
    shown = ", ".join(map(repr, examples[:EXAMPLES]))
    more = ", …" if len(examples) > EXAMPLES else ""
    return DuplicateIdsError(
        f"Several rows of the batch have the same document id in index {index!r}"
        f"{f': {shown}{more}' if examples else ''}. All but one of them would be lost.",
        remedy=_REMEDIES[kind],
    )


_REMEDIES = {
    DocumentIdKind.RECORD: "Where the transform makes several rows of one record, name the column that distinguishes "
    'them: document_ids=RecordIds(rows="column"), such as the position that posexplode gives. Otherwise let it make '
    "one row of each record.",
    DocumentIdKind.KEY: "A key has one document. Where the transform makes several rows of one record, give each row a "
    "key of its own, or use ColumnIds. Where records of one key are in several partitions, name a column that grows "
    "with every change of a key: KeyIds(version_from=…). Where two inputs read topics of one name, let it keep the "
    "column incarnation beside topic, partition and offset.",
    DocumentIdKind.COLUMNS: "Name columns that together are different in each row of a batch, or let the transform "
    "keep one row of each: dropDuplicates, or groupBy.",
}


def _digests(ids: Any, weights: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """A digest for each id: the sum of its bytes, weighted by position, modulo 2**64 (a universal hash)."""
    data, offsets = line_offsets(pc.cast(ids, pa.large_binary()))
    lengths = np.diff(offsets)
    first = int(offsets[0])
    places = np.arange(int(offsets[-1]) - first) - np.repeat(offsets[:-1] - first, lengths)
    terms = (data[first : int(offsets[-1])].astype(np.uint64) + np.uint64(1)) * weights[places]
    sums = np.concatenate((np.zeros(1, np.uint64), np.cumsum(terms, dtype=np.uint64)))
    totals: np.ndarray[Any, Any] = sums[offsets[1:] - first] - sums[offsets[:-1] - first]
    return _mixed(totals)


def _mixed(numbers: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Mix the bits of each number (the finaliser of splitmix64)."""
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: np.ndarray[Any, Any] = numbers ^ (numbers >> np.uint64(31))
    return mixed
