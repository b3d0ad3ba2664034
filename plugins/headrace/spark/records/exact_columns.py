"""Columns in which every value fits its type exactly: how those that do not are found, where lists begin, and how many
elements they may have.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

YEARS_1_TO_9999 = (-62_135_596_800, 253_402_300_799)
"""The first and the last second of the times that texts of ISO 8601 have, since 1970."""


class UnfitError(Exception):
    """A value does not fit its type exactly; the text names both, and the place."""


MOST_CELLS = 20_000_000
"""An element of a list may have no byte for each of its fields, and has a cell of 8 bytes and more for each in columns:
a record of a megabyte could take gigabytes."""


class TooManyCellsError(MemoryError):
    """The values have lists of so many elements that their columns would take too much memory. Fewer values may do."""


@lru_cache(maxsize=256)
def cells_of_element(kind: pa.DataType) -> int:
    """The cells in columns that an element of a type has; of a list in it, only its own."""
    if pa.types.is_struct(kind):
        return max(1, sum(cells_of_element(field.type) for field in kind))
    return 1


@lru_cache(maxsize=256)
def widest_element(kind: pa.DataType) -> int:
    """The most cells that an element of a list or map in the type has; 0 if there is none."""
    if pa.types.is_struct(kind):
        return max((widest_element(field.type) for field in kind), default=0)
    if pa.types.is_list(kind):
        return max(cells_of_element(kind.value_type), widest_element(kind.value_type))
    if pa.types.is_map(kind):
        return max(1 + cells_of_element(kind.item_type), widest_element(kind.item_type))
    return 0


def must_count(values: pa.Array, widest: int, shortest: int) -> bool:
    """Whether the only one of binary ``values`` may have too many elements, so that they are to be counted.

    Raises TooManyCellsError if several values may: each is then asked for by itself, so that what is refused does not
    depend on the others. ``widest``: of `widest_element`. ``shortest``: the bytes of an element without fields.
    """
    if not widest or not len(values):
        return False
    lengths = pc.binary_length(values)
    every, longest = pc.sum(lengths).as_py() or 0, pc.max(lengths).as_py() or 0
    if len(values) == 1:
        return bool(longest // shortest * widest > MOST_CELLS)
    if longest // shortest * widest > MOST_CELLS or every // shortest * widest > 2 * MOST_CELLS:
        raise TooManyCellsError
    return False


def check_cells(elements: int, cells_of_each: int) -> None:
    """Raise TooManyCellsError if so many elements of lists are too many."""
    if elements * cells_of_each > MOST_CELLS:
        raise TooManyCellsError


class ExactColumn(Protocol):
    """The values of one place in the records."""

    def array(self, values: Sequence[Any]) -> pa.Array:
        """The values (None where there is none) as Arrow's; raises UnfitError."""
        ...


def unfit(column: ExactColumn, values: Sequence[Any], first: int = 0) -> Iterator[tuple[int, UnfitError]]:
    """Yield the numbers of the values that do not fit, from ``first`` on, with the reasons. They are halved until each
    is alone."""
    try:
        column.array(values)
    except UnfitError as error:
        if len(values) == 1:
            yield first, error
            return
        half = len(values) // 2
        yield from unfit(column, values[:half], first)
        yield from unfit(column, values[half:], first + half)


def element_offsets(values: Sequence[Any]) -> pa.Array:
    """Where each list or map begins among the elements of all (int32); null for a null."""
    starts = np.zeros(len(values) + 1, np.int32)
    np.cumsum([0 if value is None else len(value) for value in values], out=starts[1:])
    absent = np.array([*(value is None for value in values), False])
    return pa.array(starts, pa.int32(), mask=absent)
