"""How commands print: a table for people, JSON for scripts."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any

import typer

_UNBOUNDED = 10_000


def print_json(value: Any) -> None:
    """``value`` (rows, lists and dicts of plain values) as JSON on standard output."""
    typer.echo(json.dumps(value, indent=2, default=_plain))


def print_table(headings: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Rows under headings; columns that hold numbers stand to the right."""
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
    # What others wrote, an error's "[n]" say, is no markup.
    console = Console(markup=False, emoji=False)
    if not console.is_terminal:
        # Into a file or a pipe every row is one line: nothing is known of a width, and grep wants whole names.
        console = Console(markup=False, emoji=False, width=_UNBOUNDED)
    console.print(table)


def printable(text: str) -> str:
    """Text that others wrote, harmless on a terminal: what is not printable, but for line ends, is escaped."""
    return "".join(
        each if each.isprintable() or each == "\n" else each.encode("unicode_escape").decode() for each in text
    )


def time_text(at_ms: int | None) -> str:
    """Epoch milliseconds as UTC in ISO 8601, to the millisecond where there are any."""
    if at_ms is None:
        return "-"
    at = datetime.fromtimestamp(at_ms / 1000, UTC)
    return at.isoformat(timespec="milliseconds" if at_ms % 1000 else "seconds").replace("+00:00", "Z")


def duration_text(from_ms: int | None, until_ms: int | None) -> str:
    """The seconds between two times."""
    return "-" if from_ms is None or until_ms is None else f"{(until_ms - from_ms) / 1000:.1f} s"


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return str(value)


def _cell(value: object) -> str:
    return "-" if value is None else f"{value:,}" if isinstance(value, int) else str(value)


def _is_number(text: str) -> bool:
    return text == "-" or text.replace(",", "").replace(".", "").isdigit()
