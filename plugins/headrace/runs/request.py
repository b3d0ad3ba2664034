"""Reads and checks what a DAG run requests for its batch, from the run's type, params and conf.

Anybody who may trigger a run can set these values, so each is checked against the stream before anything runs. They
select from what the stream declares. None of them is executed, rendered as a template or made part of a command:
parameters reach the batch through its attempt's row in the ledger.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from airflow.sdk.exceptions import AirflowFailException

from headrace.errors import HeadraceError
from headrace.runs.identity import RunIdentity, run_identity
from headrace.stream.parameters import ATTRIBUTE, ParameterError, merged
from headrace.stream.state import STATE_STEP

if TYPE_CHECKING:
    from airflow.sdk import Context

    from headrace.stream import Stream


_OPTIONS = ("reprocess", "outputs", "parameters", "from_kafka")
# Airflow's TriggerDagRunOperator adds this name while OpenLineage is on.
_OF_AIRFLOW = ("openlineage",)


class RunRequestError(HeadraceError):
    """A run's conf or params ask for something that its stream does not have, or have an invalid value."""


@dataclass(frozen=True, slots=True)
class RunRequest:
    """A run's request. ``outputs``: steps; None: all of them. ``parameters`` None: the stream's own.

    ``run`` distinguishes one request from another: a task's retry is the same request, a cleared run is a new one.
    """

    run: RunIdentity
    is_backfill: bool = False
    reprocess: bool = False
    outputs: tuple[str, ...] | None = None
    parameters: Mapping[str, Any] | None = None
    from_kafka: bool = False

    def wants(self, step: str) -> bool:
        """Whether the run should do the step. True for the state's update, because outputs may be computed from it."""
        return self.outputs is None or step in self.outputs or step == STATE_STEP

    def may_repeat(self, step: str) -> bool:
        """Whether the run may repeat a step that is done. The state is not updated again just for an output."""
        return self.outputs is None or step in self.outputs

    @property
    def attributes(self) -> dict[str, Any]:
        """The attributes by which an attempt records the run that began it and that run's parameters."""
        return {**self.run.attributes, **({} if self.parameters is None else {ATTRIBUTE: dict(self.parameters)})}


def run_request(context: Context, stream: Stream, *, options: Collection[str] = _OPTIONS) -> RunRequest:
    """The request of the task's DAG run. ``options`` are the names that mean something to its tasks.

    Raises:
        AirflowFailException: the request is invalid for the stream; a retry would make the same request.
    """
    check_names(context, options)
    run = context["dag_run"]
    # Airflow merges conf into the params unless core.dag_run_conf_overrides_params is off.
    asked = {**context.get("params", {}), **(run.conf or {})}
    try:
        return RunRequest(
            run=run_identity(context),
            is_backfill=run.run_type == "backfill",
            reprocess=_flag(asked, "reprocess"),
            outputs=_outputs(asked.get("outputs"), stream),
            parameters=_parameters(asked.get("parameters"), stream),
            from_kafka=_flag(asked, "from_kafka"),
        )
    except (RunRequestError, ParameterError) as error:
        raise AirflowFailException(str(error)) from error


def check_names(context: Context, options: Collection[str]) -> None:
    """Refuse a name in the run's conf that is none of ``options`` and that neither the DAG nor the task declares as a
    param: a misspelt option would be ignored without notice.

    The task's own ``params`` do not say what is declared: Airflow merges the whole conf into them.

    Raises:
        AirflowFailException: there is such a name.
    """
    parts: list[Any] = [context.get("dag"), context.get("task")]
    declared = (name for part in parts if part is not None for name in part.params)
    known = sorted({*options, *declared})
    unknown = sorted({*(context["dag_run"].conf or {})}.difference(known, _OF_AIRFLOW))
    if not unknown:
        return
    nearest = [near for name in unknown for near in get_close_matches(name, known, n=1)]
    meant = f" Did you mean {' or '.join(map(repr, nearest))}?" if nearest else ""
    error = RunRequestError(
        f"The run's conf has {', '.join(map(repr, unknown))}, which means nothing here.{meant} "
        f"It may have {', '.join(known) or 'no names, because these runs have no options'}.",
        remedy="Correct the name, or declare one of your own in the DAG's params.",
    )
    raise AirflowFailException(str(error)) from error


def _flag(asked: Mapping[str, Any], name: str) -> bool:
    value = asked.get(name)
    if value is None or isinstance(value, bool):
        return bool(value)
    raise RunRequestError(f"{name} must be true or false, not {value!r}.")


def _outputs(value: Any, stream: Stream) -> tuple[str, ...] | None:
    if value is None or value == []:
        return None
    known = stream.step_of_id
    unknown = sorted(str(name) for name in value if name not in list(known)) if isinstance(value, list) else [value]
    if unknown:
        raise RunRequestError(
            f"Stream {stream.name!r} has no output {', '.join(map(repr, unknown))}, but {', '.join(known)}.",
            remedy='Name outputs by their ids, in a list: {"outputs": ["elasticsearch"]}.',
        )
    return tuple(known[name] for name in value)


def _parameters(value: Any, stream: Stream) -> Mapping[str, Any] | None:
    if value is None or value == {}:
        return None
    merged(stream, value)
    return dict(value)
