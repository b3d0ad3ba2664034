"""The definition of a stream."""

from headrace.stream.definition import Stream
from headrace.stream.errors import StreamDefinitionError
from headrace.stream.inputs import (
    BytesDecoder,
    JsonDecoder,
    KafkaInput,
    StartingOffsets,
    StartingTimestamp,
    Utf8Decoder,
)
from headrace.stream.limits import Limits
from headrace.stream.outputs import ColumnIds, ConsoleOutput, ElasticsearchOutput, KeyIds, RecordIds
from headrace.stream.spark import SparkSettings
from headrace.stream.storage import Storage

__all__ = [
    "BytesDecoder",
    "ColumnIds",
    "ConsoleOutput",
    "ElasticsearchOutput",
    "JsonDecoder",
    "KafkaInput",
    "KeyIds",
    "Limits",
    "RecordIds",
    "SparkSettings",
    "StartingOffsets",
    "StartingTimestamp",
    "Storage",
    "Stream",
    "StreamDefinitionError",
    "Utf8Decoder",
]
