from __future__ import annotations

import pytest

from headrace.spark.state.errors import StateDamagedError
from headrace.spark.state.version import StoredFile, Version, VersionName, batch_time_of

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


def test_a_flipped_bit_is_told() -> None:
    data = VERSION.to_bytes().replace(b'"rows":6', b'"rows":7')
    with pytest.raises(StateDamagedError, match="version here is damaged"):
        Version.from_bytes(data, "here")


def test_a_later_format_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.spark.state.version.FORMAT_VERSION", 2)
    data = VERSION.to_bytes()
    monkeypatch.undo()
    with pytest.raises(StateDamagedError, match="has the format 2, this headrace reads 1"):
        Version.from_bytes(data, "here")


def test_the_name_tells_what_pruning_must_know() -> None:
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
def test_every_file_tells_the_batch_that_wrote_it(path: str, batch_time_ms: int | None) -> None:
    assert batch_time_of(path) == batch_time_ms


def test_attempts_sort_as_numbers() -> None:
    names = [VersionName(1, attempt, 1) for attempt in (10, 9, 2)]
    assert [name.attempt for name in sorted(names)] == [2, 9, 10]
