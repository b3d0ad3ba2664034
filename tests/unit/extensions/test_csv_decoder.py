"""The example of a decoder in a package of its own."""

from __future__ import annotations

import pyarrow as pa
import pytest
from examples.extensions.csv_decoder.headrace_csv import CsvDecoder
from examples.extensions.csv_decoder.headrace_csv_lines import CsvLines

from headrace.stream import StreamDefinitionError

KIND = pa.struct([("carrier", pa.string()), ("flight", pa.string())])


def test_lines_become_structs_and_others_are_refused_with_reason() -> None:
    lines = [b"AA,1", b'"B;\'B, C",', None, b"DL", b"\xff,1", b'"open', b""]
    decoded, refused = CsvLines(KIND, time_zone="UTC", delimiter=",").decode(pa.array(lines, pa.binary()))
    none = [None] * 5
    assert decoded.to_pylist() == [{"carrier": "AA", "flight": "1"}, {"carrier": "B;'B, C", "flight": ""}, *none]
    assert decoded.type == KIND
    assert sorted(refused) == [3, 4, 5, 6]
    assert refused[3] == "no line of CSV with 2 fields, but with 1"
    assert all(reason.startswith("no line of CSV") for reason in refused.values())


def test_the_definition_says_the_columns_and_the_arguments() -> None:
    decoder = CsvDecoder(header="carrier,flight", delimiter=";")
    assert decoder.column == "`carrier` STRING, `flight` STRING"
    CsvLines(KIND, time_zone="UTC", **decoder.keywords)


@pytest.mark.parametrize("header", ["", "a,a", "a b", "a,,b"])
def test_a_header_that_names_no_columns_is_refused(header: str) -> None:
    with pytest.raises(StreamDefinitionError, match="header must name each column once"):
        CsvDecoder(header=header)
