"""Decides which outputs send records as they are in the log, so that Spark schedules blocks and never sees a record.

Reading a batch into the JVM and back out of it takes more of the processors' time than indexing it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.spark.batch_plan import load_manifests
from headrace.stream import BytesDecoder, ElasticsearchOutput, KeyIds, RecordIds
from headrace.wal.local_copies import CopySettings

if TYPE_CHECKING:
    from headrace.spark.batch_plan import OutputPlan
    from headrace.spark.wal_source import LogBlocks
    from headrace.stream import Stream


def sends_blocks(stream: Stream, plan: OutputPlan) -> ElasticsearchOutput | None:
    """The output, if it sends the records of the log as they are, with ids that the log's columns give; else None."""
    output = plan.output
    if not isinstance(output, ElasticsearchOutput) or stream.transform_of(output) is not None:
        return None
    # A stream of several inputs has a transform. A decoder finds undecodable records, which Spark does.
    decoders = [each for source in stream.inputs for each in (source.key_decoder, source.value_decoder)]
    ids = output.document_ids
    by_record = isinstance(ids, RecordIds) and not ids.rows
    by_key = isinstance(ids, KeyIds) and ids.version_from is None
    as_they_are = (
        (by_record or by_key)
        and all(isinstance(decoder, BytesDecoder) for decoder in decoders)
        and all(origin.source != "kafka" for origin in plan.read)
    )
    return output if as_they_are else None


def blocks_of(stream: Stream, plan: OutputPlan) -> LogBlocks:
    """The blocks of the batches that the output reads. Raises ManifestError."""
    from headrace.spark.wal_source import LogBlocks

    (source,) = stream.inputs
    return LogBlocks.of(load_manifests(plan.origins), source.id, CopySettings.of(stream.storage))
