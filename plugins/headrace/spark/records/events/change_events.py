"""Decodes Debezium's change events in JSON: the row after the change, and columns about the change beside it.

It imports no Spark. Envelopes are read by one parse each, and turned column by column.
"""

from __future__ import annotations

from operator import attrgetter

import numpy as np
import pyarrow as pa

from headrace.formats.change_events import BESIDE, ROW_OPERATIONS, DecimalTexts, TimeUnit
from headrace.spark.records.events.connect_values import ConnectLeaf
from headrace.spark.records.events.declared_rows import DeclaredRows
from headrace.spark.records.events.event_columns import columns_of_source, refuse_unsent, transactions_of
from headrace.spark.records.events.event_reader import (
    NO_SOURCE,
    NOTHING,
    SOURCE_FIELDS,
    ChangeEvent,
    EventReader,
    rows_of,
)
from headrace.spark.records.json_objects import ElementsBound, not_utf8


class ChangeEvents:
    """Decodes into a struct of ``value``, the row after the change, and the columns of ``change_events.beside``.

    Called with another type, it decodes the keys of change events, into the struct of their fields.
    """

    def __init__(
        self,
        column: pa.StructType,
        *,
        time_zone: str = "UTC",
        fields: str = "",
        times: TimeUnit | None = None,
        decimals: DecimalTexts = "base64",
    ) -> None:
        self._column = column
        self._is_key = tuple(field.name for field in column) != ("value", *BESIDE)
        self._rows = DeclaredRows(
            column if self._is_key else column.field("value").type, ConnectLeaf(None, times, decimals, time_zone)
        )
        self._wanted = f"no {'key' if self._is_key else 'change event'} of {fields}" if fields else "no change event"
        self._reader = EventReader(self._rows)
        self._bound = ElementsBound(self._rows.kind, rows_of)

    def decode(self, values: pa.Array, *, headers: pa.Array | None = None) -> tuple[pa.Array, dict[int, str]]:
        """The structs of binary ``values``, and the reasons by row of those that are refused, which are null.

        ``headers``: the records' headers, which may say what a flattened row does not. The value within the struct is
        null where a row was deleted, and where the event changes no row; a tombstone is null as a whole. Raises
        TooManyCellsError.
        """
        self._bound.check(values)
        texts = values.to_pylist()
        refused = not_utf8(values)
        self._reader.forget_schemas()
        if self._is_key:
            decoded = self._keys(texts, refused)
        else:
            events = self._reader.events(texts, headers, refused)
            self._check_rows(events, refused)
            decoded = self._array(events, refused)
        return decoded, {row: f"{self._wanted}: {reason}" for row, reason in refused.items()}

    def _keys(self, texts: list[bytes | None], refused: dict[int, str]) -> pa.Array:
        rows, schemas = self._reader.rows(texts, refused)
        return self._rows.array(rows, schemas, "", refused)

    @staticmethod
    def _check_rows(events: list[ChangeEvent | None], refused: dict[int, str]) -> None:
        """Refuse the events after which there must be a row, and that have none."""
        for row, event in enumerate(events):
            if event is not None and event.after is None and event.op in ROW_OPERATIONS:
                refused[row] = f"it has the operation {event.op!r}, and no row after it"
                events[row] = None

    def _array(self, events: list[ChangeEvent | None], refused: dict[int, str]) -> pa.Array:
        rest = [NOTHING if event is None else event for event in events]
        ops, befores, afters, sources, transactions, times, schemas, positioned = (
            (list(part) for part in zip(*rest, strict=True)) if rest else ([],) * 8
        )
        # A row in flattened form may say no operation.
        afters = [after if op is None or op in ROW_OPERATIONS else None for op, after in zip(ops, afters, strict=True)]
        made = {
            "value": self._rows.array(afters, schemas, "after", refused),
            # An event stands by the row after the change, whatever was before: that row may be of an older table.
            "before": self._rows.array(befores, schemas, "before", {}),
            "op": pa.array(ops, pa.string()),
        }
        refuse_unsent(made["value"], refused)
        held = [NO_SOURCE if source is None else source for source in sources]
        of_source = (
            dict(zip(SOURCE_FIELDS, zip(*map(attrgetter(*SOURCE_FIELDS), held), strict=True), strict=True))
            if held
            else {name: () for name in SOURCE_FIELDS}
        )
        made |= columns_of_source(of_source, ops, positioned, times, [source is not None for source in sources])
        made["transaction"] = transactions_of(transactions)
        absent = np.array([event is None for event in events], bool)
        absent[list(refused)] = True
        arrays = [made[field.name].cast(field.type) for field in self._column]
        return pa.StructArray.from_arrays(arrays, fields=list(self._column), mask=pa.array(absent))
