"""Indexes one task's rows into one index: one thread prepares bodies while others wait for Elasticsearch's answers."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any

import pyarrow as pa

from headrace.clock import Clock, SystemClock
from headrace.elasticsearch.bulk_bodies import PreparedRows, prepare_rows
from headrace.elasticsearch.bulk_sender import MOST_OFFENDERS, BulkSender, SentRequest
from headrace.elasticsearch.columns import check_columns
from headrace.elasticsearch.counts import IndexingCounts
from headrace.elasticsearch.dead_letter_writer import DeadLetterWriter, OriginalRecords
from headrace.elasticsearch.document_ids import identify
from headrace.elasticsearch.duplicate_ids import DuplicateIdCheck
from headrace.elasticsearch.options import IndexingOptions
from headrace.elasticsearch.transport import Transport
from headrace.elasticsearch.verdicts import Reason, usual_of_processors

MOST_REQUESTS_WITHOUT_PASSING = 16
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
        self._sender = BulkSender(transport, options.index, options, clock=clock, cancelled=self._cancelled)
        to_dead_letters = BulkSender(
            transport, options.dead_letter_index, options, clock=clock, cancelled=self._cancelled
        )
        self._dead_letter_writer = DeadLetterWriter(transport, to_dead_letters, options, originals)
        self._counts = IndexingCounts()
        self._duplicates = DuplicateIdCheck(options, seed)
        self._in_flight: dict[Future[SentRequest], PreparedRows] = {}
        # Requests with documents that were refused for a reason that may be the index's, while no document has passed.
        self._doubtful: list[tuple[PreparedRows, SentRequest]] = []

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
                self._settle_doubtful()
                self._dead_letter_writer.flush(self._counts)
            except BaseException:
                # Ends the threads that wait to retry; the pool's exit waits for them.
                self._cancelled.set()
                raise
        self._counts.seconds = time.monotonic() - started
        self._counts.check()
        return self._counts

    def digests(self) -> Any:
        """The digests of all rows' ids, for ``repeated_digests`` (uint64 array)."""
        return self._duplicates.digests()

    def _index_batch(self, batch: pa.RecordBatch, pool: ThreadPoolExecutor) -> None:
        check_columns(batch.schema.names, self._options)
        identities = identify(batch, self._options)
        self._duplicates.take(batch, identities)
        preparation = prepare_rows(batch, self._options, identities=identities)
        self._counts.rows += batch.num_rows
        self._counts.ignored_tombstones += preparation.ignored_tombstones
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
            self._reject(prepared, sent.rejected)
            if sent.doubtful:
                self._doubtful.append((prepared, sent))
        if self._sender.passed or len(self._doubtful) > MOST_REQUESTS_WITHOUT_PASSING:
            self._settle_doubtful()

    def _reject(self, prepared: PreparedRows, lines: Iterable[tuple[int, Reason]]) -> None:
        rejected = [(prepared.row(line), reason) for line, reason in lines]
        self._dead_letter_writer.take(prepared.source, rejected, self._counts)

    def _settle_doubtful(self) -> None:
        """Make dead letters of the documents in doubt if others have passed; else raise ElasticsearchRefusedError."""
        doubts = [(prepared, *doubt) for prepared, sent in self._doubtful for doubt in sent.doubtful]
        if doubts and not self._sender.passed and not self._few_of_documents([reason for *_, reason in doubts]):
            prepared, line, status, reason = doubts[0]
            raise self._sender.refused(
                status, reason, f"all {len(doubts)} documents that were sent, such as {prepared.describe(line)},"
            )
        for prepared, sent in self._doubtful:
            self._reject(prepared, [(line, reason) for line, _, reason in sent.doubtful])
        self._doubtful = []

    def _few_of_documents(self, reasons: list[Reason]) -> bool:
        """Whether so few documents are in doubt, and an index that has taken others, that they are at fault."""
        return (
            len(reasons) <= MOST_OFFENDERS
            and all(map(usual_of_processors, reasons))
            and self._sender.holds_documents(self._sender.retry_budget())
        )


def regroup(batches: Iterable[pa.RecordBatch], options: IndexingOptions) -> Iterator[pa.RecordBatch]:
    """Combine small batches until they fill a request, and split batches whose lines could need too much memory."""
    held: list[pa.RecordBatch] = []
    rows = size = 0
    for batch in batches:
        for part in _cut(batch, options):
            held.append(part)
            rows += part.num_rows
            size += part.nbytes
            if rows >= options.bulk_actions or size >= options.bulk_bytes:
                yield _together(held)
                held, rows, size = [], 0, 0
    if rows:
        yield _together(held)


def _cut(batch: pa.RecordBatch, options: IndexingOptions) -> Iterator[pa.RecordBatch]:
    # The joined lines are a copy of the batch, so a part holds only a few requests' bytes.
    parts = max(1, batch.nbytes // max(4 * options.bulk_bytes, 1))
    step = max(1, -(-batch.num_rows // parts))
    for first in range(0, batch.num_rows, step):
        yield batch.slice(first, step)


def _together(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    if len(batches) == 1:
        return batches[0]
    merged: Any = pa.Table.from_batches(batches).combine_chunks()
    return merged.to_batches()[0]
