"""The Elasticsearch output: writes rows as documents, and undecodable records as dead letters."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from headrace.batch.places import LETTERS, PLACE, PLACES, TRUNCATED_BELOW, TRUNCATED_BELOW_THEN, place_of
from headrace.clock import SystemClock, time_text
from headrace.elasticsearch.bulk_bodies import TOMBSTONE
from headrace.elasticsearch.columns import (
    COORDINATES,
    HEADERS,
    INCARNATION,
    KEY,
    REJECTED_BECAUSE,
    TIMESTAMP,
    VALUE,
    index_column,
)
from headrace.elasticsearch.counts import EXAMPLES, IndexingCounts, IndexingReport
from headrace.elasticsearch.document_ids import identify
from headrace.elasticsearch.errors import DuplicateIdsError, ForeignVersionsError, TooManyDeadLettersError
from headrace.elasticsearch.indexer import duplicate_ids_error
from headrace.elasticsearch.options import KAFKA, LOG, IndexingOptions
from headrace.elasticsearch.target import ConcreteIndex, Target
from headrace.spark.outputs.documents import lacks_incarnation
from headrace.spark.outputs.writer import WARNING, report_file
from headrace.stream import ElasticsearchOutput, RecordIds

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from headrace.spark.attempts.shared_jobs import BatchBlocks
    from headrace.spark.outputs.documents import BatchIncarnations
    from headrace.spark.outputs.elasticsearch_sink import AtNames
    from headrace.spark.outputs.writer import Counts, RunBlocks, WrittenBatch


_DAY_MS = 86_400_000


class ElasticsearchOutputWriter:
    """Writes rows as documents. Repeated writes give no duplicates (rule 7 of the design)."""

    def __init__(self, output: ElasticsearchOutput) -> None:
        self._output = output

    def write(self, frame: DataFrame | None, batch: WrittenBatch) -> Counts:
        """Index the rows, then write the undecodable records to the dead letters.

        At last the dead letters of earlier attempts are deleted, if this attempt has not written them again.
        Returns the counts of `headrace.elasticsearch.counts.IndexingCounts`, and ``index``, the concrete index, if it
        is known.

        Raises:
            TooManyDeadLettersError: there are more dead letters than the output's limit allows. They and all other
                documents were written.
        """
        if frame is None:
            return {"rows": 0}
        incarnations = None
        if batch.incarnations is not None and lacks_incarnation(frame.schema):
            incarnations = batch.incarnations()
        total = IndexingCounts()
        with report_file(batch, self._output.id) as uri:
            options = self._options(batch, uri)
            settle = partial(self._at_names, batch)
            report = write_documents(frame, self._output, options, incarnations=incarnations, settle=settle)
        total.add(report.counts)
        for input_id, rows in batch.undecodable().items():
            with report_file(batch, f"{self._output.id}-undecodable-{input_id}") as uri:
                total.add(write_undecodable(rows, self._output, batch, report=uri).counts)
        return self._outcome(report, total, batch, options)

    def write_blocks(self, run: RunBlocks, blocks: BatchBlocks, batch: WrittenBatch) -> Counts:
        """Index the records of these blocks as they are. Otherwise as `write`."""
        from headrace.spark.outputs.elasticsearch_sink import index_blocks

        with report_file(batch, self._output.id) as uri:
            options = self._options(batch, uri)
            report = index_blocks(run, options, blocks, partial(self._at_names, batch))
        if report.duplicates:
            raise duplicate_ids_error(options.target.name, options.document_id, [])
        report.check_foreign()
        return self._outcome(report, report.counts, batch, options)

    def _options(self, batch: WrittenBatch, report: str) -> IndexingOptions:
        """The options, when the index is known to be this output's alone. Raises UnsuitableTargetError if it is not."""
        options = options_of(self._output, batch, report=report)
        self._check_unshared(options, batch)
        return options

    def _at_names(self, batch: WrittenBatch, options: IndexingOptions, names: Sequence[str]) -> IndexingOptions:
        """The options with the targets of the names of the batch's rows, and what is known of each from earlier
        batches."""
        known = batch.known_places(self._output, names)
        settled = options.with_targets(options.target.at(name, known=_known_indices(known.get(name))) for name in names)
        self._check_unshared(settled, batch)
        return settled

    def _check_unshared(self, options: IndexingOptions, batch: WrittenBatch) -> None:
        from headrace.spark.outputs.elasticsearch_sink import check_unshared

        others = batch.stream.elasticsearch_outputs
        check_unshared(options, [o for o in others if o.id != self._output.id and o.shares_ids(self._output)])

    def _outcome(
        self, report: IndexingReport, total: IndexingCounts, batch: WrittenBatch, options: IndexingOptions
    ) -> Counts:
        from headrace.spark.outputs.elasticsearch_sink import withdraw_letters

        self._check_versions(total, batch, options)
        former = [replace(options, target=options.target.of_output(step)) for step in batch.former_steps]
        total.letters_withdrawn = sum(map(withdraw_letters, [options, *former]))
        self._check_limit(total, batch.stream.name)
        if batch.written_before:
            self._warn_of_other_indices(batch, report)
        # An alias may point to another index later.
        index = report.target.concrete
        truncated_below = max(total.truncated_below, options.truncated_below)
        written_to: Counts = {}
        if index is not None or truncated_below or report.targets:
            # An alias of dead letters is known from the last batch that had some.
            letters = [report.target.dead_letter_index, total.letters_index or report.target.known_letters_index]
            written_to = {PLACE: {**place_of(self._output, index), LETTERS: letters}}
        if truncated_below:
            then = max(total.truncated_below, options.truncated_below_then)
            written_to[PLACE] |= {TRUNCATED_BELOW: truncated_below, TRUNCATED_BELOW_THEN: then}
        if index is not None:
            written_to["index"] = index.name
        if options.names is not None:
            written_to[PLACES] = [place_of(self._output.at(each.name), each.concrete) for each in report.targets]
        total.letters_index, total.truncated_below = "", 0
        return {**total.to_dict(), **written_to}

    def _warn_of_other_indices(self, batch: WrittenBatch, report: IndexingReport) -> None:
        names = [target.name for target in report.targets] or [self._output.index_text]
        if left := batch.left_behind(self._output, names):
            shown = ", ".join(left[:EXAMPLES]) + (", …" if len(left) > EXAMPLES else "")
            batch.progress(
                f"{WARNING}output {self._output.id}: earlier attempts at the batch wrote to {shown}, or may have, and "
                "its rows belong elsewhere now. What they wrote there stays: delete it, unless it is wanted twice."
            )

    def _check_versions(self, counts: IndexingCounts, batch: WrittenBatch, options: IndexingOptions) -> None:
        """Raise ForeignVersionsError if documents stay as they are because their versions count something else."""
        held, counts.held = counts.held, {}
        ahead = held.pop("", None)
        latest_ms = max(SystemClock().now_ms(), batch.batch_time_ms) + _DAY_MS
        if ahead is not None and ahead.version > latest_ms:
            raise ForeignVersionsError(
                f"Index {options.target.name!r} holds version {ahead.version:,} of document {ahead.id!r}. Versions "
                f"are batch times, such as {batch.batch_time_ms:,} of {time_text(batch.batch_time_ms)}: no batch has "
                "the other one yet, and until then no update of the document is written.",
                remedy="It was written with a clock that was ahead, or with versions of another kind. Delete such "
                "documents, wait for index.gc_deletes of the index (a minute by default), and run the batch again; or "
                "index into a new index.",
            )
        offsets = {(place.rpartition("-")[0], int(place.rpartition("-")[2])): each for place, each in held.items()}
        if offsets and (warning := batch.check_held_versions(options.target.name, offsets)):
            batch.progress(f"{WARNING}output {self._output.id}: {warning}")

    def _check_limit(self, counts: IndexingCounts, stream_name: str) -> None:
        counted = Counter(counts.dead_letter_reasons)
        del counted[TOMBSTONE]
        passed = self._output.dead_letter_limit.passed(counted.total(), counts.rows)
        if passed is None:
            return
        reasons = ", ".join(f"{number:,} {reason}" for reason, number in counted.most_common(5))
        example = f" For example {counts.dead_letter_example}" if counts.dead_letter_example else ""
        raise TooManyDeadLettersError(
            f"Of {counts.rows:,} rows for index {self._output.index_text!r} {counted.total():,} are dead letters, "
            f"{passed}: {reasons}.{example}",
            remedy=f"They are kept in {self._output.letters_place!r} (headrace dead-letters list {stream_name} "
            f"--output {self._output.id}). Correct the mapping, the decoder or the transform, or raise the output's "
            "dead_letter_limit; the batch's next run writes what is missing.",
            exceeded=passed,
            counts=counts.to_dict(),
        )


