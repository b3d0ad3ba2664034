"""The operator that allocates a batch's blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headrace.clock import time_text
from headrace.operators.batch import BatchStepOperator
from headrace.operators.claims import claim, ended_without_a_batch
from headrace.runs.environment import connections_in_environment
from headrace.runs.request import run_request
from headrace.stream_context import StreamContext
from headrace.timetables.batch_time import NothingToRun, begin_run, takes_over

if TYPE_CHECKING:
    from airflow.sdk import Context

    from headrace.batch.allocation import Allocation
    from headrace.ledger import Ledger
    from headrace.ledger.models import BatchRow
    from headrace.stream import Stream
    from headrace.wal.storage import LogStorage


class AllocateBlocksOperator(BatchStepOperator):
    """Seals the run's batch time and allocates its blocks: as a manifest beside the log, then in the ledger.

    A batch that is already allocated keeps its blocks, however often the task runs. Returns a small summary.

    If the stream coalesces, the batch of a scheduled run takes over the earlier batch times that have no batch. In
    other streams, each earlier batch time that holds records and has no run gets a run. So no records remain
    unprocessed because the schedule began later than the receiver, or does not reach back far enough. A batch time from
    before the stream began is empty, unless the run asks to build it from Kafka.

    :param stream: the stream.
    :param claim_missed: whether to trigger runs for such earlier batch times; otherwise the task's log names them.
    """

    ui_color = "#e3f1d8"

    def __init__(self, *, claim_missed: bool = True, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.claim_missed = claim_missed

    def execute(self, context: Context) -> dict[str, Any]:
        """Allocate the run's batch. Returns its `summary`."""
        with self.opened() as (ledger, storage):
            try:
                batch_time_ms = begin_run(context, self.stream, ledger)
            except NothingToRun as nothing:
                raise nothing.skip(self) from None
            return allocate_for_run(
                self.stream, ledger, storage, batch_time_ms, context, claim_missed=self.claim_missed, log=self.log
            )


def allocate_for_run(
    stream: Stream,
    ledger: Ledger,
    storage: LogStorage,
    batch_time_ms: int,
    context: Context,
    *,
    claim_missed: bool,
    log: Any,
) -> dict[str, Any]:
    """Allocate the run's batch, and handle earlier batch times that have no run. Returns the batch's `summary`.

    Raises:
        AirflowFailException: the run asks for something that the stream does not have.
    """
    from headrace.batch.allocation import allocate

    if run_request(context, stream).from_kafka:
        _build(stream, ledger, storage, batch_time_ms, log)
    over = takes_over(context, stream)
    allocation = allocate(
        StreamContext(stream, ledger, storage=storage.below(stream.name)), batch_time_ms, takes_over=over
    )
    batch = allocation.batch
    log.info(
        "Batch %s %s: %d records in %d blocks of %d partitions, %d bytes; manifest %s",
        time_text(batch_time_ms), "is allocated" if allocation.fresh else "was allocated before",
        batch.records, batch.blocks, len(allocation.inputs), batch.payload_bytes, batch.manifest_uri,
    )  # fmt: skip
    if over:
        _name_taken(stream, ledger, batch, log)
    elif not stream.coalesces:
        _claim_missed(stream, ledger, storage, batch_time_ms, context, claim_missed=claim_missed, log=log)
    return summary(allocation)


def _name_taken(stream: Stream, ledger: Ledger, batch: BatchRow, log: Any) -> None:
    """Log which batch times the batch took over, and how many are left for the next run."""
    if batch.absorbed:
        log.info(
            "It took over %d earlier batch time(s) that nobody had run, from %s on.",
            len(batch.absorbed), time_text(batch.absorbed[0]),
        )  # fmt: skip
    open_ms = ledger.streams.get(stream.name).batch_time_after(ledger.now_ms())
    left = [time for time in ledger.blocks.unclaimed(stream.name) if time.batch_time_ms < open_ms]
    if left:
        log.info(
            "%d more batch time(s) with %d records wait for the next run (limits.max_coalesced_records and _bytes).",
            len(left), sum(time.records for time in left),
        )  # fmt: skip


def _claim_missed(
    stream: Stream,
    ledger: Ledger,
    storage: LogStorage,
    batch_time_ms: int,
    context: Context,
    *,
    claim_missed: bool,
    log: Any,
) -> None:
    """Trigger runs for earlier batch times that hold records and have no run, or log them. Batch times whose run failed
    before it could allocate them are allocated here; a later run runs these batches."""
    missed = [time for time in ledger.blocks.unclaimed(stream.name) if time.batch_time_ms < batch_time_ms]
    if not missed:
        return
    log.warning(
        "%d earlier batch time(s) hold %d records and are not allocated yet, from %s to %s.",
        len(missed), sum(time.records for time in missed),
        time_text(missed[0].batch_time_ms), time_text(missed[-1].batch_time_ms),
    )  # fmt: skip
    if claim_missed:
        from headrace.batch.allocation import allocate

        times = [time.batch_time_ms for time in missed]
        claimed = claim(context, times, stream.batch_interval_ms)
        log.info("Triggered %d run(s) for them; the others have one already.", len(claimed))
        for time_ms in ended_without_a_batch(context, sorted(set(times).difference(claimed)), stream.batch_interval_ms):
            allocate(StreamContext(stream, ledger, storage=storage.below(stream.name)), time_ms)
            log.info("The run of batch %s is over, so it is allocated here.", time_text(time_ms))
    else:
        log.warning("Run them: by a backfill of this DAG over these times.")


def _build(stream: Stream, ledger: Ledger, storage: LogStorage, batch_time_ms: int, log: Any) -> None:
    from headrace.batch.building import build_from_kafka

    if batch_time_ms > ledger.streams.get(stream.name).zero_time_ms:
        log.info("Batch %s is of the stream's own time, so it is not built from Kafka.", time_text(batch_time_ms))
        return
    with connections_in_environment(stream):
        built = build_from_kafka(StreamContext(stream, ledger, storage=storage.below(stream.name)), batch_time_ms)
    log.info(
        "Batch %s is %s from Kafka by timestamps: %d records at most, in %d partitions.",
        time_text(batch_time_ms), "built" if built.fresh else "there already,", built.batch.records, len(built.inputs),
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
