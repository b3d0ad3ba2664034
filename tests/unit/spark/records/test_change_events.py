"""`ChangeEvents`: what it makes of each kind of change event, in each form, and what it refuses."""

from __future__ import annotations

import base64
import json
import struct
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from tests.support.change_events import (
    MICROS,
    ORDERS,
    UNAVAILABLE,
    changes_of,
    decode,
    event,
    field,
    mysql,
    postgres,
    unscaled,
    with_schema,
)

from headrace.spark.records.events.change_events import ChangeEvents
from headrace.spark.records.events.connect_values import well_known_text

ROW, NEW = {"id": 7, "name": "tea"}, {"id": 7, "name": "cup"}
AT = datetime(2026, 1, 5, 12, 45, 0, 250_000, UTC)


def value_of(value: Any, kind: pa.DataType, schema: Any = None, **settings: Any) -> Any:
    """What a row's field ``v`` becomes, or the reason for which it is refused."""
    given = event("c", None, {"v": value})
    if schema is not None:
        given = with_schema(given, {**schema, "field": "v"})
    (made,), refused = decode(given, row=pa.struct([("v", kind)]), **settings)
    return refused[0] if refused else made["value"]["v"]


class TestEnvelopes:
    def test_each_operation_gives_its_row(self) -> None:
        made, refused = decode(
            event("c", None, ROW), event("u", ROW, NEW), event("d", NEW, None), event("r", None, ROW), None
        )
        assert not refused
        assert [each and (each["op"], each["before"], each["value"]) for each in made] == [
            ("c", None, ROW),
            ("u", ROW, NEW),
            ("d", NEW, None),
            ("r", None, ROW),
            None,
        ]

    def test_a_truncate_and_a_message_have_no_row(self) -> None:
        message = {"op": "m", "ts_ms": 1, "source": postgres(5), "message": {"prefix": "p", "content": "eA=="}}
        made, refused = decode(event("t", None, None), message)
        assert not refused
        assert [(each["op"], each["value"]) for each in made] == [("t", None), ("m", None)]

    def test_the_source_stands_beside_the_row(self) -> None:
        transaction = {"id": "571:53195829", "total_order": 1, "data_collection_order": 2}
        (made,), _ = decode(event("c", None, ROW, postgres(40, snapshot="last"), transaction=transaction))
        assert made["source"] == {
            **{"connector": "postgresql", "name": "shop", "db": "shop", "schema": "public", "table": "orders"},
            **{"snapshot": "last", "txId": "565"},
        }
        assert (made["position"], made["changed_at"], made["transaction"]) == (40, AT, transaction)

    @pytest.mark.parametrize("op", ["c", "u", "r"])
    def test_an_event_without_the_row_it_needs_is_refused(self, op: str) -> None:
        _, refused = decode(event(op, None, None))
        assert refused == {
            0: f"no change event of the row: it has the operation {op!r}, and no row after it",
        }

    @pytest.mark.parametrize(
        "given",
        [b"", b"{", b"[]", b"7", b'"text"', b"{}", b'{"other": 1}', b"\xff", event("x", None, ROW)],
        ids=str,
    )
    def test_what_is_no_change_event_is_refused(self, given: Any) -> None:
        made, refused = decode(given, event("c", None, ROW))
        assert list(refused) == [0]
        assert made[0] is None
        assert made[1]["value"] == ROW

    def test_a_value_that_does_not_fit_names_its_place(self) -> None:
        wrong = ({"id": 2**40, "name": None}, {"id": "x", "name": None}, {"id": 1, "name": 2.5})
        made, refused = decode(*(event("c", None, row) for row in wrong), event("c", None, ROW))
        assert sorted(refused) == [0, 1]
        assert all("`$.after.id`" in reason for reason in refused.values())
        assert [made[2]["value"]["name"], made[3]["value"]] == ["2.5", ROW]

    def test_a_large_value_that_was_not_sent_is_refused(self) -> None:
        kind = pa.struct(
            [("id", pa.int32()), ("note", pa.string()), ("raw", pa.binary()), ("tags", pa.list_(pa.string()))]
        )
        unsent = base64.b64encode(UNAVAILABLE.encode()).decode()
        rows = [{"id": 1, "note": UNAVAILABLE}, {"id": 1, "raw": unsent}, {"id": 1, "tags": [UNAVAILABLE]}, {"id": 1}]
        made, refused = decode(*(event("u", None, row) for row in rows), row=kind)
        assert list(refused) == [0, 1, 2]
        assert "did not send 'note'" in refused[0]
        assert "REPLICA IDENTITY FULL" in refused[2]
        assert made[3]["value"]["id"] == 1

    @pytest.mark.parametrize(
        ("kind", "unsent", "like"),
        [
            (pa.string(), base64.b64encode(UNAVAILABLE.encode()).decode(), "X19kZWJleml1bQ=="),
            (pa.string(), UNAVAILABLE.encode().hex(), "5f5f"),
            (pa.string(), {UNAVAILABLE: UNAVAILABLE}, {"a": UNAVAILABLE}),
            (pa.string(), json.dumps({UNAVAILABLE: UNAVAILABLE}), json.dumps({"a": UNAVAILABLE})),
            (pa.map_(pa.string(), pa.string()), {UNAVAILABLE: UNAVAILABLE}, {"a": UNAVAILABLE}),
            (pa.list_(pa.int32()), list(UNAVAILABLE.encode()), list(range(len(UNAVAILABLE)))),
            (pa.list_(pa.int64()), list(UNAVAILABLE.encode()), list(UNAVAILABLE.encode())[1:]),
            (pa.list_(pa.string()), [base64.b64encode(UNAVAILABLE.encode()).decode()], ["a", "b"]),
        ],
        ids=["base64", "hex", "object", "json", "map", "ints", "longs", "array"],
    )
    def test_each_form_of_a_value_that_was_not_sent(self, kind: pa.DataType, unsent: Any, like: Any) -> None:
        values = [like, None, unsent, like, unsent]
        made, refused = decode(
            *(event("u", None, {"id": 1, "v": value}) for value in values),
            row=pa.struct([("id", pa.int32()), ("v", kind)]),
        )
        assert list(refused) == [2, 4]
        assert all("did not send 'v'" in reason for reason in refused.values())
        assert [each is None for each in made] == [False, False, True, False, True]

    def test_it_may_stand_in_the_row_before(self) -> None:
        (made,), refused = decode(event("d", {"id": 7, "name": UNAVAILABLE}, None))
        assert not refused
        assert made["value"] is None

    @pytest.mark.parametrize("before", [{"id": "x"}, {"id": 2**40}, 5, [ROW], "text"])
    def test_a_row_before_that_does_not_fit_is_null(self, before: Any) -> None:
        data = {"before": before, "after": NEW}
        cloud = {"specversion": "1.0", "iodebeziumop": "u", "data": data}
        made, refused = decode(
            event("u", before, NEW), event("d", before, None), cloud, {"id": "x", "__deleted": "true"}
        )
        assert not refused
        assert [(each["op"], each["before"], each["value"]) for each in made] == [
            ("u", None, NEW),
            ("d", None, None),
            ("u", None, NEW),
            ("d", None, None),
        ]

    @pytest.mark.parametrize("op", ["t", "m"])
    def test_an_event_of_no_row_has_none(self, op: str) -> None:
        made, refused = decode(event(op, None, ROW), {**ROW, "__op": op})
        assert not refused
        assert [(each["op"], each["value"]) for each in made] == [(op, None)] * 2

    def test_a_row_of_another_table_is_refused(self) -> None:
        others: list[Any] = [{}, {"other": 1}]
        mongo = event("c", None, json.dumps({"other": 1}))
        bare = event("c", None, {"name": None})
        made, refused = decode(bare, *(event("c", None, other) for other in others), mongo, event("c", None, ROW))
        assert list(refused) == [1, 2, 3]
        assert all("nor a field of the row" in reason for reason in refused.values())
        assert [made[0]["value"], made[4]["value"]] == [{"id": None, "name": None}, ROW]


