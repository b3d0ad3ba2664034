"""Decodes keys and values into columns for transforms, and separates the records that do not decode.

The records are decoded where they are read, in Spark's Python workers: bytes become Arrow's columns there, and the JVM
parses nothing.
"""

from __future__ import annotations

import importlib
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, Protocol

from headrace.errors import Failure, HeadraceError

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import DataType, StructField, StructType

    from headrace.kept_values import KeptUse
    from headrace.stream import Input

REASON = "undecodable_reason"
RAW_KEY = "raw_key"
RAW_VALUE = "raw_value"

_RAW = {"key": RAW_KEY, "value": RAW_VALUE}
# A classic session's observation is complete a few milliseconds after the query, since Spark's listeners make it.
_OBSERVATION_SECONDS = 1.0


class DecoderMissingError(HeadraceError):
    """A Spark task cannot import the class that decodes, because its package is not installed there."""

    failure = Failure.CODE


class ColumnDecoder(Protocol):
    """Decodes a column in Spark's tasks. It is called with the Arrow type of the decoded values
    (`DecoderDefinition.column`), the name of the session's time zone as ``time_zone``, the definition's ``keywords``,
    and `KeptValues` as ``kept`` if the definition has `keeps`.

    If the definition has columns `beside` the value, the type is a struct of ``value`` and these columns. There
    ``value`` may be null without a reason.
    """

    def decode(self, values: pa.Array, **columns: pa.Array) -> tuple[pa.Array, dict[int, str]]:
        """The decoded values of a binary array, in its order, and the reasons by row of those that are refused.

        ``columns`` are those that the definition `reads`. A null stays null, without a reason. A refused value is null
        in the array. A reason follows the words "the value is". It raises no error for a value: an error fails the
        batch. Only at a MemoryError fewer values are tried, and one that raises it alone is refused.
        """
        ...


@dataclass(frozen=True)
class TaskDecoder:
    """How tasks decode a column: the class as "module:Class", the type of the values, and keyword arguments.

    ``kept_url``: the folder of the values that the class keeps; None if it keeps none. ``beside``: the columns beside
    the value. ``reads``: the columns of the record that the class gets. ``use``: see `KeptValues`.
    """

    reference: str
    column: DataType
    keywords: Mapping[str, Any]
    kept_url: str | None = None
    beside: tuple[StructField, ...] = ()
    reads: tuple[str, ...] = ()
    use: KeptUse = "repeat"

    @property
    def made(self) -> DataType:
        """The type of what the class makes of a value."""
        from pyspark.sql.types import StructField, StructType

        return StructType([StructField("value", self.column), *self.beside]) if self.beside else self.column

    def make(self, time_zone: str) -> ColumnDecoder:
        """Make the decoder, in a task. Raises DecoderMissingError."""
        from headrace.spark.records.arrow_types import arrow_type

        module, _, name = self.reference.partition(":")
        try:
            kind: Callable[..., ColumnDecoder] = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError) as error:
            raise DecoderMissingError(
                f"A Spark task on {socket.gethostname()} cannot import the decoder {self.reference}: {error}.",
                remedy="Install its package on all hosts of the Spark application, or name it in spark.py_files.",
            ) from error
        keywords = dict(self.keywords)
        if self.kept_url is not None:
            from headrace.kept_values import KeptValues

            keywords["kept"] = KeptValues(self.kept_url, self.use)
        return kind(arrow_type(self.made), time_zone=time_zone, **keywords)


class UnknownTimeZoneError(HeadraceError):
    """The session's time zone, in which texts of times without an offset are, is not known to Arrow."""

    failure = Failure.FINAL


