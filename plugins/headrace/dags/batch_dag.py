"""The factory of the DAG that runs a stream's batches, one run for each batch time; its schedule and its params."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from airflow.sdk import DAG, Asset, AssetOrTimeSchedule, AssetWatcher, Param, TaskGroup

from headrace.dags.declaration import START_DATE, declaration, declare_once, describe, tags
from headrace.operators.batch_steps import AllocateBlocksOperator, CheckpointOperator, CleanupOperator
from headrace.operators.micro_batch import MicroBatchOperator
from headrace.operators.wal_spark_submit import WalSparkSubmitOperator
from headrace.runs.retries import batch_retries
from headrace.sensors.blocks_ready import BlocksReadySensor
from headrace.stream.model import StreamDefinitionError
from headrace.stream.state import STATE_STEP
from headrace.timetables.micro_batch import MicroBatchTimetable
from headrace.triggers.records_received import RecordsReceivedTrigger

if TYPE_CHECKING:
    from headrace.stream import Stream


# Airflow takes about a second until a run's first task works: it looks for runs that are due once a second.
_AHEAD = timedelta(seconds=1)

_DOC = """\
# {name}: batches

A run for each batch time, which is the end of its data interval. {late} A batch's blocks are allocated once: however
often its run is repeated, it processes the same records and writes the same documents.

To run a completed batch again: clear its run, or backfill its interval, or trigger a run with `reprocess` and any
logical date inside its interval (its start has a run: Airflow gives a date only one). What failed of a batch is run
alone when its task, or its run, is cleared.

{stream}
"""

_LATE = """\
A run that is late takes over all batch times that have ended and have no batch: the log of its first task names its
batch. A run for a batch time that was taken over is skipped and names the batch; with `reprocess` it repeats it."""


def batch_dag(
    stream: Stream,
    *,
    dag_id: str | None = None,
    start_date: datetime | None = None,
    catch_up: bool | timedelta | None = None,
    single_task: bool = False,
    **options: Any,
) -> DAG:
    """The batch DAG of a stream.

    :param dag_id: by default ``<stream>_batches``.
    :param start_date: the first interval to run. By default it is the one in which the scheduler first sees the DAG:
        only the ledger knows when the stream began, and runs for the years before would all be empty.
    :param catch_up: how to treat intervals that are missed later on, see ``MicroBatchTimetable``. By default the next
        run takes them over if the stream coalesces; otherwise each gets a run. It has no effect if ``start_date`` is
        given (every interval since then gets a run), or if the stream has a ``trigger``.
    :param single_task: whether one task, ``micro_batch``, runs the whole batch (``MicroBatchOperator``). Otherwise each
        of its parts is a task, and each output a task ``generate_batch.<output id>``.
    :param options: passed on to ``DAG``; ``default_args`` are merged.

    Raises:
        StreamDefinitionError: another DAG file declares a stream of this name.
    """
    declare_once(stream, "batches")
    default_args = {**batch_retries(stream), **options.pop("default_args", {})}
    with DAG(
        dag_id=dag_id or f"{stream.name}_batches",
        description=f"Runs the batches of stream {stream.name}, {_when(stream)}",
        doc_md=_DOC.format(name=stream.name, stream=describe(stream), late=_LATE if stream.coalesces else ""),
        schedule=_schedule(stream, catch_up),
        start_date=start_date or START_DATE,
        catchup=start_date is not None,
        max_active_runs=options.pop("max_active_runs", _max_active_runs(stream)),
        dagrun_timeout=None,
        default_args=default_args,
        params={**batch_params(stream), **options.pop("params", {})},
        tags=[*tags(stream, "batches"), *options.pop("tags", [])],
        **options,
    ) as dag:
        if single_task:
            MicroBatchOperator(task_id="micro_batch", stream=stream, doc_json=declaration(stream, "batches"))
        else:
            _tasks(stream)
    return dag


def _tasks(stream: Stream) -> None:
    await_blocks = BlocksReadySensor(task_id="await_blocks", stream=stream)
    allocate_blocks = AllocateBlocksOperator(
        task_id="allocate_blocks", stream=stream, doc_json=declaration(stream, "batches")
    )
    before: Any = await_blocks >> allocate_blocks
    if stream.state is not None:
        # An output may be computed from the state, so the state is updated first, once for all outputs.
        before = before >> WalSparkSubmitOperator(task_id="update_state", stream=stream, step=STATE_STEP)
    # A group also for a single output: its task keeps its id, and its history, when the stream gets another output.
    with TaskGroup("generate_batch") as generate_batch:
        for output in stream.outputs:
            WalSparkSubmitOperator(task_id=output.id, stream=stream, step=output.id)
    # Teardowns run after a failed batch too, and the tasks before them determine the run's state: a failed output fails
    # the run. The last teardown counts as well, and fails if a checkpoint is missing. (If the checkpoint counted,
    # Airflow would ignore the outputs before it.)
    checkpoint = CheckpointOperator(task_id="checkpoint", stream=stream).as_teardown()
    cleanup = CleanupOperator(task_id="cleanup", stream=stream).as_teardown(on_failure_fail_dagrun=True)
    before >> generate_batch >> checkpoint >> cleanup


def _schedule(stream: Stream, catch_up: bool | timedelta | None) -> Any:
    if stream.trigger is not None:
        return received_schedule(stream)
    interval = stream.batch_interval
    ahead = min(_AHEAD, interval // timedelta(milliseconds=10) * timedelta(milliseconds=1))
    return MicroBatchTimetable(interval, catch_up=not stream.coalesces if catch_up is None else catch_up, ahead=ahead)


def _max_active_runs(stream: Stream) -> int:
    return 1 if stream.trigger is not None else stream.limits.max_concurrent_batches


def _when(stream: Stream) -> str:
    if stream.trigger is not None:
        return f"when {stream.trigger.min_records} records wait, or one for {stream.trigger.max_delay}"
    return f"every {stream.batch_interval.total_seconds():g} s"


def batch_params(stream: Stream) -> dict[str, Any]:
    """The params of a stream's batch DAG."""
    return {
        "reprocess": Param(
            False,
            type="boolean",
            title="Run it again",
            description="Run the batch again though it has completed: the same records, with the code as it is.",
        ),
        "outputs": outputs_param(stream),
        **parameters_param(stream),
        "from_kafka": Param(
            False,
            type="boolean",
            title="Build from Kafka",
            description="For a batch time from before the stream began: find its records in Kafka by their timestamps.",
        ),
    }