class TestForms:
    """The same change, told apart by record."""

    SCHEMA = (field("id", "int32"), field("name", "string"))

    def test_with_and_without_a_schema_part(self) -> None:
        wrapped, plain = with_schema(event("c", None, ROW), *self.SCHEMA), event("u", ROW, NEW)
        compact = json.dumps(wrapped, separators=(",", ":")).encode()
        made, refused = decode(wrapped, plain, compact, compact, {"schema": None, "payload": plain})
        assert not refused
        assert [each["value"] for each in made] == [ROW, NEW, ROW, ROW, NEW]

    def test_a_second_schema_part_of_a_batch_counts_for_its_records(self) -> None:
        kind = pa.struct([("v", pa.string())])
        first = with_schema(event("c", None, {"v": 20_458}), field("v", "int32", "io.debezium.time.Date"))
        second = with_schema(event("c", None, {"v": 45_900_250}), field("v", "int32", "io.debezium.time.Time"))
        texts = [json.dumps(each, separators=(",", ":")).encode() for each in (first, second, first, first)]
        made, refused = decode(*texts, row=kind)
        assert not refused
        assert [each["value"]["v"] for each in made] == ["2026-01-05", "12:45:00.250", "2026-01-05", "2026-01-05"]

    def test_schema_parts_that_say_the_same_are_one(self) -> None:
        decoder = ChangeEvents(changes_of(ORDERS))
        texts = [
            json.dumps(with_schema(event("c", None, ROW), *self.SCHEMA, field(f"n{number}", "int32"))).encode()
            for number in range(200)
        ]
        decoded, refused = decoder.decode(pa.array(texts, pa.binary()))
        assert not refused
        assert [each["value"] for each in decoded.to_pylist()] == [ROW] * 200
        assert len(decoder._rows._said) == 2
        assert len(decoder._rows._numbers) <= 64

    def test_what_is_kept_of_schema_parts_is_bounded(self) -> None:
        kind = pa.struct([("v", pa.string())])
        decoder = ChangeEvents(changes_of(kind))

        def texts(*scales: int) -> pa.Array:
            schemas = [field("v", "bytes", f"{CONNECT}.Decimal", parameters={"scale": str(scale)}) for scale in scales]
            given = [with_schema(event("c", None, {"v": "AQ=="}), schema) for schema in schemas]
            return pa.array([json.dumps(each, separators=(",", ":")).encode() for each in given], pa.binary())

        for first in range(0, 300, 100):
            decoded, refused = decoder.decode(texts(*range(first + 1, first + 101), first + 1))
            assert not refused
            values = [Decimal(each["value"]["v"]) for each in decoded.to_pylist()]
            assert values == [Decimal(1).scaleb(-scale) for scale in (*range(first + 1, first + 101), first + 1)]
            assert len(decoder._rows._said) <= 102
            assert len(decoder._rows._objects) <= 64
        # The last schema part of the batch before is the first of this one.
        (made,) = decoder.decode(texts(201))[0].to_pylist()
        assert Decimal(made["value"]["v"]) == Decimal(1).scaleb(-201)

    def test_a_row_in_flattened_form(self) -> None:
        made, refused = decode(
            {
                **ROW,
                "__op": "c",
                "__deleted": "false",
                "__table": "orders",
                "__lsn": 40,
                "__source_ts_ms": MICROS // 1_000,
            },
            {**ROW, "__deleted": "true", "__op": "d", "__lsn": 48},
            {**ROW, "__deleted": True},
        )
        assert not refused
        assert [(each["op"], each["value"], each["before"], each["position"]) for each in made] == [
            ("c", ROW, None, 40),
            ("d", None, ROW, 48),
            ("d", None, ROW, None),
        ]
        assert made[0]["changed_at"] == AT
        assert made[0]["source"]["table"] == "orders"

    def test_a_flattened_row_deleted_by_tombstones_has_no_position(self) -> None:
        """Its tombstone could not be ordered by a position."""
        (made, _), refused = decode({**ROW, "__op": "c", "__lsn": 40}, None)
        assert not refused
        assert (made["value"], made["op"], made["position"]) == (ROW, "c", None)

    def test_a_flattened_row_with_its_change_in_headers(self) -> None:
        schema = b'{"schema":{"type":"string"},"payload":"d"}'
        made, refused = decode(
            ROW,
            NEW,
            headers=[
                [
                    {"key": "__op", "value": b"c"},
                    {"key": "__deleted", "value": b"false"},
                    {"key": "__lsn", "value": b"8"},
                ],
                [
                    {"key": "__op", "value": schema},
                    {"key": "__deleted", "value": b'"true"'},
                    {"key": "x", "value": None},
                ],
            ],
        )
        assert not refused
        assert [(each["op"], each["value"], each["position"]) for each in made] == [("c", ROW, 8), ("d", None, None)]

    def test_a_flattened_row_with_a_schema_part(self) -> None:
        schema = {"type": "struct", "fields": [field("v", "int64", "io.debezium.time.MicroTimestamp")]}
        (made,), _ = decode(
            {"schema": schema, "payload": {"v": MICROS, "__deleted": "false"}},
            row=pa.struct([("v", pa.timestamp("us", "UTC"))]),
        )
        assert made["value"]["v"] == AT

    @pytest.mark.parametrize("wrapped", [False, True])
    def test_a_cloud_event_in_structured_mode(self, wrapped: bool) -> None:
        data: Any = {"before": None, "after": ROW}
        cloud = {
            **{"id": "name:shop;lsn:29274832;txId:565", "source": "/debezium/postgresql/shop", "specversion": "1.0"},
            **{"type": "io.debezium.connector.postgresql.DataChangeEvent", "time": "2026-01-05T12:45:00.250Z"},
            **{"datacontenttype": "application/json", "iodebeziumop": "r", "iodebeziumconnector": "postgresql"},
            **{"iodebeziumname": "shop", "iodebeziumtsms": str(MICROS // 1_000), "iodebeziumsnapshot": "true"},
            **{"iodebeziumtable": "orders", "iodebeziumlsn": "29274832", "iodebeziumtxid": "565"},
            "data": with_schema(data, *self.SCHEMA) if wrapped else data,
        }
        (made, gone), refused = decode(cloud, {**cloud, "iodebeziumop": "d", "data": {"before": ROW, "after": None}})
        assert not refused
        assert (made["op"], made["value"], made["position"], made["changed_at"]) == ("r", ROW, 29_274_831, AT)
        assert made["source"]["txId"] == "565"
        assert (gone["op"], gone["value"], gone["before"]) == ("d", None, ROW)

    def test_a_cloud_event_in_binary_mode(self) -> None:
        said = {
            "specversion": "1.0",
            "type": "x",
            "iodebeziumop": "u",
            "iodebeziumconnector": "postgresql",
            "iodebeziumlsn": "40",
        }
        headers = [{"key": f"ce_{name}", "value": text.encode()} for name, text in said.items()]
        (made,), refused = decode({"before": ROW, "after": NEW}, headers=[headers])
        assert not refused
        assert (made["op"], made["before"], made["value"], made["position"]) == ("u", ROW, NEW, 40)

    def test_a_document_of_mongodb(self) -> None:
        kind = pa.struct(
            [
                ("_id", pa.string()),
                ("visits", pa.int64()),
                ("at", pa.timestamp("us", "UTC")),
                ("price", pa.decimal128(6, 2)),
                ("tags", pa.list_(pa.string())),
            ]
        )
        after = {
            **{"_id": {"$oid": "596e275826f08b2730779e1f"}, "visits": {"$numberLong": "9"}},
            **{"at": {"$date": MICROS // 1_000}, "price": {"$numberDecimal": "3.50"}, "tags": ["a"]},
        }
        source = {
            "connector": "mongodb",
            "name": "shop",
            "ts_ms": 1_767_617_100_000,
            "ord": 3,
            "db": "d",
            "collection": "c",
        }
        (made, bare), refused = decode(
            event("c", None, json.dumps(after), source), event("u", None, None, source), row=kind, decimals="number"
        )
        assert made["value"] == {
            **{"_id": "596e275826f08b2730779e1f", "visits": 9, "at": AT, "price": Decimal("3.50"), "tags": ["a"]},
        }
        assert made["position"] == (1_767_617_100 << 31) + 3
        assert made["source"]["table"] == "c"
        assert bare is None
        assert "no row after it" in refused[1]

    @pytest.mark.parametrize("wrapped", [False, True])
    @pytest.mark.parametrize(
        ("given", "into", "expected"),
        [
            ("1234", pa.decimal128(38, 4), Decimal("1234.0000")),
            ("12.50", pa.decimal128(38, 4), Decimal("12.5000")),
            ("1E+3", pa.decimal128(38, 4), Decimal(1000)),
            ("-0", pa.decimal128(38, 4), Decimal(0)),
            ("9" * 34, pa.decimal128(38, 4), Decimal("9" * 34)),
            (
                "1.234567890123456789012345678901234",
                pa.decimal128(38, 33),
                Decimal("1.234567890123456789012345678901234"),
            ),
            ("12.50", pa.float64(), 12.5),
            ("1234", pa.float64(), 1234.0),
            ("1E+3", pa.float64(), 1000.0),
            ("Infinity", pa.float64(), float("inf")),
            ("12.50", pa.string(), "12.50"),
            ("1234", pa.string(), "1234"),
            ("1E+3", pa.string(), "1E+3"),
            ("9" * 34, pa.string(), "9" * 34),
            ("0.1" + "0" * 32 + "1", pa.string(), "0.1" + "0" * 32 + "1"),
            ("NaN", pa.string(), "NaN"),
        ],
    )
    def test_a_decimal_of_mongodb_has_all_its_digits(
        self, given: str, into: pa.DataType, expected: Any, wrapped: bool
    ) -> None:
        change: Any = event("c", None, json.dumps({"v": {"$numberDecimal": given}}))
        if wrapped:
            text = field("after", "string", "io.debezium.data.Json")
            change = {"schema": {"type": "struct", "fields": [text]}, "payload": change}
        (made,), refused = decode(change, row=pa.struct([("v", into)]))
        assert not refused
        assert made["value"]["v"] == expected

    def test_a_decimal_of_mongodb_that_is_none_is_refused(self) -> None:
        kinds = {"NaN": DECIMAL, "Infinity": DECIMAL, "1E+6000": pa.float64(), "1_0": DECIMAL, " 1": DECIMAL}
        for given, kind in kinds.items():
            change = event("c", None, json.dumps({"v": {"$numberDecimal": given}}))
            assert list(decode(change, row=pa.struct([("v", kind)]))[1]) == [0], given
        double = event("c", None, json.dumps({"v": {"$numberDouble": "Infinity"}}))
        assert "Infinity" in decode(double, row=pa.struct([("v", DECIMAL)]))[1][0]

    def test_no_text_of_a_document_is_base64(self) -> None:
        kind = pa.struct([("v", DECIMAL)])
        document = event("c", None, json.dumps({"v": "1234"}))
        cloud = {"specversion": "1.0", "iodebeziumop": "c", "data": {"after": json.dumps({"v": "1234"})}}
        made, refused = decode(document, cloud, event("c", None, {"v": "AMg="}), row=kind)
        assert not refused
        assert [each["value"]["v"] for each in made] == [Decimal(1234), Decimal(1234), Decimal("0.02")]

    def test_the_unit_of_times_counts_in_documents(self) -> None:
        kind = pa.struct([("v", pa.timestamp("us", "UTC"))])
        change = event("c", None, json.dumps({"v": {"$numberLong": str(MICROS)}}))
        text = field("after", "string", "io.debezium.data.Json")
        wrapped = {"schema": {"type": "struct", "fields": [text]}, "payload": change}
        made, refused = decode(change, wrapped, row=kind, times="microseconds")
        assert not refused
        assert [each["value"]["v"] for each in made] == [AT, AT]

    def test_events_of_no_row_are_told_apart(self) -> None:
        made, refused = decode(
            {"ts_ms": 1_767_617_100_250},
            {"status": "BEGIN", "id": "571:53195829", "event_count": None, "data_collections": None, "ts_ms": 5},
            {
                "source": mysql("b.1", 4),
                "ts_ms": 5,
                "databaseName": "shop",
                "ddl": "CREATE TABLE a",
                "tableChanges": [],
            },
        )
        assert not refused
        assert [(each["op"], each["value"]) for each in made] == [
            ("heartbeat", None),
            ("transaction", None),
            ("schema_change", None),
        ]

    @pytest.mark.parametrize(
        "more",
        [
            {"ts_ms": 5},
            {"ts_us": 5, "ts_ns": 6},
            {"source": "web", "ddl": "CREATE TABLE a"},
            {"status": "open", "event_count": 5},
            {"op": "c", "source": "web", "__op": "u"},
            {"op": "c", "source": {"a": 1}, "__deleted": "false"},
        ],
        ids=str,
    )
    def test_a_flattened_row_is_no_other_event(self, more: dict[str, Any]) -> None:
        made, refused = decode({**ROW, **more})
        assert not refused
        assert [each["value"] for each in made] == [ROW]

    def test_a_table_may_have_columns_of_other_events(self) -> None:
        """An event is no row if it lacks a column that is none of its own."""
        names = ["ts_ms", "source", "ddl", "id", "status"]
        kind = pa.struct([*((name, pa.string()) for name in names), ("total", pa.int32())])
        others: list[Any] = [
            {"ts_ms": 5},
            {"ts_ms": 5, "ts_us": 6, "ts_ns": 7},
            {"source": mysql("b.1", 4), "ts_ms": 5, "databaseName": "shop", "ddl": "CREATE TABLE a"},
            {"status": "END", "id": "571:5", "event_count": 2, "data_collections": [], "ts_ms": 5},
        ]
        rows: list[Any] = [
            {"ts_ms": "5", "total": None},
            {"source": "web", "ts_ms": "5", "ddl": "CREATE TABLE a"},
            {"source": {}, "ddl": "CREATE TABLE a", "total": 1},
            {"status": "open", "id": "1", "event_count": 2},
            {"status": "END", "id": "1", "event_count": 2, "total": 1},
        ]
        made, refused = decode(*others, *rows, row=kind)
        assert not refused
        assert [each["op"] for each in made] == [
            *("heartbeat", "heartbeat", "schema_change", "transaction"),
            *[None] * 5,
        ]
        assert [each["value"] is None for each in made] == [True] * 4 + [False] * 5

    def test_a_table_of_times_alone_has_rows(self) -> None:
        made, refused = decode({"ts_ms": 5}, row=pa.struct([("ts_ms", pa.int64()), ("ts_us", pa.int64())]))
        assert not refused
        assert made[0]["value"] == {"ts_ms": 5, "ts_us": None}

    def test_headers_tell_a_flattened_row_from_other_events(self) -> None:
        said = [{"key": "__op", "value": b"c"}]
        made, refused = decode(
            {"ts_ms": 5},
            {"op": "x", "source": "web"},
            row=pa.struct([("ts_ms", pa.int64()), ("op", pa.string())]),
            headers=[said, said],
        )
        assert not refused
        assert [each["value"] for each in made] == [{"ts_ms": 5, "op": None}, {"ts_ms": None, "op": "x"}]

    @pytest.mark.parametrize("deleted", ["TRUE", "True", True])
    def test_a_flattened_row_is_deleted_in_any_case(self, deleted: Any) -> None:
        (made,), refused = decode({**ROW, "__deleted": deleted})
        assert not refused
        assert (made["op"], made["value"]) == ("d", None)

    def test_a_flattened_row_of_an_unknown_operation_is_refused(self) -> None:
        assert "has the operation 'x'" in decode({**ROW, "__op": "x"})[1][0]


class TestPositions:
    @pytest.mark.parametrize(
        ("op", "source", "expected"),
        [
            ("u", postgres(2**62), 2**62),
            ("r", postgres(40), 39),
            ("c", {"connector": "postgresql", "lsn": 0}, None),
            ("c", {"connector": "postgresql", "lsn": None}, None),
            ("c", mysql("mysql-bin.000003", 484, 2), (3 << 43) + (484 << 11) + 2),
            ("c", mysql("mysql-bin.1048575", 2**32 - 1, 2047), 2**63 - 1),
            ("c", mysql("mysql-bin.1048576", 4), None),
            ("c", mysql("mysql-bin.1", 2**32), None),
            ("c", mysql("mysql-bin.1", 4, 2048), None),
            ("c", mysql("", 0), None),
            ("c", {"connector": "mongodb", "ts_ms": 5_000, "ord": 2, "txnNumber": 1}, None),
            ("c", {"connector": "sqlserver", "change_lsn": "27:758:3", "commit_lsn": "27:758:5"}, None),
            ("c", {"connector": "oracle", "scn": "2868546"}, None),
        ],
    )
    def test_a_position_grows_or_is_none(self, op: str, source: Any, expected: int | None) -> None:
        (made,), refused = decode(event(op, None, ROW, source))
        assert not refused
        assert made["position"] == expected


LONG = "9" * 5_000


class TestNoValueRaises:
    """A decoder refuses a record, and leaves out what it cannot hold of the columns beside the row."""

    @pytest.mark.parametrize(
        "source",
        [
            postgres(2**63),
            {"connector": "postgresql", "lsn": LONG},
            {"connector": "postgresql", "sequence": f'["1","{LONG}"]'},
            mysql(f"b.{LONG}", 4),
            mysql("b.1", 4, row=LONG),
        ],
        ids=["lsn", "text", "sequence", "file", "row"],
    )
    def test_a_position_beyond_64_bits_is_null(self, source: Any) -> None:
        made, refused = decode(event("c", None, ROW, source), event("c", None, ROW, source))
        assert not refused
        assert [(each["value"], each["position"]) for each in made] == [(ROW, None)] * 2

    def test_a_time_or_an_order_beyond_64_bits_is_null(self) -> None:
        orders = {"id": "a", "total_order": 2**63, "data_collection_order": LONG}
        (made,), refused = decode(event("c", None, ROW, postgres(5, ts_us=2**63), transaction=orders))
        assert not refused
        assert made["changed_at"] is None
        assert made["transaction"] == {"id": "a", "total_order": None, "data_collection_order": None}

    @pytest.mark.parametrize("scale", [LONG, 10**400, "--1", True, None])
    def test_a_scale_that_is_no_number_says_nothing(self, scale: Any) -> None:
        schema = field("v", "bytes", f"{CONNECT}.Decimal", parameters={"scale": scale})
        assert value_of("12", DECIMAL, schema) == Decimal(12)

    @pytest.mark.parametrize("fields", [5, {"a": 1}, [5], "text"])
    def test_a_schema_part_that_says_nothing_is_none(self, fields: Any) -> None:
        part = {"type": "struct", "fields": fields}
        made, refused = decode(
            {"schema": part, "payload": event("c", None, ROW)},
            {"schema": {"type": "struct", "fields": [{**part, "field": "after"}]}, "payload": event("c", None, ROW)},
        )
        assert not refused
        assert [each["value"] for each in made] == [ROW, ROW]

    def test_a_cloud_event_may_have_half_a_transaction(self) -> None:
        cloud = {"specversion": "1.0", "iodebeziumop": "c", "iodebeziumtxtotalorder": "3", "data": {"after": ROW}}
        (made,), refused = decode(cloud)
        assert not refused
        assert made["transaction"] == {"id": None, "total_order": 3, "data_collection_order": None}

    @pytest.mark.parametrize(
        "given",
        [{"$date": 2**70}, {"$date": -(10**14)}, {"$date": 10**15}, {"$numberDouble": "1e400"}, {"$numberLong": LONG}],
        ids=str,
    )
    def test_a_value_of_mongodb_that_is_none_is_refused(self, given: Any) -> None:
        made, refused = decode(event("c", None, json.dumps({"id": given})), event("c", None, ROW))
        assert "no document of MongoDB" in refused[0]
        assert made[1]["value"] == ROW

    def test_whatever_a_reader_raises_refuses_its_record(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(*_: Any) -> Any:
            raise OverflowError("too large")

        monkeypatch.setattr("headrace.spark.records.events.event_reader.text_of", fail)
        made, refused = decode({**ROW, "__op": "c"}, event("c", None, ROW))
        assert (made[0], refused) == (None, {0: "no change event of the row: too large"})


class TestKeys:
    def test_a_key_has_its_fields_with_and_without_a_schema_part(self) -> None:
        kind = pa.struct([("id", pa.int32()), ("on", pa.date32())])
        schema = {"type": "struct", "fields": [field("id", "int32"), field("on", "int32", "io.debezium.time.Date")]}
        key = {"id": 7, "on": 20_458}
        values = [json.dumps(each).encode() for each in ({"schema": schema, "payload": key}, key, {"id": "x"})]
        decoded, refused = ChangeEvents(kind, fields="k").decode(pa.array([*values, None], pa.binary()))
        assert decoded.to_pylist() == [{"id": 7, "on": date(2026, 1, 5)}] * 2 + [None, None]
        assert refused[2].startswith("no key of k: ")


DEBEZIUM, CONNECT = "io.debezium.time", "org.apache.kafka.connect.data"
TEXT, WHEN, LOCAL = pa.string(), pa.timestamp("us", "UTC"), pa.timestamp("us")
DECIMAL = pa.decimal128(38, 4)
LOCALLY = AT.replace(tzinfo=None)


class TestTypes:
    @pytest.mark.parametrize(
        ("kind", "semantic", "value", "into", "expected"),
        [
            ("int32", f"{DEBEZIUM}.Date", -719_162, pa.date32(), date(1, 1, 1)),
            ("int32", f"{CONNECT}.Date", 2_932_896, pa.date32(), date(9999, 12, 31)),
            ("string", f"{DEBEZIUM}.IsoDate", "2026-01-05Z", pa.date32(), date(2026, 1, 5)),
            ("int32", f"{DEBEZIUM}.Time", 45_900_250, TEXT, "12:45:00.250"),
            ("int64", f"{DEBEZIUM}.MicroTime", 45_900_250_000, TEXT, "12:45:00.250000"),
            ("int64", f"{DEBEZIUM}.NanoTime", 1, TEXT, "00:00:00.000000001"),
            ("int64", f"{DEBEZIUM}.Timestamp", MICROS // 1_000, WHEN, AT),
            ("int64", f"{DEBEZIUM}.MicroTimestamp", MICROS, LOCAL, LOCALLY),
            ("int64", f"{DEBEZIUM}.MicroTimestamp", -62_135_596_800_000_000, LOCAL, datetime(1, 1, 1)),
            ("int64", f"{DEBEZIUM}.NanoTimestamp", MICROS * 1_000, WHEN, AT),
            ("int64", f"{DEBEZIUM}.NanoTimestamp", MICROS * 1_000 + 1, TEXT, "2026-01-05T12:45:00.250000001"),
            ("int64", f"{CONNECT}.Timestamp", MICROS // 1_000, TEXT, "2026-01-05T12:45:00.250"),
            ("string", f"{DEBEZIUM}.ZonedTimestamp", "2026-01-05T13:45:00.25+01:00", WHEN, AT),
            ("string", f"{DEBEZIUM}.IsoTimestamp", "2026-01-05T12:45:00.25Z", LOCAL, LOCALLY),
            ("string", f"{DEBEZIUM}.ZonedTime", "12:45:00Z", TEXT, "12:45:00Z"),
            ("string", f"{DEBEZIUM}.Interval", "P1Y2M3DT4H5M6.78S", TEXT, "P1Y2M3DT4H5M6.78S"),
            ("int64", f"{DEBEZIUM}.MicroDuration", 5, pa.int64(), 5),
            ("int32", f"{DEBEZIUM}.Year", 2026, pa.int32(), 2026),
            ("string", "io.debezium.data.Uuid", "0e8c-1", TEXT, "0e8c-1"),
            ("string", "io.debezium.data.Json", '{"a": 1}', TEXT, '{"a": 1}'),
            ("string", "io.debezium.data.Enum", "new", TEXT, "new"),
            ("bytes", "io.debezium.data.Bits", "AQ==", pa.binary(), b"\x01"),
            ("array", "io.debezium.data.DoubleVector", [1.5, 2], pa.list_(pa.float64()), [1.5, 2.0]),
            ("boolean", None, True, pa.bool_(), True),
            ("int16", None, 1, pa.bool_(), True),
            ("double", None, "NaN", pa.float64(), None),
            ("int64", None, 2**63 - 1, pa.int64(), 2**63 - 1),
            ("string", None, "-12.5", DECIMAL, Decimal("-12.5000")),
        ],
    )
    def test_a_schema_part_says_what_a_value_is(
        self, kind: str, semantic: str | None, value: Any, into: pa.DataType, expected: Any
    ) -> None:
        made = value_of(value, into, field("v", kind, semantic))
        assert str(made) == "nan" if value == "NaN" else made == expected

    @pytest.mark.parametrize("number", [0, 1, -1, 125, 10**38 - 1, 1 - 10**38])
    def test_a_decimal_is_exact(self, number: int) -> None:
        exact = field("v", "bytes", f"{CONNECT}.Decimal", parameters={"scale": "4", "connect.decimal.precision": "38"})
        expected = Decimal((number < 0, tuple(map(int, str(abs(number)))), -4))
        assert value_of(unscaled(number), DECIMAL, exact) == expected
        assert value_of(unscaled(number), TEXT, exact) == f"{expected:f}"
        variable = field("v", "struct", "io.debezium.data.VariableScaleDecimal", fields=[])
        assert value_of({"scale": 4, "value": unscaled(number)}, DECIMAL, variable) == expected
        assert value_of({"scale": 4, "value": unscaled(number)}, TEXT, variable) == f"{expected:f}"
        # Without a schema part the column says where the point is.
        assert value_of(unscaled(number), DECIMAL) == expected
        assert value_of(f"{expected:f}", DECIMAL, decimals="number") == expected

    def test_a_decimals_own_scale_counts(self) -> None:
        cents = field("v", "bytes", f"{CONNECT}.Decimal", parameters={"scale": "2"})
        assert value_of(unscaled(125), DECIMAL, cents) == Decimal("1.25")
        fine = field("v", "bytes", f"{CONNECT}.Decimal", parameters={"scale": "6"})
        assert value_of(unscaled(1_250_000), DECIMAL, fine) == Decimal("1.25")
        assert "more digits behind the point" in value_of(unscaled(1_250_001), DECIMAL, fine)
        assert "more than 4 digits" in value_of(unscaled(10_000), pa.decimal128(4, 2), cents)

    @pytest.mark.parametrize("number", ["12.5", "1e2", "0"])
    def test_a_decimal_may_be_a_number(self, number: str) -> None:
        text = json.dumps(event("c", None, {"v": "N"})).replace('"N"', number).encode()
        (made,), refused = decode(text, row=pa.struct([("v", DECIMAL)]))
        assert not refused
        assert made["value"]["v"] == Decimal(number)

    @pytest.mark.parametrize(
        ("unit", "number"),
        [("milliseconds", MICROS // 1_000), ("microseconds", MICROS), ("nanoseconds", MICROS * 1_000)],
    )
    def test_without_a_schema_part_the_definition_says_the_unit(self, unit: str, number: int) -> None:
        assert value_of(number, WHEN, times=unit) == AT
        assert value_of("2026-01-05T12:45:00.25Z", WHEN, times=unit) == AT
        assert "name it with times=" in value_of(number, WHEN)
        assert value_of(20_458, pa.date32()) == date(2026, 1, 5)

    @pytest.mark.parametrize(
        ("semantic", "value", "into"),
        [
            (f"{DEBEZIUM}.Date", 2_932_897, pa.date32()),
            (f"{DEBEZIUM}.Date", -719_163, pa.date32()),
            (f"{DEBEZIUM}.MicroTimestamp", 9_223_372_036_825_200_000, LOCAL),
            (f"{DEBEZIUM}.MicroTimestamp", -9_223_372_036_832_400_000, WHEN),
            (f"{DEBEZIUM}.NanoTimestamp", MICROS * 1_000 + 1, WHEN),
            (f"{DEBEZIUM}.Date", 2**63, TEXT),
            (None, 5, WHEN),
            (None, 2, pa.bool_()),
            (None, "x", pa.float64()),
            (f"{CONNECT}.Decimal", "no base64", DECIMAL),
            ("io.debezium.data.VariableScaleDecimal", {"scale": 99_999_999, "value": "AQ=="}, DECIMAL),
            ("io.debezium.data.geometry.Geometry", {"wkb": "AQ==", "srid": 1}, TEXT),
        ],
    )
    def test_what_does_not_fit_is_refused_with_its_place(
        self, semantic: str | None, value: Any, into: pa.DataType
    ) -> None:
        kind = "bytes" if semantic == f"{CONNECT}.Decimal" else "int64"
        more = {"parameters": {"scale": "4"}} if kind == "bytes" else {}
        assert "`$.after.v`" in value_of(value, into, field("v", kind, semantic, **more))

    @pytest.mark.parametrize(
        ("semantic", "number", "beside", "text"),
        [
            (f"{DEBEZIUM}.Date", 2_147_483_647, 20_458, "2026-01-05"),
            (f"{DEBEZIUM}.Date", -719_163, 20_458, "2026-01-05"),
            (f"{DEBEZIUM}.MicroTimestamp", 9_223_372_036_825_200_000, MICROS, "2026-01-05T12:45:00.250000"),
            (f"{DEBEZIUM}.MicroTimestamp", -9_223_372_036_832_400_000, MICROS, "2026-01-05T12:45:00.250000"),
            (f"{DEBEZIUM}.Timestamp", 2**63 - 1, MICROS // 1_000, "2026-01-05T12:45:00.250"),
            (f"{DEBEZIUM}.Time", 86_400_000, 1, "00:00:00.001"),
            (f"{DEBEZIUM}.MicroTime", 86_400_000_000, 1, "00:00:00.000001"),
            (f"{DEBEZIUM}.MicroTime", -1, 1, "00:00:00.000001"),
        ],
    )
    def test_a_text_has_the_number_that_no_calendar_has(
        self, semantic: str, number: int, beside: int, text: str
    ) -> None:
        given = [
            with_schema(event("c", None, {"v": value}), field("v", "int64", semantic))
            for value in (number, None, beside)
        ]
        made, refused = decode(*given, row=pa.struct([("v", TEXT)]))
        assert not refused
        assert [each["value"]["v"] for each in made] == [str(number), None, text]

    @pytest.mark.parametrize("semantic", [None, "io.debezium.data.Json", f"{DEBEZIUM}.IsoDate"])
    def test_bytes_that_are_sent_as_text_are_refused(self, semantic: str | None) -> None:
        """Hex may be taken for base64."""
        text = field("v", "string", semantic)
        reason = value_of("deadbeef", pa.binary(), text)
        assert "binary.handling.mode=bytes, or declare the field as STRING: deadbeef - at `$.after.v`" in reason
        assert value_of(None, pa.binary(), text) is None
        assert value_of("deadbeef", TEXT, text) == "deadbeef"
        assert value_of("3q2+7w==", pa.binary(), field("v", "bytes")) == bytes.fromhex("deadbeef")
        assert value_of("3q2+7w==", pa.binary()) == bytes.fromhex("deadbeef")
        listed = field("v", "array", items={"type": "string"})
        assert "binary.handling.mode" in value_of(["deadbeef"], pa.list_(pa.binary()), listed)

    def test_a_point_is_its_text(self) -> None:
        point = field("v", "struct", "io.debezium.data.geometry.Point", fields=[])
        wkb = base64.b64encode(struct.pack("<BIdd", 1, 1, 13.5, 52.25)).decode()
        assert value_of({"x": 13.5, "y": 52.25, "wkb": wkb, "srid": None}, TEXT, point) == "POINT (13.5 52.25)"
        assert value_of({"x": 13.5, "y": 52.25}, TEXT, point) == "POINT (13.5 52.25)"
        kind = pa.struct([("wkb", pa.binary()), ("srid", pa.int32())])
        assert value_of({"wkb": wkb, "srid": 4326}, kind, point)["srid"] == 4326

    def test_an_object_in_a_text_is_its_json(self) -> None:
        assert value_of({"dimensions": 9, "vector": [[1, 2.5]]}, TEXT) == '{"dimensions": 9, "vector": [[1, 2.5]]}'


ONE, TWO, NINE, NAN = "000000000000f03f", "0000000000000040", "0000000000002240", "000000000000f87f"


@pytest.mark.parametrize(
    ("wkb", "text"),
    [
        ("0000000001" + "3ff0000000000000" + "4000000000000000", "POINT (1 2)"),
        ("0101000020e6100000" + "000000000000f03f" + "0000000000000040", "POINT (1 2)"),
        ("01e9030000" + "000000000000f03f" + "0000000000000040" + "0000000000000840", "POINT (1 2 3)"),
        ("01d1070000" + ONE + TWO + NINE, "POINT (1 2)"),
        ("01010000c0" + ONE + TWO + NINE + ONE, "POINT (1 2 9)"),
        ("010200000002000000" + "000000000000f03f0000000000000040" * 2, "LINESTRING (1 2, 1 2)"),
        ("010300000001000000" + "01000000" + "000000000000f03f0000000000000040", "POLYGON ((1 2))"),
        ("010400000001000000" + "0101000000" + "000000000000f03f0000000000000040", "MULTIPOINT (1 2)"),
        (
            "010400008002000000" + "0101000080" + ONE + TWO + NINE + "0101000080" + TWO + ONE + NINE,
            "MULTIPOINT (1 2 9, 2 1 9)",
        ),
        ("010400000002000000" + "0101000000" + ONE + TWO + "0101000000" + NAN + NAN, "MULTIPOINT (1 2)"),
        ("010400000001000000" + "0101000000" + NAN + NAN, "MULTIPOINT EMPTY"),
        ("010500004001000000" + "010200004001000000" + ONE + TWO + NINE, "MULTILINESTRING ((1 2))"),
        (
            "010600008001000000" + "010300008001000000" + "01000000" + ONE + TWO + NINE,
            "MULTIPOLYGON (((1 2 9)))",
        ),
        ("010700000001000000" + "0101000000" + "000000000000f03f0000000000000040", "GEOMETRYCOLLECTION (POINT (1 2))"),
        ("010700000000000000", "GEOMETRYCOLLECTION EMPTY"),
        ("010300000000000000", "POLYGON EMPTY"),
    ],
)
def test_a_geometry_has_its_text(wkb: str, text: str) -> None:
    assert well_known_text(bytes.fromhex(wkb)) == text


@pytest.mark.parametrize(
    "wkb",
    [
        "",
        "01",
        "02",
        "0108000000",
        "0102000000ffffffff",
        "01" * 40,
        "010700000001000000" * 40,
        "010400000001000000" + "010200000000000000",
    ],
)
def test_what_is_no_geometry_is_refused(wkb: str) -> None:
    with pytest.raises((ValueError, struct.error)):
        well_known_text(bytes.fromhex(wkb))
