"""A receiver copies the blocks that it has stored, and no others."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.unit.receiver.conftest import Setting
from tests.unit.receiver.waiting import eventually

from headrace.blocks import BlockHandle
from headrace.ledger import ReceiverState
from headrace.ledger.errors import LedgerUnavailableError
from headrace.stream import LocalCopies, Storage, Stream
from headrace.wal.local_copies import BlockCopies, CopySettings
from headrace.wal.reader import read_blocks


@pytest.fixture
def setting(make_stream: Callable[..., Stream], make_setting: Callable[[Stream], Setting], tmp_path: Path) -> Setting:
    """A receiver whose log is in an object store, with copies below ``tmp_path``."""
    storage = Storage(
        url=f"memory://bucket/{secrets.token_hex(8)}", local_copies=LocalCopies(folder=str(tmp_path / "copies"))
    )
    made = make_setting(make_stream().model_copy(update={"storage": storage}))
    made.topic(1)
    made.assign(0)
    return made


def handles(setting: Setting) -> list[BlockHandle]:
    """The handles of all blocks that the ledger has accepted."""
    blocks = setting.ledger.allocations.blocks_of
    return [
        block.info.handle
        for each in setting.ledger.blocks.unclaimed("air")
        for block in blocks("air", each.batch_time_ms)
    ]


def copies_of(setting: Setting) -> BlockCopies:
    """The copies, as a batch's task opens them."""
    settings = CopySettings.of(setting.stream.storage)
    assert settings is not None
    return BlockCopies(f"{setting.stream.folder_url}/log", settings)


def test_each_stored_block_is_copied_and_read_from_the_copy(setting: Setting) -> None:
    with setting.running() as running:
        for number in range(3):
            setting.kafka.produce("flights", 0, b"%d" % number)
            eventually(lambda number=number: setting.positions() == [number + 1])  # type: ignore[misc]
        eventually(lambda: setting.receiver().stats.get("copied_blocks") == 3)
        assert running.end().state is ReceiverState.STOPPED
    copies, stored = copies_of(setting), handles(setting)
    read = read_blocks(setting.storage.below("log"), stored, copies)
    assert [block.batch.column("value")[0].as_py() for block in read] == [b"0", b"1", b"2"]
    assert (copies.counts.hits, copies.counts.misses) == (3, 0)
    stats = setting.receiver().stats
    assert (stats["copied_bytes"], stats["copy_failures"]) == (sum(each.length for each in stored), 0)


def test_a_block_that_the_ledger_has_not_accepted_is_not_copied(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.receiver.block_store.LEDGER_TIMEOUT_SECONDS", 0.0)

    def add(*_: Any) -> Any:
        raise LedgerUnavailableError("There is no connection.")

    monkeypatch.setattr(type(setting.ledger.blocks), "add", add)
    setting.kafka.produce("flights", 0, b"a")
    assert "did not answer" in (setting.start().join().error or "")
    assert len(setting.storage.paths("log")) == 1
    assert not copies_of(setting).folder.exists()


def test_a_block_is_stored_also_if_it_cannot_be_copied(setting: Setting, tmp_path: Path) -> None:
    (tmp_path / "copies").write_text("a file where the folder should be")
    setting.kafka.produce("flights", 0, b"a")
    with setting.running() as running:
        eventually(lambda: setting.positions() == [1])
        eventually(lambda: setting.receiver().stats.get("copy_failures") == 1)
        assert running.end().state is ReceiverState.STOPPED
    assert setting.stored() == [(0, 0, b"a")]


def test_a_stream_without_the_setting_has_no_copies(setting: Setting, tmp_path: Path) -> None:
    storage = Storage(url=setting.stream.storage.url)
    setting.stream = setting.stream.model_copy(update={"storage": storage})
    setting.kafka.produce("flights", 0, b"a")
    with setting.running() as running:
        eventually(lambda: setting.positions() == [1])
        eventually(lambda: setting.receiver().stats.get("blocks") == 1)
        assert running.end().state is ReceiverState.STOPPED
    assert setting.receiver().stats["copied_blocks"] == 0
    assert not (tmp_path / "copies").exists()
