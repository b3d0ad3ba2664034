"""What a user writes: the definition of a stream, with its inputs, outputs, windows, state and limits."""

from headrace.stream.definition import Stream
from headrace.stream.errors import StreamDefinitionError
from headrace.stream.fields import BatchTrigger
from headrace.stream.inputs import (
    BytesDecoder,
    Input,
    JsonDecoder,
    KafkaInput,
    ReceiverInput,
    StartingOffsets,
    StartingTimestamp,
    Utf8Decoder,
)
from headrace.stream.limits import Backpressure, DeadLetterLimit, Limits
from headrace.stream.listeners import Listener
from headrace.stream.outputs import (
    ColumnIds,
    ConsoleOutput,
    ElasticsearchOutput,
    ForeachBatchOutput,
    KafkaOutput,
    KeyIds,
    Output,
    ParquetOutput,
    RecordIds,
)
from headrace.stream.spark import ExecutorAllocation, SparkSettings
from headrace.stream.state import STATE_STEP, State
from headrace.stream.storage import LocalCopies, Storage
from headrace.stream.windows import Window

__all__ = [
    "STATE_STEP",
    "Backpressure",
    "BatchTrigger",
    "BytesDecoder",
    "ColumnIds",
    "ConsoleOutput",
    "DeadLetterLimit",
    "ElasticsearchOutput",
    "ExecutorAllocation",
    "ForeachBatchOutput",
    "Input",
    "JsonDecoder",
    "KafkaInput",
    "KafkaOutput",
    "KeyIds",
    "Limits",
    "Listener",
    "LocalCopies",
    "Output",
    "ParquetOutput",
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
