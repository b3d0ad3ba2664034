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
    first, found, before = kept(tmp_path, answers).newest("orders-value")
    assert found.schema == schema("A").schema
    assert (first.version, before) == (1, None)
    assert kept(tmp_path, answers).newest("orders-value")[::2] == (first, None)
    answers.versions.append(schema("B"))
    assert kept(tmp_path, answers).newest("orders-value", record=False)[2] == first
    assert kept(tmp_path, answers).recorded("orders-value") == first
    second, _, before = kept(tmp_path, answers).newest("orders-value")
    assert (second.version, before) == (2, first)
    assert kept(tmp_path, answers).recorded("orders-value") == second
    assert kept(tmp_path, answers).recorded("orders-key") is None
    assert kept(tmp_path, answers).of_digest(first.sha256).schema == schema("A").schema
    # A version that was taken back is the newest one again.
    del answers.versions[1]
    assert kept(tmp_path, answers).newest("orders-value")[::2] == (first, second)
    assert kept(tmp_path, answers).recorded("orders-value") == first


def test_a_named_version_is_asked_for_once(tmp_path: Path) -> None:
    answers = Answers({}, [schema("A"), schema("B")])
    assert kept(tmp_path, answers).of_version("orders-value", 1).schema == schema("A").schema
    answers.versions.clear()
    assert kept(tmp_path, answers).of_version("orders-value", 1).schema == schema("A").schema


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
