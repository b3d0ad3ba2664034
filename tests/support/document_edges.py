"""Columns of every type of Spark, with values at their edges: as SQL, and as headrace writes them in documents."""

from __future__ import annotations

EDGES: dict[str, tuple[str, tuple[tuple[str, str], ...]]] = {
    "boolean": ("BOOLEAN", (("true", "true"), ("false", "false"))),
    "tiny": ("TINYINT", (("CAST(-128 AS TINYINT)", "-128"), ("CAST(127 AS TINYINT)", "127"))),
    "int": ("INT", (("-2147483648", "-2147483648"), ("2147483647", "2147483647"))),
    "big": (
        "BIGINT",
        (("-9223372036854775807L - 1", "-9223372036854775808"), ("9223372036854775807L", "9223372036854775807")),
    ),
    "float": ("FLOAT", (("CAST(3.4028235E38 AS FLOAT)", "3.4028235E38"), ("CAST(0 AS FLOAT)", "0.0"))),
    "double": (
        "DOUBLE",
        (
            ("1.7976931348623157E308D", "1.7976931348623157E308"),
            ("-1.7976931348623157E308D", "-1.7976931348623157E308"),
        ),
    ),
    "money": (
        "DECIMAL(38, 2)",
        (
            ("CAST('999999999999999999999999999999999999.99' AS DECIMAL(38, 2))", f"{'9' * 36}.99"),
            ("CAST('-0.01' AS DECIMAL(38, 2))", "-0.01"),
        ),
    ),
    "unsigned": (
        "DECIMAL(20, 0)",
        (
            ("CAST('18446744073709551615' AS DECIMAL(20, 0))", "18446744073709551615"),
            ("CAST(-1 AS DECIMAL(20, 0))", "-1"),
        ),
    ),
    "whole": (
        "DECIMAL(18, 0)",
        (("CAST(-999999999999999999 AS DECIMAL(18, 0))", "-999999999999999999"), ("CAST(0 AS DECIMAL(18, 0))", "0")),
    ),
    "text": ("STRING", (("'2026-01-05'", '"2026-01-05"'), ("repeat('ä', 30000)", f'"{"ä" * 30_000}"'))),
    "bytes": ("BINARY", (("X'0102'", '"AQI="'), ("X''", '""'))),
    "day": ("DATE", (("DATE'0001-01-01'", '"0001-01-01"'), ("DATE'9999-12-31'", '"9999-12-31"'))),
    "at": (
        "TIMESTAMP",
        (
            ("TIMESTAMP'0001-01-01 00:00:00Z'", '"0001-01-01T00:00:00.000000Z"'),
            ("TIMESTAMP'9999-12-31 23:59:59.999999Z'", '"9999-12-31T23:59:59.999999Z"'),
        ),
    ),
    "local": (
        "TIMESTAMP_NTZ",
        (
            ("TIMESTAMP_NTZ'0001-01-01 00:00:00'", '"0001-01-01T00:00:00.000000"'),
            ("TIMESTAMP_NTZ'9999-12-31 23:59:59.999999'", '"9999-12-31T23:59:59.999999"'),
        ),
    ),
    "texts": ("ARRAY<STRING>", (("array('2026-01-05')", '["2026-01-05"]'), ("array('a', 'b')", '["a","b"]'))),
    "item": (
        "STRUCT<cents: BIGINT, sizes: ARRAY<STRUCT<name: STRING>>>",
        (
            (
                "named_struct('cents', 1L, 'sizes', array(named_struct('name', '2026-01-05')))",
                '{"cents":1,"sizes":[{"name":"2026-01-05"}]}',
            ),
            (
                "named_struct('cents', 2L, 'sizes', array(named_struct('name', 'XL')))",
                '{"cents":2,"sizes":[{"name":"XL"}]}',
            ),
        ),
    ),
    "labels": (
        "MAP<STRING, STRING>",
        (("map('k', '2026-01-05', 'l.m', 'x')", '{"k":"2026-01-05","l.m":"x"}'), ("map('k', 'word')", '{"k":"word"}')),
    ),
    "rates": (
        "MAP<STRING, DOUBLE>",
        (("map('eur', 1D)", '{"eur":1.0}'), ("map('eur', 1e300D)", '{"eur":1.0E300}')),
    ),
    "by_name": (
        "MAP<STRING, STRUCT<note: STRING>>",
        (
            ("map('k', named_struct('note', '2026-01-05'))", '{"k":{"note":"2026-01-05"}}'),
            ("map('k', named_struct('note', 'word'))", '{"k":{"note":"word"}}'),
        ),
    ),
}
"""By the column's name its type, and two values as SQL and as JSON."""

DDL = ", ".join(f"`{name}` {kind}" for name, (kind, _) in EDGES.items())


def sql_of_row(number: int) -> str:
    """The query of the first or second values, as one row."""
    return "SELECT " + ", ".join(f"{values[number][0]} AS `{name}`" for name, (_, values) in EDGES.items())


def document(number: int) -> str:
    """The document of that row."""
    return "{" + ",".join(f'"{name}":{values[number][1]}' for name, (_, values) in EDGES.items()) + "}"