@dataclass(frozen=True)
class RecordDecoding:
    """Decodes records (``record_columns.RECORD_SCHEMA``) in a Spark task.

    ``decoders`` are those of ``key`` and ``value``; a column without one has any bytes. It holds no part of the
    definition, whose modules a task does not import.

    ``keep_bytes``: the columns ``raw_key`` and ``raw_value`` have the bytes of all records, or only of undecodable
    ones, because other bytes would cost their way to the JVM. None: the records are only checked, and ``key`` and
    ``value`` stay bytes.
    """

    decoders: Mapping[str, TaskDecoder]
    time_zone: str
    keep_bytes: Literal["all", "undecodable"] | None = "undecodable"

    @classmethod
    def of(
        cls, source: Input, spark: SparkSession, folder_url: str, *, uses: Mapping[str, KeptUse] = MappingProxyType({})
    ) -> RecordDecoding | None:
        """The decoding of an input's records; None if its decoders accept any bytes. ``folder_url``: the stream's.
        ``uses``: for what the decoders of "key" and "value" keep values, see `KeptValues`.

        Raises UnknownTimeZoneError, and SchemaNotKnownError if a decoder has a `question` without an answer.
        """
        named = {"key": source.key_decoder, "value": source.value_decoder}
        decoders = {
            name: TaskDecoder(
                decoder.decodes,
                _column_type(decoder.column),
                decoder.keywords,
                decoder.kept_url(folder_url) if decoder.keeps else None,
                _columns_beside(decoder.beside),
                decoder.reads,
                uses.get(name, "repeat"),
            )
            for name, decoder in named.items()
            if decoder.decodes is not None
        }
        if not decoders:
            return None
        zone = spark.conf.get("spark.sql.session.timeZone") or "UTC"
        _check_time_zone(zone)
        return cls(decoders, zone)

    @property
    def beside(self) -> list[str]:
        """The names of the columns beside the value."""
        return [field.name for decoder in self.decoders.values() for field in decoder.beside]

    @property
    def schema(self) -> StructType:
        """The columns of the decoded rows: those of the record and beside its value, its bytes, and
        ``undecodable_reason`` (null: none)."""
        from pyspark.sql.types import BinaryType, StringType, StructField, StructType

        from headrace.spark.records.record_columns import RECORD_SCHEMA

        if self.keep_bytes is None:
            return StructType([*RECORD_SCHEMA.fields, StructField(REASON, StringType())])
        columns = [
            StructField(
                field.name,
                self.decoders[field.name].column if field.name in self.decoders else field.dataType,
                metadata=field.metadata,
            )
            for field in RECORD_SCHEMA.fields
        ]
        beside = [field for decoder in self.decoders.values() for field in decoder.beside]
        raw = [StructField(name, BinaryType()) for name in _RAW.values()]
        return StructType([*columns, *beside, *raw, StructField(REASON, StringType())])

    def run(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield the batches with the columns of ``schema``."""

        from headrace.spark.records.arrow_types import arrow_schema

        target = arrow_schema(self.schema)
        # The executor's database may lack what the driver's has. Each local time would then be refused.
        _check_time_zone(self.time_zone)
        decode = {name: decoder.make(self.time_zone).decode for name, decoder in self.decoders.items()}
        for batch in batches:
            yield from self._decoded(batch, decode, target)

    def _decoded(
        self, batch: pa.RecordBatch, decode: Mapping[str, _Decode], target: pa.Schema
    ) -> Iterator[pa.RecordBatch]:
        """Yield the batch, in parts if its columns do not fit into memory at once."""
        if not batch.num_rows:
            yield self._columns(batch, decode, target)
            return
        waiting = [batch]
        while waiting:
            part = waiting.pop()
            try:
                made = self._columns(part, decode, target)
            except MemoryError:
                half = part.num_rows // 2
                waiting += [part[half:], part[:half]]
                continue
            yield made

    def _columns(self, batch: pa.RecordBatch, decode: Mapping[str, _Decode], target: pa.Schema) -> pa.RecordBatch:
        """The batch with its decoded columns. Raises MemoryError if it has several rows."""
        import pyarrow as pa

        columns = {name: batch.column(name) for name in batch.schema.names}
        reasons: list[str | None] = [None] * batch.num_rows
        for name, function in decode.items():
            decoder = self.decoders[name]
            others = {read: batch.column(read) for read in decoder.reads}
            try:
                decoded, refused = function(batch.column(name), **others)
            except MemoryError as error:
                if batch.num_rows > 1:
                    raise
                decoded, _ = function(pa.nulls(1, batch.column(name).type), **others)
                refused = {0: _too_large(error)}
            for row, reason in {**_left_out(batch.column(name), decoded, refused), **refused}.items():
                text = f"the {name} is {reason}"
                reasons[row] = text if reasons[row] is None else f"{reasons[row]}; {text}"
            if self.keep_bytes is None:
                continue
            if not decoder.beside:
                columns[name] = decoded
                continue
            # flatten() gives a null to the fields of a null.
            columns[name], *fields = decoded.flatten()
            columns |= {field.name: each for field, each in zip(decoder.beside, fields, strict=True)}
        columns[REASON] = pa.array(reasons, pa.string())
        columns |= self._bytes(batch, columns[REASON])
        return pa.RecordBatch.from_arrays([columns[field.name] for field in target], schema=target)

    def _bytes(self, batch: pa.RecordBatch, reasons: pa.Array) -> dict[str, pa.Array]:
        import pyarrow as pa
        import pyarrow.compute as pc

        if self.keep_bytes == "all":
            return {raw: batch.column(name) for name, raw in _RAW.items()}
        if reasons.null_count == batch.num_rows:
            return {raw: pa.nulls(batch.num_rows, pa.binary()) for raw in _RAW.values()}
        return {raw: pc.if_else(pc.is_valid(reasons), batch.column(name), None) for name, raw in _RAW.items()}


_Decode = Callable[..., "tuple[pa.Array, dict[int, str]]"]


def _too_large(error: MemoryError) -> str:
    from headrace.spark.records.exact_columns import MOST_CELLS, TooManyCellsError

    if isinstance(error, TooManyCellsError):
        return f"one whose lists have more than {MOST_CELLS:,} fields"
    return "one that takes more memory than there is"


def _left_out(values: pa.Array, decoded: pa.Array, refused: Mapping[int, str]) -> dict[int, str]:
    """Reasons for values that a decoder makes null without one: such a record would count as one without a value, and
    an output by keys would delete what it has of the key."""
    if decoded.null_count == values.null_count + len(refused):
        return {}
    import pyarrow.compute as pc

    rows = pc.indices_nonzero(pc.and_(pc.is_valid(values), pc.is_null(decoded))).to_pylist()
    return dict.fromkeys(rows, "decoded to null, and its decoder gives no reason")


def _columns_beside(ddl: str) -> tuple[StructField, ...]:
    """The columns, marked as the record's own."""
    if not ddl:
        return ()
    from pyspark.sql.types import DataType, StructField, StructType

    from headrace.spark.records.record_columns import record_mark

    columns = DataType.fromDDL(ddl)
    if not isinstance(columns, StructType):
        raise TypeError(f"{ddl!r} names no columns")
    return tuple(StructField(field.name, field.dataType, metadata=record_mark(field.name)) for field in columns.fields)


def _column_type(ddl: str) -> DataType:
    from pyspark.sql.types import DataType, StringType

    from headrace.spark.records.record_columns import with_marked_fields

    # Spark parses DDL in the JVM, over Spark Connect by a request.
    return StringType() if ddl == "STRING" else with_marked_fields(DataType.fromDDL(ddl))


class Reader(Protocol):
    """Reads an input's records: decoded, or as they are."""

    def __call__(self, *, decoding: RecordDecoding | None = None) -> DataFrame: ...


@dataclass(frozen=True)
class DecodedInput:
    """An input's records of a batch, in three views.

    ``decoded`` has the decoded keys and values, ``original`` the same records with their bytes from Kafka.
    ``undecodable`` has all other records, with their bytes and the column ``undecodable_reason``; it is None if the
    decoders accept any bytes. ``observations`` count the records of queries of the first two views.
    """

    decoded: DataFrame
    undecodable: DataFrame | None = None
    read_original: Callable[[], DataFrame] | None = None
    observations: tuple[Any, ...] = ()

    @cached_property
    def original(self) -> DataFrame:
        """The records that decode, with their bytes."""
        return self.decoded if self.read_original is None else self.read_original()

    def number_undecodable(self, records: int | None = None) -> int:
        """The number of undecodable records, by a query of its own if it is not known yet.

        It is known if an earlier query has read all ``records`` of the input. A query can read fewer (one with a
        limit) or none (one whose condition is always false), so its number of records is compared.
        """
        if self.undecodable is None:
            return 0
        for observed in _observed(self.observations) if records is not None and self.observations else ():
            if observed.get("records") == records:
                return int(observed["undecodable"])
        return self.undecodable.count()


def decode_input(
    spark: SparkSession,
    source: Input,
    read: Reader,
    folder_url: str,
    *,
    uses: Mapping[str, KeptUse] = MappingProxyType({}),
) -> DecodedInput:
    """Read an input's records with its decoders. ``folder_url``: the stream's. ``uses``: as of `RecordDecoding.of`.

    A null stays null: a tombstone is not a decoding error. JSON must be one object that fits the schema exactly
    (``JsonObjects``); a missing field is null, an additional field is dropped.
    """
    from pyspark.sql import functions as F  # noqa: N812 - as everyone calls it

    from headrace.spark.records.record_columns import RECORD_SCHEMA

    decoding = RecordDecoding.of(source, spark, folder_url, uses=uses)
    if decoding is None:
        return DecodedInput(read())
    observations = tuple(_observation(spark) for _ in range(2))

    def good(rows: DataFrame, observation: Any, *beside: str) -> DataFrame:
        counts = (F.count(F.lit(1)).alias("records"), F.count(REASON).alias("undecodable"))
        good_rows = rows.observe(observation, *counts).where(F.col(REASON).isNull())
        return good_rows.select(*RECORD_SCHEMA.names, *beside)

    rows = read(decoding=decoding)
    bad = rows.where(F.col(REASON).isNotNull())
    for name, raw in _RAW.items():
        bad = bad.withColumn(name, F.col(raw))
    return DecodedInput(
        decoded=good(rows, observations[0], *decoding.beside),
        undecodable=bad.select(*RECORD_SCHEMA.names, REASON),
        read_original=lambda: good(read(decoding=replace(decoding, keep_bytes=None)), observations[1]),
        observations=observations,
    )


def _check_time_zone(zone: str) -> None:
    import pyarrow as pa
    import pyarrow.compute as pc

    try:
        pc.assume_timezone(pa.scalar(0, pa.timestamp("us")), zone)
    except pa.ArrowInvalid:
        raise UnknownTimeZoneError(
            f"spark.sql.session.timeZone is {zone!r}, which is no name of the IANA database of this host.",
            remedy="Set it to such a name, for example Europe/Berlin, or to an offset such as +02:00. If the host has "
            "no such database, install tzdata, on executors too.",
        ) from None


def _observation(spark: SparkSession) -> Any:
    """A new observation of the session's kind. The public class chooses by the environment, not by the session."""
    from headrace.spark.sessions import is_connect

    if is_connect(spark):
        from pyspark.sql.connect.observation import Observation as ConnectObservation

        return ConnectObservation()
    from pyspark.sql import Observation

    return Observation()


def _observed(observations: tuple[Any, ...]) -> list[dict[str, Any]]:
    """What queries have observed; empty if none has. In a classic session ``get`` would wait for one for ever."""
    until = time.monotonic() + _OBSERVATION_SECONDS
    while not any(map(_is_complete, observations)) and time.monotonic() < until:
        time.sleep(0.005)
    return [counts for done in filter(_is_complete, observations) if (counts := _observed_counts(done))]


def _is_complete(observation: Any) -> bool:
    java = getattr(observation, "_jo", None)
    return java.future().isCompleted() if java is not None else True


def _observed_counts(observation: Any) -> dict[str, Any]:
    try:
        return dict(observation.get)
    except Exception:
        # Spark removed the observation from its plan, because the query needed no records.
        return {}
