"""Outputs and decoders of other packages in a definition, found by the entry point that is named as their kind."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import pytest
from tests.unit.stream.definitions import fields

from headrace.stream import KafkaInput, OutputDefinition, Stream, StreamDefinitionError
from headrace.stream.stream import check_extensions

MODULE = """
from typing import ClassVar, Literal
from headrace.stream import DecoderDefinition, InputDefinition, OutputDefinition

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

class TelegraphInput(InputDefinition):
    kind: Literal["telegraph"] = "telegraph"
    id: str = "telegraph"
    cable: str

    @property
    def receiver_class(self):
        return "fax_extension:Telegraph"

class Hex: ...
class FaxWriter: ...
class Telegraph: ...
"""
ENTRY_POINTS = """
[headrace.outputs]
fax = fax_extension:FaxOutput
torn = fax_extension_that_is_not_there:Output
odd = json:loads

[headrace.inputs]
telegraph = fax_extension:TelegraphInput

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


def test_a_definition_travels_as_json_with_an_extensions_fields(installed: Path) -> None:
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


def test_an_output_without_a_writer_is_refused_at_its_definition() -> None:
    """It is refused when its class is defined."""
    with pytest.raises(StreamDefinitionError, match=r"writer of the class .*BareOutput.* is None; .*\"module:name\""):

        class BareOutput(OutputDefinition):
            kind: Literal["bare"] = "bare"
            id: str = "bare"

    class OfSeveralKinds(OutputDefinition):
        """Without a kind, it is a base class of others."""


def defined(base: str, body: str) -> Any:
    """The class of an extension with this body, in a module ``house_fax``."""
    lines = [f"class House({base}):", "    kind: Literal['house'] = 'house'", '    """Of a package."""']
    if base == "OutputDefinition":
        lines += ["    writer = 'house_fax:Writer'", "    id: str = 'house'"]
    names: dict[str, Any] = {"__name__": "house_fax"}
    text = "\n".join([*lines, *(f"    {line}" for line in body.splitlines())])
    program = f"from typing import *\nfrom headrace.stream import *\n{text}"
    exec(compile(program, "house_fax.py", "exec", dont_inherit=True), names)  # noqa: S102 - the test's own
    return names["House"]


