"""Decoders of Debezium's change events and of their keys."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial, reduce
from operator import or_
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, JsonValue, SerializeAsAny, WrapValidator, field_validator, model_validator

from headrace.formats import change_events
from headrace.formats.change_events import DecimalTexts, TimeUnit
from headrace.formats.schema_text import SchemaText
from headrace.stream.ddl import ColumnsText, type_tree, typed_columns
from headrace.stream.decoder import (
    DecoderDefinition,
    JsonDecoder,
    SchemaQuestion,
    ambiguous_names,
    check_held_by_json,
)
from headrace.stream.model import validate_part
from headrace.stream.schema_decoders import AvroDecoder, JsonSchemaDecoder, ProtobufDecoder, SchemaNotKnownError

if TYPE_CHECKING:
    from headrace.stream.fields import StreamFields


class _OfDebezium(DecoderDefinition):
    """What the decoders of change events and of their keys have in common."""

    decodes: ClassVar[str | None] = "headrace.spark.records.events.change_events:ChangeEvents"

    times: TimeUnit | None = Field(
        default=None,
        description="The unit of a number in a TIMESTAMP or TIME, where the event has no schema part that says it.",
    )
    decimals: DecimalTexts = Field(
        default="base64",
        description="What a text in a DECIMAL is, where the event has no schema part that says it: base64 as Debezium "
        "sends decimals by default, which is read with the scale of the DECIMAL, as such an event says none, or "
        '"number" with its decimal.handling.mode "string".',
    )


class DebeziumKeyDecoder(_OfDebezium):
    """Decode the keys of Debezium's change events in JSON, with or without their schema part. ``fields`` are the
    columns of the table's primary key, such as ``"id INT"``."""

    kind: Literal["debezium_key"] = "debezium_key"
    fields: ColumnsText

    @field_validator("fields")
    @classmethod
    def _fields_are_what_json_can_hold(cls, value: str) -> str:
        return check_held_by_json(value)

    @property
    def column(self) -> str:
        return self.fields

    @property
    def keywords(self) -> dict[str, JsonValue]:
        return {"fields": self.fields, "times": self.times, "decimals": self.decimals}

    @property
    def description(self) -> tuple[str, str]:
        return "Debezium's key", f"`{self.fields}`"


_OF_EVENTS = (JsonDecoder, AvroDecoder, ProtobufDecoder, JsonSchemaDecoder)

if TYPE_CHECKING:
    EventDecoder = DecoderDefinition
else:
    EventDecoder = Annotated[
        Annotated[reduce(or_, _OF_EVENTS), Field(discriminator="kind")],
        WrapValidator(partial(validate_part, DecoderDefinition, _OF_EVENTS, "headrace.decoders")),
        SerializeAsAny(),
    ]


class DebeziumDecoder(_OfDebezium):
    """Decode Debezium's change events: the row after the change.

    Of events in JSON, ``fields`` are the table's columns in Spark's DDL, such as ``"id INT, total DECIMAL(38, 4), at
    TIMESTAMP"``; where events have no schema part, a DECIMAL must have the scale of the table's column. Of events in
    another format, ``events`` is the decoder of this format, whose columns are the envelope.
    The record's value is the row; where a row was deleted it is null. Columns beside it say what happened: ``op``,
    ``position``, ``before``, ``changed_at``, ``source`` and ``transaction``. Events in flattened form and CloudEvents
    are recognised (docs/guides/change-events.md).
    """

    kind: Literal["debezium"] = "debezium"
    fields: ColumnsText | None = None
    events: EventDecoder | None = None

    @field_validator("fields")
    @classmethod
    def _fields_are_what_json_can_hold(cls, value: str | None) -> str | None:
        return None if value is None else check_held_by_json(value)

    @model_validator(mode="after")
    def _has_rows(self) -> Self:
        if (self.fields is None) == (self.events is None):
            raise ValueError("name either the fields of the table, for events in JSON, or the decoder of the events")
        return self

    @property
    def decodes(self) -> str:  # type: ignore[override]
        of = "change_events:ChangeEvents" if self.events is None else "decoded_events:DecodedEvents"
        return f"headrace.spark.records.events.{of}"

    @property
    def reads(self) -> tuple[str, ...]:  # type: ignore[override]
        return ("headers",) if self.events is None else self.events.reads

    @property
    def keeps(self) -> bool:  # type: ignore[override]
        return self.events is not None and self.events.keeps

    @property
    def column(self) -> str:
        """Raises SchemaNotKnownError, and ValueError if what ``events`` decodes are no change events."""
        if self.events is None:
            return str(self.fields)
        column = self.events.column
        tree = type_tree(column)
        # A type that is no struct has no columns.
        return change_events.row_columns(*((typed_columns(column), tree) if isinstance(tree, dict) else ((), {})))

    @property
    def beside(self) -> str:
        try:
            return change_events.beside(_as_struct(self.column))
        except (SchemaNotKnownError, ValueError):
            # The names of the columns are known.
            return change_events.beside("STRING")

    @property
    def keywords(self) -> dict[str, JsonValue]:
        if self.events is None:
            return {"fields": self.fields, "times": self.times, "decimals": self.decimals}
        columns: Any = type_tree(self.events.column)
        reads: list[JsonValue] = [*self.events.reads]
        inner: dict[str, JsonValue] = {"decodes": self.events.decodes, "columns": columns, "reads": reads}
        return {"events": {**inner, "keywords": self.events.keywords}}

    def kept_url(self, folder_url: str) -> str:
        return super().kept_url(folder_url) if self.events is None else self.events.kept_url(folder_url)

    @property
    def question(self) -> SchemaQuestion | None:
        return None if self.events is None else self.events.question

    @property
    def is_framed(self) -> bool:
        return self.events is not None and self.events.is_framed

    def with_registry(self, connection_id: str) -> Self:
        if self.events is None:
            return self
        return self.model_copy(update={"events": self.events.with_registry(connection_id)})

    def with_reader(self, schema: SchemaText | None, part: Literal["key", "value"]) -> Self:
        if self.events is None:
            return self
        made = self.model_copy(update={"events": self.events.with_reader(schema, part)})
        if schema is not None:
            # Whether its values are change events is known now.
            _ = made.column
        return made

    @property
    def connection_ids(self) -> tuple[str, ...]:
        return () if self.events is None else self.events.connection_ids

    @property
    def description(self) -> tuple[str, str]:
        if self.events is None:
            return "Debezium", f"`{self.fields}`"
        system, target = self.events.description
        return f"Debezium in {system}", target

    def problems(self, stream: StreamFields) -> Iterator[str]:
        if self.events is None:
            yield from ambiguous_names(stream, "fields", str(self.fields))
            return
        yield from (f"events.{text}" for text in self.events.problems(stream))
        # As long as the schema is not known, nothing is known of its columns.
        with contextlib.suppress(SchemaNotKnownError):
            try:
                column = self.column
            except ValueError as error:
                yield f"events: {error}"
            else:
                yield from ambiguous_names(stream, "events", column)


def _as_struct(columns: str) -> str:
    """The type of a value with these columns, which may be in ``STRUCT<…>`` already."""
    return columns if columns.strip().lower().startswith("struct<") else f"STRUCT<{columns}>"
