"""`SchemaText`: a schema as its author wrote it, with the texts of the schemas that it refers to."""

from __future__ import annotations

import json
from dataclasses import dataclass

_SHOWN_CHARACTERS = 200


class UnreadableSchemaError(ValueError):
    """No value that was written by a schema can be read by another one; the text has what differs."""


MAX_SCHEMA_BYTES = 4 * 1024 * 1024
"""Of a schema's text. One of a megabyte decodes its first value within a tenth of a second to three seconds: a JSON
Schema of 9,000 properties takes longest, of which a validator and a decoder are made."""
MAX_DEPTH = 64
MAX_COLUMNS = 10_000
"""Of all depths. A type that is named in many places has its columns in each."""


@dataclass(frozen=True, slots=True)
class SchemaText:
    """A schema in Avro's JSON, in Protobuf's language, or in JSON Schema.

    ``references`` are the schemas that it refers to, directly or not: the name by which it does, and the text. A name
    is that of an Avro type, of a file that Protobuf imports, or a URI of a ``$ref``. Those that others refer to come
    first.
    """

    text: str
    references: tuple[tuple[str, str], ...] = ()

    def to_json(self) -> str:
        """As JSON, the same for equal schemas."""
        return json.dumps({"schema": self.text, "references": list(self.references)}, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> SchemaText:
        """The schema of `to_json`."""
        found = json.loads(text)
        return cls(found["schema"], tuple((name, referred) for name, referred in found["references"]))

    def same_as(self, other: SchemaText) -> bool:
        """Whether both are the same but for blanks, and for the order of names in JSON."""
        mine, theirs = (_normal(each) for each in (self, other))
        return mine == theirs

    def shown(self) -> str:
        """The beginning of the text, on one line."""
        text = " ".join(self.text.split())
        return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}…"


def _normal(schema: SchemaText) -> list[str]:
    texts = [schema.text, *(text for _, text in sorted(schema.references))]
    return [*(name for name, _ in sorted(schema.references)), *map(_normal_text, texts)]


def _normal_text(text: str) -> str:
    try:
        # Not compared as Python's values, to which 1 is True.
        return json.dumps(json.loads(text), sort_keys=True)
    except ValueError:
        # A comment ends with its line.
        return "\n".join(" ".join(line.split()) for line in text.splitlines() if line.strip())
