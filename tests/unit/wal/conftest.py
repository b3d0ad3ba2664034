"""A log on a temporary directory, and its writer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.support.faulty_storage import FaultyStorage
from tests.support.segments import writer_options

from headrace.blocks import ReceiverId
from headrace.clock import ManualClock
from headrace.wal.storage import LocalStorage
from headrace.wal.writer import WriteAheadLogWriter

RECEIVER = ReceiverId("flights", "kafka", 0)


@pytest.fixture
def receiver() -> ReceiverId:
    return RECEIVER


@pytest.fixture
def storage(tmp_path: Path) -> FaultyStorage:
    """A storage rooted at the log."""
    return FaultyStorage(LocalStorage(tmp_path / "log"))


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(1_700_000_000_000)


@pytest.fixture
def open_writer(storage: FaultyStorage, clock: ManualClock) -> Callable[..., WriteAheadLogWriter]:
    def open_writer(epoch: int = 1, **options: Any) -> WriteAheadLogWriter:
        return WriteAheadLogWriter(storage, "", RECEIVER, epoch, clock=clock, **writer_options(**options))

    return open_writer
