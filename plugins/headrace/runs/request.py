"""Reads and checks what a DAG run requests for its batch, from the run's type, params and conf.

Anybody who may trigger a run can set these values, so each is checked against the stream before anything runs. They
select from what the stream declares. None of them is executed, rendered as a template or made part of a command:
parameters reach the batch through its attempt's row in the ledger.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from airflow.sdk.exceptions import AirflowFailException

from headrace.errors import HeadraceError
from headrace.runs.identity import RunIdentity, run_identity
from headrace.stream.parameters import ATTRIBUTE, ParameterError, merged
from headrace.stream.state import STATE_STEP

if TYPE_CHECKING:
    from airflow.sdk import Context

    from headrace.stream import Stream


_NAMES = ("reprocess", "outputs", "parameters", "from_kafka")


class RunRequestError(HeadraceError):
    """A run's conf or params ask for something that its stream does not have, or have an invalid value."""


@dataclass(frozen=True, slots=True)
class RunRequest:
    """A run's request. ``outputs`` None: all of them. ``parameters`` None: the stream's own.

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


def run_request(context: Context, stream: Stream) -> RunRequest:
    """The request of the task's DAG run.

    Raises:
        AirflowFailException: the request is invalid for the stream; a retry would make the same request.
    """
    run = context["dag_run"]
    # Airflow merges conf into the params only if core.dag_run_conf_overrides_params is set and the DAG declares them.
    params: Mapping[str, Any] = context.get("params", {})
    asked = {**params, **(run.conf or {})}
    try:
        _check_names(run.conf or {}, params)
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


def _check_names(conf: Mapping[str, Any], params: Mapping[str, Any]) -> None:
    """Refuse unknown names in conf: otherwise a misspelt name would be ignored without notice."""
    known = {*_NAMES, *params}
    unknown = sorted(set(conf) - known)
    if unknown:
        raise RunRequestError(
            f"The run's conf has {', '.join(map(repr, unknown))}, which means nothing here; it may have "
            f"{', '.join(sorted(known))}.",
            remedy="Correct the name, or declare one of your own in the DAG's params.",
        )


def _flag(asked: Mapping[str, Any], name: str) -> bool:
    value = asked.get(name)
    if value is None or isinstance(value, bool):
        return bool(value)
    raise RunRequestError(f"{name} must be true or false, not {value!r}.")


def _outputs(value: Any, stream: Stream) -> tuple[str, ...] | None:
    if value is None or value == []:
        return None
    unknown = sorted(str(name) for name in value if name not in stream.steps) if isinstance(value, list) else [value]
    if unknown:
        raise RunRequestError(
            f"Stream {stream.name!r} has no output {', '.join(map(repr, unknown))}, but {', '.join(stream.steps)}.",
            remedy='Name outputs by their ids, in a list: {"outputs": ["elasticsearch"]}.',
        )
    return tuple(value)


def _parameters(value: Any, stream: Stream) -> Mapping[str, Any] | None:
    if value is None or value == {}:
        return None
    merged(stream, value)
    return dict(value)
