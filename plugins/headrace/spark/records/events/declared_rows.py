"""The rows of a change event as its decoder declares them: read from JSON, and made Arrow's columns."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from headrace.formats.change_events import PLAIN, Said, said_of_places
from headrace.spark.records.events.connect_values import ConnectLeaf
from headrace.spark.records.exact_columns import UnfitError
from headrace.spark.records.json_objects import REFUSED, Objects

_SCHEMAS_KEPT = 64
NO_SCHEMA, OF_DOCUMENTS = 0, -1
"""In place of the number of a schema part: of events without one, and of MongoDB's documents. These are texts, of whose
fields a schema part says nothing, and in which no number is base64."""


class DeclaredRows:
    """The rows of one declared type, as msgspec reads them, and as Arrow's columns by each schema part."""

    def __init__(self, kind: pa.StructType, leaf: ConnectLeaf) -> None:
        self.kind = kind
        self._leaf = leaf
        self._objects: dict[tuple[int, str], Objects] = {}
        self._said: list[Mapping[str, Mapping[str, Said]] | None] = [None]
        self._by_said: dict[Hashable, int] = {}
        self._numbers: dict[bytes, int] = {}
        objects = Objects(kind, "$", leaf)
        self.strict, self.loose = objects.strict, objects.loose
        self.names = frozenset(field.name for field in kind)
        self._first, *_ = self.strict.__struct_fields__

    def is_bare(self, row: Any) -> bool:
        """Whether all fields of a row are null, or absent."""
        # The first is asked by itself, as this is asked of each row, and most have a key in it.
        return getattr(row, self._first) is None and not any(
            getattr(row, name) is not None for name in row.__struct_fields__
        )

    def schema_number(self, text: bytes) -> int:
        """The number of a schema part. Raises ValueError if it is none."""
        if (number := self._numbers.get(text)) is None:
            try:
                schema = msgspec.json.decode(text)
            except REFUSED as error:
                raise ValueError(f"its schema part is no JSON: {error}") from None
            said = _said_of_parts(schema)
            # Schema parts that differ in what is of no account here, such as a version, are one.
            same = frozenset((part, frozenset(places.items())) for part, places in said.items())
            if (number := self._by_said.get(same)) is None:
                number = self._by_said[same] = len(self._said)
                self._said.append(said)
            if len(self._numbers) >= _SCHEMAS_KEPT:
                self._numbers.clear()
            self._numbers[text] = number
        return number

    def forget_schemas(self) -> bool:
        """Forget the schema parts, and their numbers, if there are many; whether it has. Only between batches."""
        if len(self._said) <= _SCHEMAS_KEPT:
            return False
        self._said[1:] = []
        for kept in (self._numbers, self._by_said, self._objects):
            kept.clear()
        return True

    def array(self, rows: list[Any], schemas: Sequence[int], part: str, refused: dict[int, str]) -> pa.Array:
        """The rows as Arrow's; those that do not fit are null, and added to ``refused``. ``part``: "before", "after",
        or "" of a row that is no part of an envelope."""
        numbers = set(schemas)
        if len(numbers) <= 1:
            return self._array(rows, numbers.pop() if numbers else NO_SCHEMA, part, refused)
        made, order = [], []
        for number in sorted(numbers):
            own = [row for row, schema in enumerate(schemas) if schema == number]
            of_number: dict[int, str] = {}
            made.append(self._array([rows[row] for row in own], number, part, of_number))
            refused |= {own[row]: reason for row, reason in of_number.items() if own[row] not in refused}
            order += own
        return pa.concat_arrays(made).take(pa.array(np.argsort(order)))

    def _array(self, rows: list[Any], schema: int, part: str, refused: dict[int, str]) -> pa.Array:
        if not any(row is not None for row in rows):
            return pa.nulls(len(rows), self.kind)
        objects = self._objects_of(schema, part)
        try:
            return objects.array(rows)
        except UnfitError:
            kept = list(rows)
            for row, error in objects.unfit(rows):
                refused.setdefault(row, str(error))
                kept[row] = None
        return objects.array(kept)

    def _objects_of(self, schema: int, part: str) -> Objects:
        if (objects := self._objects.get((schema, part))) is None:
            said = None if schema == OF_DOCUMENTS else self._said[schema]
            place = f"$.{part}" if part else "$"
            leaf = self._leaf if schema != OF_DOCUMENTS else replace(self._leaf, decimals="number")
            if said is not None:
                # In a flattened row the fields are beside each other, in an envelope within its parts.
                leaf = ConnectLeaf(said.get(part, said[""]), leaf.times, leaf.decimals, leaf.time_zone)
                leaf = ConnectLeaf(
                    {place + at[1:]: each for at, each in (leaf.said or {}).items()},
                    leaf.times,
                    leaf.decimals,
                    leaf.time_zone,
                )
            if len(self._objects) >= _SCHEMAS_KEPT:
                self._objects.clear()
            objects = self._objects[schema, part] = Objects(self.kind, place, leaf)
        return objects


def _said_of(schema: Any) -> Mapping[str, Said]:
    return {place: said for place, said in said_of_places(schema) if said != PLAIN}


def _said_of_parts(schema: Any) -> Mapping[str, Mapping[str, Said]]:
    """What a schema part says of the places in "before" and "after", and of those in the value itself ("")."""
    fields = schema.get("fields") if isinstance(schema, dict) else None
    parts: dict[str, Mapping[str, Said]] = {"": _said_of(schema)}
    for field in fields if isinstance(fields, list) else ():
        if isinstance(field, dict) and field.get("type") == "struct":
            if field.get("field") in ("before", "after"):
                parts[field["field"]] = _said_of(field)
            elif field.get("field") == "data":
                # Of a CloudEvent.
                parts |= {name: said for name, said in _said_of_parts(field).items() if name}
    return parts
