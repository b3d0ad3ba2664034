"""A state's versions: how they are stored, read, and refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from tests.support.faulty_storage import EVERYTHING, FaultyStorage, WriteFault

from headrace.clock import time_text
from headrace.spark.state.version import (
    VERSIONS,
    StateDamagedError,
    StateError,
    StateFencedError,
    StateMissingError,
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


def test_a_version_with_a_class_in_its_schema_is_refused() -> None:
    """Spark would import the class, or load the pickle that stands beside its name."""
    evil = {"type": "udt", "pyClass": "evil.Type", "serializedClass": "gAS=", "sqlType": "integer"}
    for kind in (evil, {"type": "array", "elementType": evil, "containsNull": True}):
        schema = {"type": "struct", "fields": [{"name": "n", "type": kind, "nullable": True, "metadata": {}}]}
        with pytest.raises(StateDamagedError, match="a user-defined type"):
            Version.from_bytes(replace(VERSION, schema=schema).to_bytes(), "here")


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


def test_changes_of_the_whole_table_are_a_snapshot_for_nothing(versions: Any) -> None:
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


def base_time(store: StateStore, time_ms: int) -> int | None:
    base = store.base_of(time_ms)
    return None if base is None else base.batch_time_ms


def test_the_first_batch_starts_from_an_empty_table(store: StateStore, time_ms: TimeMs) -> None:
    assert store.base_of(time_ms(0)) is None


def test_a_batch_starts_from_the_newest_version_before_it(store: StateStore, versions: Any, time_ms: TimeMs) -> None:
    for batch in (0, 1, 4):
        versions.update(batch, added=1)
    assert base_time(store, time_ms(1)) == time_ms(0)
    # Batches 2 and 3 were coalesced, or abandoned: they have no state of their own.
    assert base_time(store, time_ms(4)) == time_ms(1)
    assert base_time(store, time_ms(5)) == time_ms(4)


def test_a_batch_run_again_starts_from_the_state_before_it(store: StateStore, versions: Any, time_ms: TimeMs) -> None:
    for batch in range(4):
        versions.update(batch, added=1)
    again = versions.update(2, added=1, attempt=2)
    assert again.based_on == (time_ms(1), 1)
    assert again.rows == 3
    assert store.version_of(time_ms(2)) == again
    assert store.later_than(time_ms(2)) == 1


def test_a_version_stays_on_the_attempt_that_it_was_based_on(store: StateStore, versions: Any, time_ms: TimeMs) -> None:
    versions.update(0, added=1)
    first = versions.update(1, added=1)
    later = versions.update(2, added=1)
    versions.update(1, added=5, attempt=2)
    assert store.version_of(time_ms(2)) == later
    assert set(first.changes) <= set(later.table)
    assert versions.update(2, added=1, attempt=2).based_on == (time_ms(1), 2)


@pytest.mark.parametrize("attempt", [1, 2])
def test_a_fenced_attempt_does_not_replace_a_later_ones_version(
    store: StateStore, versions: Any, time_ms: TimeMs, attempt: int
) -> None:
    newest = versions.update(0, added=1, attempt=2)
    with pytest.raises(StateFencedError, match=f"already has a state of batch .* by attempt {attempt} or a later one"):
        versions.update(0, added=7, attempt=attempt)
    assert store.version_of(time_ms(0)) == newest


def test_a_fenced_attempts_late_version_is_not_the_batchs(store: StateStore, versions: Any, time_ms: TimeMs) -> None:
    newest = versions.update(0, added=1, attempt=2)
    # Between its last look and its write the later attempt was done.
    late = replace(newest, attempt=1, rows=99)
    store.storage.write_atomically(late.name.path, late.to_bytes(), exclusive=True)
    assert store.version_of(time_ms(0)) == newest
    assert base_time(store, time_ms(1)) == time_ms(0)
    assert versions.update(1, added=1).based_on == (time_ms(0), 2)


def test_a_crash_before_the_document_leaves_the_state_as_it_was(
    store: StateStore, versions: Any, time_ms: TimeMs
) -> None:
    versions.update(0, added=1)
    faulty = FaultyStorage(store.storage)
    faulty.write_faults.extend([None, WriteFault()])  # the data is written, the document is not
    versions.store = StateStore(faulty)
    with pytest.raises(OSError, match="error"):
        versions.update(1, added=1)
    assert [name.batch_time_ms for name in store.names()] == [time_ms(0)]
    versions.store = store
    assert versions.update(1, added=2, attempt=2).rows == 3


def test_a_doubtful_version_is_followed_by_the_next_attempts_own(
    store: StateStore, versions: Any, time_ms: TimeMs
) -> None:
    """The writer of the doubtful version could not confirm it."""
    versions.update(0, added=1)
    faulty = FaultyStorage(store.storage)
    faulty.write_faults.extend([None, WriteFault(written=EVERYTHING)])
    versions.store = StateStore(faulty)
    with pytest.raises(OSError, match="error"):
        versions.update(1, added=1)
    versions.store = store
    again = versions.update(1, added=1, attempt=2)
    assert again.based_on == (time_ms(0), 1)
    assert store.version_of(time_ms(1)) == again


def test_a_batch_without_a_state_is_an_error_with_a_remedy(store: StateStore, versions: Any, time_ms: TimeMs) -> None:
    versions.update(0, added=1)
    with pytest.raises(
        StateMissingError, match=f'no state of batch {time_text(time_ms(1))}.*Run the batch\'s step "state"'
    ):
        store.version_of(time_ms(1))


def test_a_damaged_version_document_is_an_error_with_its_path(
    store: StateStore, versions: Any, time_ms: TimeMs
) -> None:
    version = versions.update(0, added=1)
    store.storage.write_atomically(version.name.path, b"{}\n")
    with pytest.raises(StateDamagedError, match="is damaged"):
        store.base_of(time_ms(1))


def test_pruning_keeps_what_batches_may_start_from(
    store: StateStore, make_versions: Callable[..., Any], time_ms: TimeMs
) -> None:
    versions = make_versions(snapshot_every=3)
    made = [versions.update(batch, added=2, changed=1 if batch else 0) for batch in range(12)]
    assert [version.batch_time_ms for version in made if version.is_snapshot] == [time_ms(n) for n in (0, 3, 6, 9)]
    store.prune(time_ms(8))
    # Batch 8 starts from 7, whose table begins with the whole one of 6.
    assert [name.batch_time_ms for name in store.names()] == [time_ms(n) for n in range(6, 12)]
    for batch in range(8, 12):
        assert store.base_of(time_ms(batch)) == made[batch - 1]
        assert all(store.storage.exists(file.path) for file in made[batch - 1].table)
    assert store.prune(time_ms(8)) == 0


def test_pruning_removes_what_crashes_left(store: StateStore, make_versions: Callable[..., Any]) -> None:
    versions = make_versions(snapshot_every=2)
    for batch in range(8):
        versions.update(batch, added=1)
    oldest = versions.update(0, added=1, attempt=2).batch_time_ms
    left = [f"data/{oldest}-1-left.parquet", f"reports/{oldest}-1-left.json", f"drafts/{oldest}-1-{oldest}.json"]
    for path in left:
        store.storage.write_atomically(path, b"left")
    kept = f"data/{versions.update(8, added=1).batch_time_ms}-1-under-way.parquet"
    store.storage.write_atomically(kept, b"under way")
    store.prune(store.names()[-1].batch_time_ms)
    assert not [path for path in left if store.storage.exists(path)]
    assert store.storage.exists(kept)


def test_a_batch_whose_start_was_pruned_is_refused(
    store: StateStore, make_versions: Callable[..., Any], time_ms: TimeMs
) -> None:
    versions = make_versions(snapshot_every=2)
    for batch in range(9):
        versions.update(batch, added=1)
    store.prune(time_ms(8))
    for batch in (0, 3):
        with pytest.raises(
            StateMissingError, match=f"before batch {time_text(time_ms(batch))} has been deleted.*state.remember"
        ):
            store.base_of(time_ms(batch))
        with pytest.raises(StateMissingError, match=f"of batch {time_text(time_ms(batch))} has been deleted"):
            store.version_of(time_ms(batch))


def test_a_batch_from_before_the_first_one_starts_empty(store: StateStore, versions: Any, time_ms: TimeMs) -> None:
    versions.update(5, added=1)
    assert store.base_of(time_ms(3)) is None


def test_a_crash_while_pruning_leaves_an_unbroken_row(
    store: StateStore, make_versions: Callable[..., Any], time_ms: TimeMs, monkeypatch: pytest.MonkeyPatch
) -> None:
    versions = make_versions(snapshot_every=2)
    for batch in range(9):
        versions.update(batch, added=1)
    delete, deleted = store.storage.delete, []

    def crash_at_the_third(path: str) -> bool:
        if len(deleted) == 2:
            raise OSError("killed")
        deleted.append(path)
        return delete(path)

    monkeypatch.setattr(store.storage, "delete", crash_at_the_third)
    with pytest.raises(OSError, match="killed"):
        store.prune(time_ms(8))
    monkeypatch.undo()
    assert all(path.startswith(VERSIONS) for path in deleted)
    assert [name.batch_time_ms for name in store.names()] == [time_ms(n) for n in range(2, 9)]
    store.prune(time_ms(8))
    listed = store.storage.paths()
    assert min(listed).startswith("data/") and not [path for path in listed if str(time_ms(1)) in path]
