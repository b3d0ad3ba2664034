"""Makes DataFrames of a batch's manifests: the decoded records of each input, then the rows of each output.

Each set of batches is read once for all outputs that read it, and each transform is called once for all outputs that
share it and a window. An output that sends records as they are gets their blocks instead (`sends_blocks`):
Spark schedules the blocks and never sees a record. Reading a batch into the JVM and back out of it takes more of the
processors' time than indexing it.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property, partial, reduce
from typing import TYPE_CHECKING, Any

from headrace.batch.manifest import Manifest
from headrace.batch.readers import BatchReaders
from headrace.clock import time_text
from headrace.elasticsearch.columns import INCARNATION
from headrace.errors import Failure, HeadraceError
from headrace.spark.attempts.batch_plan import load_manifests
from headrace.spark.outputs.documents import FOUND_INCARNATION, BatchIncarnations, lacks_incarnation
from headrace.spark.records.decoding import DecodedInput, RecordDecoding, decode_input
from headrace.spark.records.transforms import STATE_FRAMES, apply_transform, load_transform, takes
from headrace.spark.sessions import parallelism, register_source
from headrace.wal.local_copies import CopySettings

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from headrace.kept_values import KeptUse
    from headrace.ledger.batches.tables import BatchOrigin
    from headrace.spark.attempts.batch_attempt import BatchAttempt
    from headrace.spark.attempts.batch_plan import OutputPlan
    from headrace.spark.attempts.shared_jobs import BatchBlocks
    from headrace.stream import Input, Output, Stream


Origins = tuple["BatchOrigin", ...]


class StateNotUpdatedError(HeadraceError):
    """An output's transform takes the state, and the state's update failed in this attempt."""


class ReadAgainError(HeadraceError):
    """The log no longer has the records of a batch, and their input cannot be read again."""

    failure = Failure.FINAL


def read_inputs(
    spark: SparkSession,
    stream: Stream,
    origins: Sequence[BatchOrigin],
    partitions: int | None = None,
    *,
    uses: Callable[[Input], Mapping[str, KeptUse]] = lambda _: {},
) -> dict[str, DecodedInput]:
    """Every input of the stream, by id, with the records of all these batches, each once.

    Args:
        origins: the batches, from ``ledger.batches.origins``; if there are none, the frames are empty.
        partitions: about how many tasks read an input; by default `parallelism`.
        uses: for what decoders keep values: see `BatchReaders.uses`.
    """
    copies = CopySettings.of(stream.storage)
    return {
        source.id: decode_input(
            spark,
            source,
            partial(read_records, spark, source, origins, partitions=partitions, copies=copies),
            stream.folder_url,
            uses=uses(source),
        )
        for source in stream.inputs
    }


def read_records(
    spark: SparkSession,
    source: Input,
    origins: Sequence[BatchOrigin],
    *,
    partitions: int | None = None,
    copies: CopySettings | None = None,
    decoding: RecordDecoding | None = None,
) -> DataFrame:
    """The records of one input in these batches, by default undecoded (``headrace.wal.frame.RECORD_SCHEMA``).

    ``copies``: the settings of the log's local copies; None: the log is read.
    """
    tasks = partitions or parallelism(spark)
    in_kafka = [origin.manifest_uri for origin in origins if origin.source == "kafka"]
    in_log = [origin for origin in origins if origin.source != "kafka"]
    frames = []
    if in_log or not in_kafka:
        from headrace.spark.records.wal_source import LogBlocks

        frames.append(LogBlocks.of(load_manifests(in_log), source.id, copies).frame(spark, tasks, decoding))
    if in_kafka and source.in_kafka is None:
        refuse_reading_again(source, in_kafka)
    elif in_kafka:
        from headrace.spark.records.kafka_ranges_source import KafkaRangesDataSource

        register_source(spark, KafkaRangesDataSource)
        reader = spark.read.format("kafka_ranges").options(manifests=json.dumps(in_kafka), input=source.id)
        read = reader.options(numPartitions=tasks, stream=source.model_dump_json()).load()
        frames.append(read if decoding is None else read.mapInArrow(decoding.run, decoding.schema))
    return _union(frames)


def refuse_reading_again(source: Input, manifest_uris: Sequence[str]) -> None:
    """Refuse batches that have records of this input, which is no Kafka input, and of which the log no longer has all.

    Raises:
        ReadAgainError: there is one.
    """
    for uri in manifest_uris:
        manifest = Manifest.load(uri)
        if manifest.ranges(source.id):
            raise ReadAgainError(
                f"Batch {time_text(manifest.batch_time_ms)} has records of input {source.id!r}, and the log no longer "
                "has all blocks of the batch. Kafka would be read again; this input cannot be.",
                remedy="A batch can run again as long as the log keeps it: raise the stream's remember for later "
                "batches.",
            )


class BatchInputs:
    """The inputs of an attempt, by the batches that an output reads. Each set of batches is read once."""

    def __init__(self, attempt: BatchAttempt, *, pins: bool = True) -> None:
        """``pins``: whether the schemas that a registry's records are read by are recorded with the batch."""
        self._attempt = attempt
        self._pins = pins
        self._inputs: dict[tuple[Origins, bool], dict[str, DecodedInput]] = {}
        self._incarnations: dict[Origins, BatchIncarnations] = {}
        self._undecodable: dict[Origins, tuple[int, dict[str, DataFrame]]] = {}

    def of(self, origins: Origins, *, by_state: bool = False) -> dict[str, DecodedInput]:
        """Every input, by id, with its records of these batches. ``by_state``: as they entered the state."""
        key = (origins, by_state)
        if key not in self._inputs:
            attempt, readers = self._attempt, self.readers
            parts = [
                read_inputs(attempt.spark, by.stream, some, attempt.partitions, uses=by.uses)
                for by, some in readers.by_registry(attempt.context, attempt.batch_time_ms, origins, by_state=by_state)
            ]
            self._inputs[key] = {name: _together([part[name] for part in parts]) for name in parts[0]}
        return self._inputs[key]

    @cached_property
    def readers(self) -> BatchReaders:
        """The schemas by which the batch's records are read. Raises as `BatchReaders.of` does."""
        attempt = self._attempt
        claim = attempt.claim if self._pins else None
        return BatchReaders.of(attempt.context, attempt.batch_time_ms, claim=claim, warn=attempt.report)

    def decoded(self, origins: Origins, *, by_state: bool = False) -> dict[str, DataFrame]:
        """The inputs with decoded keys and values, as the user's functions get them."""
        return {name: views.decoded for name, views in self.of(origins, by_state=by_state).items()}

    def incarnations(self, origins: Origins) -> BatchIncarnations:
        """The topic incarnations of these batches' records."""
        if origins not in self._incarnations:
            self._incarnations[origins] = BatchIncarnations.of(load_manifests(origins))
        return self._incarnations[origins]

    def undecodable(self, origins: Origins) -> tuple[int, Mapping[str, DataFrame]]:
        """The number of undecodable records of these batches, and these records for each input that has any.

        It usually needs no query of its own after the records were read (``DecodedInput.number_undecodable``).
        """
        if origins not in self._undecodable:
            inputs = self.of(origins)
            counts = {name: views.number_undecodable(_records(origins, name)) for name, views in inputs.items()}
            undecodable = {name: views.undecodable for name, views in inputs.items() if counts[name]}
            kept = {name: rows for name, rows in undecodable.items() if rows is not None}
            self._undecodable[origins] = (sum(counts.values()), kept)
        return self._undecodable[origins]


