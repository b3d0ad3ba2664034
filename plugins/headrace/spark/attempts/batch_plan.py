"""Plans what each output of a batch reads, and whether an earlier attempt may have written it, by the ledger alone.

A batch may not need Spark at all. Airflow asks for the plans too, so nothing here imports pyspark. Blocks that a power
failure took from the log are found first (`without_vanished`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from headrace.batch.manifest import Manifest, ManifestBlock
from headrace.clock import time_text
from headrace.errors import Failure, HeadraceError
from headrace.kafka.errors import RecordsReplacedError
from headrace.ledger.states import AttemptState, EventKind
from headrace.spark.attempts.former_outputs import former_steps
from headrace.spark.state.version import StateStore
from headrace.stream import STATE_STEP
from headrace.stream.model import milliseconds
from headrace.wal.errors import DamagedFrameError
from headrace.wal.frame import SegmentName
from headrace.wal.log_storage import LogStorage
from headrace.wal.reader import read_block
from headrace.wal.storage import open_storage

if TYPE_CHECKING:
    from headrace.kafka.ranges import RecordedRange
    from headrace.ledger import Ledger
    from headrace.ledger.batches.tables import Attempt, AttemptRow, BatchOrigin, BatchRow
    from headrace.stream import Output, Stream
    from headrace.stream_context import StreamContext

logger = logging.getLogger(__name__)

WRITTEN = "written"
"""The attribute of a failed attempt with the names of the outputs that may hold its documents. Outputs that it did not
begin are not included, nor those that failed because of another source's documents: the conflicting documents are not
the batch's own. An attempt without this attribute succeeded, was killed or never reported; it may have written to all
of its outputs."""

_MANIFEST_READERS = 8
# Of a receiver: its input, its index, and the epoch of its instance.
_Instance = tuple[str, int, int]
_MAX_NAMED = 20


class BatchNotReadableError(HeadraceError):
    """The batch is abandoned or absorbed, so its records are not read."""


class WindowRemovedError(HeadraceError):
    """A window reaches back to batches that were removed with the stream's history."""

    failure = Failure.FINAL


class UndeclaredInputError(HeadraceError):
    """The batch has records of an input that the stream's definition does not have."""

    failure = Failure.CODE


@dataclass(frozen=True, slots=True)
class OutputPlan:
    """What one output does at a batch time.

    Its rows are made from the batches of ``origins``, oldest first. Undecodable records of the batches in ``fresh``
    become dead letters. ``fresh`` has the batches since the previous window, so that each of these records becomes one
    dead letter, also a record in no window. ``needs_spark`` is False if these batches give no rows. ``skipped`` is the
    reason why the output has nothing to do at this batch time. ``written_before``: an earlier attempt may have written
    documents of this batch. ``tried_before``: an earlier attempt included the output, and may have written dead
    letters. ``former_steps``: see ``headrace.spark.attempts.former_outputs``.
    """

    output: Output
    origins: tuple[BatchOrigin, ...] = ()
    fresh: tuple[BatchOrigin, ...] = ()
    needs_spark: bool = False
    skipped: str | None = None
    written_before: bool = False
    tried_before: bool = False
    former_steps: tuple[str, ...] = ()

    @property
    def read(self) -> tuple[BatchOrigin, ...]:
        """All batches that are read, oldest first."""
        return tuple(sorted({*self.origins, *self.fresh}, key=lambda origin: origin.batch_time_ms))


@dataclass(frozen=True, slots=True)
class AttemptPlan:
    """What an attempt reads. ``own``: the batch's own records. ``leaving``: the batches whose records leave the state's
    window. ``outputs``: the plans of its outputs, without the state. ``stream_steps``: of a replay, the steps that
    attempts at the batch itself had."""

    own: BatchOrigin
    leaving: tuple[BatchOrigin, ...]
    outputs: tuple[OutputPlan, ...]
    stream_steps: tuple[str, ...] = ()


