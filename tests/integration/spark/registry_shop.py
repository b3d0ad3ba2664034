"""A shop's topic whose values are in the frame of a schema registry, and a stream that reads it."""

from __future__ import annotations

import io
import json
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from confluent_kafka.schema_registry import Schema, SchemaRegistryClient
from pyarrow import parquet
from pyspark.sql import SparkSession
from tests.integration.spark.conftest import records
from tests.support.avro_examples import encoded

from headrace.batch.places import READERS
from headrace.batch.readers import BatchReaders
from headrace.devstack.registry import RegistryServer
from headrace.errors import FAILURE
from headrace.stream import AvroDecoder, KafkaInput, ParquetOutput, Stream
from headrace.stream_context import StreamContext

Define = Callable[..., str]


def order(*fields: Any) -> dict[str, Any]:
    return {"type": "record", "name": "shop.Order", "fields": list(fields)}


ID: Any = {"name": "id", "type": "int"}
FIRST = order(ID)
SECOND = order({"name": "id", "type": "long"}, {"name": "note", "type": ["null", "string"], "default": None})
THIRD = order({"name": "id", "type": "long"}, {"name": "total", "type": "double", "default": 1.5})
UNREADABLE = order({"name": "id", "type": "string"})


class Topic:
    """A topic's subject in a registry, and records that are framed by its versions."""

    def __init__(self, url: str) -> None:
        self.name = f"orders-{uuid.uuid4().hex[:8]}"
        self._client = SchemaRegistryClient({"url": url})

    def register(self, schema: Any) -> int:
        return int(self._client.register_schema(f"{self.name}-value", Schema(json.dumps(schema), "AVRO")))

    def framed(self, schema: Any, **value: Any) -> bytes:
        return framed(self.register(schema), schema, **value)


def framed(id_: int, schema: Any, **value: Any) -> bytes:
    return b"\x00" + id_.to_bytes(4, "big") + encoded(schema, value)


def read_rows(written: Path, *columns: str) -> list[dict[str, Any]]:
    """The rows of a Parquet output, by their offsets."""
    rows: list[Any] = []
    for file in sorted(written.glob("batch_time=*/*.parquet")):
        rows += parquet.read_table(file, columns=["offset", *columns]).to_pylist()
    return [{name: row[name] for name in columns} for row in sorted(rows, key=lambda row: row["offset"])]


class Shop:
    """A stream that decodes a topic's values by a registry, and writes them to files.

    ``outputs``: ids of Parquet outputs with the other fields that they have.
    """

    def __init__(self, server: RegistryServer, define: Define, make: Any, folder: Path, **outputs: Any) -> None:
        self.topic = Topic(server.url)
        self.connection = connect(define, server.url)
        self._folder = folder
        self._outputs = outputs or {"parquet": {}}
        self.batch = make(**self._fields())
        self._next = 0
        self.log = ""

    def definition(self, **decoder: Any) -> Stream:
        """The stream, with changed fields of its decoder."""
        return Stream(**{**dict(self.batch.stream), **self._fields(**decoder)})

    def _fields(self, **decoder: Any) -> dict[str, Any]:
        value_decoder = AvroDecoder(**{"registry": self.connection, **decoder})
        made = [ParquetOutput(id=id_, path=str(self._folder / id_), **more) for id_, more in self._outputs.items()]
        return {
            "inputs": KafkaInput(bootstrap_servers="127.0.0.1:1", topics=self.topic.name, value_decoder=value_decoder),
            "outputs": tuple(made),
        }

    def allocate(self, *values: bytes | None) -> int:
        """A batch of these values; its time."""
        if values:
            self.batch.add(records(values, topic=self.topic.name, first_offset=self._next))
        self._next += len(values)
        return int(self.batch.allocate())

    def run(
        self, spark: SparkSession, time_ms: int, *, force: bool = False, outputs: Any = None, **decoder: Any
    ) -> Any:
        """Run the batch, by a changed definition if ``decoder`` has fields of one."""
        attempt = self.batch.begin(time_ms, force=force, outputs=outputs)
        return self.attempt(spark, attempt, **decoder)

    def replay(self, spark: SparkSession, time_ms: int, target: str, **decoder: Any) -> Any:
        """Replay the batch. Its files are those of the stream, with another name."""
        fields = self._fields(**decoder)
        renamed = [output.model_copy(update={"path": f"{output.path}-{target}"}) for output in fields["outputs"]]
        stream = Stream(**{**dict(self.batch.stream), **fields, "outputs": tuple(renamed)})
        claim = self.batch.ledger.replays.begin(
            stream.name,
            time_ms,
            target=target,
            definition=stream.to_json(),
            outputs=[output.step for output in renamed],
            holder="test",
            way="submit",
            lease_ms=60_000,
        )
        return self.attempt(spark, claim, stream=stream)

    def attempt(self, spark: SparkSession, claim: Any, *, stream: Stream | None = None, **decoder: Any) -> Any:
        lines: list[str] = []
        given = stream or self.definition(**decoder)
        try:
            return self.batch.run(spark, claim, stream=given, out=io.StringIO(), report=lines.append)
        finally:
            self.log = "\n".join(lines)

    def written(self, output: str = "parquet") -> list[Any]:
        return [row["value"] for row in read_rows(self._folder / output, "value")]

    def failure(self, time_ms: int) -> Any:
        """The failure of the only attempt at a batch."""
        (row,) = self.batch.ledger.attempts.of_batch(self.batch.stream.name, time_ms)
        return row.attributes[FAILURE]

    def readers(
        self, time_ms: int, *, claim: Any = None, told: list[str] | None = None, **decoder: Any
    ) -> BatchReaders:
        """The readers of a batch; without a claim those that a preview has. ``told`` gets the lines of the log."""
        return self.readers_of(self.definition(**decoder), time_ms, claim=claim, told=told)

    def readers_of(
        self, stream: Stream, time_ms: int, *, claim: Any = None, told: list[str] | None = None
    ) -> BatchReaders:
        lines: list[str] = [] if told is None else told
        return BatchReaders.of(StreamContext(stream, self.batch.ledger), time_ms, claim=claim, warn=lines.append)

    def add_output(self, **output: Any) -> None:
        """Give the stream another output, before the others."""
        self._outputs = {**output, **self._outputs}
        stream = self.definition()
        self.batch.ledger.streams.register(
            stream.name,
            stream.to_json(),
            batch_interval_ms=stream.batch_interval_ms,
            block_interval_ms=stream.block_interval_ms,
            outputs=stream.steps,
            ordered=stream.is_ordered,
        )

    def complete(self, time_ms: int, **decoder: Any) -> BatchReaders:
        """Record a batch as decoded and written, without Spark."""
        claim = self.batch.begin(time_ms)
        readers = self.readers(time_ms, claim=claim, **decoder)
        for step in claim.outputs:
            self.batch.ledger.attempts.record_output(claim, step, {"undecodable": 0, READERS: dict(readers.facts)})
        self.batch.ledger.attempts.complete(claim)
        return readers


def connect(define: Define, url: str) -> str:
    return define(conn_type="http", host=url)
