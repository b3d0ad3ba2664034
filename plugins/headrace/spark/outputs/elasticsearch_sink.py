"""Writes rows as documents, in the tasks of one Spark job. Repeated writes give no duplicates.

The tasks (`IndexingTask`) index their rows, and return their counts and the digests of their ids. The calling process
checks the index before and after, and what the tasks returned. Records that nothing transforms are read from
the log by the task that indexes them, so that they do not pass through the JVM. A dead letter gets its original record
by the batch's manifest, from the log or from Kafka. It works in classic sessions and over Spark Connect.

Rows that delete documents are held back until all tasks have ended (`HeldDeletions`). The tasks
return them, and the calling process sends them. If they are too many for that, a second job reads the rows again.

A data source's writer would do the same with ``mapInArrow``, but Spark starts a new Python process for each of its
three steps (create the source, make the writer, commit). In a small batch these were most of the write's time.

The calling process and each task's worker look the connection up in their own environments. So its secrets are in no
option, no plan and no task.
"""

from __future__ import annotations

import contextlib
import json
import logging
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from pyspark import TaskContext

from headrace.elasticsearch.columns import REJECTED_BECAUSE, document_column, index_column
from headrace.elasticsearch.counts import IndexingCounts, IndexingReport, warnings_beside
from headrace.elasticsearch.errors import DocumentsUnaccountedError, TooManyIndicesError, UnsuitableTargetError
from headrace.elasticsearch.indexer import Indexer, repeated_digests
from headrace.elasticsearch.options import KAFKA, IndexingOptions, TombstonePolicy
from headrace.elasticsearch.target import ConcreteIndex, Target
from headrace.elasticsearch.target_watch import TargetWatch, open_transport
from headrace.elasticsearch.transport import Cluster
from headrace.errors import HeadraceError
from headrace.processes import freeze_imports

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from headrace.spark.attempts.shared_jobs import BatchBlocks
    from headrace.spark.outputs.writer import RunBlocks
    from headrace.stream import ElasticsearchOutput
from headrace.spark.outputs.held_deletions import HeldDeletions, held_rows, only_deletions
from headrace.spark.outputs.original_records import (
    BatchOriginalRecords,
    KafkaOriginalRecords,
    ManifestOriginalRecords,
    WindowOriginalRecords,
)

logger = logging.getLogger(__name__)


_RESULT = "counts STRING, digests BINARY, held BIGINT, deletions BINARY"
_NAMES = "name STRING"
_NAMES_SHOWN = 5


_RESULT_SCHEMA = pa.schema(
    [("counts", pa.string()), ("digests", pa.binary()), ("held", pa.int64()), ("deletions", pa.binary())]
)


# Each row of a result is at most about 3 MiB, with deletions: Spark Connect sends it in one message.
_DIGESTS_IN_A_ROW = 256 * 1024


AtNames = Callable[[IndexingOptions, Sequence[str]], IndexingOptions]
"""Gives the options for a batch whose rows name these indices, with their targets."""


def at_names(options: IndexingOptions, names: Sequence[str]) -> IndexingOptions:
    """The options for a batch whose rows name these indices, of which no earlier batch is known."""
    return options.with_targets(map(options.target.at, names))


def index_rows(rows: DataFrame, options: IndexingOptions, settle: AtNames = at_names) -> IndexingReport:
    """Index the rows, with the columns of ``headrace.elasticsearch.columns``. Returns when every row has its outcome.

    The caller must check the report for duplicate ids and foreign documents. Where each row has an index of its own,
    the rows are read once before for the names, and ``settle`` gets these.

    Raises:
        UnsuitableRowsError: the ids need a column that the rows do not have. Nothing was written.
        TooManyIndicesError: the rows name too many indices. Nothing was written.
        UnsuitableTargetError: the index cannot be written to, or it was replaced during the write.
        IndexingError: within Spark, some row cannot get an outcome. Others may be indexed; write them all again.
    """
    options.check_columns(rows.columns)
    if options.names is not None and options.targets is None:
        prepared = (*map(index_column, range(len(options.names.placeholders))), REJECTED_BECAUSE)
        written = rows
        if options.tombstones is TombstonePolicy.IGNORE:
            written = rows.where(f"{document_column(rows.columns)} IS NOT NULL")
        named = written.select(*(name for name in prepared if name in rows.columns))
        options = settle(options, _names(lambda task: named.mapInArrow(task.run, _NAMES).toArrow(), options))
    return _index(lambda task: _run_rows(task, rows), options)