def plan_attempt(context: StreamContext, attempt: Attempt, batch: BatchRow) -> AttemptPlan:
    """Plan an attempt, and check that each manifest is the one with which its batch was allocated.

    Raises:
        BatchNotReadableError: the batch is abandoned, or another one absorbed it.
        ManifestError: a manifest is missing or damaged, or is not the recorded one.
        UndeclaredInputError: no output would read some of the batch's own records, and none has read them before.
        WindowRemovedError: the batch was completed before, or is replayed, and a window reaches back to a removed one.
        AmbiguousOutputError: see ``headrace.spark.attempts.former_outputs``.
    """
    time_ms = batch.batch_time_ms
    own = origins_of(context, [time_ms]).get(time_ms)
    if own is None:
        raise BatchNotReadableError(f"Batch {time_text(time_ms)} is {batch.state.value}, so its records are not read.")
    leaving = evicted_batches(context, time_ms) if STATE_STEP in attempt.outputs else ()
    rows = context.ledger.attempts.of_batch(attempt.stream, time_ms)
    earlier = _earlier(rows, attempt)
    written = written_before(context, attempt, batch, earlier)
    tried = tried_before(attempt, earlier)
    former = former_steps(context, attempt, batch, earlier)

    def with_history(plan: OutputPlan) -> OutputPlan:
        step = plan.output.step
        steps = former.get(step, ())
        return replace(
            plan,
            written_before=step in written or any(_may_have_written(row, steps) for row in earlier),
            tried_before=step in tried or bool(steps),
            former_steps=steps,
        )

    plans = tuple(map(with_history, plan_outputs(context, time_ms, attempt.outputs, own=(own, batch.records))))
    # A first run replaces nothing, so its window has the batches that there are.
    is_repeat = bool(attempt.target) or batch.steps is not None
    for plan in plans:
        if is_repeat and plan.skipped is None:
            _check_not_removed(context, plan.output, time_ms)
    for manifest in load_manifests([own, *leaving, *(origin for plan in plans for origin in plan.read)]):
        # Not those of a window's earlier batches: their inputs may have been removed since.
        if manifest.batch_time_ms == time_ms:
            _check_inputs(context.stream, manifest, is_repeat=is_repeat)
    of_stream = {step for row in rows if attempt.target and not row.target for step in row.outputs}
    return AttemptPlan(own, leaving, plans, tuple(sorted(of_stream - {STATE_STEP})))


def _check_inputs(stream: Stream, manifest: Manifest, *, is_repeat: bool) -> None:
    """A receiver job keeps the inputs with which it started, so blocks of a renamed or removed input go on to come.

    If the batch has been completed before, they were written then, and are only reported.
    """
    at = time_text(manifest.batch_time_ms)
    declared = {source.id for source in stream.inputs}
    for input_id in sorted({*manifest.inputs, *manifest.built} - declared):
        records = sum(recorded.weight for recorded in manifest.ranges(input_id))
        if records and is_repeat:
            logger.warning(
                "%d records of the input %r are left out of batch %s: the definition no longer has the input",
                records, input_id, at,
            )  # fmt: skip
        elif records:
            raise UndeclaredInputError(
                f"Batch {at} of stream {stream.name!r} has {records:,} records of the input {input_id!r}, which the "
                "definition no longer has: no output would write them.",
                remedy=f"Declare the input {input_id!r} again until its batches are done; a run then retries them. Or "
                f"give the batch up: `headrace batches abandon {stream.name} {at} --reason WHY`. To remove or rename "
                "an input, stop the stream first, and wait until its batches are done.",
            )


def plan_outputs(
    context: StreamContext, batch_time_ms: int, steps: Iterable[str], *, own: tuple[BatchOrigin, int] | None = None
) -> list[OutputPlan]:
    """The plans of these steps' outputs, in the order of ``steps``; the step "state" has no plan.

    ``own``: the origin of the batch's own records and their number, if the caller has read them.
    """
    outputs = [context.stream.output_of_step(step) for step in steps if step != STATE_STEP]
    return [_plan_output(context, batch_time_ms, output, own) for output in outputs]


