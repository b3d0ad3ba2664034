"""Columns in which every value fits its type exactly: how those that do not are found, and where lists begin."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

YEARS_1_TO_9999 = (-62_135_596_800, 253_402_300_799)
"""The first and the last second of the times that texts of ISO 8601 have, since 1970."""


class UnfitError(Exception):
    """A value does not fit its type exactly; the text names both, and the place."""


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