def outputs_param(stream: Stream) -> Param:
    """The param that limits a run to some of the stream's steps."""
    return Param(
        None,
        type=["null", "array"],
        items={"type": "string", "enum": list(stream.step_of_id)},
        # The form offers the examples as choices.
        examples=list(stream.step_of_id),
        title="Outputs",
        description="Run these alone; empty: all of them.",
    )


def parameters_param(stream: Stream) -> dict[str, Any]:
    """The param with the values for the stream's transforms; empty if the stream declares none."""
    if not stream.parameters:
        return {}
    return {
        "parameters": Param(
            dict(stream.parameters),
            type=["object", "null"],
            properties={name: {} for name in stream.parameters},
            additionalProperties=False,
            title="Parameters",
            description="Values for the transforms, in the place of the stream's own, for this run.",
        )
    }


def received_schedule(stream: Stream, *, poll_interval: float | None = None) -> AssetOrTimeSchedule:
    """The ``schedule`` of the stream's batch DAG, which needs ``max_active_runs=1``.

    A trigger in Airflow's triggerer polls the ledger and emits an asset event when a batch is due; Airflow then creates
    a run without a logical date. The timetable starts no runs by itself: it allows backfills of the DAG, and runs
    triggered for a batch time.

    :param poll_interval: seconds between two polls of the ledger; by default ``[headrace] poll_interval``.

    Raises:
        StreamDefinitionError: the stream declares no trigger.
    """
    if stream.trigger is None:
        raise StreamDefinitionError(
            f"Stream {stream.name!r} declares no trigger, so its batches are started by the clock.",
            remedy="Give it trigger={'min_records': …, 'max_delay': …}.",
        )
    trigger = RecordsReceivedTrigger(
        ledger=stream.ledger,
        stream=stream.name,
        min_records=stream.trigger.min_records,
        max_delay_ms=stream.trigger.max_delay_ms,
        interval_ms=stream.batch_interval_ms,
        poll_interval=poll_interval,
    )
    asset = Asset(
        uri=f"headrace://{stream.name}/received",
        group="headrace",
        watchers=[AssetWatcher(name=f"{stream.name} received", trigger=trigger)],
    )
    timetable: Any = MicroBatchTimetable(stream.batch_interval, automatic=False)
    return AssetOrTimeSchedule(assets=[asset], timetable=timetable)
