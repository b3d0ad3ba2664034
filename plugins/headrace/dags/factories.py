"""The factories of a stream's DAGs: the receiver's, the batches', the repair's, and those that run batches again.

In this order: what keeps the receiver job alive; what runs a batch for each batch time, its schedule and its params;
what tries failed batches again; what runs a range of completed batches again; what replays batches into other places.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from airflow.sdk import DAG, Asset, AssetOrTimeSchedule, AssetWatcher, Param, TaskGroup

from headrace.dags.declaration import START_DATE, declaration, declare_once, describe, tags
from headrace.operators.batch_steps import AllocateBlocksOperator, CheckpointOperator, CleanupOperator
from headrace.operators.kafka_receiver import KafkaReceiverOperator
from headrace.operators.micro_batch import MicroBatchOperator
from headrace.operators.repair_batches import RepairBatchesOperator, RepairCheckpointOperator
from headrace.operators.replay_batch import RepeatBatchesOperator, ReplayBatchOperator
from headrace.operators.wal_spark_submit import WalSparkSubmitOperator
from headrace.runs.retries import batch_retries, replay_retries
from headrace.sensors.blocks_ready import BlocksReadySensor
from headrace.stream.model import StreamDefinitionError
from headrace.stream.state import STATE_STEP
from headrace.stream.stream import replayed
from headrace.timetables.micro_batch import MicroBatchTimetable
from headrace.triggers.ledger import poll_seconds
from headrace.triggers.records_received import RecordsReceivedTrigger
from headrace.triggers.repair_due import RepairDueTrigger

if TYPE_CHECKING:
    from headrace.stream import Stream


_RECEIVER_DOC = """\
# {name}: receiver

One run follows another; each keeps the stream's receiver job alive: a Spark application that reads Kafka and stores
blocks in the write-ahead log. The job is a process of its own and outlives this task's crashes: the next run attaches
to it by its lease in the ledger.

Pausing this DAG leaves the job running. To stop it, run `headrace streams stop {name}`; `headrace streams start
{name}` undoes that. Marking or clearing the task stops the job as well, but the next run starts another at once, unless
this DAG is paused.

{stream}
"""


def receiver_dag(stream: Stream, *, dag_id: str | None = None, **options: Any) -> DAG:
    """The receiver DAG of a stream.

    :param dag_id: by default ``<stream>_receiver``.
    :param options: passed on to ``DAG``; ``default_args`` are merged.

    Raises:
        StreamDefinitionError: another DAG file declares a stream of this name.
    """
    declare_once(stream, "receiver")
    # A retry restarts a job that died. A job that cannot start shows as a failed run after some minutes, and the
    # schedule begins the next run.
    default_args = {
        "retries": 5,
        # No backoff: the start itself takes 15 s, and a run that lasts months may have many tries.
        "retry_delay": timedelta(seconds=1),
        **options.pop("default_args", {}),
    }
    with DAG(
        dag_id=dag_id or f"{stream.name}_receiver",
        description=f"Keeps the receiver job of stream {stream.name} alive",
        doc_md=_RECEIVER_DOC.format(name=stream.name, stream=describe(stream)),
        schedule="@continuous",
        start_date=START_DATE,
        catchup=False,
        max_active_runs=1,
        dagrun_timeout=None,
        default_args=default_args,
        tags=[*tags(stream, "receiver"), *options.pop("tags", [])],
        **options,
    ) as dag:
        KafkaReceiverOperator(task_id="receive", stream=stream, doc_json=declaration(stream, "receiver"))
    return dag


# Airflow takes about a second until a run's first task works: it looks for runs that are due once a second.
_AHEAD = timedelta(seconds=1)

_BATCH_DOC = """\
# {name}: batches

A run for each batch time, which is the end of its data interval. {late} A batch's blocks are allocated once: however
often its run is repeated, it processes the same records and writes the same documents.

