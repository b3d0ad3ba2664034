"""The decoders that a definition can name: headrace's own, and those of other packages."""

from __future__ import annotations

from functools import partial, reduce
from operator import or_
from typing import TYPE_CHECKING, Annotated

from pydantic import Field, SerializeAsAny, WrapValidator

from headrace.stream.change_event_decoders import DebeziumDecoder, DebeziumKeyDecoder
from headrace.stream.decoder import BytesDecoder, DecoderDefinition, JsonDecoder, Utf8Decoder
from headrace.stream.model import validate_part
from headrace.stream.schema_decoders import AvroDecoder, JsonSchemaDecoder, ProtobufDecoder

_BUILT_IN = (
    *(BytesDecoder, Utf8Decoder, JsonDecoder),
    *(AvroDecoder, ProtobufDecoder, JsonSchemaDecoder),
    *(DebeziumDecoder, DebeziumKeyDecoder),
)

if TYPE_CHECKING:
    Decoder = DecoderDefinition
else:
    Decoder = Annotated[
        Annotated[reduce(or_, _BUILT_IN), Field(discriminator="kind")],
        WrapValidator(partial(validate_part, DecoderDefinition, _BUILT_IN, "headrace.decoders")),
        # A decoder of another package is none of the union.
        SerializeAsAny(),
    ]
