"""The schemas of a registry that a stream keeps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headrace.formats.schema_text import SchemaText
from headrace.kept_values import KeptValues
from headrace.registry.client import RegisteredSchema, SchemaUnknownError
from headrace.registry.schemas import KeptSchemaMissingError, KeptSchemas, RegistryChangedError


def schema(name: str, blanks: str = "") -> RegisteredSchema:
    return RegisteredSchema("AVRO", SchemaText(f'{{"type": "enum", "name":{blanks} "{name}", "symbols": ["X"]}}'))


class Answers:
    """What a registry answers. Each question is counted."""

    def __init__(self, ids: dict[int | str, RegisteredSchema], versions: list[RegisteredSchema] | None = None) -> None:
        self.ids = ids
        self.versions = versions or []
        self.asked = 0

    def schema(self, id_: int | str) -> RegisteredSchema:
        self.asked += 1
        if id_ not in self.ids:
            raise SchemaUnknownError(f"no schema {id_}")
        return self.ids[id_]

    def version(self, subject: str, version: int | None = None) -> RegisteredSchema:
        self.asked += 1
        number = len(self.versions) if version is None else version
        found = self.versions[number - 1]
        return RegisteredSchema(found.format, found.schema, number)


def kept(folder: Path, answers: Answers, connection: str = "schemas") -> KeptSchemas:
    return KeptSchemas(KeptValues(str(folder)), connection, lambda _: answers)


def test_a_kept_schema_needs_no_registry(tmp_path: Path) -> None:
    answers = Answers({7: schema("A")})
    assert kept(tmp_path, answers).of_id(7, ask=True) == schema("A")
    assert kept(tmp_path, answers).of_id(7, ask=False) == schema("A")
    assert answers.asked == 1


def test_another_schema_for_an_id_is_refused(tmp_path: Path) -> None:
    """A registry that was set up again counts its ids from 1 again."""
    kept(tmp_path, Answers({7: schema("A")})).of_id(7, ask=True)
    again = Answers({7: schema("B")})
    with pytest.raises(RegistryChangedError, match=r'schema 7 .* now AVRO .*"B".* before AVRO .*"A"'):
        kept(tmp_path, again).of_id(7, ask=True)
    assert kept(tmp_path, again).of_id(7, ask=False) == schema("A")


def test_a_registry_may_write_a_schema_in_another_way(tmp_path: Path) -> None:
    kept(tmp_path, Answers({7: schema("A")})).of_id(7, ask=True)
    kept(tmp_path, Answers({7: schema("A", "  ")})).of_id(7, ask=True)


def test_two_registries_have_ids_of_their_own(tmp_path: Path) -> None:
    kept(tmp_path, Answers({7: schema("A")})).of_id(7, ask=True)
    assert kept(tmp_path, Answers({7: schema("B")}), "other").of_id(7, ask=True) == schema("B")


def test_an_unknown_id_is_asked_for_again(tmp_path: Path) -> None:
    answers = Answers({})
    with pytest.raises(SchemaUnknownError):
        kept(tmp_path, answers).of_id(7, ask=True)
    answers.ids[7] = schema("A")
    assert kept(tmp_path, answers).of_id(7, ask=True) == schema("A")


def test_the_newest_version_is_recorded_when_it_changes(tmp_path: Path) -> None:
    answers = Answers({}, [schema("A")])
    schemas = kept(tmp_path, answers)
    first, found = schemas.newest("orders-value")
    assert (first.version, found.schema) == (1, schema("A").schema)
    assert not list(tmp_path.iterdir())
    schemas.keep(found)
    for _ in range(2):
        schemas.record("in.value_decoder", first)
    assert len(list(tmp_path.glob("reader-*"))) == 1
    answers.versions.append(schema("B"))
    second, _ = schemas.newest("orders-value")
    assert second.version == 2
    assert schemas.recorded("in.value_decoder", "orders-value") == first
    schemas.record("in.value_decoder", second)
    assert kept(tmp_path, answers).recorded("in.value_decoder", "orders-value") == second
    assert kept(tmp_path, answers).recorded("in.key_decoder", "orders-key") is None
    assert kept(tmp_path, answers).of_digest(first.sha256).schema == schema("A").schema
    # A version that was taken back is the newest one again.
    schemas.record("in.value_decoder", first)
    assert kept(tmp_path, answers).recorded("in.value_decoder", "orders-value") == first


def test_a_named_version_is_asked_for_once(tmp_path: Path) -> None:
    answers = Answers({}, [schema("A"), schema("B")])
    assert kept(tmp_path, answers).of_version("orders-value", 1, ask=False) is None
    for _ in range(2):
        found = kept(tmp_path, answers).of_version("orders-value", 1)
        assert found is not None
        assert found.schema == schema("A").schema
        answers.versions.clear()


def test_a_look_at_a_batch_keeps_nothing(tmp_path: Path) -> None:
    answers = Answers({7: schema("A")}, [schema("A")])
    looking = KeptSchemas(KeptValues(str(tmp_path), "look"), "schemas", lambda _: answers)
    assert looking.of_id(7, ask=False) == schema("A")
    assert looking.of_version("orders-value", 1) is not None
    assert not list(tmp_path.iterdir())


def test_a_known_id_costs_no_write(tmp_path: Path) -> None:
    kept(tmp_path, Answers({7: schema("A")})).of_id(7, ask=True)
    times = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    for path in times:
        path.chmod(0o400)
    assert kept(tmp_path, Answers({7: schema("A")})).of_id(7, ask=True) == schema("A")
    assert {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == times


def test_an_id_that_a_registry_has_lost_is_read_as_before(tmp_path: Path) -> None:
    """No record can be written with it any more."""
    kept(tmp_path, Answers({7: schema("A")})).of_id(7, ask=True)
    assert kept(tmp_path, Answers({})).of_id(7, ask=True) == schema("A")


def test_the_same_text_in_another_format_is_refused(tmp_path: Path) -> None:
    kept(tmp_path, Answers({7: RegisteredSchema("AVRO", SchemaText('{"type":"string"}'))})).of_id(7, ask=True)
    other = Answers({7: RegisteredSchema("JSON", SchemaText('{"type":"string"}'))})
    with pytest.raises(RegistryChangedError):
        kept(tmp_path, other).of_id(7, ask=True)


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ('{"a": 1, "b": 2}', '{"b":2,"a":1}', True),
        ('{"const": 1}', '{"const": true}', False),
        ("message M {\n  int32 a = 1;\n}", "message M {\n\nint32  a = 1;\n}\n", True),
        ("message M { // old\n int32 a = 1; }", "message M { // old int32 a = 1; }", False),
    ],
)
def test_schemas_are_the_same_but_for_blanks(one: str, other: str, same: bool) -> None:
    assert SchemaText(one).same_as(SchemaText(other)) is same


@pytest.mark.parametrize("damage", ["missing", "damaged"])
@pytest.mark.parametrize("ask", [True, False])
def test_a_registry_mends_a_lost_schema(tmp_path: Path, damage: str, ask: bool) -> None:
    """If it still gives the schema of the digest."""
    answers = Answers({7: schema("A")}, [schema("A")])
    kept(tmp_path, answers).of_id(7, ask=True)
    reader, _ = kept(tmp_path, answers).newest("orders-value")

    def damage_file() -> Path:
        (path,) = tmp_path.glob("schema-*")
        path.unlink() if damage == "missing" else path.write_bytes(path.read_bytes()[:9])
        return path

    path = damage_file()
    looking = KeptSchemas(KeptValues(str(tmp_path), "look"), "schemas", lambda _: answers)
    assert looking.of_reader(reader).schema == schema("A").schema
    assert not path.exists() or len(path.read_bytes()) == 9
    assert kept(tmp_path, answers).of_id(7, ask=ask) == schema("A")
    assert kept(tmp_path, Answers({})).of_id(7, ask=False) == schema("A")
    damage_file()
    assert kept(tmp_path, answers).of_reader(reader).schema == schema("A").schema
    assert kept(tmp_path, Answers({})).of_digest(reader.sha256) == schema("A")
    damage_file()
    with pytest.raises(KeptSchemaMissingError, match=f"is {damage} in"):
        kept(tmp_path, Answers({7: schema("B")}, [schema("B")])).of_reader(reader)


@pytest.mark.parametrize("damage", ["missing", "damaged"])
def test_a_lost_schema_is_named(tmp_path: Path, damage: str) -> None:
    kept(tmp_path, Answers({7: schema("A")})).of_id(7, ask=True)
    (path,) = tmp_path.glob("schema-*")
    if damage == "missing":
        path.unlink()
    else:
        path.write_text(json.dumps({"format": "AVRO", "text": "{}"}))
    with pytest.raises(KeptSchemaMissingError, match=f"is {damage} in"):
        kept(tmp_path, Answers({})).of_id(7, ask=False)
