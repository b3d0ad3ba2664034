"""What a user writes: the definition of a stream, with its inputs, outputs, windows, state and limits."""

from headrace.stream.change_event_decoders import DebeziumDecoder, DebeziumKeyDecoder
from headrace.stream.decoder import BytesDecoder, DecoderDefinition, JsonDecoder, Utf8Decoder
from headrace.stream.fields import BatchTrigger
from headrace.stream.inputs import (
    Input,
    InputDefinition,
    KafkaInput,
    ReceiverInput,
    StartingOffsets,
    StartingTimestamp,
)
from headrace.stream.model import StreamDefinitionError
from headrace.stream.outputs import (
    ColumnIds,
    ConsoleOutput,
    DeadLetterTopic,
    ElasticsearchOutput,
    ForeachBatchOutput,
    KafkaOutput,
    KeyIds,
    Output,
    OutputDefinition,
    ParquetOutput,
    RecordIds,
)
from headrace.stream.schema_decoders import AvroDecoder, JsonSchemaDecoder, ProtobufDecoder
from headrace.stream.settings import (
    Backpressure,
    DeadLetterLimit,
    ExecutorAllocation,
    Limits,
    Listener,
    LocalCopies,
    SparkSettings,
    Storage,
)
from headrace.stream.state import STATE_STEP, State, Window
from headrace.stream.stream import Stream

__all__ = [
    "STATE_STEP",
    "AvroDecoder",
    "Backpressure",
    "BatchTrigger",
    "BytesDecoder",
    "ColumnIds",
    "ConsoleOutput",
    "DeadLetterLimit",
    "DeadLetterTopic",
    "DebeziumDecoder",
    "DebeziumKeyDecoder",
    "DecoderDefinition",
    "ElasticsearchOutput",
    "ExecutorAllocation",
    "ForeachBatchOutput",
    "Input",
    "InputDefinition",
    "JsonDecoder",
    "JsonSchemaDecoder",
    "KafkaInput",
    "KafkaOutput",
    "KeyIds",
    "Limits",
    "Listener",
    "LocalCopies",
    "Output",
    "OutputDefinition",
    "ParquetOutput",
    "ProtobufDecoder",
    "ReceiverInput",
    "RecordIds",
    "SparkSettings",
    "StartingOffsets",
    "StartingTimestamp",
    "State",
    "Storage",
    "Stream",
    "StreamDefinitionError",
    "Utf8Decoder",
    "Window",
]