def _plan_output(
    context: StreamContext, batch_time_ms: int, output: Output, own: tuple[BatchOrigin, int] | None
) -> OutputPlan:
    interval_ms = context.stream.batch_interval_ms
    window = output.window
    if window is not None and not window.is_due(batch_time_ms, interval_ms):
        every = window.slide_ms(interval_ms)
        return OutputPlan(output, skipped=f"no window ends at this batch time, but every {every} ms")
    held: Iterable[int] = (batch_time_ms,)
    fresh: Iterable[int] = (batch_time_ms,)
    if window is not None:
        held = window.batch_times_ms(batch_time_ms, interval_ms)
        fresh = window.fresh_times_ms(batch_time_ms, interval_ms)
    # Without a transform there are no rows without records.
    has_rows = context.stream.transform_of(output) is not None and output.takes_rows_without_records
    if window is None and own is not None:
        origin, records = own
        return OutputPlan(output, (origin,), (origin,), has_rows or records > 0)
    by_time = origins_of(context, {*held, *fresh})
    return OutputPlan(
        output,
        tuple(by_time[time] for time in held if time in by_time),
        tuple(by_time[time] for time in fresh if time in by_time),
        has_rows or _hold_records(context, sorted(by_time)),
    )


def _check_not_removed(context: StreamContext, output: Output, batch_time_ms: int) -> None:
    """Refuse a window over removed batches: what the other batches give would replace what the whole window gave.

    Raises:
        WindowRemovedError: the output's window reaches back to a batch that was removed.
    """
    if output.window is None:
        return
    interval_ms, row = context.stream.batch_interval_ms, context.ledger.streams.get(context.name)
    times = (
        *output.window.batch_times_ms(batch_time_ms, interval_ms),
        *output.window.fresh_times_ms(batch_time_ms, interval_ms),
    )
    removed = [time_ms for time_ms in times if row.removed_until_ms and row.has_removed(time_ms)]
    if removed:
        raise WindowRemovedError(
            f"Output {output.id!r} of batch {time_text(batch_time_ms)} has a window over batches that were removed, up "
            f"to {time_text(max(removed))}: stream {context.name!r} keeps its batches for limits.history.",
            remedy="It cannot be written again. What it wrote is where it was written. Begin with a later batch.",
        )


def _hold_records(context: StreamContext, times_ms: Sequence[int]) -> bool:
    # The newest first: the batch itself is rarely empty, so usually one query is enough.
    return any(context.ledger.batches.get(context.name, time_ms).records for time_ms in reversed(times_ms))


def evicted_batches(context: StreamContext, batch_time_ms: int) -> tuple[BatchOrigin, ...]:
    """The batches whose records leave the state's window with this batch, oldest first.

    The records of an abandoned batch leave too, if later versions of the table were built on its version.
    """
    times = evicted_batch_times(context.stream, batch_time_ms)
    if not times:
        return ()
    origins = origins_of(context, times, abandoned=True)
    abandoned = origins.keys() - context.ledger.batches.origins(context.name, times).keys()
    return tuple(
        origin
        for time_ms, origin in sorted(origins.items())
        if time_ms not in abandoned or _is_in_state(context, time_ms, batch_time_ms)
    )


def evicted_batch_times(stream: Stream, batch_time_ms: int) -> list[int]:
    """The batch times whose records leave the state's window with this batch, oldest first; usually one.

    There are several if earlier batch times have no state of their own, for example because they were coalesced. Batch
    times before the first state are not included, because their records are not in the table.
    """
    if stream.state is None or stream.state.window is None:
        return []
    base = StateStore.of(stream).base_of(batch_time_ms)
    if base is None:
        return []
    window_ms, interval_ms = milliseconds(stream.state.window), stream.batch_interval_ms
    times = range(base.batch_time_ms - window_ms + interval_ms, batch_time_ms - window_ms + 1, interval_ms)
    return [time for time in times if time >= base.first_ms]