def sharing_frames(stream: Stream, plans: Iterable[OutputPlan]) -> list[list[OutputPlan]]:
    """Group the plans by transform (or none) and window (or none)."""
    groups: dict[Any, list[OutputPlan]] = {}
    for plan in plans:
        groups.setdefault((stream.transform_of(plan.output), plan.output.window), []).append(plan)
    return list(groups.values())


class OutputFrames:
    """The rows of outputs that share a transform and a window (one group of `sharing_frames`).

    The transform is called when the first frame is requested. A frame that several outputs read completely is persisted
    until the end of the ``with`` block, in memory, or on disk if memory is short: 100,000 records of JSON, parsed and
    written twice, took 3.8 s instead of 5.9 s, an aggregate of them 2.7 s instead of 5.5 s. Undecoded records of the
    log are not persisted, since reading them again is as fast; nor are frames for the few rows of a console (3.4 s,
    persisted 4.6 s).
    """

    def __init__(
        self, attempt: BatchAttempt, inputs: BatchInputs, plans: Sequence[OutputPlan], *, state_failed: bool = False
    ) -> None:
        self._attempt = attempt
        self._inputs = inputs
        self._plans = [plan for plan in plans if plan.needs_spark]
        self._context = attempt.batch_context(plans[0].output.window)
        self._state_failed = state_failed
        self._frames: dict[str, DataFrame] | None = None
        self._persisted: list[DataFrame] = []
        self._error: Exception | None = None

    def __enter__(self) -> OutputFrames:
        return self

    def __exit__(self, *_: object) -> None:
        for frame in self._persisted:
            # If the application is gone, nothing is persisted any more.
            with contextlib.suppress(Exception):
                frame.unpersist()

    def of(self, output: Output) -> DataFrame:
        """The output's rows. An error of the transform is raised again for each output of the group."""
        if self._error is not None:
            raise self._error
        if self._frames is None:
            try:
                self._frames = self._make(output)
            except Exception as error:
                self._error = error
                raise
        return self._frames[output.id]

    def _make(self, output: Output) -> dict[str, DataFrame]:
        origins = self._plans[0].origins
        inputs = self._inputs.of(origins)
        transform = load_transform(self._attempt.stream, output)
        if transform is None:
            # These outputs send the value's own bytes, so parsing and serialising them again would gain nothing.
            (views,) = inputs.values()
            stream = self._attempt.stream
            as_bytes = {plan.output.id for plan in self._plans if stream.sends_bytes(plan.output)}
            sent = dict.fromkeys(as_bytes, views.original) if as_bytes else {}
            rows = {plan.output.id: views.decoded for plan in self._plans if plan.output.id not in as_bytes}
            return {**sent, **(rows if views.decoded is views.original else self._persist_shared(rows))}
        decoded = self._inputs.decoded(origins)
        frames = self._transformed(transform, decoded)
        needing = [plan.output for plan in self._plans if plan.output.needs_incarnation]
        lacking = [output for output in needing if lacks_incarnation(frames[output.id].schema)]
        if lacking and len(decoded) == 1:
            known = self._inputs.incarnations(origins)
            if known.ambiguous:
                frames |= self._by_incarnation(transform, decoded, known.numbers, lacking)
        return self._persist_shared(frames)

    def _transformed(self, transform: Callable[..., Any], inputs: Mapping[str, DataFrame]) -> dict[str, DataFrame]:
        return apply_transform(
            transform,
            inputs,
            [plan.output.id for plan in self._plans],
            self._context,
            more=self._state_frames(transform),
            # A replay has only some of the stream's outputs, but the transform may return all of them.
            known=None if self._context.target else [known.id for known in self._attempt.stream.outputs],
        )

    def _by_incarnation(
        self,
        transform: Callable[..., Any],
        inputs: Mapping[str, DataFrame],
        numbers: Iterable[int],
        outputs: Iterable[Output],
    ) -> dict[str, DataFrame]:
        """The rows of these outputs with their incarnation, for a transform that drops it.

        The transform is called separately with the records of each incarnation, as if a batch had ended when the topic
        was created again.
        """
        from pyspark.sql import functions as F  # noqa: N812

        parts = {}
        for number in numbers:
            of_it = {name: frame.where(F.col(INCARNATION) == number) for name, frame in inputs.items()}
            parts[number] = self._transformed(transform, of_it)
        made: dict[Any, DataFrame] = {}
        frames = {}
        for output in outputs:
            rows = {number: part[output.id] for number, part in parts.items()}
            # Outputs that shared a frame share the new one too, so that it is persisted for them.
            same = tuple(map(id, rows.values()))
            if same not in made:
                made[same] = _union(
                    [frame.withColumn(FOUND_INCARNATION, F.lit(number)) for number, frame in rows.items()]
                )
            frames[output.id] = made[same]
        return frames

    def _persist_shared(self, frames: dict[str, DataFrame]) -> dict[str, DataFrame]:
        whole = {plan.output.id for plan in self._plans if plan.output.reads_all_rows}
        readers: dict[int, list[str]] = {}
        for name, frame in frames.items():
            readers.setdefault(id(frame), []).append(name)
        for names in readers.values():
            if len(whole.intersection(names)) > 1:
                persisted = frames[names[0]].persist()
                self._persisted.append(persisted)
                frames.update(dict.fromkeys(names, persisted))
        return frames

    def _state_frames(self, transform: Callable[..., Any]) -> dict[str, Any]:
        attempt = self._attempt
        if attempt.stream.state is None or not any(takes(transform, name) for name in STATE_FRAMES):
            return {}
        if self._state_failed:
            raise StateNotUpdatedError("The transform takes the state, whose update failed.")
        from headrace.spark.state.updating import state_frames

        frames = state_frames(attempt.spark, attempt.stream, attempt.batch_time_ms)
        return {name: getattr(frames, name) for name in STATE_FRAMES}