def _run_rows(task: IndexingTask, rows: DataFrame) -> pa.Table:
    if task.options.has_ceiling:
        # Workers import this module, and few outputs have a ceiling.
        from headrace.spark.sessions import parallelism

        # A frame does not tell how many tasks will run at once. With this there are no more than so many.
        tasks = parallelism(rows.sparkSession)
        task, rows = task.among(tasks), rows.coalesce(tasks)
    return rows.mapInArrow(task.run, _RESULT).toArrow()


def index_blocks(
    run: RunBlocks, options: IndexingOptions, blocks: BatchBlocks, settle: AtNames = at_names
) -> IndexingReport:
    """Index the records of the blocks as they are, by tasks that ``run`` runs. Otherwise as `index_rows`.

    Raises DocumentsUnaccountedError, if the tasks read other records than those of the blocks.
    """
    if options.names is not None and options.targets is None:
        options = settle(options, _names(lambda task: run(task, blocks, _NAMES), options, blocks))
    report = _index(lambda task: run(task, blocks, _RESULT), options, blocks)
    if blocks.records not in (None, report.counts.rows):
        raise DocumentsUnaccountedError(
            f"The tasks of the write read {report.counts.rows} records, the blocks of the batch have {blocks.records}.",
            remedy="Run the batch again.",
        )
    return report


def _names(
    run: Callable[[_NamesTask], pa.Table], options: IndexingOptions, blocks: BatchBlocks | None = None
) -> list[str]:
    """The names of the indices of all rows, in order. Nothing is sent meanwhile, so that a batch with too many names
    leaves nothing behind, and each index is known before its first document."""
    found = sorted(set(run(_NamesTask(options, blocks)).column("name").to_pylist()))
    if len(found) > options.max_indices:
        examples = ", ".join(map(repr, found[:_NAMES_SHOWN]))
        raise TooManyIndicesError(
            f"The rows of the batch name more than {options.max_indices} indices ({examples}, …), by index "
            f"{options.target.name!r} of output {options.target.owner.output_id}. Nothing of the batch was sent.",
            remedy="Name the index by something that has few values, such as a day instead of an hour, and run the "
            "batch again. If they are meant, and the cluster can hold as many shards, raise the output's max_indices.",
        )
    return found


def _index(
    run: Callable[[IndexingTask], pa.Table], options: IndexingOptions, blocks: BatchBlocks | None = None
) -> IndexingReport:
    watch = TargetWatch(options)
    with warnings_beside(options.report):
        options = options.with_targets(watch.check_before())
    task = IndexingTask(options, secrets.randbits(64), blocks, Part.REST if options.deletes else Part.ALL)
    written = _Written.of(run(task))
    if written.held:
        written.add(_delete(run, task, written))
    counts = written.counts
    counts.check()
    if counts.truncates:
        counts.truncated += _truncate(options, counts.truncated_below)
    targets = watch.check_after()
    duplicates = repeated_digests(written.digests)
    if options.refresh:
        watch.refresh()
    logger.info("Indexed into %s: %s", options.target.name, counts.to_dict())
    if options.names is not None:
        return IndexingReport(options.target, counts, duplicates, targets)
    return IndexingReport(targets[0], counts, duplicates)


def _delete(run: Callable[[IndexingTask], pa.Table], task: IndexingTask, written: _Written) -> _Written:
    """Send the deletions that the tasks have held back."""
    if sum(part.num_rows for part in written.deletions) == written.held:
        sending = replace(task, part=Part.DELETIONS, blocks=None)
        deleted = _Written.of(pa.Table.from_batches(sending.run(iter(written.deletions)), _RESULT_SCHEMA))
    else:
        deleted = _Written.of(run(replace(task, part=Part.DELETIONS)))
    if deleted.counts.rows != written.held:
        raise DocumentsUnaccountedError(
            f"The tasks of the write found {written.held} rows without a document, which delete their key's document, "
            f"and {deleted.counts.rows} when they read the rows again to send them.",
            remedy="Let the transform give the same rows each time, and run the batch again.",
        )
    return deleted


