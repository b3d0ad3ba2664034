"""The operator that allocates a batch's blocks."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from headrace.clock import time_text
from headrace.errors import HeadraceError
from headrace.operators.batch import BatchStepOperator
from headrace.runs.batch_run import BatchRun
from headrace.runs.batch_time import NothingToRun, takes_over
from headrace.runs.environment import connections_in_environment

if TYPE_CHECKING:
    from airflow.sdk import Context

    from headrace.batch.allocation import Allocation
    from headrace.ledger.batch_tables import BatchRow

# Bound the work and the time that a task spends on missed batch times. The next run continues with the others.
_MOST_AT_ONCE = 50
_MOST_SECONDS = 10.0


class AllocateBlocksOperator(BatchStepOperator):
    """Seals the run's batch time and allocates its blocks: as a manifest beside the log, then in the ledger.

    A batch that is already allocated keeps its blocks, however often the task runs. Returns a small summary.

    If the stream coalesces, the batch of a scheduled run takes over the earlier batch times that have no batch. In
    other streams, a scheduled run also allocates the earlier batch times that hold records and have no batch, so that
    later runs run these batches (``runs/retries.py``). In an ordered stream this is left to the task that runs the
    batch: it first allocates and runs the earlier ones. So no records remain unprocessed because the schedule began
    later than the receiver, or does not reach back far enough, or a run failed. A batch time from before the stream
    began is empty, unless the run asks to build it from Kafka.

    :param stream: the stream.
    """

    ui_color = "#e3f1d8"

    def execute(self, context: Context) -> dict[str, Any]:
        """Allocate the run's batch. Returns the allocation's `summary`."""
        with self.opened() as stream_context:
            try:
                return allocate_blocks(BatchRun.begin(context, stream_context), self.log)
            except NothingToRun as nothing:
                raise nothing.skip(context, self) from None


def allocate_blocks(run: BatchRun, log: Any) -> dict[str, Any]:
    """Allocate the run's batch, and earlier batch times that were missed. Returns the batch's `summary`.

    Raises:
        AirflowFailException: the run asks for something that the stream does not have.
        NothingToRun: another run's batch has taken the batch time over since this run began.
    """
    from headrace.batch.allocation import allocate

    if run.request.from_kafka:
        _build(run, log)
    over = takes_over(run.context, run.stream)
    allocation = allocate(run.stream_context, run.batch_time_ms, takes_over=over)
    batch = allocation.batch
    if batch.absorbed_by_ms is not None:
        raise NothingToRun(f"batch {time_text(batch.absorbed_by_ms)} has taken {time_text(run.batch_time_ms)} over")
    log.info(
        "Batch %s %s: %d records in %d blocks of %d partitions, %d bytes; manifest %s",
        time_text(run.batch_time_ms), "is allocated" if allocation.fresh else "was allocated before",
        batch.records, batch.blocks, len(allocation.inputs), batch.payload_bytes, batch.manifest_uri,
    )  # fmt: skip
    if over:
        _report_taken_over(run, batch, log)
    elif not run.stream.coalesces and not run.stream.is_ordered:
        _allocate_missed(run, log)
    return summary(allocation)


def _report_taken_over(run: BatchRun, batch: BatchRow, log: Any) -> None:
    """Log which batch times the batch took over, and how many are left for the next run."""
    if batch.absorbed:
        log.info(
            "It took over %d earlier batch time(s) that nobody had run, from %s on.",
            len(batch.absorbed), time_text(batch.absorbed[0]),
        )  # fmt: skip
    ledger, name = run.ledger, run.stream.name
    open_ms = ledger.streams.get(name).batch_time_after(ledger.now_ms())
    left = [each for each in ledger.blocks.unclaimed(name) if each.batch_time_ms < open_ms]
    if left:
        log.info(
            "%d more batch time(s) with %d records wait for the next run (limits.max_coalesced_records and _bytes).",
            len(left), sum(each.records for each in left),
        )  # fmt: skip


def _allocate_missed(run: BatchRun, log: Any) -> None:
    """Allocate earlier batch times that hold records and have no batch, the oldest first, if other runs follow this one
    and run these batches; else log them."""
    from headrace.batch.allocation import allocate

    missed = [each for each in run.ledger.blocks.unclaimed(run.stream.name) if each.batch_time_ms < run.batch_time_ms]
    if not missed:
        return
    log.warning(
        "%d earlier batch time(s) hold %d records and are not allocated yet, from %s to %s.",
        len(missed), sum(each.records for each in missed),
        time_text(missed[0].batch_time_ms), time_text(missed[-1].batch_time_ms),
    )  # fmt: skip
    if not run.is_automatic:
        log.warning("The next scheduled run allocates them, and later ones run them; a backfill of this DAG does both.")
        return
    number, until = 0, time.monotonic() + _MOST_SECONDS
    for each in missed[:_MOST_AT_ONCE]:
        try:
            allocate(run.stream_context, each.batch_time_ms)
        except HeadraceError as error:
            # The run's own batch is allocated, and must not wait for this one.
            log.warning(
                "Batch %s is left to the next run, which allocates it: %s", time_text(each.batch_time_ms), error
            )
            break
        number += 1
        if time.monotonic() >= until:
            break
    log.info("Allocated %d of them. Later runs run them, unless their own runs do.", number)


def _build(run: BatchRun, log: Any) -> None:
    from headrace.batch.build_from_kafka import build_from_kafka

    if run.batch_time_ms > run.ledger.streams.get(run.stream.name).zero_time_ms:
        at = time_text(run.batch_time_ms)
        log.info("Batch %s does not end before the stream began, so it is not built from Kafka.", at)
        return
    with connections_in_environment(run.stream):
        built = build_from_kafka(run.stream_context, run.batch_time_ms)
    log.info(
        "Batch %s %s built from Kafka by timestamps: %d records at most, in %d partitions.",
        time_text(run.batch_time_ms), "is" if built.fresh else "was already",
        built.batch.records, len(built.inputs),
    )  # fmt: skip


def summary(allocation: Allocation) -> dict[str, Any]:
    """The main numbers of an allocation, for the next tasks and for people. Small enough for an XCom."""
    batch = allocation.batch
    return {
        "batch_time_ms": batch.batch_time_ms,
        "fresh": allocation.fresh,
        "blocks": batch.blocks,
        "records": batch.records,
        "absorbed": len(batch.absorbed),
        "payload_bytes": batch.payload_bytes,
        "partitions": len(allocation.inputs),
        "manifest_uri": batch.manifest_uri,
    }
