"""The console output: prints the first rows of every batch in the form of Spark Streaming's ``print()``."""

from __future__ import annotations

from typing import IO, TYPE_CHECKING, Any

from headrace.clock import time_text
from headrace.spark.sessions import collect

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pyspark.sql import DataFrame

    from headrace.spark.outputs.writer import Counts, WrittenBatch
    from headrace.stream import ConsoleOutput

_RULE = "-------------------------------------------"


class ConsoleWriter:
    """Prints batches to their ``out``. For an empty batch only the header is printed."""

    def __init__(self, output: ConsoleOutput) -> None:
        self._output = output

    @property
    def needs_empty_batches(self) -> bool:
        """True: any row can be printed."""
        return True

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
