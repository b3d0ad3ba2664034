"""Output of commands: tables for people, JSON for scripts."""

from __future__ import annotations

import dataclasses
import json
import logging
import sys
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import typer

from headrace.clock import time_text

_UNBOUNDED = 10_000


# A smaller value is a duration: no time is before 1973.
_FIRST_TIME_MS = 100_000_000_000


def print_json(value: Any, *, without_times: Collection[str] = ()) -> None:
    """Print ``value`` (views, rows, lists and dicts of plain values) as JSON on standard output.

    For each time in epoch milliseconds (``batch_time_ms``), adds its ISO 8601 form (``batch_time``), except inside the
    values of the names in ``without_times``: a user's rows stay as they are.
    """
    # JSON has no NaN and no infinity: they become text.
    plain = json.loads(json.dumps(value, default=_plain), parse_constant=str)
    typer.echo(json.dumps(_with_times(plain, without_times), indent=2))


def log_to_standard_error() -> None:
    """Keep the lines of Airflow's log out of the output, which may be JSON.

    Airflow, which a definition's module may import, writes them to the standard output. Since 3.3 it does this itself
    for its own commands with the option ``--output``.
    """
    for handler in logging.getLogger().handlers:
        if isinstance(handler, logging.StreamHandler) and handler.stream is sys.stdout:
            handler.setStream(sys.stderr)


def echo(text: str, *, err: bool = False) -> None:
    """Print a line. Text of others in it, such as an error or a topic's name, cannot control the terminal."""
    typer.echo(printable(text), err=err)


def print_table(headings: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print rows under headings; columns of numbers are right-aligned."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    listed = [[_cell(value) for value in row] for row in rows]
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for index, heading in enumerate(headings):
        numbers = bool(listed) and all(_is_number(row[index]) for row in listed)
        table.add_column(heading, justify="right" if numbers else "left", overflow="fold")
    for row in listed:
        table.add_row(*row)
    # Text of others, for example "[n]" in an error, is not markup.
    console = Console(markup=False, emoji=False)
    if not console.is_terminal:
        # In a file or a pipe every row is one line: there is no terminal width, and grep needs whole names.
        console = Console(markup=False, emoji=False, width=_UNBOUNDED)
    console.print(table)


def printable(text: str) -> str:
    """Make text of others safe for a terminal: escapes all unprintable characters except line ends."""
    return "".join(
        character if character.isprintable() or character == "\n" else character.encode("unicode_escape").decode()
        for character in text
    )


def duration_text(from_ms: int | None, until_ms: int | None) -> str:
    """The seconds between two times, as text; "-" if one is None."""
    return seconds_text(None if from_ms is None or until_ms is None else (until_ms - from_ms) / 1000)


def seconds_text(seconds: float | None) -> str:
    """Seconds as text; "-" for None."""
    return "-" if seconds is None else f"{seconds:.1f} s"


def fields_of(value: Any) -> dict[str, Any] | None:
    """The fields of a view or of a row, by the names that they have in Python; None of anything else.

    The rows that a view was made of are left out.
    """
    if hasattr(type(value), "model_fields"):
        return {name: field for name, field in value if name not in ("row", "rows")}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return None


def _plain(value: Any) -> Any:
    fields = fields_of(value)
    return str(value) if fields is None else fields


def _with_times(value: Any, without: Collection[str]) -> Any:
    if isinstance(value, list):
        return [_with_times(element, without) for element in value]
    if not isinstance(value, dict):
        return value
    timed: dict[str, Any] = {}
    for name, field in value.items():
        timed[name] = field if name in without else _with_times(field, without)
        readable = name.removesuffix("_ms")
        if name != readable and readable not in value and isinstance(field, int) and field >= _FIRST_TIME_MS:
            timed[readable] = time_text(field)
    return timed


def _cell(value: object) -> str:
    return "-" if value is None else f"{value:,}" if isinstance(value, int) else printable(str(value))


def _is_number(text: str) -> bool:
    return text == "-" or text.replace(",", "").replace(".", "").isdigit()
