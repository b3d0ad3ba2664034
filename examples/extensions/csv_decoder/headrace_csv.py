"""The decoder "csv_lines": each value is one line of CSV, whose header row is in the definition."""

from __future__ import annotations

import csv
from typing import Annotated, Literal

from pydantic import Field, JsonValue, field_validator

from headrace.stream import DecoderDefinition


class CsvDecoder(DecoderDefinition):
    """Decode a line of CSV into a struct of texts, with a field for each name of ``header``.

    A line with another number of fields is undecodable. An empty field is an empty text.
    """

    # Spark's tasks import this module, and it imports no pydantic: importing is most of a small batch's time.
    decodes = "headrace_csv_lines:CsvLines"

    kind: Literal["csv_lines"] = "csv_lines"
    header: str
    delimiter: Annotated[str, Field(min_length=1, max_length=1)] = ","

    @field_validator("header")
    @classmethod
    def _names_differ(cls, value: str) -> str:
        names = next(csv.reader([value]), [])
        if not names or not all(name.isidentifier() for name in names) or len(set(names)) < len(names):
            raise ValueError("must name each column once, by letters, digits and _, such as carrier,flight")
        return value

    @property
    def column(self) -> str:
        return ", ".join(f"`{name}` STRING" for name in next(csv.reader([self.header])))

    @property
    def keywords(self) -> dict[str, JsonValue]:
        return {"delimiter": self.delimiter}