def origins_of(context: StreamContext, times: Iterable[int], *, abandoned: bool = False) -> dict[int, BatchOrigin]:
    """Where the records of these batches are to be read, by batch time, after a check for vanished blocks.

    Raises the errors of `without_vanished` and of `refuse_reused`.
    """
    origins = without_vanished(context, context.ledger.batches.origins(context.name, times, abandoned=abandoned))
    refuse_reused(context, origins.values())
    return origins


def without_vanished(context: StreamContext, origins: Mapping[int, BatchOrigin]) -> dict[int, BatchOrigin]:
    """The origins of batches, by batch time, without blocks that have vanished.

    A vanished block is in the ledger, and its bytes never reached the disk: a power failure took it from a log that is
    not synced (`Stream.delivery`). A process that is killed loses none, because the kernel has its bytes. So only
    segments of receivers that have ended are checked, by reading their blocks of the batch.

    With ``delivery="at_least_once"``, a batch that lacks a block is read from Kafka. With ``"at_most_once"`` its other
    blocks are read, and the offsets of the vanished ones are recorded as gaps.

    Raises:
        ManifestError: a manifest is missing or damaged, or is not the recorded one.
        WalError: the log cannot be read.
    """
    if context.stream.delivery == "exactly_once":
        return dict(origins)
    now_ms = context.ledger.now_ms()
    live = {
        (row.receiver_id.input_id, row.receiver_id.index, row.epoch)
        for row in context.ledger.receivers.all(context.name)
        if row.alive(now_ms)
    }
    return {time_ms: _without_vanished(context, origin, live) for time_ms, origin in origins.items()}


def _without_vanished(context: StreamContext, origin: BatchOrigin, live: set[_Instance]) -> BatchOrigin:
    if origin.source != "log":
        return origin
    manifest = Manifest.load(origin.manifest_uri, sha256=origin.manifest_sha256)
    log = open_storage(manifest.log_root)
    vanished = [
        (input_id, block)
        for input_id, blocks in manifest.inputs.items()
        for block in blocks
        if _instance_of(block) not in live and _is_vanished(log, block)
    ]
    if not vanished:
        return origin
    delivery, records = context.stream.delivery, sum(block.records for _, block in vanished)
    logger.warning(
        "Batch %s: the log has lost %d blocks of %d records before they reached the disk (delivery %s).",
        time_text(origin.batch_time_ms), len(vanished), records, delivery,
    )  # fmt: skip
    if delivery == "at_least_once":
        return replace(origin, source="kafka")
    lost = [(input_id, offset_range) for input_id, block in vanished for offset_range in block.ranges]
    context.ledger.gaps.add_vanished(context.name, origin.batch_time_ms, lost)
    return replace(origin, vanished=frozenset(block.handle for _, block in vanished))


def _instance_of(block: ManifestBlock) -> _Instance | None:
    name = SegmentName.parse(block.handle.segment)
    return None if name is None else (name.input_id, name.index, name.epoch)


def _is_vanished(log: LogStorage, block: ManifestBlock) -> bool:
    try:
        read_block(log, block.handle)
    except DamagedFrameError:
        return True
    return False


def refuse_reused(context: StreamContext, origins: Iterable[BatchOrigin]) -> None:
    """Refuse batches that would be read from Kafka where its log was truncated since: other records have their offsets.

    What no receiver has reported, for example because none ran, is refused when it is read, by the leader epochs in the
    manifest. A batch that was built from Kafka has none.

    Raises:
        RecordsReplacedError: a receiver has reported such offsets; the text names them.
    """
    in_kafka = [origin for origin in origins if origin.source == "kafka"]
    reused = context.ledger.events.latest(context.name, [EventKind.OFFSETS_REUSED], 1_000) if in_kafka else ()
    problems = [
        f"{recorded} of batch {time_text(manifest.batch_time_ms)}"
        for manifest in (load_manifests(in_kafka) if reused else ())
        for event in reused
        for recorded in manifest.ranges(event.payload["input"])
        if recorded.weight and _holds_reused(recorded, event.payload)
    ]
    if problems:
        raise RecordsReplacedError("; ".join(sorted(set(problems))[:_MAX_NAMED]))


