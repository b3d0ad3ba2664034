"""Finds what became of a record in each output of its batch, and of the batch's replays."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from headrace.clock import time_text
from headrace.errors import HeadraceError
from headrace.ledger.batch_tables import AttemptRow, BatchOutputRow, BatchRow
from headrace.ledger.states import AttemptState
from headrace.stream import STATE_STEP, ElasticsearchOutput, Output, Stream
from headrace.stream.outputs import ConsoleOutput, ForeachBatchOutput, KafkaOutput, ParquetOutput
from headrace.stream_context import StreamContext
from headrace.trace.document_outcome import DocumentQuestion, elasticsearch_outcome
from headrace.trace.models import Outcome, OutputTrace, RecordPosition, TracedRecord


@dataclass(frozen=True, slots=True)
class _Step:
    """A step of the batch or of its replay ``target``. ``row`` is its newest result, ``stream`` the definition with
    which it ran, or will run."""

    name: str
    target: str
    stream: Stream
    row: BatchOutputRow | None
    revision: int | None


def trace_outputs(
    context: StreamContext,
    position: RecordPosition,
    batch: BatchRow,
    attempts: Sequence[AttemptRow],
    record: TracedRecord | None,
    *,
    document_id: str | None = None,
    environ: Mapping[str, str] | None = None,
) -> tuple[OutputTrace, ...]:
    """Trace the record in all outputs of its batch: the batch's own first, then those of its replays."""
    return tuple(
        _trace(step, batch, position, record, document_id=document_id, environ=environ)
        for step in _steps(context, batch, attempts)
    )


def _steps(context: StreamContext, batch: BatchRow, attempts: Sequence[AttemptRow]) -> Iterator[_Step]:
    by_number = {attempt.number: attempt for attempt in attempts}
    for target in ("", *dict.fromkeys(attempt.target for attempt in attempts if attempt.target)):
        rows = context.ledger.attempts.outputs(context.name, batch.batch_time_ms, target=target)
        of_name = {row.output_id: row for row in rows}
        begun = [attempt for attempt in attempts if attempt.target == target]
        expected = [name for attempt in begun for name in attempt.outputs]
        if not target:
            expected = [*context.stream.steps, *expected]
        for name in dict.fromkeys([*expected, *of_name]):
            row = of_name.get(name)
            attempt = by_number.get(row.attempt) if row is not None else next(iter(reversed(begun)), None)
            stream = _definition(context, attempt)
            revision = None if attempt is None else attempt.revision
            yield _Step(name, target, stream, row, revision)


def _definition(context: StreamContext, attempt: AttemptRow | None) -> Stream:
    """The definition with which the attempt ran; the stream's present one if that is not known."""
    if attempt is None:
        return context.stream
    with contextlib.suppress(HeadraceError):
        if attempt.definition is not None:
            return Stream.from_json(attempt.definition)
        if attempt.revision is not None:
            return Stream.from_json(context.ledger.streams.at_revision(context.name, attempt.revision).definition)
    return context.stream


def _trace(
    step: _Step,
    batch: BatchRow,
    position: RecordPosition,
    record: TracedRecord | None,
    *,
    document_id: str | None,
    environ: Mapping[str, str] | None,
) -> OutputTrace:
    output = next((each for each in step.stream.outputs if each.step == step.name), None)
    kind = step.name if step.name == STATE_STEP else "unknown" if output is None else output.kind
    row = step.row
    known = OutputTrace(
        step.name if output is None else output.id, kind, step.target, Outcome.UNKNOWN, "", revision=step.revision
    )
    if row is not None:
        known = replace(
            known,
            attempt=row.attempt,
            code_version=row.code_version,
            recorded_at_ms=row.recorded_at_ms,
            error=row.error,
            counts=row.counts,
        )
    if (reason := batch.abandoned_steps.get(step.name)) and not step.target and not _is_written(row):
        return replace(known, outcome=Outcome.NOT_WRITTEN, text=f"The output was given up for this batch: {reason}")
    if output is None and step.name != STATE_STEP:
        return replace(known, text="The stream's definition does not have this output any more.")
    if row is not None and _is_written(row) and "skipped" in row.counts:
        text = f"The output had nothing to write at this batch time: {row.counts['skipped']}."
        return replace(known, outcome=Outcome.WRITTEN, text=text)
    if isinstance(output, ElasticsearchOutput):
        question = DocumentQuestion(
            stream=step.stream,
            output=output,
            position=position,
            record=record,
            index=_index(row, output),
            written=_is_written(row),
            waits=_waits(batch, row),
            document_id=document_id,
            environ=environ,
        )
        return elasticsearch_outcome(known, question)
    if not _is_written(row):
        return replace(known, outcome=Outcome.NOT_WRITTEN, text=_waits(batch, row))
    return replace(known, outcome=Outcome.WRITTEN, text=_written(output, batch))


def _is_written(row: BatchOutputRow | None) -> bool:
    return row is not None and row.state is AttemptState.COMPLETED


def _index(row: BatchOutputRow | None, output: ElasticsearchOutput) -> str:
    recorded = None if row is None else row.counts.get("index")
    return output.index if recorded is None else str(recorded)


def _waits(batch: BatchRow, row: BatchOutputRow | None) -> str:
    """Why the output has not written the batch."""
    if row is not None and row.error:
        return f"The output has not written the batch; attempt {row.attempt} failed: {row.error}"
    if row is not None and row.state is AttemptState.FENCED:
        return f"The output has not written the batch: attempt {row.attempt} was replaced by a later one."
    return f"The output has not written the batch, which is {batch.state.value}."


def _written(output: Output | None, batch: BatchRow) -> str:
    time_ms = batch.batch_time_ms
    match output:
        case ParquetOutput():
            place = f"Its rows are in {output.path.rstrip('/')}/batch_time={time_ms}/."
        case KafkaOutput():
            place = f"Its rows were sent to topic {output.topic}, in one transaction."
        case ConsoleOutput():
            place = f"Up to {output.rows} rows were printed to the log of the output's task."
        case ForeachBatchOutput():
            place = f"Its rows were given to {output.function}."
        case _:
            return "The state was updated with the batch's records."
    return (
        f"The batch is written. {place} Whether a row of this record is among them is not recorded: headrace batches "
        f"preview {batch.stream} {time_text(time_ms)} --output {output.id} shows the rows."
    )
