"""What a batch's steps need: Spark, a process that prints, or nothing."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from headrace.stream import ConsoleOutput
from headrace.stream.state import STATE_STEP

if TYPE_CHECKING:
    from headrace.ledger.rows import BatchRow
    from headrace.stream import Output, Stream


def needs_spark(stream: Stream, batch: BatchRow, steps: Iterable[str]) -> bool:
    """Whether any of the steps has to read or make rows."""
    return any(_step_needs_spark(stream, batch, step) for step in steps)


def needs_process(stream: Stream, batch: BatchRow, steps: Iterable[str]) -> bool:
    """Whether any of the steps needs Spark, or prints: a console has its heading for a batch without records too."""
    steps = tuple(steps)
    return needs_spark(stream, batch, steps) or any(
        isinstance(output, ConsoleOutput) and _is_due(stream, batch, output)
        for output in stream.outputs
        if output.id in steps
    )


def _step_needs_spark(stream: Stream, batch: BatchRow, step: str) -> bool:
    from headrace.spark.outputs.registry import needs_empty_batches

    if step == STATE_STEP:
        # Keys time out, and a version of the state is written, without records too.
        return True
    output = stream.output(step)
    if not _is_due(stream, batch, output):
        return False
    # The window's other batches may have what this one has not.
    return batch.records > 0 or output.window is not None or needs_empty_batches(output, stream)


def _is_due(stream: Stream, batch: BatchRow, output: Output) -> bool:
    """Whether the output is written at this batch time; between two slides, one with a window is not."""
    return output.window is None or output.window.is_due(batch.batch_time_ms, stream.batch_interval_ms)