def _holds_reused(recorded: RecordedRange, reused: Mapping[str, Any]) -> bool:
    is_same = (recorded.partition.topic_id, recorded.partition.partition) == (reused["topic_id"], reused["partition"])
    return is_same and recorded.from_offset < reused["until_offset"] and reused["from_offset"] < recorded.until_offset


def _is_in_state(context: StreamContext, time_ms: int, until_ms: int) -> bool:
    """Whether the table from which the batch ``until_ms`` starts contains the records of the batch ``time_ms``."""
    built_on = StateStore.of(context.stream).is_built_on(time_ms, until_ms)
    if built_on is not None:
        return built_on
    # The ledger is updated after the version is written, so it lacks attempts that died in between.
    outputs = context.ledger.attempts.outputs(context.name, time_ms)
    return any(row.output_id == STATE_STEP and row.state is AttemptState.COMPLETED for row in outputs)


def load_manifests(origins: Iterable[BatchOrigin]) -> Iterator[Manifest]:
    """Yield the manifests with which the batches were allocated, each once, without the blocks that have vanished.

    Raises:
        ManifestError: a manifest is missing or damaged, or is not the recorded one.
    """

    def load(origin: BatchOrigin) -> Manifest:
        manifest = Manifest.load(origin.manifest_uri, sha256=origin.manifest_sha256)
        return manifest.without(origin.vanished) if origin.vanished else manifest

    by_uri = {origin.manifest_uri: origin for origin in origins}
    with ThreadPoolExecutor(_MANIFEST_READERS) as pool:
        yield from pool.map(load, by_uri.values())


def written_before(
    context: StreamContext, attempt: Attempt, batch: BatchRow, earlier: Iterable[AttemptRow]
) -> frozenset[str]:
    """The outputs of ``attempt`` whose documents of this batch an earlier attempt may have written.

    Only attempts at the same output of the batch, or of the same replay, count. All outputs are returned in two cases:
    a rebuilt ledger lacks the attempts at batches from before; and a batch that was built from Kafka by timestamps may
    have late records that a later batch wrote. An output with a window is always included, because it writes the
    records of one batch in several batches.
    """
    steps = {output.step for output in context.stream.outputs if output.window is not None}
    for row in earlier:
        steps.update(row.attributes.get(WRITTEN, row.outputs))
    asked = frozenset(attempt.outputs)
    if batch.built:
        return asked
    if not attempt.target and not steps.issuperset(asked):
        rebuilt = context.ledger.events.latest(attempt.stream, [EventKind.LEDGER_REBUILT], limit=1)
        if rebuilt and batch.allocated_at_ms <= rebuilt[0].at_ms:
            return asked
    return asked.intersection(steps)


def _may_have_written(row: AttemptRow, steps: Iterable[str]) -> bool:
    return not set(steps).isdisjoint(row.attributes.get(WRITTEN, row.outputs))


def tried_before(attempt: Attempt, earlier: Iterable[AttemptRow]) -> frozenset[str]:
    """The outputs of ``attempt`` for which an earlier attempt may have written dead letters."""
    return frozenset(attempt.outputs).intersection(name for row in earlier for name in row.outputs)


def earlier_attempts(ledger: Ledger, attempt: Attempt) -> list[AttemptRow]:
    """The attempts before this one at the batch, or at its replay, oldest first."""
    return _earlier(ledger.attempts.of_batch(attempt.stream, attempt.batch_time_ms), attempt)


def _earlier(rows: Iterable[AttemptRow], attempt: Attempt) -> list[AttemptRow]:
    return [row for row in rows if row.number < attempt.number and row.target == attempt.target]
