"""What a run asks for of a stream's batches, and which run it is.

Each value is checked against the stream before anything runs. The values select from what the stream declares. None of
them is executed, rendered as a template or made part of a command.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from headrace.clock import parse_time
from headrace.errors import HeadraceError
from headrace.stream.state import STATE_STEP
from headrace.stream.stream import PARAMETERS, merged_parameters

if TYPE_CHECKING:
    from headrace.stream import Stream


@dataclass(frozen=True, slots=True)
class RunIdentity:
    """A run: Airflow's, since it was last cleared. Attempts record it, so that the run can find its own attempts.

    ``clear_number`` is how often it was cleared. ``started`` is when it began after that (ISO 8601), None if Airflow
    does not report it.
    """

    run_id: str
    clear_number: int = 0
    started: str | None = None

    @property
    def attributes(self) -> dict[str, Any]:
        """The attributes by which an attempt records the run that began it."""
        reported = {"run_id": self.run_id, "clear_number": self.clear_number}
        return reported if self.started is None else {**reported, "run_started": self.started}

    def clear_of(self, attributes: Mapping[str, Any]) -> int | None:
        """The ``clear_number`` at which this run made the attempt with these attributes; None if another run did."""
        clear = int(attributes.get("clear_number") or 0)
        if attributes.get("run_id") != self.run_id or clear > self.clear_number:
            return None
        # Clearing gives a run another start time, so start times are compared only within the same clear.
        started = attributes.get("run_started", self.started)
        return clear if clear < self.clear_number or self.started in (None, started) else None

    def __str__(self) -> str:
        return f"{self.run_id}, cleared {self.clear_number} times, begun {self.started}"

    def made(self, attributes: Mapping[str, Any]) -> bool:
        """Whether this run made the attempt with these attributes, since it was last cleared."""
        return self.clear_of(attributes) == self.clear_number


class RunRequestError(HeadraceError):
    """A run's conf or params ask for something that its stream does not have, or have an invalid value."""


@dataclass(frozen=True, slots=True)
class RunRequest:
    """A run's request. ``outputs``: steps; None: all of them. ``parameters`` None: the stream's own.

    ``span``: the run is about the batches whose intervals lie between these two times, in milliseconds since the epoch;
    None: about that of its logical date.

    ``run`` distinguishes one request from another: a task's retry is the same request, a cleared run is a new one.
    """

    run: RunIdentity
    is_backfill: bool = False
    reprocess: bool = False
    outputs: tuple[str, ...] | None = None
    parameters: Mapping[str, Any] | None = None
    from_kafka: bool = False
    span: tuple[int, int] | None = None

    @classmethod
    def of(cls, run: RunIdentity, asked: Mapping[str, Any], stream: Stream, *, is_backfill: bool, spans: bool) -> Self:
        """The request of a run that asks for this, by the names of a run's conf. ``spans``: it may ask for a range.

        Raises:
            RunRequestError: a value is invalid, or the stream does not have it.
            ParameterError: the stream has no such parameter.
        """
        return cls(
            run=run,
            is_backfill=is_backfill,
            reprocess=_flag(asked, "reprocess"),
            outputs=_outputs(asked.get("outputs"), stream),
            parameters=_parameters(asked.get("parameters"), stream),
            from_kafka=_flag(asked, "from_kafka"),
            span=_span(asked) if spans else None,
        )

    def wants(self, step: str) -> bool:
        """Whether the run should do the step. True for the state's update, because outputs may be computed from it."""
        return self.outputs is None or step in self.outputs or step == STATE_STEP

    def may_repeat(self, step: str) -> bool:
        """Whether the run may repeat a step that is done. The state is not updated again just for an output."""
        return self.outputs is None or step in self.outputs

    @property
    def attributes(self) -> dict[str, Any]:
        """The attributes by which an attempt records the run that began it and that run's parameters."""
        return {**self.run.attributes, **({} if self.parameters is None else {PARAMETERS: dict(self.parameters)})}


def _flag(asked: Mapping[str, Any], name: str) -> bool:
    value = asked.get(name)
    if value is None or isinstance(value, bool):
        return bool(value)
    raise RunRequestError(f"{name} must be true or false, not {value!r}.")


def _span(asked: Mapping[str, Any]) -> tuple[int, int] | None:
    after_ms, until_ms = (_time_ms(asked.get(name), name) for name in ("from", "until"))
    if after_ms is None and until_ms is None:
        return None
    if after_ms is None or until_ms is None or after_ms >= until_ms:
        raise RunRequestError(
            f"from={asked.get('from')!r} and until={asked.get('until')!r} are not a range of batches.",
            remedy="Give two times, the earlier one as `from`: "
            '{"from": "2026-11-20T00:00:00Z", "until": "2026-11-21T00:00:00Z"} is a day.',
        )
    return after_ms, until_ms


def _time_ms(value: Any, name: str) -> int | None:
    if value is None or value == "":
        return None
    try:
        return parse_time(value)
    except (TypeError, ValueError):
        raise RunRequestError(
            f"{name} must be a time in ISO 8601, not {value!r}.", remedy="For example 2026-11-20T00:00:00Z."
        ) from None


def _outputs(value: Any, stream: Stream) -> tuple[str, ...] | None:
    if value is None or value == []:
        return None
    known = stream.step_of_id
    unknown = sorted(str(name) for name in value if name not in list(known)) if isinstance(value, list) else [value]
    if unknown:
        raise RunRequestError(
            f"Stream {stream.name!r} has no output {', '.join(map(repr, unknown))}. "
            f"Its outputs are {', '.join(known)}.",
            remedy='Name outputs by their ids, in a list: {"outputs": ["elasticsearch"]}.',
        )
    return tuple(known[name] for name in value)


def _parameters(value: Any, stream: Stream) -> Mapping[str, Any] | None:
    if value is None or value == {}:
        return None
    merged_parameters(stream, value)
    return dict(value)