def _records(origins: Origins, input_id: str) -> int | None:
    """The number of an input's records in these batches; None if some are read from Kafka, which may have fewer."""
    from headrace.spark.records.wal_source import LogBlocks

    if any(origin.source == "kafka" for origin in origins):
        return None
    return LogBlocks.of(load_manifests(origins), input_id).records


def _together(parts: Sequence[DecodedInput]) -> DecodedInput:
    """An input's records of batches that were read apart."""
    if len(parts) == 1:
        return parts[0]
    undecodable = [part.undecodable for part in parts if part.undecodable is not None]
    return DecodedInput(
        decoded=_union(part.decoded for part in parts),
        undecodable=_union(undecodable) if undecodable else None,
        read_original=lambda: _union(part.original for part in parts),
    )


def _union(frames: Iterable[DataFrame]) -> DataFrame:
    return reduce(lambda left, right: left.unionByName(right), frames)


def sends_blocks(stream: Stream, plan: OutputPlan) -> bool:
    """Whether the output sends the records as they are, so that its writer takes blocks in place of rows.

    They are all in the log, or all read again from Kafka.
    """
    if not sends_records(stream, plan.output):
        return False
    in_kafka = {origin.source == "kafka" for origin in plan.read}
    return in_kafka <= {False} or (in_kafka == {True} and stream.inputs[0].in_kafka is not None)


def sends_records(stream: Stream, output: Output) -> bool:
    """Whether the output sends the records as they are, if `sends_blocks` allows it."""
    if not output.takes_blocks or stream.transform_of(output) is not None:
        return False
    # A stream of several inputs has a transform. A decoder finds undecodable records, which Spark does.
    decoders = [decoder for source in stream.inputs for decoder in source.decoders.values()]
    return all(decoder.decodes is None for decoder in decoders)


def blocks_of(stream: Stream, plan: OutputPlan) -> BatchBlocks:
    """The blocks of the batches that the output reads (`sends_blocks`).

    Raises ManifestError, and if the input's connection is not defined, as `RangeClients.of` does.
    """
    (source,) = stream.inputs
    manifests = load_manifests(plan.origins)
    kafka = source.in_kafka
    if kafka is not None and any(origin.source == "kafka" for origin in plan.origins):
        from headrace.spark.records.kafka_ranges_source import KafkaBlocks

        return KafkaBlocks.of(manifests, kafka)
    from headrace.spark.records.wal_source import LogBlocks

    return LogBlocks.of(manifests, source.id, CopySettings.of(stream.storage))