def options_of(output: ElasticsearchOutput, batch: WrittenBatch, *, report: str) -> IndexingOptions:
    """The options for writing the batch's rows to the output."""
    known = batch.known_place(output) or {}
    letters, known_letters_index = known.get(LETTERS) or (None, None)
    target = Target.of(
        output,
        batch.stream.name,
        replay=batch.target,
        known=_known_indices(known),
        known_letters_index=known_letters_index if letters == output.dead_letters else None,
    )
    # The manifests of a window's other batches come newest first.
    # In a test of the transform there is none.
    manifests = [(KAFKA if batch.from_kafka else LOG, batch.manifest_uri)] if batch.manifest_uri else []
    manifests += [(origin.source, origin.manifest_uri) for origin in reversed(batch.earlier)]
    return IndexingOptions.of(
        output,
        target,
        batch_time_ms=batch.batch_time_ms,
        attempt=batch.attempt,
        report=report,
        manifests=manifests,
        inputs=batch.stream.kafka_inputs,
        written_before=batch.written_before,
        withdraw_letters=batch.written_before or batch.tried_before,
        truncated_below=known.get(TRUNCATED_BELOW, 0),
        truncated_below_then=known.get(TRUNCATED_BELOW_THEN, 0),
        letters_names=[other.dead_letters for other in batch.stream.elasticsearch_outputs],
        began_ms=SystemClock().now_ms(),
        read_topics=_read_topics(output, batch),
    )


