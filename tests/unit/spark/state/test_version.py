from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from headrace.spark.state.version import (
    StateDamagedError,
    StateError,
    StateStore,
    StoredFile,
    Version,
    VersionName,
    batch_time_of,
    cut,
)

SHARED = StoredFile("data/1700000010000-1-a.parquet", 3, 300)
OLDER = StoredFile("data/1700000000000-1-b.parquet", 5, 500)
VERSION = Version(
    stream="words",
    batch_time_ms=1_700_000_010_000,
    attempt=2,
    based_on=(1_700_000_000_000, 1),
    first_ms=1_700_000_000_000,
    since_ms=1_700_000_000_000,
    chain=2,
    rows=6,
    keys=("word",),
    schema={"type": "struct", "fields": []},
    changes=(SHARED,),
    table=(OLDER, SHARED),
)


def test_a_version_is_read_as_it_was_written() -> None:
    assert Version.from_bytes(VERSION.to_bytes(), "here") == VERSION


def test_a_version_with_a_flipped_bit_is_an_error() -> None:
    data = VERSION.to_bytes().replace(b'"rows":6', b'"rows":7')
    with pytest.raises(StateDamagedError, match="version here is damaged"):
        Version.from_bytes(data, "here")


def test_a_later_format_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.spark.state.version.FORMAT_VERSION", 2)
    data = VERSION.to_bytes()
    monkeypatch.undo()
    with pytest.raises(StateDamagedError, match="has the format 2, this headrace reads 1"):
        Version.from_bytes(data, "here")


def test_a_versions_name_has_all_that_pruning_needs() -> None:
    assert VERSION.name.path == "versions/1700000010000-2-1700000000000.json"
    assert VersionName.parse(VERSION.name.path) == VERSION.name


@pytest.mark.parametrize("path", ["data/1700000010000-1-a.parquet", "versions/readme.json", "versions/1-2.json"])
def test_other_files_are_no_versions(path: str) -> None:
    assert VersionName.parse(path) is None


@pytest.mark.parametrize(
    ("path", "batch_time_ms"),
    [
        (VERSION.name.path, 1_700_000_010_000),
        ("data/1700000010000-1-a.parquet", 1_700_000_010_000),
        ("reports/1700000010000-12-a.json", 1_700_000_010_000),
        ("data/notes.txt", None),
    ],
)
def test_the_name_of_every_file_has_the_batch_time_that_wrote_it(path: str, batch_time_ms: int | None) -> None:
    assert batch_time_of(path) == batch_time_ms


def test_attempts_sort_as_numbers() -> None:
    names = [VersionName(1, attempt, 1) for attempt in (10, 9, 2)]
    assert [name.attempt for name in sorted(names)] == [2, 9, 10]


TimeMs = Callable[[int], int]


def cost(version: Version) -> tuple[int, int]:
    """Files and bytes that reading the table takes."""
    return len(version.table), sum(file.size for file in version.table)


def test_rows_are_counted_from_version_to_version(versions: Any) -> None:
    assert versions.update(0, added=5).rows == 5
    assert versions.update(1, added=2, changed=3).rows == 7
    assert versions.update(2, removed=6).rows == 1
    assert versions.update(3, added=1, removed=1).rows == 1


def test_changes_that_are_the_whole_table_are_a_snapshot_for_nothing(versions: Any) -> None:
    versions.update(0, added=5)
    whole = versions.update(1, changed=5)
    assert whole.is_snapshot
    assert whole.table == whole.changes


def test_a_batch_that_changes_nothing_writes_no_rows(versions: Any) -> None:
    before = versions.update(0, added=5)
    after = versions.update(1)
    assert (after.table, after.changes, after.rows) == (before.table, (), 5)


def test_a_snapshot_must_have_every_row(versions: Any) -> None:
    versions.update(0, added=5)
    version = versions.update(1, added=1)
    with pytest.raises(StateError, match="has 5 rows where 6 were counted"):
        cut(version, [StoredFile("data/1-1-x.parquet", 5, 50)])


@pytest.mark.parametrize("snapshot_every", [1, 3, 10])
def test_the_thousandth_batch_costs_what_the_tenth_did(
    store: StateStore, make_versions: Callable[..., Any], time_ms: TimeMs, snapshot_every: int
) -> None:
    """A table of 1,000 rows of which each batch changes 10, over 1,000 batches."""
    versions = make_versions(snapshot_every=snapshot_every)
    versions.update(0, added=1_000)
    costs, stored = [], []
    for batch in range(1, 1_001):
        version = versions.update(batch, changed=10)
        store.prune(time_ms(batch) - 10_000)
        costs.append(cost(version))
        stored.append(len(store.storage.paths()))
    assert max(costs[500:]) == max(costs[: 2 * snapshot_every])
    assert max(files for files, _ in costs) <= snapshot_every
    assert max(stored[500:]) <= max(stored[: 3 * snapshot_every])
    assert max(stored) <= 5 * (snapshot_every + 2)


def test_without_snapshots_the_chain_of_versions_grows(make_versions: Callable[..., Any]) -> None:
    versions = make_versions(snapshot_every=10**9)
    versions.update(0, added=1_000)
    costs = [cost(versions.update(batch, changed=10)) for batch in range(1, 101)]
    assert costs[99][0] == 101
    assert costs[99][1] > costs[9][1]
