"""Decodes lines of CSV in Spark's tasks."""

from __future__ import annotations

import csv

import pyarrow as pa


class CsvLines:
    """Decodes into ``kind``, a struct of texts."""

    def __init__(self, kind: pa.StructType, *, time_zone: str, delimiter: str) -> None:  # noqa: ARG002 - no times
        self._kind = kind
        self._names = [field.name for field in kind]
        self._delimiter = delimiter

    def decode(self, values: pa.Array) -> tuple[pa.Array, dict[int, str]]:
        """The structs of binary ``values``, and the reasons by row of those that are refused, which are null."""
        refused: dict[int, str] = {}
        rows: list[dict[str, str] | None] = []
        for row, value in enumerate(values.to_pylist()):
            rows.append(None)
            if value is None:
                continue
            try:
                fields = self._fields(value)
            except (UnicodeDecodeError, csv.Error) as error:
                refused[row] = f"no line of CSV: {error}"
                continue
            if len(fields) == len(self._names):
                rows[row] = dict(zip(self._names, fields, strict=True))
            else:
                refused[row] = f"no line of CSV with {len(self._names)} fields, but with {len(fields)}"
        return pa.array(rows, self._kind), refused

    def _fields(self, value: bytes) -> list[str]:
        lines = list(csv.reader([value.decode()], delimiter=self._delimiter, strict=True))
        return lines[0] if lines else []
