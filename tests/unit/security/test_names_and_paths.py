"""Names in a definition become folders, indices and identifiers, and stay within them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headrace.blocks import BlockHandle
from headrace.stream import ConsoleOutput, ElasticsearchOutput, KafkaInput, ParquetOutput, Stream
from headrace.stream.model import StreamDefinitionError, is_reference
from headrace.wal.errors import PathEscapesRootError
from headrace.wal.reader import read_block
from headrace.wal.storage import open_storage

HOSTILE_NAMES = [
    "../up",
    "a/b",
    "a\n",
    "a b",
    "",
    ".",
    "..",
    "a\x00",
    "-rf",
    "--class",
    "A",
    "ä",
    "a" * 64,
    "a;b",
    "$(id)",
]


def definition(folder: Path, **changes: Any) -> Stream:
    fields: dict[str, Any] = {
        "name": "shop",
        "inputs": KafkaInput(bootstrap_servers="127.0.0.1:1", topics="clicks"),
        "outputs": ConsoleOutput(),
        "batch_interval": "10 s",
        "storage": folder,
        "ledger": f"sqlite:///{folder}/ledger.db",
    }
    return Stream(**(fields | changes))


@pytest.mark.parametrize("name", HOSTILE_NAMES)
def test_a_name_is_a_plain_word(tmp_path: Path, name: str) -> None:
    with pytest.raises(StreamDefinitionError):
        definition(tmp_path, name=name)
    with pytest.raises(StreamDefinitionError):
        definition(tmp_path, inputs=KafkaInput(id=name, bootstrap_servers="127.0.0.1:1", topics="clicks"))
    with pytest.raises(StreamDefinitionError):
        definition(tmp_path, outputs=ConsoleOutput(id=name))


@pytest.mark.parametrize("index", ["..", ".", "a/b", "a\nb", "a,b", "*", "_all", "a?x", "a#b", "a\x00b", "A"])
def test_an_index_is_one_index(index: str) -> None:
    with pytest.raises(StreamDefinitionError):
        ElasticsearchOutput(hosts="http://127.0.0.1:9200", index=index)
    with pytest.raises(StreamDefinitionError):
        ElasticsearchOutput(hosts="http://127.0.0.1:9200", index="a", dead_letter_index=index)


@pytest.mark.parametrize("path", ["relative", "../up", "s3://bucket/x", "file://host/x"])
def test_files_go_to_an_absolute_folder(path: str) -> None:
    with pytest.raises(StreamDefinitionError):
        ParquetOutput(path=path)


@pytest.mark.parametrize("url", ["relative", "../up", "s3://user:secret@bucket/x"])
def test_storage_is_an_absolute_folder_without_a_secret(tmp_path: Path, url: str) -> None:
    with pytest.raises(StreamDefinitionError):
        definition(tmp_path, storage={"url": url})


@pytest.mark.parametrize(
    "text", ["os:system\n", "os.system", "os:path.join", "os:system('id')", ":x", "x:", "a b:c", "lambda:0", "-m:x"]
)
def test_a_reference_is_a_module_and_a_name_and_nothing_else(text: str) -> None:
    assert not is_reference(text)


@pytest.mark.parametrize(
    "path", ["../outside", "a/../../outside", "/etc/passwd", "a/./b", "a\\..\\b", "a\x00b", "link/x"]
)
def test_a_handle_leads_nowhere_but_into_the_log(tmp_path: Path, path: str) -> None:
    (tmp_path / "log").mkdir()
    (tmp_path / "outside").write_bytes(b"secret")
    (tmp_path / "log" / "link").symlink_to(tmp_path)
    with pytest.raises(PathEscapesRootError):
        read_block(open_storage(str(tmp_path / "log")), BlockHandle(path, 0, 100))


def test_a_file_that_links_out_of_the_storage_is_left_alone(tmp_path: Path) -> None:
    """It is neither read nor cut."""
    (tmp_path / "log").mkdir()
    outside = tmp_path / "outside"
    outside.write_bytes(b"secret")
    (tmp_path / "log" / "segment").symlink_to(outside)
    storage = open_storage(str(tmp_path / "log"))
    for touch in (lambda: storage.read("segment"), lambda: storage.truncate("segment", 0)):
        with pytest.raises(PathEscapesRootError):
            touch()
    assert outside.read_bytes() == b"secret"


@pytest.mark.parametrize("field", ["transform", "outputs"])
def test_a_definition_is_read_and_not_run(tmp_path: Path, field: str) -> None:
    marker = tmp_path / "ran"
    module = tmp_path / "evil.py"
    module.write_text(f"open({str(marker)!r}, 'w')\n")
    given = definition(tmp_path, transform="evil:run", spark={"py_files": [str(module)]})
    assert Stream.from_json(given.to_json()) == given
    assert not marker.exists()
