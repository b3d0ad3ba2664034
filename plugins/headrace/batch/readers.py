"""The schemas of a registry by which a batch's records are read.

The first attempt at a batch takes the newest version of the subject, and records it with the batch: each later
attempt, a replay and a preview read by the same. A definition that names a version, or has a schema of its own, leaves
nothing to record. If the newest version gives other columns than the one that the last batch began with, an event says
so before the records are read, since a transform or a mapping may depend on them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from headrace.errors import Failure, HeadraceError
from headrace.kept_values import KeptValues
from headrace.ledger.states import EventKind
from headrace.registry.client import RegisteredSchema
from headrace.registry.schemas import KeptSchemas, RecordedReader
from headrace.stream.ddl import column_differences

if TYPE_CHECKING:
    from headrace.ledger.batches.tables import Attempt
    from headrace.stream import DecoderDefinition, Input, Stream
    from headrace.stream.decoders import SchemaQuestion
    from headrace.stream_context import StreamContext

READERS = "readers"
"""The attribute of an attempt, and the count of an output, with the schemas that its batch is read by: the subject, its
version and the digest of the schema, by input and decoder."""


class ReaderUnfitError(HeadraceError):
    """The schema of a registry's subject cannot give the columns of a decoder."""

    failure = Failure.CODE


@dataclass(frozen=True)
class BatchReaders:
    """``stream`` has decoders whose columns are known. ``facts`` are those of `READERS`. ``first_run``: whether the
    batch has never completed, so that a registry is asked for ids that the stream knows."""

    stream: Stream
    facts: Mapping[str, Any] = field(default_factory=dict)
    first_run: bool = False

    @classmethod
    def of(
        cls,
        context: StreamContext,
        batch_time_ms: int,
        *,
        claim: Attempt | None = None,
        warn: Callable[[str], None] = lambda _: None,
    ) -> BatchReaders:
        """The readers of a batch. With the ``claim`` of an attempt they are recorded, and changed columns are told.

        Raises:
            RegistryUnavailableError, RegistryRefusedError, SubjectUnknownError: the registry does not give a schema
                that no batch has begun with.
            ReaderUnfitError: the schema has another format than the decoder, or values without columns.
            KeptSchemaMissingError: a schema that the batch was read by before is no longer kept.
        """
        stream, attempts = context.stream, context.ledger.attempts
        if not any(decoder.is_framed for source in stream.inputs for decoder in source.decoders.values()):
            return cls(stream)
        target = "" if claim is None else claim.target
        known = attempts.pinned(context.name, batch_time_ms, READERS, target=target)
        choice = _Choice(stream, known)
        sources = tuple(map(choice.resolved, stream.inputs))
        if claim is None:
            return cls(stream.model_copy(update={"inputs": sources}), choice.taken)
        if choice.new and (held := attempts.pin(claim, READERS, choice.new)) != choice.new:
            # Another attempt at the batch was first.
            choice = _Choice(stream, {**known, **held})
            sources = tuple(map(choice.resolved, stream.inputs))
        for change in choice.changes:
            context.ledger.events.append(context.name, EventKind.SCHEMA_CHANGED, change, batch_time_ms=batch_time_ms)
            warn(
                f"the columns of {change['decoder']} have changed with version {change['version']} of subject "
                f"{change['subject']!r}: {', '.join(change['differences'])}"
            )
        first_run = not target and context.ledger.batches.get(context.name, batch_time_ms).steps is None
        return cls(stream.model_copy(update={"inputs": sources}), choice.taken, first_run)


@dataclass(frozen=True)
class AskedReader:
    """What a schema registry says of a decoder's columns.

    ``decoder`` has its columns. ``reader`` is None if the definition has a schema of its own. ``before``: the version
    that the last batch began with, if it is another. ``differences``: of the columns, in words.
    """

    decoder: DecoderDefinition
    reader: RecordedReader | None = None
    before: RecordedReader | None = None
    differences: tuple[str, ...] = ()


