"""The search for a key: over a real log and ledger, newest first, bounded, and saying how far it looked."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa
import pytest
from tests.unit.fsck.conftest import INTERVAL_MS, STREAM, TIMES, Shop
from typer.testing import CliRunner

from headrace.cli.main import app
from headrace.stream_context import StreamContext
from headrace.views import trace_location, trace_records
from headrace.views.trace_records import search_key
from headrace.wal.frame import RECORD_SCHEMA


@pytest.fixture
def keyed(make_shop: Any, monkeypatch: pytest.MonkeyPatch) -> Shop:
    """Three batch times of four records: two batches, and one that waits. Record 2 of each has the key b"cup"."""
    shop: Shop = make_shop()
    write = shop.writer.write

    def write_with_keys(records: pa.RecordBatch, *given: Any, **named: Any) -> Any:
        keys = [b"cup" if offset % 4 == 2 else b"%d" % offset for offset in records.column("offset").to_pylist()]
        columns = [pa.array(keys, pa.binary()) if f.name == "key" else records.column(f.name) for f in RECORD_SCHEMA]
        return write(pa.RecordBatch.from_arrays(columns, schema=RECORD_SCHEMA), *given, **named)

    monkeypatch.setattr(shop.writer, "write", write_with_keys)
    for _ in range(3):
        shop.store({0: 4})
        shop.clock.advance(INTERVAL_MS)
    shop.run(TIMES[0])
    shop.allocate(TIMES[1])
    return shop


def test_the_newest_record_with_the_key_comes_first(keyed: Shop) -> None:
    search = search_key(keyed.context, b"cup")
    assert [(m.position.offset, m.batch_time_ms) for m in search.matches] == [
        (10, TIMES[2]), (6, TIMES[1]), (2, TIMES[0])
    ]  # fmt: skip
    assert search.matches[0].position.partition == keyed.partition(0)
    assert (search.searched_records, search.searched_batches) == (12, 3)
    assert (search.from_ms, search.until_ms, search.complete) == (TIMES[0], TIMES[2], True)


def test_a_search_ends_at_its_limits_and_says_so(keyed: Shop) -> None:
    search = search_key(keyed.context, b"cup", limit=1)
    assert ([m.position.offset for m in search.matches], search.complete) == ([10], False)
    assert "--limit" in search.ended
    bounded = search_key(keyed.context, b"2", max_records=5)
    assert (bounded.matches, bounded.searched_records, bounded.from_ms) == ((), 8, TIMES[1])
    assert "--max-records" in bounded.ended and not bounded.complete


class Hurried:
    """A clock on which each look takes a second."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        self.now += 1
        return self.now


def test_a_search_ends_when_its_time_is_up_and_says_so(keyed: Shop) -> None:
    every = search_key(keyed.context, b"cup")
    hurried = StreamContext(keyed.stream, keyed.ledger, storage=keyed.context.storage, clock=Hurried())  # type: ignore[arg-type]
    # It looks at the beginning, before each batch time and after each block.
    search = search_key(hurried, b"cup", max_seconds=3)
    assert search.matches == every.matches[:1]
    assert (search.searched_batches, search.searched_records, search.complete) == (1, 4, False)
    assert "It ended after 3 s" in search.ended


def test_a_search_for_an_absent_key_says_that_the_limit_ended_it(keyed: Shop) -> None:
    """The limit is one of batch times."""
    for limit in (1, 2):
        search = search_key(keyed.context, b"absent", max_batches=limit)
        assert (search.searched_batches, search.complete) == (limit, False)
        assert f"after {limit} batch times: --max-batches" in search.ended
    assert search_key(keyed.context, b"absent", max_batches=3).complete


def test_all_waiting_times_are_searched_newest_first(keyed: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_location, "_TIMES_OF_A_PAGE", 1)
    keyed.store({0: 4})
    search = search_key(keyed.context, b"cup")
    assert [m.position.offset for m in search.matches] == [14, 10, 6, 2]


def test_a_block_taken_during_the_search_is_searched_once(keyed: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch takes the block meanwhile."""
    monkeypatch.setattr(trace_records, "PROGRESS_RECORDS", 1)

    def allocate(line: str) -> None:
        if "4 records" in line:
            keyed.allocate(TIMES[2])

    search = search_key(keyed.context, b"cup", progress=allocate)
    assert keyed.ledger.batches.find(STREAM, TIMES[2]) is not None
    assert ([m.position.offset for m in search.matches], search.searched_records) == ([10, 6, 2], 12)


def test_progress_is_reported(keyed: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_records, "PROGRESS_RECORDS", 8)
    lines: list[str] = []
    search_key(keyed.context, b"cup", progress=lines.append)
    assert len(lines) == 1 and lines[0].startswith("8 records searched, back to batch 2023-11-14T22:13:40Z: 2 found")


def test_batches_that_left_the_log_are_named(keyed: Shop) -> None:
    keyed.new_epoch()
    keyed.complete(TIMES[1])
    keyed.checkpoint(TIMES[1])
    for time_ms in TIMES[2:5]:
        keyed.clock.advance(INTERVAL_MS)
        keyed.run(time_ms)
    assert keyed.clean().segments
    search = search_key(keyed.context, b"cup")
    assert (search.matches, search.complete) == ((), False)
    assert "no longer has 3 batch(es)" in search.ended and "--kafka" in search.ended
    other = keyed.stream.inputs[0].model_copy(update={"id": "other"})
    keyed.stream = keyed.stream.model_copy(update={"inputs": (other,)})
    without_input = search_key(keyed.context, b"cup", from_kafka=True)
    assert not without_input.complete
    assert "3 part(s) could not be read" in without_input.ended and "does not have any more" in without_input.ended


def test_a_damaged_block_is_reported_and_the_others_are_searched(keyed: Shop) -> None:
    (block,) = keyed.ledger.blocks.of_times(STREAM, [TIMES[1]])
    path = keyed.log_path(block.info.handle.segment)
    damaged = bytearray(path.read_bytes())
    damaged[block.info.handle.offset + block.info.handle.length - 5] ^= 0xFF
    path.write_bytes(bytes(damaged))
    search = search_key(keyed.context, b"cup")
    assert [m.position.offset for m in search.matches] == [10, 2]
    assert "1 part(s) could not be read" in search.ended and not search.complete


def test_the_command_prints_what_it_found_and_how_far_it_looked(keyed: Shop) -> None:
    command = ["trace", STREAM, "--key", "cup", "--ledger", keyed.stream.ledger]
    printed = CliRunner().invoke(app, command)
    assert printed.exit_code == 0, printed.output
    assert "3 record(s) with this key. Searched 12 records in 3 batch times" in printed.stdout
    fields = json.loads(CliRunner().invoke(app, [*command, "--json"]).stdout)
    assert ([m["position"]["offset"] for m in fields["matches"]], fields["key"]) == ([10, 6, 2], "cup")
