"""The schemas of a registry that a stream has used, kept durably below its folder.

A batch that runs again needs no registry: what it used is kept before its records are decoded. An id's schema never
changes. A registry that was set up again may give the same ids to other schemas; then the first run of a batch, which
asks for every id that it meets, is refused.

Values are kept under these names, with ``r`` as a digest of the connection's id:

==============================  ==============================================================================
``schema-<sha256>``             a schema, by the digest of what is kept
``id-<r>-<id>``                 the digest of the schema of this id, or GUID
``version-<r>-<subject>-<n>``   the digest of the schema of a subject's version
``reader-<r>-<subject>-<n>``    the n-th schema that was the newest of its subject when a batch began
==============================  ==============================================================================
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from headrace.errors import Failure, HeadraceError
from headrace.formats.schema_text import SchemaText
from headrace.kept_values import KeptValues
from headrace.registry.client import RegisteredSchema, Registry

_DIGITS = 16


class RegistryChangedError(HeadraceError):
    """The registry answers another schema for an id or a version than it did before."""

    failure = Failure.FINAL


class KeptSchemaMissingError(HeadraceError):
    """A schema that a batch was decoded with is no longer below the stream's folder."""

    failure = Failure.FINAL


class Questions(Protocol):
    """What is asked of a registry (`headrace.registry.client.Registry`)."""

    def schema(self, id_: int | str) -> RegisteredSchema: ...

    def version(self, subject: str, version: int | None = None) -> RegisteredSchema: ...


@dataclass(frozen=True, slots=True)
class RecordedReader:
    """The schema by which records are read: the version of its subject, and the digest under which it is kept."""

    subject: str
    version: int
    sha256: str

    def to_json(self) -> dict[str, str | int]:
        """As JSON."""
        return {"subject": self.subject, "version": self.version, "sha256": self.sha256}


class KeptSchemas:
    """The kept schemas of one registry, which is asked for those that are not there."""

    def __init__(
        self, kept: KeptValues, connection_id: str, registry: Callable[[str], Questions] = Registry.of
    ) -> None:
        """``registry``: opens the registry of a connection, when it is first asked."""
        self._kept = kept
        self._connection_id = connection_id
        self._open = registry
        self._digest = hashlib.sha256(connection_id.encode()).hexdigest()[:_DIGITS]

    def of_id(self, id_: int | str, *, ask: bool) -> RegisteredSchema:
        """The schema of an id, or of a GUID. ``ask``: compare a kept one with the registry.

        Raises RegistryChangedError, and as `Registry.schema` and `KeptValues.get` do.
        """
        name = f"id-{self._digest}-{id_}"
        return self._same(name, f"schema {id_}", ask=ask, question=lambda registry: registry.schema(id_))

    def of_version(self, subject: str, version: int) -> RegisteredSchema:
        """A version of a subject. Raises as `Registry.version` and `KeptValues.get` do."""
        name = f"version-{self._digest}-{_digest(subject)}-{version}"
        what = f"version {version} of subject {subject!r}"
        return self._same(name, what, ask=False, question=lambda registry: registry.version(subject, version))

    def newest(
        self, subject: str, *, record: bool = True
    ) -> tuple[RecordedReader, RegisteredSchema, RecordedReader | None]:
        """The newest version of a subject, its schema, and the version that was recorded before, if it is another.

        ``record``: whether it is recorded. Raises as `Registry.version` and `KeptValues.get` do.
        """
        found = self._open(self._connection_id).version(subject)
        new = RecordedReader(subject, found.version or 0, self.keep(found) if record else _kept_as(found)[0])
        while True:
            number, last = self._last_recorded(subject)
            if last == new:
                return new, found, None
            name = f"reader-{self._digest}-{_digest(subject)}-{number + 1:06}"
            value = json.dumps(new.to_json()).encode()
            if not record or self._kept.keep(name, value) == value:
                return new, found, last

    def recorded(self, subject: str) -> RecordedReader | None:
        """The version of a subject that was recorded last; None if no batch has begun with one."""
        return self._last_recorded(subject)[1]

    def of_digest(self, sha256: str) -> RegisteredSchema:
        """The schema that is kept under this digest. Raises KeptSchemaMissingError, and as `KeptValues.get` does."""
        data = self._kept.get(f"schema-{sha256}")
        if data is None or hashlib.sha256(data).hexdigest() != sha256:
            raise KeptSchemaMissingError(
                f"The schema {sha256[:_DIGITS]} of connection {self._connection_id!r} is "
                f"{'missing' if data is None else 'damaged'} in {self._kept.url}.",
                remedy="Restore the folder from a copy. A batch that was decoded with it cannot run again without it.",
            )
        fields = json.loads(data)
        return RegisteredSchema(fields["format"], SchemaText.from_json(fields["text"]))

    def _same(
        self, name: str, what: str, *, ask: bool, question: Callable[[Questions], RegisteredSchema]
    ) -> RegisteredSchema:
        known = self._kept.get(name)
        if known is not None and not ask:
            return self.of_digest(known.decode())
        found = question(self._open(self._connection_id))
        sha256 = self.keep(found)
        before = self._kept.keep(name, sha256.encode()).decode()
        if before == sha256 or (kept := self.of_digest(before)).schema.same_as(found.schema):
            # It may be written in another way by another version of the registry.
            return found
        raise RegistryChangedError(
            f"The schema registry of connection {self._connection_id!r} gives another schema for {what} than it did "
            f"before: now {found.format} {found.schema.shown()}, before {kept.format} {kept.schema.shown()}. It was "
            "set up again, or the connection leads to another registry.",
            remedy="Restore the registry's data. If the new one is right, name it by a connection with another id in "
            "the decoder: ids of both are then told apart.",
        )

    def keep(self, found: RegisteredSchema) -> str:
        """Keep a schema; returns the digest under which it is kept."""
        sha256, data = _kept_as(found)
        self._kept.keep(f"schema-{sha256}", data)
        return sha256

    def _last_recorded(self, subject: str) -> tuple[int, RecordedReader | None]:
        names = self._kept.names(f"reader-{self._digest}-{_digest(subject)}-")
        if not names:
            return 0, None
        data = self._kept.get(names[-1])
        reader = None if data is None else RecordedReader(**json.loads(data))
        return int(names[-1].rpartition("-")[2]), reader


def _kept_as(found: RegisteredSchema) -> tuple[str, bytes]:
    """The digest and the bytes under which a schema is kept."""
    data = json.dumps({"format": found.format, "text": found.schema.to_json()}, separators=(",", ":")).encode()
    return hashlib.sha256(data).hexdigest(), data


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:_DIGITS]
