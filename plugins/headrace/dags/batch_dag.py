"""The DAG that runs a stream's batches, one run for each batch time."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from airflow.sdk import DAG, Param

from headrace.dags.defaults import START_DATE, batch_retries, describe, tags
from headrace.operators.allocate_blocks import AllocateBlocksOperator
from headrace.operators.checkpoint import CheckpointOperator
from headrace.operators.cleanup import CleanupOperator
from headrace.operators.wal_spark_submit import WalSparkSubmitOperator
from headrace.sensors.blocks_ready import BlocksReadySensor
from headrace.timetables.micro_batch import MicroBatchTimetable

if TYPE_CHECKING:
    from headrace.stream import Stream

_DOC = """\
# {name}: batches

A run for each batch time, which is the end of its data interval. A batch's blocks are allocated once: however often its
run is repeated, it processes the same records and writes the same documents. To run a completed batch again, trigger a
run with `reprocess` set and any logical date inside its interval (its start has a run: Airflow gives a date only one).

{stream}
"""


def batch_dag(
    stream: Stream,
    *,
    dag_id: str | None = None,
    start_date: datetime | None = None,
    catch_up: bool | timedelta = True,
    **options: Any,
) -> DAG:
    """The batch DAG of a stream.

    :param dag_id: by default ``<stream>_batches``.
    :param start_date: the first interval to run. By default that in which the scheduler first sees the DAG, since
        only the ledger knows when the stream began, and runs for the years before would all be empty.
    :param catch_up: what becomes of intervals that were missed later on, see ``MicroBatchTimetable``. Without effect
        where ``start_date`` is given: then every interval since gets a run.
    :param options: passed on to ``DAG``; ``default_args`` are merged.
    """
    default_args = {**batch_retries(), **options.pop("default_args", {})}
    with DAG(
        dag_id=dag_id or f"{stream.name}_batches",
        description=f"Runs the batches of stream {stream.name}, {_every(stream)}",
        doc_md=_DOC.format(name=stream.name, stream=describe(stream)),
        schedule=MicroBatchTimetable(stream.batch_interval, catch_up=catch_up),
        start_date=start_date or START_DATE,
        catchup=start_date is not None,
        max_active_runs=options.pop("max_active_runs", stream.limits.max_concurrent_batches),
        dagrun_timeout=None,
        default_args=default_args,
        params={
            "reprocess": Param(
                False, type="boolean", title="Reprocess", description="Run the batch again though it has completed."
            ),
            **options.pop("params", {}),
        },
        tags=[*tags(stream, "batches"), *options.pop("tags", [])],
        **options,
    ) as dag:
        await_blocks = BlocksReadySensor(task_id="await_blocks", stream=stream)
        allocate_blocks = AllocateBlocksOperator(task_id="allocate_blocks", stream=stream)
        generate_batch = WalSparkSubmitOperator(task_id="generate_batch", stream=stream)
        # Teardowns run after a failed batch too, and a run's state is that of the tasks before them: a failed batch
        # fails the run. The last one counts itself as well, and it fails where a checkpoint is missing. (If the
        # checkpoint counted, Airflow would no longer look at the batch before it.)
        checkpoint = CheckpointOperator(task_id="checkpoint", stream=stream).as_teardown()
        cleanup = CleanupOperator(task_id="cleanup", stream=stream).as_teardown(on_failure_fail_dagrun=True)
        await_blocks >> allocate_blocks >> generate_batch >> checkpoint >> cleanup
    return dag


def _every(stream: Stream) -> str:
    return f"every {stream.batch_interval.total_seconds():g} s"