def ask_reader(
    stream: Stream,
    source: Input,
    field_name: str,
    *,
    pinned: Mapping[str, Any] | None = None,
    how: Literal["record", "ask", "recorded"] = "record",
) -> AskedReader:
    """The reader of a decoder of an input, by the field that has it.

    Args:
        pinned: the fact of `READERS` that is recorded with a batch.
        how: of a definition that leaves the version open: record the newest one, only ask for it, or take the one that
            was recorded last, without a registry.

    Raises as `BatchReaders.of` does, and SchemaNotKnownError if none was recorded.
    """
    decoder = source.decoders[field_name]
    part: Literal["key", "value"] = "key" if field_name == "key_decoder" else "value"
    question = decoder.question
    if question is None:
        return AskedReader(decoder.with_reader(None, part))
    subject = question.subject or f"{source.topic_names[0]}-{part}"
    kept = KeptSchemas(KeptValues(decoder.kept_url(stream.folder_url)), question.registry)
    before = None
    if question.version is not None:
        found = kept.of_version(subject, question.version)
        reader = RecordedReader(subject, question.version, kept.keep(found))
    elif pinned is not None and (pinned.get("subject"), pinned.get("registry")) == (subject, question.registry):
        reader = RecordedReader(subject, pinned["version"], pinned["sha256"])
        found = kept.of_digest(reader.sha256)
    elif how == "recorded":
        known = kept.recorded(subject)
        if known is None:
            return AskedReader(decoder)
        reader, found = known, kept.of_digest(known.sha256)
    else:
        reader, found, before = kept.newest(subject, record=how == "record")
    made = _with_reader(decoder, found, part, question, f"version {reader.version} of subject {subject!r}")
    former = None if before is None else _column_by(decoder, kept, before, part)
    differences = () if former is None else tuple(column_differences(former, made.column))
    return AskedReader(made, reader, before, differences)


def last_read_by(stream: Stream, source: Input) -> Input:
    """The input with the columns that its last batch had, as they were recorded: no registry is asked. A decoder whose
    columns no batch has had yet stays as it is.

    Raises KeptSchemaMissingError, ReaderUnfitError, and as `KeptValues.get` does.
    """
    changes = {
        name: ask_reader(stream, source, name, how="recorded").decoder
        for name, decoder in source.decoders.items()
        if decoder.is_framed
    }
    return source.model_copy(update=changes) if changes else source


class _Choice:
    """Chooses the readers of the decoders. ``known``: those that are recorded with the batch."""

    def __init__(self, stream: Stream, known: Mapping[str, Any]) -> None:
        self._stream = stream
        self._known = known
        self.changes: list[dict[str, Any]] = []
        self.taken: dict[str, Any] = {}
        self.new: dict[str, Any] = {}

    def resolved(self, source: Input) -> Input:
        """The input with decoders whose columns are known."""
        changes = {
            name: self._resolved(f"{source.id}.{name}", source, name)
            for name, decoder in source.decoders.items()
            if decoder.is_framed
        }
        return source.model_copy(update=changes) if changes else source

    def _resolved(self, where: str, source: Input, name: str) -> DecoderDefinition:
        asked = ask_reader(self._stream, source, name, pinned=self._known.get(where))
        question, reader = source.decoders[name].question, asked.reader
        if question is None or reader is None:
            return asked.decoder
        self.taken[where] = {"registry": question.registry, **reader.to_json()}
        if question.version is None and self._known.get(where) != self.taken[where]:
            self.new[where] = self.taken[where]
        if asked.before is not None and asked.differences:
            versions = {"subject": reader.subject, "version_before": asked.before.version, "version": reader.version}
            self.changes.append({"decoder": where, **versions, "differences": list(asked.differences)})
        return asked.decoder


def _column_by(
    decoder: DecoderDefinition, kept: KeptSchemas, reader: RecordedReader, part: Literal["key", "value"]
) -> str | None:
    """The column of a decoder that reads by this schema; None if it gives none, so that its batches failed."""
    try:
        return decoder.with_reader(kept.of_digest(reader.sha256).schema, part).column
    except (HeadraceError, ValueError):
        return None


def _with_reader(
    decoder: DecoderDefinition,
    found: RegisteredSchema,
    part: Literal["key", "value"],
    question: SchemaQuestion,
    named: str,
) -> DecoderDefinition:
    """The decoder that reads by this schema. Raises ReaderUnfitError."""
    where = f"The schema of {named} in connection {question.registry!r}"
    if found.format != question.format:
        raise ReaderUnfitError(
            f"{where} is {found.format}, and the decoder's format is {question.format}.",
            remedy="Take the decoder of this format, or name another subject.",
        )
    try:
        return decoder.with_reader(found.schema, part)
    except ValueError as error:
        raise ReaderUnfitError(
            f"{where} {error}.", remedy="Name another version of it, or give the schema of the columns as schema_text."
        ) from None