To run a completed batch again: clear the run of this DAG that completed it, or backfill its interval, or trigger a run
with `reprocess` and any logical date inside its interval (its start has a run: Airflow gives a date only one). What
failed of a batch is run alone when its task, or its run, is cleared.

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
    repair: bool = True,
    **options: Any,
) -> DAG:
    """The batch DAG of a stream. Also makes its repair DAG, which registers itself in the DAG file that is parsed.

    :param dag_id: by default ``<stream>_batches``.
    :param start_date: the first interval to run. By default it is the one in which the scheduler first sees the DAG:
        only the ledger knows when the stream began, and runs for the years before would all be empty. A run that is
        triggered for an earlier date has no tasks, and Airflow lets it succeed; a backfill's has.
    :param catch_up: how to treat intervals that are missed later on, see ``MicroBatchTimetable``. By default the next
        run takes them over if the stream coalesces; otherwise each gets a run. It has no effect if ``start_date`` is
        given (every interval since then gets a run), or if the stream has a ``trigger``.
    :param single_task: whether one task, ``micro_batch``, runs the whole batch (``MicroBatchOperator``). Otherwise each
        of its parts is a task, and each output a task ``generate_batch.<output id>``.
    :param repair: whether to make the repair DAG with its defaults. To give it other options, pass False and call
        ``repair_dag``; without one, a batch that failed waits for a person.
    :param options: passed on to ``DAG``; ``default_args`` are merged.

    Raises:
        StreamDefinitionError: another DAG file declares a stream of this name.
    """
    declare_once(stream, "batches")
    default_args = {**batch_retries(stream), **options.pop("default_args", {})}
    with DAG(
        dag_id=dag_id or f"{stream.name}_batches",
        description=f"Runs the batches of stream {stream.name}, {_when(stream)}",
        doc_md=_BATCH_DOC.format(name=stream.name, stream=describe(stream), late=_LATE if stream.coalesces else ""),
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
    if repair:
        repair_dag(stream, batch_dag_id=dag.dag_id)
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


def range_params() -> dict[str, Any]:
    """The params of a run for a range of batches."""
    times: dict[str, Any] = {"type": ["null", "string"], "format": "date-time"}
    return {
        "from": Param(None, **times, title="From", description="Run all batches of a range: where it begins."),
        "until": Param(
            None,
            **times,
            title="Until",
            description="Where it ends. A day is from its midnight until the next one. Without a range, the run is "
            "about the batch of its logical date.",
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


_REPAIR_DOC = """\
# {name}: repair

A run tries again the batches that their own runs left unfinished, the oldest first. It begins by itself when one is
due: when its output is available again, or the definition or the code has changed. In a stream whose batches run in
order, the first batch is tried again after a pause. A red run means that an attempt failed again; its log says why.

Trigger a run to try all of them at once, also those that failed by the code or for good. While `{batches}` is paused,
nothing is repaired by itself. A batch that can never succeed: `headrace batches abandon {name} TIME --reason WHY`.

{stream}
"""


def repair_dag(stream: Stream, *, dag_id: str | None = None, batch_dag_id: str | None = None, **options: Any) -> DAG:
    """The DAG that repairs a stream. It is not paused when Airflow first sees it.

    A trigger in Airflow's triggerer polls the ledger, and starts a run when a batch is due to be tried again.

    :param dag_id: by default ``<stream>_repair``.
    :param batch_dag_id: the id of the stream's batch DAG; by default ``<stream>_batches``.
    :param options: passed on to ``DAG``; ``default_args`` are merged.

    Raises:
        StreamDefinitionError: another DAG file declares a stream of this name.
    """
    declare_once(stream, "repair")
    batches = batch_dag_id or f"{stream.name}_batches"
    trigger = RepairDueTrigger(
        ledger=stream.ledger,
        stream=stream.name,
        retry_for_ms=stream.retry_for_ms,
        # A poll costs some milliseconds of a processor; what was interrupted is to be tried again at once.
        poll_interval=poll_seconds(otherwise=min(max(stream.batch_interval.total_seconds(), 5.0), 15.0)),
    )
    due = Asset(
        uri=f"headrace://{stream.name}/repair",
        group="headrace",
        watchers=[AssetWatcher(name=f"{stream.name} repair", trigger=trigger)],
    )
    with DAG(
        dag_id=dag_id or f"{stream.name}_repair",
        description=f"Tries again what failed of stream {stream.name}",
        doc_md=_REPAIR_DOC.format(name=stream.name, batches=batches, stream=describe(stream)),
        schedule=[due],
        start_date=START_DATE,
        catchup=False,
        max_active_runs=1,
        dagrun_timeout=None,
        # Nobody unpauses it by habit, and without it failed batches wait for a person.
        is_paused_upon_creation=options.pop("is_paused_upon_creation", False),
        # The next event is the retry.
        default_args={"retries": 0, **options.pop("default_args", {})},
        tags=[*tags(stream, "repair"), *options.pop("tags", [])],
        **options,
    ) as dag:
        repair = RepairBatchesOperator(
            task_id="repair", stream=stream, batch_dag_id=batches, doc_json=declaration(stream, "repair")
        )
        repair >> RepairCheckpointOperator(task_id="checkpoint", stream=stream).as_teardown()
    return dag


_AGAIN_DOC = """\
# {name}: again

Runs completed batches again, into the places of the stream, with the same records and the code as it is. Nothing runs
by itself. Trigger a run with `from` and `until`: it runs all batches of this range, several at a time. A retry goes on
with what is left. The log says how far it is.

{stream}
"""


def again_dag(stream: Stream, *, dag_id: str | None = None, **options: Any) -> DAG:
    """The DAG whose runs run a range of completed batches again. It is not paused when Airflow first sees it.

    :param dag_id: by default ``<stream>_again``.
    :param options: passed on to ``DAG``; ``default_args`` are merged.

    Raises:
        StreamDefinitionError: the stream has state, or another DAG file declares a stream of this name.
    """
    if stream.state is not None:
        raise StreamDefinitionError(
            f"Stream {stream.name!r} has state, which only the runs of its batches update, one after another.",
            remedy="Backfill its batch DAG with the reprocess behaviour `completed`.",
        )
    declare_once(stream, "again")
    with DAG(
        dag_id=dag_id or f"{stream.name}_again",
        description=f"Runs a range of completed batches of stream {stream.name} again",
        doc_md=_AGAIN_DOC.format(name=stream.name, stream=describe(stream)),
        schedule=None,
        start_date=START_DATE,
        max_active_runs=1,
        dagrun_timeout=None,
        is_paused_upon_creation=options.pop("is_paused_upon_creation", False),
        default_args={**replay_retries(), **options.pop("default_args", {})},
        params={
            **range_params(),
            "outputs": outputs_param(stream),
            **parameters_param(stream),
            **options.pop("params", {}),
        },
        tags=[*tags(stream, "again"), *options.pop("tags", [])],
        **options,
    ) as dag:
        again = RepeatBatchesOperator(task_id="run_again", stream=stream, doc_json=declaration(stream, "again"))
        again >> RepairCheckpointOperator(task_id="checkpoint", stream=stream).as_teardown()
    return dag


_REPLAY_NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")
_REPLAY_DOC = """\
# {name}: replay {replay}

Runs batches of the stream {name} once more, with the records that each was allocated, into other places, while the
stream itself goes on. Nothing runs by itself. Trigger a run with `from` and `until`: it replays all batches of this
range, several at a time, and a retry goes on with what is left. Or trigger one for a batch time, or backfill this DAG.
Batch times that have no batch of their own are skipped.

{stream}
"""


def replay_dag(
    stream: Stream,
    name: str,
    *,
    outputs: Mapping[str, Mapping[str, Any]],
    transform: str | None = None,
    dag_id: str | None = None,
    **options: Any,
) -> DAG:
    """The DAG of a replay.

    :param name: the replay's name, in the ledger too. A new name is a new replay, without completed batches.
    :param outputs: the outputs to replay, with their changed fields: ``{"elasticsearch": {"index": "flights-v2"}}``.
    :param transform: ``module:function`` that replaces the stream's transform and the outputs' own.
    :param dag_id: by default ``<stream>_replay_<name>``.
    :param options: passed on to ``DAG``; ``default_args`` are merged.

    Raises:
        StreamDefinitionError: an output is unknown or would write where the stream writes, the stream has state, or the
            name is invalid.
    """
    if not _REPLAY_NAME.match(name):
        raise StreamDefinitionError(f"{name!r} is no name for a replay: letters, digits, and _ . - between them.")
    replay = replayed(stream, outputs, transform=transform)
    default_args = {**replay_retries(), **options.pop("default_args", {})}
    with (
        DAG(
            dag_id=dag_id or f"{stream.name}_replay_{name}",
            description=f"Runs batches of stream {stream.name} again: {name}",
            doc_md=_REPLAY_DOC.format(name=stream.name, replay=name, stream=describe(replay)),
            schedule=MicroBatchTimetable(stream.batch_interval, automatic=False),
            start_date=START_DATE,
            catchup=False,
            max_active_runs=options.pop("max_active_runs", stream.limits.max_concurrent_batches),
            dagrun_timeout=None,
            default_args=default_args,
            params={
                **range_params(),
                "outputs": outputs_param(replay),
                **parameters_param(replay),
                **options.pop("params", {}),
            },
            tags=[*tags(stream, "replay"), *options.pop("tags", [])],
            **options,
        ) as dag,
        TaskGroup("replay_batch"),
    ):
        for output in replay.outputs:
            ReplayBatchOperator(
                task_id=output.id,
                stream=stream,
                replay=replay,
                target=name,
                step=output.id,
                # The ledger checks the order. So Airflow starts no run too early, and refuses a backfill backwards.
                depends_on_past=output.deletes_by_key,
                doc_json=declaration(stream, "replay"),
            )
    return dag
