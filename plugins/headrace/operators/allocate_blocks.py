"""The operator that gives a batch its blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headrace.operators.batch import BatchStepOperator
from headrace.operators.claims import claim

if TYPE_CHECKING:
    from airflow.sdk import Context

    from headrace.batching.allocation import Allocation
    from headrace.ledger.rows import UnclaimedTime


class AllocateBlocksOperator(BatchStepOperator):
    """Seals the run's batch time and allocates its blocks: as a manifest beside the log, then in the ledger.

    A batch that is allocated already keeps its blocks, however often the task runs. Returns a small summary.

    Earlier batch times that hold records and have no run get one: nothing is left lying because the schedule began
    later than the receiver, or does not reach back far enough.

    :param stream: the stream.
    :param claim_missed: whether to trigger those runs; otherwise the task's log names them.
    """

    ui_color = "#e3f1d8"

    def __init__(self, *, claim_missed: bool = True, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.claim_missed = claim_missed

    def execute(self, context: Context) -> dict[str, Any]:
        """Allocate, and tell how many blocks and records the batch has."""
        from headrace.batching.allocation import allocate

        at_ms = self.batch_time_ms(context)
        with self.opened() as (ledger, storage):
            told = summary(allocate(self.stream, ledger, storage, at_ms))
            missed = [time for time in ledger.blocks.unclaimed(self.stream.name) if time.batch_time_ms < at_ms]
        self.log.info("Batch %d: %s", at_ms, ", ".join(f"{name} {value}" for name, value in told.items()))
        if missed:
            self._claim(context, missed)
        return told

    def _claim(self, context: Context, missed: list[UnclaimedTime]) -> None:
        records = sum(time.records for time in missed)
        self.log.warning(
            "%d earlier batch time(s) hold %d records and are not allocated yet, from %d to %d (ms since the epoch).",
            len(missed), records, missed[0].batch_time_ms, missed[-1].batch_time_ms,
        )  # fmt: skip
        if not self.claim_missed:
            self.log.warning("Run them: by a backfill of this DAG over these times.")
            return
        times = [time.batch_time_ms for time in missed]
        claimed = claim(context, times, self.stream.batch_interval_ms)
        self.log.info("Triggered %d run(s) for them; the others have one already.", len(claimed))


def summary(allocation: Allocation) -> dict[str, Any]:
    """What the next tasks and people want to know of an allocation, small enough for an XCom."""
    batch = allocation.batch
    return {
        "batch_time_ms": batch.batch_time_ms,
        "fresh": allocation.fresh,
        "blocks": batch.blocks,
        "records": batch.records,
        "payload_bytes": batch.payload_bytes,
        "partitions": len(allocation.inputs),
        "manifest_uri": batch.manifest_uri,
    }
