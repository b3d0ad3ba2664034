from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from headrace.spark.state.source import OUTCOME, StateTableSource, StateWriter, TaskReport, group_files, read_file
from headrace.spark.state.version import CHANGED_MS, REMOVED, StateDamagedError, StateError, StoredFile, WriteReport
from headrace.wal.storage import open_storage

MEGABYTE = 1024 * 1024


def rows(words: list[str | None], outcomes: list[str] | None = None) -> pa.RecordBatch:
    columns: dict[str, Any] = {
        "word": pa.array(words, pa.string()),
        "count": pa.array(range(len(words)), pa.int64()),
        CHANGED_MS: pa.array([1] * len(words), pa.int64()),
        REMOVED: pa.array([False] * len(words), pa.bool_()),
    }
    if outcomes is not None:
        columns[OUTCOME] = pa.array(outcomes)
    return pa.RecordBatch.from_pydict(columns)


def written(folder: Path, *batches: pa.RecordBatch) -> TaskReport:
    done = StateWriter(str(folder), "1700000000000-1", "reports/x.json", ("word",)).write(iter(batches))
    assert isinstance(done, TaskReport)
    return done


def read(folder: Path, file: StoredFile, schema: pa.Schema) -> pa.Table:
    return pa.Table.from_batches(read_file(str(folder), file, schema), schema)


def test_rows_come_back_as_they_were(tmp_path: Path) -> None:
    batch = rows(["a", "b"])
    (file,) = written(tmp_path, batch, rows([]), rows(["c"])).files
    assert file.rows == 3
    assert file.size == open_storage(str(tmp_path)).size(file.path)
    assert file.path.startswith("data/1700000000000-1-")
    assert read(tmp_path, file, batch.schema).column("word").to_pylist() == ["a", "b", "c"]


def test_outcomes_are_counted_and_not_stored(tmp_path: Path) -> None:
    done = written(tmp_path, rows(["a", "b", "c"], ["added", "added", "removed"]))
    assert done.outcomes == Counter(added=2, removed=1)
    (file,) = done.files
    assert OUTCOME not in read(tmp_path, file, rows([]).schema).schema.names


def test_a_wrong_key_is_named(tmp_path: Path) -> None:
    done = written(tmp_path, rows(["a", "b", None], ["added", "double_key", "null_key"]))
    assert {name: json.loads(key) for name, key in done.examples.items()} == {
        "double_key": {"word": "b"},
        "null_key": {"word": None},
    }


def test_no_rows_make_no_file(tmp_path: Path) -> None:
    assert written(tmp_path, rows([])).files == []
    assert written(tmp_path).files == []


def test_two_attempts_at_one_task_never_share_a_file(tmp_path: Path) -> None:
    one, other = written(tmp_path, rows(["a"])), written(tmp_path, rows(["a"]))
    assert one.files[0].path != other.files[0].path


def test_the_commit_reports_the_files_of_every_task(tmp_path: Path) -> None:
    writer = StateWriter(str(tmp_path), "1700000000000-1", "reports/x.json", ("word",))
    tasks = [writer.write(iter([rows(["a"], ["added"])])), writer.write(iter([rows(["b"], ["changed"])]))]
    writer.commit(tasks)
    report = WriteReport.read(open_storage(str(tmp_path)), "reports/x.json")
    assert report.outcomes == Counter(added=1, changed=1)
    assert [file.rows for file in report.files] == [1, 1]
    with pytest.raises(StateError, match="did not report its rows"):
        writer.commit([None])


def test_a_missing_report_of_the_states_write_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(StateDamagedError, match=r"reports/x.json.*Spark sees the stream's storage"):
        WriteReport.read(open_storage(str(tmp_path)), "reports/x.json")


def test_a_later_column_is_null_in_older_files(tmp_path: Path) -> None:
    """A number that became wider is read too."""
    batch = rows(["a"])
    (file,) = written(tmp_path, batch.set_column(1, "count", batch.column("count").cast(pa.int32()))).files
    wanted = batch.schema.append(pa.field("seen", pa.timestamp("us", tz="UTC")))
    table = read(tmp_path, file, wanted)
    assert table.schema == wanted
    assert table.column("seen").to_pylist() == [None]


def test_only_the_columns_asked_for_are_read(tmp_path: Path) -> None:
    (file,) = written(tmp_path, rows(["a"])).files
    assert read(tmp_path, file, pa.schema([("word", pa.string())])).to_pydict() == {"word": ["a"]}


def test_a_file_that_is_gone_or_damaged_is_named(tmp_path: Path) -> None:
    batch = rows(["a"])
    (file,) = written(tmp_path, batch).files
    with pytest.raises(StateDamagedError, match="has 1 rows, its version says 2"):
        read(tmp_path, StoredFile(file.path, 2, file.size), batch.schema)
    (tmp_path / file.path).write_bytes(b"PAR1 nothing of the kind")
    with pytest.raises(StateDamagedError, match=f"{file.path} cannot be read"):
        read(tmp_path, file, batch.schema)
    (tmp_path / file.path).unlink()
    with pytest.raises(StateDamagedError, match=f"{file.path} cannot be read"):
        read(tmp_path, file, batch.schema)


def test_small_files_share_a_task_and_large_ones_have_their_own() -> None:
    sizes = [20 * MEGABYTE, 9 * MEGABYTE, 9 * MEGABYTE, *[MEGABYTE] * 10]
    files = [StoredFile(f"data/{place}", 1, size) for place, size in enumerate(sizes)]
    groups = group_files(files)
    assert sorted(file.path for group in groups for file in group) == sorted(file.path for file in files)
    assert [sum(file.size for file in group) // MEGABYTE for group in groups] == [20, 9, 16, 3]
    assert group_files([]) == []


def test_missing_options_of_the_state_source_are_refused(tmp_path: Path) -> None:
    with pytest.raises(StateError, match=r'"state_table" data source needs the option.s. document, files'):
        StateTableSource({"folder": str(tmp_path)}).reader(None)  # type: ignore[arg-type]


def test_a_missing_version_document_fails_the_reads_planning(tmp_path: Path) -> None:
    options = {"folder": str(tmp_path), "document": "versions/1-1-1.json", "files": "table"}
    with pytest.raises(StateDamagedError, match=r"versions/1-1-1.json is gone"):
        StateTableSource(options).reader(None).partitions()  # type: ignore[arg-type]