@pytest.mark.parametrize(
    ("base", "body", "message"),
    [
        (
            "OutputDefinition",
            "def connection_ids(self): return ('a',)",
            "connection_ids .* is a method; it must be a prop",
        ),
        (
            "OutputDefinition",
            "connection_ids: ClassVar = 'lake'",
            r"connection_ids .* is 'lake' \(a str\); .*tuple of the ids",
        ),
        (
            "OutputDefinition",
            "description: ClassVar = 'files'",
            r"description .* is 'files' \(a str\); .*tuple of two texts",
        ),
        (
            "OutputDefinition",
            "places: ClassVar = ('folder',)",
            r"places .*must be a tuple of OutputPlace\(server, kind",
        ),
        (
            "OutputDefinition",
            "functions: ClassVar = ('write',)",
            'functions .*must be a tuple of texts "module:function"',
        ),
        ("OutputDefinition", "keeps_undecodable = 'yes'", r"keeps_undecodable .* is 'yes' \(a str\); .*True or False"),
        ("OutputDefinition", "datasets = 'sent'", 'datasets .*a text "module:name", or None'),
        ("OutputDefinition", "check = print", 'check .* is <built-in function print>.*"module:name", or None'),
        (
            "OutputDefinition",
            "@property\ndef problems(self): return ()",
            "problems .* is <property.*; it must be a method",
        ),
        ("OutputDefinition", "description: str = 'files'", "description .* is a field; it must be a property"),
        ("OutputDefinition", "kind: str = 'house'", "kind .* is no Literal of one text"),
        ("DecoderDefinition", "decodes = 'Hex'", "decodes .* is 'Hex'"),
        ("DecoderDefinition", "def column(self): return 'STRING'", "column .* is a method; it must be a property"),
        ("DecoderDefinition", "column: ClassVar = ''", "column .*a type in Spark's DDL"),
        ("DecoderDefinition", "keeps = 'all'", r"keeps .* is 'all' \(a str\); .*True or False"),
        ("InputDefinition", "receiver_class: ClassVar = 'Wire'", "receiver_class .* is 'Wire'"),
        ("InputDefinition", "def keywords(self): return {}", "keywords .* is a method; it must be a property"),
        ("DecoderDefinition", "keywords: ClassVar = ['a']", "keywords .*a dict of keyword arguments"),
    ],
)
def test_an_attribute_of_a_wrong_shape_is_refused_with_its_class(base: str, body: str, message: str) -> None:
    """It is refused when the class is defined."""
    with pytest.raises(StreamDefinitionError, match=rf"{message}") as refused:
        defined(base, body)
    assert "house_fax.House (package house_fax)" in str(refused.value)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("@property\ndef description(self): return 'files'", r"outputs\.house: description .* is 'files' \(a str\)"),
        ("@property\ndef description(self): return self.nowhere", "description .* raises AttributeError: .*two texts"),
        ("@property\ndef connection_ids(self): return 'lake'", "connection_ids .* is 'lake'"),
        ("@property\ndef connection_ids(self): return None", "connection_ids .* is None"),
        ("@property\ndef places(self): return ('server', 'folder', 'x')", "places .* is "),
        ("@property\ndef functions(self): return [len]", "functions .* is "),
        ("def problems(self, stream): return None", "problems .* raises TypeError: .*an iterator of texts"),
        ("def problems(self, stream): return 'no folder'", "problems .* is 'no folder'"),
        ("def problems(self): yield 'x'", "problems .* raises TypeError"),
        ("def reasons_for_order(self): yield 1", "reasons_for_order .* is "),
        ("def whereabouts(self, batch_time_ms): return 1 / batch_time_ms", "whereabouts .* raises ZeroDivisionError"),
    ],
)
def test_a_value_of_a_wrong_shape_is_refused_with_its_stream(body: str, message: str) -> None:
    """It is refused where a stream is defined with it."""
    house = defined("OutputDefinition", body)
    with pytest.raises(StreamDefinitionError, match=message) as refused:
        Stream(**fields(outputs=(house(),)))
    assert "package house_fax" in str(refused.value)


