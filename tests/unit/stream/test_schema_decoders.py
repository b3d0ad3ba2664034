"""Decoders whose columns come from a schema: their own, or one of a registry."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from headrace.formats.schema_text import SchemaText
from headrace.stream import AvroDecoder, ConsoleOutput, KafkaInput, State, Stream, StreamDefinitionError
from headrace.stream.decoder import SchemaQuestion
from headrace.stream.schema_decoders import SchemaNotKnownError

SCHEMA = '{"type": "record", "name": "Order", "fields": [{"name": "id", "type": "int"}]}'


def stream(decoder: Any, *, state: State | None = None, **fields: Any) -> Stream:
    source = {"bootstrap_servers": "kafka:9092", "topics": "orders", "value_decoder": decoder, **fields}
    return Stream(
        name="orders",
        inputs=KafkaInput(**source),
        outputs=ConsoleOutput(),
        batch_interval="10 s",
        storage="/orders",
        ledger="sqlite:////orders/ledger.db",
        state=state,
    )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "has no schema: give schema_text, or the connection of a registry"),
        ({"schema_text": SCHEMA, "version": 2}, "there is no registry|schema_text is the schema of the columns"),
        ({"schema_text": SCHEMA, "registry": "schemas", "subject": "x"}, "schema_text is the schema of the columns"),
        ({"schema_text": SCHEMA, "refused_ids": (1,)}, "only values in the frame of a registry have the id"),
        ({"schema_text": '"nothing"'}, "names the type 'nothing'"),
        ({"registry": "schemas", "version": 0}, "greater than 0"),
        ({"registry": "schemas", "refused_ids": (-1,)}, "refused_ids"),
        ({"registry": "schemas", "refused_ids": ("schema 7",)}, "refused_ids"),
    ],
)
def test_a_decoder_has_one_schema(fields: dict[str, Any], message: str) -> None:
    with pytest.raises((ValidationError, StreamDefinitionError), match=message):
        AvroDecoder(**fields)


def test_a_registrys_columns_are_known_with_its_answer() -> None:
    decoder = AvroDecoder(registry="schemas", version=3, refused_ids=(0, 9, "89791762-2336-4186-9674-299b90a802e2"))
    assert decoder.question == SchemaQuestion("schemas", "AVRO", None, 3)
    assert decoder.connection_ids == ("schemas",)
    with pytest.raises(SchemaNotKnownError, match="connection 'schemas'"):
        _ = decoder.column
    answered = decoder.with_reader(SchemaText(SCHEMA), "key")
    assert answered.column == "`id` INT"
    assert answered.keywords["part"] == "key"
    assert answered.keywords["refused_ids"] == [0, 9, "89791762-2336-4186-9674-299b90a802e2"]
    with pytest.raises(ValueError, match="no value that could be a column"):
        decoder.with_reader(SchemaText('"null"'), "value")


def test_a_schema_of_the_definition_asks_no_question() -> None:
    decoder = AvroDecoder(registry="schemas", schema_text=SCHEMA)
    assert decoder.question is None
    assert decoder.column == "`id` INT"
    assert decoder.with_reader(None, "key").keywords["schema"] == SCHEMA


def test_a_stored_definition_has_no_answer() -> None:
    """Which version a batch is read by is recorded with the batch."""
    defined = stream(AvroDecoder(registry="schemas").with_reader(SchemaText(SCHEMA), "value"))
    stored = Stream.from_json(defined.to_json())
    assert stored.inputs[0].value_decoder == AvroDecoder(registry="schemas")


@pytest.mark.parametrize("topics", [{"topics": ("a", "b")}, {"topics": (), "topic_pattern": "orders-.*"}])
def test_several_topics_need_the_name_of_a_subject(topics: dict[str, Any]) -> None:
    with pytest.raises(StreamDefinitionError, match="name the subject of the schema"):
        stream(AvroDecoder(registry="schemas"), **topics)
    stream(AvroDecoder(registry="schemas", subject="shop.Order"), **topics)
    stream(AvroDecoder(registry="schemas", schema_text=SCHEMA), **topics)


def test_what_leaves_a_window_must_be_what_entered_it() -> None:
    """A newer schema may give an added field another default."""
    state = State(update="m:f", fields="id INT, n BIGINT", keys="id", window="20 s")
    with pytest.raises(StreamDefinitionError, match=r"the state has a window.*give the decoder schema_text"):
        stream(AvroDecoder(registry="schemas"), state=state)
    stream(AvroDecoder(registry="schemas", schema_text=SCHEMA), state=state)


def test_any_id_that_a_frame_can_have_may_be_refused() -> None:
    """A broken record may begin with bytes that are 0, or with a 1."""
    guid = "89791762-2336-4186-9674-299b90a802e2"
    decoder = AvroDecoder(registry="schemas", schema_text=SCHEMA, refused_ids=(0, guid.upper(), 2**31 - 1))
    assert decoder.keywords["refused_ids"] == [0, guid, 2**31 - 1]
    assert AvroDecoder.model_validate_json(decoder.model_dump_json()) == decoder