def _truncate(options: IndexingOptions, version: int) -> int:
    # Few batches have truncates, so others do not import this.
    from headrace.elasticsearch.truncate import delete_older

    with closing(open_transport(options, options.requests_in_flight)) as transport:
        return delete_older(transport, options, version)


class Part(Enum):
    """Which of its rows a task indexes."""

    ALL = auto()
    REST = auto()
    """Those that do not delete. The task returns the others, or their number if they are too many."""
    DELETIONS = auto()


@dataclass(frozen=True, slots=True)
class _NamesTask:
    """What a task does with its rows to find the indices that they name."""

    options: IndexingOptions
    blocks: BatchBlocks | None = None

    def among(self, tasks: int) -> _NamesTask:  # noqa: ARG002
        """The task itself: it sends no requests."""
        return self

    def run(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield the names, each once, and one too many if there are too many."""
        from headrace.elasticsearch.record_indices import distinct_names

        with contextlib.ExitStack() as closed:
            rows = batches if self.blocks is None else closed.enter_context(closing(self.blocks.read(batches)))
            names = distinct_names(rows, self.options, self.options.max_indices + 1)
        yield pa.record_batch([pa.array(names, pa.string())], names=["name"])


@dataclass(frozen=True, slots=True)
class IndexingTask:
    """What a task does with its rows. ``seed`` is equal for all tasks (see ``DuplicateIdCheck``). ``tasks``: the most
    that run at once and share the output's ceiling."""

    options: IndexingOptions
    seed: int
    blocks: BatchBlocks | None = None
    part: Part = Part.ALL
    tasks: int = 1

    def among(self, tasks: int) -> IndexingTask:
        """The task as one of at most so many that run at once."""
        return replace(self, tasks=tasks)

    def run(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Index the task's rows. Yields its counts and digests when every dead letter is written."""
        freeze_imports()
        if self.blocks is None:
            yield from self._index(batches)
            return
        # If indexing fails, the error keeps the read, and so what it uses of the task's, until garbage is collected.
        with closing(self.blocks.read(batches)) as records:
            yield from self._index(records)

    def _index(self, rows: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        held = HeldDeletions()
        if self.part is Part.REST:
            rows = held.rest_of(rows)
        elif self.part is Part.DELETIONS:
            rows = only_deletions(rows)
        options = self._options()
        originals = _originals(options)
        try:
            with (
                closing(open_transport(options, options.requests_in_flight)) as transport,
                warnings_beside(options.report),
            ):
                indexer = Indexer(transport, options, originals=originals, seed=self.seed)
                counts = indexer.index(rows)
        finally:
            if originals is not None:
                originals.close()
        yield from _result(counts, indexer.digests(), held)

    def _options(self) -> IndexingOptions:
        context = TaskContext.get()
        number, earlier_tries = (0, 0) if context is None else (context.partitionId(), context.attemptNumber())
        # Dead letters of the deletions are others than those of the same task's other rows.
        return self.options.for_task(-1 - number if self.part is Part.DELETIONS else number, earlier_tries, self.tasks)


def _result(counts: IndexingCounts, digests: np.ndarray[Any, Any], held: HeldDeletions) -> Iterator[pa.RecordBatch]:
    first: list[Any] = [json.dumps(counts.to_dict()), held.rows, held.to_bytes()]
    for start in range(0, max(1, len(digests)), _DIGESTS_IN_A_ROW):
        part = digests[start : start + _DIGESTS_IN_A_ROW].tobytes()
        text, rows, deletions = first
        values = ([text], [part], [rows], [deletions])
        yield pa.record_batch(
            [pa.array(*column) for column in zip(values, _RESULT_SCHEMA.types, strict=True)], schema=_RESULT_SCHEMA
        )
        first = [None, 0, None]


@dataclass(slots=True)
class _Written:
    """What the tasks of a job returned. ``held``: the number of deletions that they held back; ``deletions`` are these
    rows, or some of them."""

    counts: IndexingCounts = field(default_factory=IndexingCounts)
    digests: list[np.ndarray[Any, Any]] = field(default_factory=list)
    held: int = 0
    deletions: list[pa.RecordBatch] = field(default_factory=list)

    @classmethod
    def of(cls, results: pa.Table) -> _Written:
        """Raises DocumentsUnaccountedError if there are more digests than rows."""
        written = cls()
        for row in results.to_pylist():
            if row["counts"] is not None:
                written.counts.add(IndexingCounts.from_dict(json.loads(row["counts"])))
            written.digests.append(np.frombuffer(row["digests"], np.uint64))
            written.held += row["held"]
            written.deletions += held_rows(row["deletions"]) if row["deletions"] else []
        indexed = sum(len(part) for part in written.digests)
        if indexed > written.counts.rows:
            raise DocumentsUnaccountedError(
                f"The tasks of the write returned the digests of {indexed} rows, and counts of {written.counts.rows}.",
                remedy="Run the batch again.",
            )
        return written

    def add(self, other: _Written) -> None:
        self.counts.add(other.counts)
        self.digests += other.digests


def withdraw_letters(options: IndexingOptions) -> int:
    """Delete the dead letters of earlier attempts that this one did not write again. Returns their number.

    From a topic nothing is deleted: it is told that they do not hold, and their number is not known.
    """
    if not options.withdraw_letters or options.attempt is None:
        return 0
    if options.letter_topic is not None:
        from headrace.elasticsearch.dead_letter_topic import LetterSender

        LetterSender.of(options).withdraw(options)
        return 0
    # Only a batch that was tried before has such letters, so other batches do not import this.
    from headrace.elasticsearch.administration import Administration
    from headrace.elasticsearch.dead_letter_index import DeadLetterIndex

    with Administration.of(
        Cluster.of(options),
        timeout_seconds=options.request_timeout_seconds,
        max_retry_seconds=options.max_retry_seconds,
    ) as administration:
        return DeadLetterIndex(administration, options.target).withdraw(
            options.batch_time_ms, options.attempt, of_names=options.names is not None
        )


def check_unshared(options: IndexingOptions, others: Iterable[ElasticsearchOutput]) -> None:
    """Raise UnsuitableTargetError if one of the stream's other outputs writes into this index, by whatever name.

    ``others`` are those whose documents may have the same ids. Those whose rows have an index each are left out: their
    definitions are compared.
    """
    own: list[ConcreteIndex] = []
    for other in (other for other in others if other.names.is_plain):
        own = own or [index for index in TargetWatch(options).now() if index is not None]
        if not own:
            return
        theirs = None
        # What is wrong with another output's index is its own error.
        with contextlib.suppress(HeadraceError):
            target = Target.of(other, options.target.owner.stream_name)
            asking = IndexingOptions.of(other, target, batch_time_ms=options.batch_time_ms)
            (theirs,) = TargetWatch(replace(asking, max_retry_seconds=0, request_timeout_seconds=5)).now()
        if theirs is not None and theirs.uuid is not None and theirs.uuid in {index.uuid for index in own}:
            raise UnsuitableTargetError(
                f"Output {other.id} writes into the same index, {theirs.name!r}, as {other.index_text!r}. Their "
                "documents have the same ids, so that those of one output are lost.",
                remedy="Give each output an index of its own.",
            )


def _originals(options: IndexingOptions) -> BatchOriginalRecords | None:
    """Where the task finds the records of dead letters, if the options name manifests."""
    if not options.manifests:
        return None
    clients = {}
    if options.inputs:
        from headrace.stream.inputs import KafkaInput

        clients = KafkaOriginalRecords.clients_of([KafkaInput.model_validate(fields) for fields in options.inputs])
    return WindowOriginalRecords(
        [
            KafkaOriginalRecords(uri, clients) if place == KAFKA else ManifestOriginalRecords(uri)
            for place, uri in options.manifests
        ]
    )
