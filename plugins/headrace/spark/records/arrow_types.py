"""The Arrow types of Spark's, with all times in UTC: what pyspark 4.1 names otherwise than 4.2 and later."""

from __future__ import annotations

from inspect import signature
from typing import TYPE_CHECKING, Any

from pyspark.sql.pandas.types import to_arrow_schema, to_arrow_type

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import DataType, StructType

# In 4.1 UTC is the default.
_UTC: dict[str, Any] = {"timezone": "UTC"} if "timezone" in signature(to_arrow_type).parameters else {}


def arrow_schema(schema: StructType) -> pa.Schema:
    """The schema of record batches that Spark takes for rows of ``schema``."""
    return to_arrow_schema(schema, **_UTC)


def arrow_type(kind: DataType) -> pa.DataType:
    """The type of arrays that Spark takes for columns of ``kind``."""
    return to_arrow_type(kind, **_UTC)