def _known_indices(place: Mapping[str, Any] | None) -> tuple[ConcreteIndex, ...]:
    return (ConcreteIndex(place["index"], place["uuid"]),) if place and place.get("index") else ()


def _read_topics(output: ElasticsearchOutput, batch: WrittenBatch) -> list[str]:
    if output.dead_letter_topic is None:
        return []
    from headrace.spark.outputs.kafka import read_topic_ids

    return read_topic_ids(batch, output.dead_letter_topic.topic)


def write_documents(
    frame: DataFrame,
    output: ElasticsearchOutput,
    options: IndexingOptions,
    *,
    incarnations: BatchIncarnations | None = None,
    settle: AtNames | None = None,
) -> IndexingReport:
    """Make the documents of the rows, write them, and return the report with their outcomes.

    The options are the output's. ``report`` in them is a URI, new for every write, beside which the Spark application
    stores warnings and this process reads them. ``settle``: see `elasticsearch_sink.index_rows`.

    Raises:
        UnsuitableRowsError: see ``headrace.spark.outputs.documents.prepare_documents``.
        DuplicateIdsError: rows of the batch have the same id.
        ForeignDocumentsError: the index holds documents of another source under ids of the batch.
    """
    from headrace.spark.outputs.documents import prepare_documents
    from headrace.spark.outputs.elasticsearch_sink import at_names, index_rows

    prepared = prepare_documents(frame, output, incarnations=incarnations)
    report = index_rows(prepared, options, settle or at_names)
    if report.duplicates:
        raise _duplicate_ids(prepared, options)
    report.check_foreign()
    return report


def write_undecodable(
    undecodable: DataFrame, output: ElasticsearchOutput, batch: WrittenBatch, *, report: str
) -> IndexingReport:
    """Write records that do not decode to the output's dead letters, with their bytes from Kafka."""
    from pyspark.sql import functions as F  # noqa: N812

    from headrace.spark.outputs.elasticsearch_sink import index_rows
    from headrace.spark.records.decoding import REASON

    reason = F.col(REASON).alias(REJECTED_BECAUSE)
    rows = undecodable.select(*COORDINATES, INCARNATION, KEY, VALUE, HEADERS, TIMESTAMP, reason)
    # The rows have the record's own columns only, whatever the ids of the output's documents are.
    changed = {"document_ids": RecordIds(), "tombstones": "dead_letter", "truncates": "dead_letter"}
    by_record = output.model_copy(update=changed)
    options = options_of(by_record, batch, report=report)
    # The rows are dead letters, so they name no index.
    return index_rows(rows, replace(options, written_before=False, withdraw_letters=False, targets={}))


def _duplicate_ids(prepared: DataFrame, options: IndexingOptions) -> DuplicateIdsError:
    """The error with examples of the ids, which are queried here: the sink's tasks only count them."""
    of_names = () if options.names is None else map(index_column, range(len(options.names.placeholders)))
    of_ids = {*options.needed_columns, INCARNATION, *of_names}
    names = [name for name in prepared.columns if name in of_ids]
    examples: list[str] = []
    # A transform that is not deterministic may give no such rows now. A failing query must not replace the error.
    with contextlib.suppress(Exception):
        duplicates = prepared.groupBy(*names).count().where("count > 1").limit(EXAMPLES).toArrow().combine_chunks()
        examples = [text for batch in duplicates.to_batches() for text in identify(batch, options).ids.to_pylist()]
    return duplicate_ids_error(options.target.name, options.document_id, examples)
