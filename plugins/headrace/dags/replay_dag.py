"""The factory of the DAG that replays a stream's batches into other targets, while the stream continues."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from airflow.sdk import DAG, TaskGroup

from headrace.dags.batch_dag import outputs_param, parameters_param
from headrace.dags.declaration import START_DATE, declaration, describe, tags
from headrace.operators.replay_batch import ReplayBatchOperator
from headrace.runs.retries import replay_retries
from headrace.stream.model import StreamDefinitionError
from headrace.stream.stream import replayed
from headrace.timetables.micro_batch import MicroBatchTimetable

if TYPE_CHECKING:
    from headrace.stream import Stream

_NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")
_DOC = """\
# {name}: replay {replay}

Runs batches of the stream {name} once more, with the records that each was allocated, into other places, while the
stream itself goes on. Nothing runs by itself: backfill this DAG over the time to be replayed, or trigger it for one
batch time. Batch times that have no batch of their own are skipped.

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
    if not _NAME.match(name):
        raise StreamDefinitionError(f"{name!r} is no name for a replay: letters, digits, and _ . - between them.")
    replay = replayed(stream, outputs, transform=transform)
    default_args = {**replay_retries(), **options.pop("default_args", {})}
    with (
        DAG(
            dag_id=dag_id or f"{stream.name}_replay_{name}",
            description=f"Runs batches of stream {stream.name} again: {name}",
            doc_md=_DOC.format(name=stream.name, replay=name, stream=describe(replay)),
            schedule=MicroBatchTimetable(stream.batch_interval, automatic=False),
            start_date=START_DATE,
            catchup=False,
            max_active_runs=options.pop("max_active_runs", stream.limits.max_concurrent_batches),
            dagrun_timeout=None,
            default_args=default_args,
            params={"outputs": outputs_param(replay), **parameters_param(replay), **options.pop("params", {})},
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
