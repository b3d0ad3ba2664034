"""What is read from the log's folder, from Kafka or from the ledger is parsed, never run."""

from __future__ import annotations

import ast
import json
import struct
from pathlib import Path

import google_crc32c
import pyarrow as pa
import pytest
from tests.support.records import make_block

import headrace
from headrace.batch.checkpoint import CheckpointError, read_newest
from headrace.batch.manifest import DocumentDamagedError, Manifest, ManifestError, decode_document, encode_document
from headrace.blocks import BlockHandle
from headrace.wal import frame
from headrace.wal.errors import PathEscapesRootError, PayloadError, WalError
from headrace.wal.frame import decode, encode
from headrace.wal.reader import read_block
from headrace.wal.scan import scan_segment
from headrace.wal.storage import open_storage

SOURCES = sorted(Path(headrace.__file__).parent.rglob("*.py"))
# Loads objects, or runs text.
UNSAFE_MODULES = {"pickle", "marshal", "shelve", "dill", "yaml", "cloudpickle", "joblib"}
UNSAFE_CALLS = {"eval", "exec", "compile", "__import__"}
# Registers the user's own modules to be sent by value; loads only what it has pickled itself, in a test.
SENDS_ONLY = {"spark/records/transforms.py", "testing/extensions.py"}


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: str(path.relative_to(SOURCES[0].parent)))
def test_nothing_loads_objects_or_runs_text(source: Path) -> None:
    name = source.relative_to(Path(headrace.__file__).parent).as_posix()
    for node in ast.walk(ast.parse(source.read_text())):
        modules: list[str] = []
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            modules = [node.module or "", *(alias.name for alias in node.names)]
        if name not in SENDS_ONLY:
            assert not {module.partition(".")[0] for module in modules} & UNSAFE_MODULES, name
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in UNSAFE_CALLS, name
        if isinstance(node, ast.keyword) and node.arg == "shell":
            assert isinstance(node.value, ast.Constant) and node.value.value is False, name


def hostile_payload() -> bytes:
    """A block whose checksum would hold, and whose values' offsets lead far out of their buffer."""
    batch = make_block([b"some"] * 4)[0]
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as stream:
        stream.write_batch(batch)
    data = bytearray(sink.getvalue().to_pybytes())
    column = batch.column("value")
    offsets = column.buffers()[1].to_pybytes()[: 4 * (len(batch) + 1)]
    place = data.find(offsets)
    assert place > 0
    data[place + 4 : place + 8] = struct.pack("<i", 2**31 - 1)
    return bytes(data)


def test_offsets_out_of_their_buffer_are_not_followed() -> None:
    with pytest.raises(PayloadError):
        decode(hostile_payload())
    assert decode(encode(make_block([b"x"])[0])).num_rows == 1


@pytest.mark.parametrize(
    "header",
    [b"[" * 100_000, b"[]", b"null", b'"text"', b"{}", b'{"stream": {}}', b"\xff\xfe", b"1e999", b'{"ranges": 5}'],
    ids=lambda header: repr(header[:12]),
)
@pytest.mark.parametrize("kind", [1, 2, 3])
def test_a_header_of_another_form_is_damage(tmp_path: Path, header: bytes, kind: int) -> None:
    name = "records-0/0000000001-000000-1700000000000.wal"
    layout = frame._LAYOUT.pack(frame.MAGIC, frame.VERSION, kind, 0, frame.segment_id(name), 0, len(header), 0, 0)
    crc = google_crc32c.extend(google_crc32c.value(layout), header)
    path = tmp_path / name
    path.parent.mkdir()
    path.write_bytes(layout + frame._CRC.pack(crc) + header)
    scan = scan_segment(open_storage(str(tmp_path)), name, newest=True)
    try:
        assert list(scan) == []
    except WalError:
        return
    assert scan.torn_tail is not None


@pytest.mark.parametrize("body", [b"[" * 100_000, b"[]", b"null", b"{", b"\xff"], ids=lambda body: repr(body[:5]))
def test_a_document_of_another_form_is_damaged(tmp_path: Path, body: bytes) -> None:
    data = body + b"\ncrc32c:%08x\n" % google_crc32c.value(body)
    with pytest.raises(DocumentDamagedError):
        decode_document(data)
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "1-1.json").write_bytes(data)
    with pytest.raises(CheckpointError):
        read_newest(open_storage(str(tmp_path)))


MANIFEST = {"version": 1, "stream": "s", "batch_time_ms": 1, "interval_ms": 1, "segments": ["a"], "inputs": {}}


@pytest.mark.parametrize(
    "changes",
    [
        {"inputs": []},
        {"inputs": {"a": {}}},
        {"inputs": {"a": {"partitions": 5, "blocks": []}}},
        {"inputs": {"a": {"partitions": [], "blocks": [[7, 0, 1, 1, 1, []]]}}},
        {"inputs": {"a": {"partitions": [["t", "i", 0, 1]], "blocks": [[0, 0, 1, 1, 1, [[0, 9, 1, 1]]]]}}},
        {"segments": None, "inputs": {"a": {"partitions": [], "blocks": [[0, 0, 1, 1, 1, []]]}}},
    ],
    ids=str,
)
def test_a_manifest_of_another_form_is_refused(changes: dict[str, object]) -> None:
    data = encode_document(json.loads(json.dumps(MANIFEST | changes)))
    with pytest.raises(ManifestError):
        Manifest.from_bytes(data, "/s/manifests/1.json")


def test_a_manifest_names_files_below_its_log_only(tmp_path: Path) -> None:
    inputs = {"a": {"partitions": [["t", "i", 0, 1]], "blocks": [[0, 0, 60, 1, 1, [[0, 0, 1, 1]]]]}}
    data = encode_document(MANIFEST | {"segments": ["../../secret"], "inputs": inputs})
    manifest = Manifest.from_bytes(data, f"{tmp_path}/s/manifests/1.json")
    ((handle, _, _),) = manifest.blocks("a")
    assert handle == BlockHandle("../../secret", 0, 60)
    with pytest.raises(PathEscapesRootError):
        read_block(open_storage(manifest.log_root), handle)
