"""Outputs and decoders of other packages in a definition, found by the entry point that is named as their kind."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.unit.stream.definitions import fields

from headrace.stream import Stream, StreamDefinitionError

MODULE = """
from typing import Literal
from headrace.stream import DecoderDefinition, OutputDefinition

class HexDecoder(DecoderDefinition):
    decodes = "hex_lines:Hex"
    kind: Literal["hex"] = "hex"
    upper: bool = False

class FaxOutput(OutputDefinition):
    writer = "fax:FaxWriter"
    kind: Literal["fax"] = "fax"
    id: str = "fax"
    number: int
"""
ENTRY_POINTS = """
[headrace.outputs]
fax = fax_extension:FaxOutput
torn = fax_extension_that_is_not_there:Output
odd = json:loads

[headrace.decoders]
hex = fax_extension:HexDecoder
"""


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with an installed package that has an output and a decoder; it is on the path."""
    (tmp_path / "fax_extension.py").write_text(MODULE)
    folder = tmp_path / "fax_extension-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: fax-extension\nVersion: 1.0\n")
    (folder / "entry_points.txt").write_text(ENTRY_POINTS)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def definition(**changes: Any) -> str:
    """The JSON of a stream with some of the fields of its output changed."""
    given = json.loads(Stream(**fields()).to_json())
    given["outputs"] = [{"number": 7, **changes}]
    given["inputs"][0]["value_decoder"] = {"kind": "hex", "upper": True}
    return json.dumps(given)


def test_a_definition_travels_as_json_with_all_fields_of_an_extension(installed: Path) -> None:
    text = definition(kind="fax")
    read = Stream.from_json(text)
    assert Stream.from_json(read.to_json()) == read
    assert json.loads(read.to_json())["outputs"][0]["number"] == 7
    assert json.loads(read.to_json())["inputs"][0]["value_decoder"] == {"kind": "hex", "upper": True}
    # In Python it is named by its class, which needs no entry point.
    from fax_extension import FaxOutput

    assert Stream(**fields(outputs=(FaxOutput(number=7),), inputs=read.inputs)) == read


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "telex"}, r"outputs\.0 has the kind 'telex', which is none of headrace's \(console, .*"
         r"entry point 'telex' in the group headrace\.outputs, wherever the stream runs"),
        ({"kind": "torn"}, r"outputs\.0 has the kind 'torn', .*fax_extension_that_is_not_there.*cannot be loaded"),
        ({"kind": "odd"}, r"json:loads, is no class that extends OutputDefinition"),
        ({"kind": "fax", "number": "x"}, r"outputs\.0\.number must be a valid integer"),
        ({"kind": "fax", "numbre": 1}, r"outputs\.0\.numbre is no field"),
    ],
    ids=["not installed", "cannot be imported", "no output", "wrong field", "unknown field"],
)  # fmt: skip
def test_what_is_wrong_with_an_extension_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(StreamDefinitionError, match=message):
        Stream.from_json(definition(**changes))


def test_a_definition_without_extensions_looks_for_no_entry_points() -> None:
    text = Stream(**fields()).to_json()
    code = "import sys; from headrace.stream import Stream; Stream.from_json(sys.argv[1])"
    # pydantic looks for its own plugins when it is imported; a read definition must not add to that.
    code += "; import importlib.metadata as m; m.entry_points = None; Stream.from_json(sys.argv[1])"
    subprocess.run([sys.executable, "-c", code, text], check=True)
