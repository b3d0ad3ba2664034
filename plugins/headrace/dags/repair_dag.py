"""The factory of the DAG that repairs a stream: it tries again the batches that their own runs left unfinished."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from airflow.sdk import DAG, Asset, AssetWatcher

from headrace.dags.declaration import START_DATE, declaration, declare_once, describe, tags
from headrace.operators.repair_batches import RepairBatchesOperator, RepairCheckpointOperator
from headrace.triggers.ledger import poll_seconds
from headrace.triggers.repair_due import RepairDueTrigger

if TYPE_CHECKING:
    from headrace.stream import Stream

_DOC = """\
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
        # Seldom more often than once an interval: a poll costs some milliseconds of a processor.
        poll_interval=poll_seconds(otherwise=min(max(stream.batch_interval.total_seconds(), 5.0), 60.0)),
    )
    due = Asset(
        uri=f"headrace://{stream.name}/repair",
        group="headrace",
        watchers=[AssetWatcher(name=f"{stream.name} repair", trigger=trigger)],
    )
    with DAG(
        dag_id=dag_id or f"{stream.name}_repair",
        description=f"Tries again what failed of stream {stream.name}",
        doc_md=_DOC.format(name=stream.name, batches=batches, stream=describe(stream)),
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
