"""Outputs and decoders of other packages in a definition, found by the entry point that is named as their kind."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import pytest
from tests.unit.stream.definitions import fields

from headrace.stream import OutputDefinition, Stream, StreamDefinitionError
from headrace.stream.stream import check_extensions

MODULE = """
from typing import ClassVar, Literal
from headrace.stream import DecoderDefinition, OutputDefinition

class HexDecoder(DecoderDefinition):
    decodes = "fax_extension:Hex"
    kind: Literal["hex"] = "hex"
    upper: bool = False
    column: ClassVar[str] = "STRING"

class FaxOutput(OutputDefinition):
    writer = "fax_extension:FaxWriter"
    kind: Literal["fax"] = "fax"
    id: str = "fax"
    number: int

class RegistryDecoder(HexDecoder):
    kind: Literal["registry"] = "registry"
    registry: str = "registry_default"

    @property
    def connection_ids(self):
        return (self.registry,)

class Hex: ...
class FaxWriter: ...
"""
ENTRY_POINTS = """
[headrace.outputs]
fax = fax_extension:FaxOutput
torn = fax_extension_that_is_not_there:Output
odd = json:loads

[headrace.decoders]
hex = fax_extension:HexDecoder
registry = fax_extension:RegistryDecoder
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
def test_the_connections_of_a_decoder_are_those_of_its_stream() -> None:
    given = json.loads(definition(kind="fax"))
    given["inputs"][0] |= {"key_decoder": {"kind": "registry"}, "value_decoder": {"kind": "registry", "registry": "b"}}
    stream = Stream(**given)
    assert {"registry_default", "b"} <= set(stream.connection_ids)
    assert len(stream.connection_ids) == len(set(stream.connection_ids))


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "telex"}, r"outputs\.0 has the kind 'telex', which is none of headrace's \(console, .*"
         r"of no installed package \([^)]*fax, odd,[^)]*torn[^)]*\); .*"
         r"entry point 'telex' in the group headrace\.outputs, wherever the stream runs"),
        ({"kind": "torn"}, r"outputs\.0 has the kind 'torn', .*fax_extension_that_is_not_there.*cannot be loaded"),
        ({"kind": "odd"}, r"json:loads, is no class that extends OutputDefinition"),
        ({"kind": "fax", "number": "x"}, r"outputs\.0\.number must be a valid integer"),
        ({"kind": "fax", "numbre": 1}, r"outputs\.0\.numbre is no field"),
        # The class gives its id the type str.
        ({"kind": "fax", "id": "to/all"}, r"outputs\.0\.id must start with a letter and hold at most 63 of"),
    ],
    ids=["not installed", "cannot be imported", "no output", "wrong field", "unknown field", "no id"],
)  # fmt: skip
def test_what_is_wrong_with_an_extension_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(StreamDefinitionError, match=message):
        Stream.from_json(definition(**changes))


def test_an_output_without_a_writer_is_refused_when_its_class_is_defined() -> None:
    with pytest.raises(StreamDefinitionError, match=r"BareOutput names no writer\. .*writer = \"module:Class\""):

        class BareOutput(OutputDefinition):
            kind: Literal["bare"] = "bare"
            id: str = "bare"

    class OfSeveralKinds(OutputDefinition):
        """Without a kind, it is a base class of others."""


@pytest.mark.parametrize(
    ("attribute", "value", "message"),
    [
        ("FaxOutput.writer", "nowhere:Writer", "The writer of output 'fax' nowhere:Writer cannot be imported"),
        ("FaxOutput.check", "fax_extension:answers", "has no 'answers' to be the check of output 'fax'"),
        ("FaxOutput.datasets", "fax_extension:sent", "has no 'sent' to be the datasets of output 'fax'"),
        ("HexDecoder.decodes", "fax_extension:Hxe", "no 'Hxe' to be the class of the value_decoder of input"),
        ("HexDecoder.column", "a VARCHR(2)", r"has the column 'a VARCHR\(2\)', which is not in Spark's DDL"),
    ],
)
def test_code_that_an_extension_names_wrongly_is_found_before_a_batch_runs(
    installed: Path, monkeypatch: pytest.MonkeyPatch, attribute: str, value: str, message: str
) -> None:
    stream = Stream.from_json(definition(kind="fax"))
    check_extensions(stream)
    monkeypatch.setattr(f"fax_extension.{attribute}", value)
    with pytest.raises(StreamDefinitionError, match=message):
        check_extensions(stream)


@pytest.mark.parametrize("column", ["ARRAY<STRING>", "a INT, b STRUCT<c: DATE>", "STRUCT<a: INT>"])
def test_a_decoded_value_is_of_one_type_or_a_struct_of_columns(
    installed: Path, monkeypatch: pytest.MonkeyPatch, column: str
) -> None:
    stream = Stream.from_json(definition(kind="fax"))
    monkeypatch.setattr("fax_extension.HexDecoder.column", column)
    check_extensions(stream)


def test_an_extension_that_has_no_entry_point_or_changes_as_json_is_found_before_a_batch_runs(installed: Path) -> None:
    stream = Stream.from_json(definition(kind="fax"))
    from fax_extension import FaxOutput

    class TelexOutput(FaxOutput):
        kind: Literal["telex"] = "telex"

    class LoudFaxOutput(FaxOutput):
        """Of the kind whose entry point names another class."""

    of_class = {**dict(stream), "outputs": TelexOutput(number=7)}
    with pytest.raises(StreamDefinitionError, match="has the kind 'telex', which is none of headrace's"):
        check_extensions(Stream(**of_class))
    with pytest.raises(StreamDefinitionError, match="is another one when it is read from its JSON"):
        check_extensions(Stream(**{**of_class, "outputs": LoudFaxOutput(number=7)}))


def test_a_definition_without_extensions_looks_for_no_entry_points() -> None:
    text = Stream(**fields()).to_json()
    code = "import sys; from headrace.stream import Stream; Stream.from_json(sys.argv[1])"
    # pydantic looks for its own plugins when it is imported; a read definition must not add to that.
    code += "; import importlib.metadata as m; m.entry_points = None; Stream.from_json(sys.argv[1])"
    subprocess.run([sys.executable, "-c", code, text], check=True)
