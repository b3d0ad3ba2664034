"""What the source makes of a block that it cannot read."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.blocks import ReceiverId
from headrace.errors import Failure
from headrace.spark.block_groups import ListedBlock
from headrace.spark.wal_source import DamagedBlockError, UnknownVersionError, UnreadableBlockError, read_partition
from headrace.testing.records import make_block
from headrace.wal import frame
from headrace.wal.local_storage import LocalStorage
from headrace.wal.writer import WriteAheadLogWriter


@pytest.mark.parametrize(
    ("what", "error", "failure"),
    [
        ("newer", UnknownVersionError, Failure.PASSING),
        ("damaged", DamagedBlockError, Failure.FINAL),
        ("gone", UnreadableBlockError, Failure.PASSING),
    ],
)
def test_a_block_that_cannot_be_read_says_whether_to_try_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, error: type[UnreadableBlockError], failure: Failure
) -> None:
    storage = LocalStorage(tmp_path)
    batch, ranges = make_block([b"value"])
    with monkeypatch.context() as patch:
        if what == "newer":
            patch.setattr(frame, "VERSION", 2)
        handle = (
            WriteAheadLogWriter(storage, "", ReceiverId("flights", "kafka", 0), 1)
            .write(batch, ranges, cut_time_ms=0, last_accepted_sequence=None)
            .handle
        )
    path = tmp_path / handle.segment
    if what == "damaged":
        path.write_bytes(path.read_bytes()[:-9] + bytes(9))
    elif what == "gone":
        path.unlink()
    with pytest.raises(UnreadableBlockError, match="cannot be read") as raised:
        list(read_partition(str(tmp_path), [ListedBlock(handle, 1, 1)]))
    assert type(raised.value) is error
    assert raised.value.failure is failure
