"""Decodes keys and values into columns for transforms, and separates the records that do not decode."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headrace.stream import BytesDecoder, Input, JsonDecoder, Utf8Decoder

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

REASON = "undecodable_reason"

_CORRUPT = "_headrace_corrupt_record"
# A classic session's observation is complete a few milliseconds after the query, since Spark's listeners make it.
_OBSERVATION_SECONDS = 1.0


@dataclass(frozen=True)
class DecodedInput:
    """An input's records of a batch, in three views.

    ``decoded`` has the decoded keys and values, ``original`` the same records with their bytes from Kafka.
    ``undecodable`` has all other records, with their bytes and the column ``undecodable_reason``; it is None if the
    decoders accept any bytes. ``observation`` counts the records of queries of the first two views.
    """

    decoded: DataFrame
    original: DataFrame
    undecodable: DataFrame | None
    observation: Any = None

    def number_undecodable(self, records: int | None = None) -> int:
        """The number of undecodable records, by a query of its own if it is not known yet.

        It is known if an earlier query has read all ``records`` of the input. A query can read fewer (one with a
        limit) or none (one whose condition is always false), so its number of records is compared.
        """
        if self.undecodable is None:
            return 0
        observed = _observed(self.observation)
        if records is not None and observed.get("records") == records:
            return int(observed["undecodable"])
        return self.undecodable.count()


def decode_input(records: DataFrame, source: Input) -> DecodedInput:
    """Apply the input's decoders to its records (``wal_source.RECORD_SCHEMA``).

    A null stays null: a tombstone is not a decoding error. JSON must be one object that fits the schema: a field of
    another type, or text after the object, makes the record undecodable; a missing field is null, an additional field
    is dropped.

    The observation also keeps Spark from copying the decoding into each column and condition that uses it: Spark moves
    neither past it. Without it the JSON of a record was parsed once for each of its fields: 14 s of processor time for
    500,000 records of eight fields, and 3 s with it.
    """
    from pyspark.sql import functions as F  # noqa: N812 - as everyone calls it

    from headrace.spark.record_columns import record_mark

    attempts = {
        name: (decoder, f"_headrace_{name}")
        for name, decoder in (("key", source.key_decoder), ("value", source.value_decoder))
        if not isinstance(decoder, BytesDecoder)
    }
    if not attempts:
        return DecodedInput(records, records, None)
    staged = records
    problems: list[Column] = []
    for name, (decoder, attempt) in attempts.items():
        staged = staged.withColumn(attempt, _attempt(F.col(name), decoder))
        failed = F.col(name).isNotNull() & _failed(F.col(name), F.col(attempt), decoder)
        problems.append(F.when(failed, F.lit(f"the {name} is {_wanted(decoder)}")))
    staged = staged.withColumn(REASON, F.concat_ws("; ", *problems))
    bad = staged.where(F.col(REASON) != "")
    observation = _observation(records)
    counts = (F.count(F.lit(1)).alias("records"), F.count_if(F.col(REASON) != "").alias("undecodable"))
    good = staged.observe(observation, *counts).where(F.col(REASON) == "")
    results = {
        name: _result(F.col(attempt), decoder).alias(name, metadata=record_mark(name))
        for name, (decoder, attempt) in attempts.items()
    }
    return DecodedInput(
        decoded=good.select(*[results.get(name, F.col(name)) for name in records.columns]),
        original=good.select(*records.columns),
        undecodable=bad.select(*records.columns, REASON),
        observation=observation,
    )


def _observation(frame: DataFrame) -> Any:
    """A new observation of the frame's kind. The public class chooses by the environment, not by the frame."""
    from headrace.spark.sessions import is_connect

    if is_connect(frame.sparkSession):
        from pyspark.sql.connect.observation import Observation as ConnectObservation

        return ConnectObservation()
    from pyspark.sql import Observation

    return Observation()


def _observed(observation: Any) -> dict[str, Any]:
    """What queries have observed; empty if none has. In a classic session ``get`` would wait for one for ever."""
    java = getattr(observation, "_jo", None)
    until = time.monotonic() + _OBSERVATION_SECONDS
    while java is not None and not java.future().isCompleted():
        if time.monotonic() > until:
            return {}
        time.sleep(0.005)
    try:
        return dict(observation.get)
    except Exception:
        # Spark removed the observation from its plan, because the query needed no records.
        return {}


def _attempt(column: Column, decoder: Utf8Decoder | JsonDecoder) -> Column:
    from pyspark.sql import functions as F  # noqa: N812
    from pyspark.sql.types import DataType, StringType, StructType

    from headrace.spark.record_columns import with_marked_fields

    # A cast of bytes to a string checks nothing: bytes that are not UTF-8 would become a broken string.
    text = F.try_validate_utf8(column.cast("string"))
    if isinstance(decoder, Utf8Decoder):
        return text
    schema = with_marked_fields(DataType.fromDDL(decoder.fields))
    if not isinstance(schema, StructType):
        raise TypeError(f"a JSON decoder's fields are columns, not {schema.simpleString()}")
    options = {"mode": "PERMISSIVE", "columnNameOfCorruptRecord": _CORRUPT}
    return F.from_json(text, StructType(schema.fields).add(_CORRUPT, StringType()), options)


def _failed(column: Column, attempt: Column, decoder: Utf8Decoder | JsonDecoder) -> Column:
    if isinstance(decoder, Utf8Decoder):
        return attempt.isNull()
    return attempt.isNull() | attempt[_CORRUPT].isNotNull() | _is_more_than_one(column)


def _is_more_than_one(column: Column) -> Column:
    """Whether something follows the first JSON object of the text, such as another one in a record of several lines.

    `from_json` ignores what follows. Most objects end with their first "}", which costs a tenth of the parsing; others
    are parsed once more, as the only element of an array.
    """
    from pyspark.sql import functions as F  # noqa: N812

    text = column.cast("string")
    ends_at_once = F.octet_length(F.substring_index(text, "}", 1)) + 1 == F.octet_length(text)
    array = F.concat(F.lit("["), F.try_validate_utf8(text), F.lit("]"))
    values = F.size(F.from_json(array, f"ARRAY<STRUCT<{_CORRUPT}: STRING>>"))
    return F.when(ends_at_once, F.lit(False)).otherwise(F.coalesce(values, F.lit(0)) != 1)


def _result(attempt: Column, decoder: Utf8Decoder | JsonDecoder) -> Column:
    return attempt if isinstance(decoder, Utf8Decoder) else attempt.dropFields(_CORRUPT)


def _wanted(decoder: Utf8Decoder | JsonDecoder) -> str:
    return "not UTF-8" if isinstance(decoder, Utf8Decoder) else f"no JSON object of {decoder.fields}"
