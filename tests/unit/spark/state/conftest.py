"""A state's versions without Spark: as many files and rows as a test says, written by the real store."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest
from pyspark.sql.types import LongType, StringType, StructField, StructType
from tests.support.memory_storage import MemoryStorage

from headrace.spark.state.version import (
    DATA,
    Outcome,
    StateStore,
    StoredFile,
    Version,
    WriteReport,
    cut,
    is_cut_due,
    next_version,
    stem,
)

INTERVAL_MS = 10_000
FIRST_MS = 1_700_000_000_000
COLUMNS = StructType([StructField("word", StringType()), StructField("count", LongType())])
BYTES_PER_ROW = 10


@dataclass
class Versions:
    """`update` does what a batch's update does to the store, without rows; batches count from 0."""

    store: StateStore
    snapshot_every: int = 10
    files_written: Iterator[int] = field(default_factory=lambda: iter(range(1_000_000)))

    def update(self, batch: int, *, added: int = 0, changed: int = 0, removed: int = 0, attempt: int = 1) -> Version:
        time_ms = FIRST_MS + batch * INTERVAL_MS
        outcomes = Counter({Outcome.ADDED: added, Outcome.CHANGED: changed, Outcome.REMOVED: removed})
        written = WriteReport(self._files(time_ms, attempt, added + changed + removed), outcomes)
        version = next_version(
            self.store.base_of(time_ms),
            written,
            stream_name="words",
            batch_time_ms=time_ms,
            attempt=attempt,
            keys=("word",),
            schema=COLUMNS.jsonValue(),
        )
        if is_cut_due(version, self.snapshot_every):
            version = cut(version, self._files(time_ms, attempt, version.rows))
        self.store.write(version)
        return version

    def _files(self, time_ms: int, attempt: int, rows: int) -> list[StoredFile]:
        if not rows:
            return []
        data = b"x" * rows * BYTES_PER_ROW
        path = f"{DATA}/{stem(time_ms, attempt)}-{next(self.files_written):08d}.parquet"
        self.store.storage.write_atomically(path, data, exclusive=True)
        return [StoredFile(path, rows, len(data))]


@pytest.fixture
def store() -> StateStore:
    return StateStore(MemoryStorage())


@pytest.fixture
def make_versions(store: StateStore) -> Callable[..., Versions]:
    """A `Versions` over the test's store; takes ``snapshot_every``."""
    return lambda **more: Versions(store, **more)


@pytest.fixture
def versions(make_versions: Callable[..., Versions]) -> Versions:
    return make_versions()


@pytest.fixture
def time_ms() -> Callable[[int], int]:
    """The batch time of the n-th batch."""
    return lambda batch: FIRST_MS + batch * INTERVAL_MS