def test_the_values_of_a_decoder_are_checked_too() -> None:
    house = defined("DecoderDefinition", "@property\ndef connection_ids(self): return 'registry'")
    source = KafkaInput(bootstrap_servers="h:1", topics="t", value_decoder=house())
    with pytest.raises(StreamDefinitionError, match=r"inputs\.records\.value_decoder: connection_ids .* is 'registry'"):
        Stream(**fields(inputs=source))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("@property\ndef receiver_class(self): return 'Wire'", r"inputs\.house: receiver_class .* is 'Wire'"),
        ("", r"inputs\.house: its class names no receiver_class"),
        ("@property\ndef receiver_class(self): return 'no_wire:Wire'", "receiver_class of inputs.house no_wire:Wire"),
    ],
    ids=["no reference", "none", "no such module"],
)
def test_an_input_without_receivers_is_refused(body: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    house = defined("InputDefinition", f"id: str = 'house'\n{body}")
    # As if its entry point were installed.
    monkeypatch.setattr("headrace.stream.model._class_of_kind", lambda *_: house)
    with pytest.raises(StreamDefinitionError, match=message):
        check_extensions(Stream(**fields(inputs=house())))


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_by": "timestamp"}, "batch_by: input telegraph is no Kafka input"),
        ({"delivery": "at_least_once", "storage": {"url": "/d"}}, "input telegraph is no Kafka input"),
        ({"inputs": {"kind": "telegraph", "cable": "a", "id": "TELE"}}, r"inputs\.0\.id must start with a letter"),
    ],
    ids=["event times", "at least once", "id"],
)
def test_what_only_kafka_can_is_refused_for_a_packages_input(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(StreamDefinitionError, match=message):
        Stream(**fields(**{"inputs": {"kind": "telegraph", "cable": "a"}, **changes}))


def test_a_field_of_an_extension_takes_no_secret() -> None:
    house = defined("OutputDefinition", "api_key: str\nurl: str = ''")
    with pytest.raises(
        StreamDefinitionError, match=r"outputs\.house: holds a login or a secret in api_key, url"
    ) as refused:
        Stream(**fields(outputs=(house(api_key="hunter2", url="https://me:hunter2@h"),)))
    assert "hunter2" not in str(refused.value)


def test_lists_are_taken_for_tuples() -> None:
    house = defined("OutputDefinition", "@property\ndef connection_ids(self): return ['lake']")
    assert "lake" in Stream(**fields(outputs=(house(),))).connection_ids


@pytest.mark.parametrize(
    ("name", "code", "message"),
    [
        ("exits", "raise SystemExit(3)", "cannot be loaded: SystemExit: 3"),
        ("fails", "raise RuntimeError('no licence')", "cannot be loaded: RuntimeError: no licence"),
        ("lacks", "import no_such_module", "cannot be loaded: ModuleNotFoundError"),
        (
            "shapes",
            "{}\n    description: ClassVar = 'x'\n",
            r"cannot be loaded: .*description of the class .*'x' \(a str\)",
        ),
        (
            "validates",
            "{}\n    @field_validator('id')\n    def _wrong(cls, value):\n        return {{}}[value]\n",
            r"a validator of its class house_validates\.House raises KeyError",
        ),
    ],
)
def test_an_extension_that_fails_is_the_error_of_its_stream(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, code: str, message: str
) -> None:
    beginning = "from typing import *\nfrom pydantic import field_validator\nfrom headrace.stream import *\n"
    beginning += f"class House(OutputDefinition):\n    kind: Literal['{name}'] = '{name}'\n    id: str = 'house'\n"
    (tmp_path / f"house_{name}.py").write_text(code.format(f"{beginning}    writer = 'house:Writer'"))
    package = tmp_path / f"house_{name}-1.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text(f"Metadata-Version: 2.1\nName: house-{name}\nVersion: 1.0\n")
    (package / "entry_points.txt").write_text(f"[headrace.outputs]\n{name} = house_{name}:House\n")
    monkeypatch.syspath_prepend(tmp_path)
    given = {**json.loads(Stream(**fields()).to_json()), "outputs": [{"kind": name, "id": "house"}]}
    with pytest.raises(StreamDefinitionError, match=rf"kind '{name}', .*{message}"):
        Stream(**given)


@pytest.mark.parametrize(
    ("attribute", "value", "message"),
    [
        ("FaxOutput.writer", "nowhere:Writer", "The writer of outputs.fax nowhere:Writer cannot be imported"),
        ("FaxOutput.check", "fax_extension:answers", "has no 'answers' to be the check of outputs.fax"),
        ("FaxOutput.datasets", "fax_extension:sent", "has no 'sent' to be the datasets of outputs.fax"),
        ("HexDecoder.decodes", "fax_extension:Hxe", "no 'Hxe' to be the decodes of inputs.records.value_decoder"),
        ("HexDecoder.column", "a VARCHR(2)", r"has the column 'a VARCHR\(2\)', which is not in Spark's DDL"),
    ],
)
def test_wrongly_named_code_is_found_before_a_batch_runs(
    installed: Path, monkeypatch: pytest.MonkeyPatch, attribute: str, value: str, message: str
) -> None:
    """An extension names that code."""
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


def test_an_extension_without_an_entry_point_is_found_early(installed: Path) -> None:
    """It is found before a batch runs, and so is one that changes as JSON."""
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


def test_a_definition_without_extensions_seeks_no_entry_points() -> None:
    text = Stream(**fields()).to_json()
    code = "import sys; from headrace.stream import Stream; Stream.from_json(sys.argv[1])"
    # pydantic looks for its own plugins when it is imported; a read definition must not add to that.
    code += "; import importlib.metadata as m; m.entry_points = None; Stream.from_json(sys.argv[1])"
    subprocess.run([sys.executable, "-c", code, text], check=True)
