"""`SchemaText`: a schema as its author wrote it, with the texts of the schemas that it refers to."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass

MAX_SCHEMA_BYTES = 4 * 1024 * 1024
"""Of a schema's text. One of a megabyte is read in a tenth of a second."""
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

    @property
    def sha256(self) -> str:
        """The hexadecimal SHA-256 of `to_json`."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()
