"""The foreach_batch output: calls the user's own function, which writes the batch."""

from __future__ import annotations

import inspect
import json
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from headrace.spark.failures import failure_of, first_cause
from headrace.spark.outputs.errors import FunctionFailedError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from headrace.spark.outputs.writer import Counts, WrittenBatch
    from headrace.stream import ForeachBatchOutput, Stream

_UNDECODABLE = "undecodable"
# The number of frames in an error's text: of a deep recursion the innermost frames are the most useful.
_FRAMES = 12


class ForeachBatchWriter:
    """Calls ``function(frame, batch)`` in the batch's own process, with its DataFrame and its `BatchContext`.

    A function with a parameter ``undecodable`` gets in it a mapping from input ids to DataFrames of the records that do
    not decode, with their bytes and ``undecodable_reason``; inputs without such records are not in it. For all other
    functions these records are counted and left out.
    """

    def __init__(self, output: ForeachBatchOutput) -> None:
        self._output = output

    @property
    def needs_empty_batches(self) -> bool:
        """True: rows that are made without records are valid, and the function decides what to do with no rows."""
        return True

    def write(self, frame: DataFrame | None, batch: WrittenBatch) -> Counts:
        """Call the function. Returns its result, a mapping of counts that JSON can hold; empty if it returns None.

        It is not called if ``frame`` is None: then there is no session.

        Raises:
            FunctionFailedError: the function raised an error, or its result is not a mapping of counts. The text has
                the frames of the user's code; the function's error is the cause.
            StreamDefinitionError, TransformError: the function cannot be found, or does not take its arguments.
        """
        if frame is None:
            return {}
        function = load_foreach(batch.stream, self._output)
        wanted = _UNDECODABLE in inspect.signature(function).parameters
        more = {_UNDECODABLE: dict(batch.undecodable())} if wanted else {}
        try:
            returned = function(frame, batch.context, **more)
        except Exception as error:
            raise self._failed(error) from error
        return self._counts(returned)

    def _failed(self, error: Exception) -> FunctionFailedError:
        frames = "".join(traceback.format_list(_own_frames(error.__traceback__)))
        failed = FunctionFailedError(
            f"The function {self._output.function} of output {self._output.id!r} failed: {first_cause(error)}\n{frames}"
        )
        failed.failure = failure_of(error)
        return failed

    def _counts(self, returned: object) -> Counts:
        if returned is None:
            return {}
        if not isinstance(returned, Mapping):
            raise FunctionFailedError(
                f"The function {self._output.function} returned {type(returned).__name__}, not a mapping of counts.",
                remedy="Return nothing, or a mapping such as {'rows': 7}.",
            )
        for name, value in returned.items():
            if not isinstance(name, str) or not _is_json(value):
                raise FunctionFailedError(
                    f"The function {self._output.function} returned {name!r}: {type(value).__name__}, which the "
                    "ledger cannot store.",
                    remedy="Names must be strings and values JSON values: convert them, for example with int(value).",
                )
        return dict(returned)


def load_foreach(stream: Stream, output: ForeachBatchOutput) -> Callable[..., Any]:
    """Import the output's function in the same way as a transform, and check that it takes a DataFrame and a batch.

    Raises StreamDefinitionError or TransformError.
    """
    from headrace.spark.transforms import TransformError, load_function

    function = load_function(stream, output.function, f"function of output {output.id!r}")
    signature = inspect.signature(function)
    more = {_UNDECODABLE: None} if _UNDECODABLE in signature.parameters else {}
    try:
        signature.bind(None, None, **more)
    except TypeError:
        raise TransformError(
            f"The function {output.function} of output {output.id!r} takes ({', '.join(signature.parameters)}).",
            remedy="It must take the batch's DataFrame and its context: def write(frame, batch).",
        ) from None
    return function


def _own_frames(trace: TracebackType | None) -> list[traceback.FrameSummary]:
    """The user's frames in this process: at most ``_FRAMES``, without those of this file and of Spark."""
    frames = traceback.extract_tb(trace)
    return [frame for frame in frames if frame.filename != __file__ and not _is_sparks(frame.filename)][-_FRAMES:]


def _is_sparks(filename: str) -> bool:
    return not {"pyspark", "py4j", "grpc"}.isdisjoint(Path(filename).parts)


def _is_json(value: object) -> bool:
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        return False
    return True
