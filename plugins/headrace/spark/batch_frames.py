"""Computes the rows of outputs that share a transform and a window, once for all of them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import reduce
from typing import TYPE_CHECKING, Any

from headrace.elasticsearch.columns import INCARNATION
from headrace.errors import HeadraceError
from headrace.spark.incarnations import lacks_incarnation, needs_incarnation
from headrace.spark.transforms import STATE_FRAMES, BatchContext, apply_transform, load_transform, takes
from headrace.stream import ConsoleOutput, ElasticsearchOutput, KafkaOutput

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from headrace.spark.batch_plan import OutputPlan
    from headrace.spark.batch_reading import BatchReading
    from headrace.stream import Output, Stream


class StateNotUpdatedError(HeadraceError):
    """An output's transform takes the state, and the state's update failed in this attempt."""


def sharing_a_frame(stream: Stream, plans: Iterable[OutputPlan]) -> list[list[OutputPlan]]:
    """Group the plans by transform (or none) and window (or none)."""
    groups: dict[Any, list[OutputPlan]] = {}
    for plan in plans:
        groups.setdefault((stream.transform_of(plan.output), plan.output.window), []).append(plan)
    return list(groups.values())


class OutputFrames:
    """The frames of one group; a context manager that releases the frames that Spark persisted.

    The transform is called when the first frame is requested. A frame that several outputs read completely is persisted
    until the end, in memory, or on disk if memory is short: 100,000 records of JSON, parsed and written twice, took
    3.8 s instead of 5.9 s, an aggregate of them 2.7 s instead of 5.5 s. Undecoded records of the log are not persisted,
    since reading them again is as fast; nor are frames for the few rows of a console (3.4 s, persisted 4.6 s).
    """

    def __init__(
        self,
        stream: Stream,
        plans: Sequence[OutputPlan],
        reading: BatchReading,
        context: BatchContext,
        *,
        batch_time_ms: int,
        state_failed: bool = False,
    ) -> None:
        self._stream = stream
        self._plans = [plan for plan in plans if plan.needs_spark]
        self._reading = reading
        self._context = context
        self._batch_time_ms = batch_time_ms
        self._state_failed = state_failed
        self._frames: dict[str, DataFrame] | None = None
        self._kept: list[DataFrame] = []
        self._error: Exception | None = None

    def __enter__(self) -> OutputFrames:
        return self

    def __exit__(self, *_: object) -> None:
        for frame in self._kept:
            # If the application is gone, nothing is persisted any more.
            with contextlib.suppress(Exception):
                frame.unpersist()

    def of(self, output: Output) -> DataFrame:
        """The output's rows. An error of the transform is raised again for each output of the group."""
        if self._error is not None:
            raise self._error
        if self._frames is None:
            try:
                self._frames = self._make(output)
            except Exception as error:
                self._error = error
                raise
        return self._frames[output.id]

    def _make(self, output: Output) -> dict[str, DataFrame]:
        inputs = self._reading.inputs(self._plans[0].origins)
        transform = load_transform(self._stream, output)
        if transform is None:
            # These outputs send the value's own bytes, so parsing and serialising them again would gain nothing.
            (views,) = inputs.values()
            sent = {plan.output.id: views.original for plan in self._plans if _sends_bytes(plan.output)}
            rows = {plan.output.id: views.decoded for plan in self._plans if not _sends_bytes(plan.output)}
            return {**sent, **(rows if views.decoded is views.original else self._keep_shared(rows))}
        decoded = {name: views.decoded for name, views in inputs.items()}
        frames = self._transformed(transform, decoded)
        needing = [plan.output for plan in self._plans if needs_incarnation(plan.output)]
        lacking = [output for output in needing if lacks_incarnation(frames[output.id].columns)]
        if lacking and len(decoded) == 1:
            known = self._reading.incarnations(self._plans[0].origins)
            if known.ambiguous:
                frames |= self._by_incarnation(transform, decoded, known.numbers, lacking)
        return self._keep_shared(frames)

    def _transformed(self, transform: Callable[..., Any], inputs: Mapping[str, DataFrame]) -> dict[str, DataFrame]:
        return apply_transform(
            transform,
            inputs,
            [plan.output.id for plan in self._plans],
            self._context,
            more=self._state_frames(transform),
            # A replay has only some of the stream's outputs, but the transform may return all of them.
            known=None if self._context.target else [known.id for known in self._stream.outputs],
        )

    def _by_incarnation(
        self,
        transform: Callable[..., Any],
        inputs: Mapping[str, DataFrame],
        numbers: Iterable[int],
        outputs: Iterable[Output],
    ) -> dict[str, DataFrame]:
        """The rows of these outputs with their incarnation, for a transform that drops it.

        The transform is called separately with the records of each incarnation, as if a batch had ended when the topic
        was created again.
        """
        from pyspark.sql import functions as F  # noqa: N812

        parts = {}
        for number in numbers:
            of_it = {name: frame.where(F.col(INCARNATION) == number) for name, frame in inputs.items()}
            parts[number] = self._transformed(transform, of_it)
        made: dict[Any, DataFrame] = {}
        frames = {}
        for output in outputs:
            rows = {number: part[output.id] for number, part in parts.items()}
            # Outputs that shared a frame share the new one too, so that it is persisted for them.
            same = tuple(map(id, rows.values()))
            if same not in made:
                marked = [frame.withColumn(INCARNATION, F.lit(number)) for number, frame in rows.items()]
                made[same] = reduce(lambda left, right: left.unionByName(right), marked)
            frames[output.id] = made[same]
        return frames

    def _keep_shared(self, frames: dict[str, DataFrame]) -> dict[str, DataFrame]:
        whole = {plan.output.id for plan in self._plans if not isinstance(plan.output, ConsoleOutput)}
        readers: dict[int, list[str]] = {}
        for name, frame in frames.items():
            readers.setdefault(id(frame), []).append(name)
        for names in readers.values():
            if len(whole.intersection(names)) > 1:
                kept = frames[names[0]].persist()
                self._kept.append(kept)
                frames.update(dict.fromkeys(names, kept))
        return frames

    def _state_frames(self, transform: Callable[..., Any]) -> dict[str, Any]:
        if self._stream.state is None or not any(takes(transform, name) for name in STATE_FRAMES):
            return {}
        if self._state_failed:
            raise StateNotUpdatedError("The transform takes the state, whose update failed.")
        from headrace.spark.state.frames import state_frames

        frames = state_frames(self._reading.spark, self._stream, self._batch_time_ms)
        return {name: getattr(frames, name) for name in STATE_FRAMES}


def _sends_bytes(output: Output) -> bool:
    return isinstance(output, ElasticsearchOutput | KafkaOutput)
