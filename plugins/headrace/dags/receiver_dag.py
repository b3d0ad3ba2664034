"""The factory of the DAG that keeps a stream's receiver job alive."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

from airflow.sdk import DAG

from headrace.dags.declaration import START_DATE, declaration, declare_once, describe, tags
from headrace.operators.kafka_receiver import KafkaReceiverOperator

if TYPE_CHECKING:
    from headrace.stream import Stream

_DOC = """\
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
        doc_md=_DOC.format(name=stream.name, stream=describe(stream)),
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
