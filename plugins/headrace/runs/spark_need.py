"""Determines what a batch's steps need: Spark, only a process that prints, or nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headrace.stream import STATE_STEP, ConsoleOutput

if TYPE_CHECKING:
    from headrace.ledger import Ledger
    from headrace.stream import Stream


@dataclass(frozen=True, slots=True)
class StepNeeds:
    """``spark``: some step reads or makes rows. ``process``: some step needs Spark, or prints. ``counts``: the counts
    to record for each step if no process is needed."""

    spark: bool
    process: bool
    counts: Mapping[str, Mapping[str, Any]]


def needs_of(ledger: Ledger, stream: Stream, batch_time_ms: int, steps: Iterable[str]) -> StepNeeds:
    """What these steps of an allocated batch need."""
    from headrace.spark.batch_plan import plan_outputs
    from headrace.stream_context import StreamContext

    steps = tuple(steps)
    plans = plan_outputs(StreamContext(stream, ledger), batch_time_ms, steps)
    # The state is updated without records too: keys time out, and a version of the state is written.
    spark = STATE_STEP in steps or any(plan.needs_spark for plan in plans)
    # A console output prints its heading for a batch without records too.
    prints = any(isinstance(plan.output, ConsoleOutput) and plan.skipped is None for plan in plans)
    counts = {plan.output.id: {"skipped": plan.skipped} if plan.skipped else {"records": 0} for plan in plans}
    return StepNeeds(spark, spark or prints, counts)
