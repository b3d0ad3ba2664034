"""The operator that gives a batch its blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from airflow.sdk import BaseOperator

from headrace.operators.batch import BatchStep, summary

if TYPE_CHECKING:
    from airflow.sdk import Context

    from headrace.stream import Stream


class AllocateBlocksOperator(BatchStep, BaseOperator):
    """Seals the run's batch time and allocates its blocks: as a manifest beside the log, then in the ledger.

    A batch that is allocated already keeps its blocks, however often the task runs. Returns a small summary.

    :param stream: the stream.
    """

    template_fields: Sequence[str] = ()
    ui_color = "#e3f1d8"

    def __init__(self, *, stream: Stream, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.stream = stream

    def execute(self, context: Context) -> dict[str, Any]:
        """Allocate, and tell how many blocks and records the batch has."""
        from headrace.batching.allocation import allocate

        at_ms = self.batch_time_ms(context)
        with self.opened() as (ledger, storage):
            told = summary(allocate(self.stream, ledger, storage, at_ms))
            waiting = [time for time in ledger.batches.unclaimed(self.stream.name) if time.batch_time_ms < at_ms]
        self.log.info("Batch %d: %s", at_ms, ", ".join(f"{name} {value}" for name, value in told.items()))
        if waiting:
            self.log.warning(
                "%d earlier batch time(s) hold %d records that no run has claimed, from %d to %d (ms since the epoch). "
                "Run them: a backfill of this DAG over these times, or `headrace batches claim`.",
                len(waiting),
                sum(time.records for time in waiting),
                waiting[0].batch_time_ms,
                waiting[-1].batch_time_ms,
            )
        return told
