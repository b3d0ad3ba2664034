"""The schemas of a registry that a stream has used, kept durably below its folder.

A batch that runs again needs no registry: what it used is kept before its records are decoded. An id's schema never
changes. A registry that was set up again may give the same ids to other schemas; then the first run of a batch, which
asks for every id that it meets, is refused.

Values are kept under these names, with ``r`` as a digest of the connection's id:

==============================  ==============================================================================
``schema-<sha256>``             a schema, by the digest of what is kept
``id-<r>-<id>``                 the digest of the schema of this id, or GUID
``version-<r>-<subject>-<n>``   the digest of the schema of a subject's version
``reader-<decoder>-<n>``        the n-th schema that was the newest of a decoder's subject when a batch began
==============================  ==============================================================================
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from headrace.errors import Failure, HeadraceError
from headrace.formats.schema_text import SchemaText
from headrace.kept_values import KeptValues
from headrace.registry.client import RegisteredSchema, Registry, SchemaUnknownError

_DIGITS = 16
_DIGEST = re.compile(rb"[0-9a-f]{64}")


class RegistryChangedError(HeadraceError):
    """The registry answers another schema for an id than it did before."""

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

        A registry that no longer has the id contradicts nothing: no record can be written with it any more.

        Raises RegistryChangedError, KeptSchemaMissingError, and as `Registry.schema` and `KeptValues.get` do.
        """
        name = f"id-{self._digest}-{id_}"
        known = self._digest_in(name)
        kept = None if known is None else self._mended(known, lambda registry: registry.schema(id_))
        if kept is not None and not ask:
            return kept
        try:
            found = self._open(self._connection_id).schema(id_)
        except SchemaUnknownError:
            if kept is None:
                raise
            return kept
        if kept is None:
            kept = self.of_digest(self._kept.keep(name, self.keep(found).encode()).decode(), found)
        # It may be written in another way by another version of the registry.
        if kept.format != found.format or not kept.schema.same_as(found.schema):
            raise RegistryChangedError(
                f"The schema registry of connection {self._connection_id!r} gives another schema for schema {id_} than "
                f"it did before: now {found.format} {found.schema.shown()}, before {kept.format} "
                f"{kept.schema.shown()}. It was set up again, or the connection leads to another registry.",
                remedy="Restore the registry's data, and run the batch again. If the new one is right, name it by a "
                "connection with another id in the decoder: what was written is read by the schemas of before, and "
                "other batches by the new registry.",
            )
        return kept

    def of_version(self, subject: str, version: int, *, ask: bool = True) -> RegisteredSchema | None:
        """A version of a subject, as it was kept; else as the registry has it, or None if it is not to be asked.

        Raises KeptSchemaMissingError, and as `Registry.version` and `KeptValues.get` do.
        """
        name = self._version_name(subject, version)
        known = self._digest_in(name)
        if known is not None:
            return self.of_reader(RecordedReader(subject, version, known))
        if not ask:
            return None
        found = self._open(self._connection_id).version(subject, version)
        return self.of_digest(self._kept.keep(name, self.keep(found).encode()).decode(), found)

    def keep_version(self, reader: RecordedReader, found: RegisteredSchema) -> None:
        """Keep the version of a subject that a definition names, and its schema: no registry is asked for it again."""
        self._kept.keep(self._version_name(reader.subject, reader.version), self.keep(found).encode())

    def _version_name(self, subject: str, version: int) -> str:
        return f"version-{self._digest}-{_digest(subject)}-{version}"

    def newest(self, subject: str) -> tuple[RecordedReader, RegisteredSchema]:
        """The newest version of a subject, and its schema. Nothing is kept. Raises as `Registry.version` does."""
        found = self._open(self._connection_id).version(subject)
        return RecordedReader(subject, found.version or 0, _kept_as(found)[0]), found

    def record(self, where: str, reader: RecordedReader) -> None:
        """Record the version that a batch has begun with at this decoder, unless it is the last recorded one. Its
        schema is kept already. Raises as `KeptValues.keep` does."""
        value = json.dumps(reader.to_json()).encode()
        while True:
            number, last = self._last_recorded(where, reader.subject)
            name = f"{_reader_prefix(where, reader.subject)}{number + 1:06}"
            if last == reader or self._kept.keep(name, value) == value:
                return

    def recorded(self, where: str, subject: str) -> RecordedReader | None:
        """The version of a subject that was recorded last at this decoder; None if no batch has begun with one."""
        return self._last_recorded(where, subject)[1]

    def of_digest(self, sha256: str, found: RegisteredSchema | None = None) -> RegisteredSchema:
        """The schema that is kept under this digest; ``found``, if it is this one.

        Raises KeptSchemaMissingError, and as `KeptValues.get` does.
        """
        if found is not None and _kept_as(found)[0] == sha256:
            return found
        data = self._kept.get(f"schema-{sha256}")
        if data is None or hashlib.sha256(data).hexdigest() != sha256:
            raise KeptSchemaMissingError(
                f"The schema {sha256[:_DIGITS]} of connection {self._connection_id!r} is "
                f"{'missing' if data is None else 'damaged'} in {self._kept.url}.",
                remedy="Restore the folder from a copy, and run the batch again; without the schema it cannot. The "
                "registry that gave the schema would mend it, but does not answer, or no longer gives this one.",
            )
        fields = json.loads(data)
        return RegisteredSchema(fields["format"], SchemaText.from_json(fields["text"]))

    def of_reader(self, reader: RecordedReader) -> RegisteredSchema:
        """The schema of a reader. Raises as `of_digest` does."""
        return self._mended(reader.sha256, lambda registry: registry.version(reader.subject, reader.version))

    def keep(self, found: RegisteredSchema) -> str:
        """Keep a schema; returns the digest under which it is kept."""
        sha256, data = _kept_as(found)
        if self._kept.keep(f"schema-{sha256}", data) != data:
            self._kept.mend(f"schema-{sha256}", data)
        return sha256

    def _mended(self, sha256: str, ask: Callable[[Questions], RegisteredSchema]) -> RegisteredSchema:
        """The schema that is kept under this digest. One that is missing or damaged is kept again, if the registry
        still gives the schema of the digest. Raises as `of_digest` does."""
        try:
            return self.of_digest(sha256)
        except KeptSchemaMissingError as error:
            try:
                found = ask(self._open(self._connection_id))
            except HeadraceError as unanswered:
                raise error from unanswered
            if digest_of(found) != sha256:
                raise
            self.keep(found)
            return found

    def _digest_in(self, name: str) -> str | None:
        """The digest that the value of this name is. Raises KeptSchemaMissingError if it is none."""
        known = self._kept.get(name)
        if known is None or _DIGEST.fullmatch(known):
            return None if known is None else known.decode()
        raise KeptSchemaMissingError(
            f"The value {name} in {self._kept.url} is damaged.",
            remedy="Restore it from a copy. Without one, delete it if the registry was not set up again since: it is "
            "then asked once more.",
        )

    def _last_recorded(self, where: str, subject: str) -> tuple[int, RecordedReader | None]:
        names = self._kept.names(_reader_prefix(where, subject))
        if not names:
            return 0, None
        reader = None
        # Of a damaged one nothing is known: the next batch records its reader behind it.
        with contextlib.suppress(ValueError, TypeError):
            reader = RecordedReader(**json.loads(self._kept.get(names[-1]) or b""))
        return int(names[-1].rpartition("-")[2]), reader


def _reader_prefix(where: str, subject: str) -> str:
    return f"reader-{_digest(f'{where} of {subject}')}-"


def digest_of(found: RegisteredSchema) -> str:
    """The digest under which a schema is kept."""
    return _kept_as(found)[0]


def _kept_as(found: RegisteredSchema) -> tuple[str, bytes]:
    """The digest and the bytes under which a schema is kept."""
    data = json.dumps({"format": found.format, "text": found.schema.to_json()}, separators=(",", ":")).encode()
    return hashlib.sha256(data).hexdigest(), data


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:_DIGITS]
