"""The outputs that run in the batch's own process: the console, and the user's function of foreach_batch.

The console prints the first rows of every batch in the form of Spark Streaming's ``print()``.
"""

from __future__ import annotations

import inspect
import json
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any

from headrace.clock import time_text
from headrace.errors import Failure
from headrace.spark.attempts.failures import failure_of, first_cause
from headrace.spark.outputs.writer import OutputError
from headrace.spark.records.transforms import UNDECODABLE, load_foreach
from headrace.spark.sessions import collect

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pyspark.sql import DataFrame

    from headrace.spark.outputs.writer import Counts, WrittenBatch
    from headrace.stream import ConsoleOutput, ForeachBatchOutput


class FunctionFailedError(OutputError):
    """A foreach_batch output's function raised an error or returned invalid counts.

    ``failure`` is set from the error that the function raised.
    """

    failure = Failure.CODE


_RULE = "-------------------------------------------"


class ConsoleWriter:
    """Prints batches to their ``out``. For an empty batch only the header is printed."""

    def __init__(self, output: ConsoleOutput) -> None:
        self._output = output

    def write(self, frame: DataFrame | None, batch: WrittenBatch) -> Counts:
        """Print the batch. Returns the count ``printed``, in rows."""
        rows = print_batch(frame, batch_time_ms=batch.batch_time_ms, rows=self._output.rows, out=batch.out)
        return {"printed": rows}


def print_batch(frame: DataFrame | None, *, batch_time_ms: int, rows: int, out: IO[str]) -> int:
    """Print the batch's header, at most ``rows`` rows, and "..." if there are more. Returns the number of rows printed.

    ``frame`` is None for an empty batch that needs no Spark.
    """
    taken: Sequence[Any] = [] if frame is None else collect(frame.limit(rows + 1))
    lines = [_RULE, f"Time: {batch_time_ms} ms ({time_text(batch_time_ms)})", _RULE]
    lines += [_row(row) for row in taken[:rows]]
    if len(taken) > rows:
        lines.append("...")
    # A single write, because other outputs' progress may be printed to the same stream.
    out.write("\n".join([*lines, "", ""]))
    out.flush()
    return min(len(taken), rows)


def _row(row: Any) -> str:
    values = tuple(_readable(value) for value in row)
    return str(values[0]) if len(values) == 1 else str(values)


def _readable(value: Any) -> Any:
    if isinstance(value, (bytes, bytearray)):
        try:
            return bytes(value).decode()
        except UnicodeDecodeError:
            return bytes(value)
    return value


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
        function = load_foreach(batch.stream, self._output, self._output.function)
        wanted = UNDECODABLE in inspect.signature(function).parameters
        more = {UNDECODABLE: dict(batch.undecodable())} if wanted else {}
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
