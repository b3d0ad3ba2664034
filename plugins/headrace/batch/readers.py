"""The schemas of a registry by which a batch's records are read.

The first attempt at a batch takes the newest version of the subject, or the one that the definition names, and records
it with the batch: each later attempt, a replay and a preview read by the same. If the newest version gives other
columns than the one that the last batch began with, an event says so before the records are read, since a transform or
a mapping may depend on them.

The registry's connection is recorded too. Once an output has decoded the records of a batch, their ids are those of
this registry, whatever connection the definition names later: a new registry may give them to other schemas. What is
kept for it suffices, so a connection may be renamed, or removed, without its registry.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from headrace.batch.places import READERS
from headrace.errors import Failure, HeadraceError
from headrace.kept_values import KeptUse, KeptValues
from headrace.registry.client import RegisteredSchema
from headrace.registry.schemas import KeptSchemas, RecordedReader, digest_of
from headrace.stream.ddl import column_differences

if TYPE_CHECKING:
    from headrace.ledger.batches.tables import Attempt, BatchOrigin
    from headrace.stream import DecoderDefinition, Input, Stream
    from headrace.stream.decoder import SchemaQuestion
    from headrace.stream_context import StreamContext


class ReaderUnfitError(HeadraceError):
    """The schema of a registry's subject cannot give the columns of a decoder."""

    failure = Failure.CODE


@dataclass(frozen=True)
class BatchReaders:
    """``stream`` has decoders whose columns are known. ``facts`` are those of `READERS`. ``first``: the decoders, as
    "input.field", whose records have never been decoded to their end. ``is_look``: nothing is kept."""

    stream: Stream
    facts: Mapping[str, Any] = field(default_factory=dict)
    first: frozenset[str] = frozenset()
    is_look: bool = False

    def uses(self, source: Input) -> dict[str, KeptUse]:
        """For what the decoders of keys and values keep what they look up, by "key" and "value"."""
        found: dict[str, KeptUse] = {}
        for name in source.decoders:
            is_first = f"{source.id}.{name}" in self.first
            looking: KeptUse = "first_look" if is_first else "look"
            found[name.removesuffix("_decoder")] = looking if self.is_look else "first_run" if is_first else "repeat"
        return found

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
        if not any(_framed(stream)):
            return cls(stream)
        target = "" if claim is None else claim.target
        known = attempts.pinned(context.name, batch_time_ms, READERS, target=target)
        decoded = attempts.decoded_by(context.name, [batch_time_ms], READERS, target=target).get(batch_time_ms)
        decoded_by = None if decoded is None else decoded[0]
        choice = _Choice(stream, known, decoded_by)
        if claim is None:
            return cls(choice.stream, choice.facts, frozenset(choice.first), is_look=True)
        for warning in choice.warnings:
            warn(warning)
        if choice.new:
            choice.keep()
            held = attempts.pin(claim, READERS, choice.new, changes=choice.changes)
            if held != choice.new:
                # Another attempt at the batch was first.
                choice = _Choice(stream, {**known, **held}, decoded_by)
            for change in choice.changes.values():
                warn(
                    f"the columns of {change['decoder']} have changed with version {change['version']} of subject "
                    f"{change['subject']!r}: {', '.join(change['differences'])}"
                )
            # Last: if this process ends before, the next batch tells of the change.
            choice.record()
        return cls(choice.stream, choice.facts, frozenset(choice.first))

    def by_registry(
        self,
        context: StreamContext,
        batch_time_ms: int,
        origins: Sequence[BatchOrigin],
        *,
        by_state: bool = False,
    ) -> list[tuple[BatchReaders, list[BatchOrigin]]]:
        """The batches that this one reads, as a window does, by those that have the registries of their ids. The
        schemas of the columns are the same for all.

        A batch that has decoded nothing itself may have been decoded by the window of a later one, of those that are
        given. One that never was is read as one that runs first. ``by_state``: they leave a state, which they had
        entered by the registries that it recorded.
        """
        in_order = sorted(origins, key=lambda origin: origin.batch_time_ms)
        times = [origin.batch_time_ms for origin in in_order]
        if not self.facts or times in ([], [batch_time_ms]):
            return [(self, in_order)]
        decoded = context.ledger.attempts.decoded_by(context.name, times, READERS, by_state=by_state)
        as_defined = tuple((input_id, name, by.connection_ids[0]) for input_id, name, by in _framed(context.stream))
        groups: dict[tuple[_Registries, bool], list[BatchOrigin]] = {}
        for number, origin in enumerate(in_order):
            later = (decoded.get(time) for time in times[number:])
            facts = next((each[0] for nth, each in enumerate(later) if each is not None and each[1] > nth), None)
            by: tuple[_Registries, bool] = ((), False)
            if origin.batch_time_ms != batch_time_ms:
                by = (as_defined, True) if facts is None else (tuple(_other_registries(self.stream, facts)), False)
            groups.setdefault(by, []).append(origin)
        return [(self._by(*by) if by[0] else self, found) for by, found in groups.items()]

    def _by(self, registries: _Registries, is_first: bool) -> BatchReaders:
        """The readers by these registries. ``is_first``: of batches that were never decoded."""
        inputs = []
        for source in self.stream.inputs:
            decoders = {
                name: source.decoders[name].with_registry(registry)
                for input_id, name, registry in registries
                if input_id == source.id
            }
            inputs.append(source.model_copy(update=decoders))
        stream = self.stream.model_copy(update={"inputs": tuple(inputs)})
        first = [f"{input_id}.{name}" for input_id, name, _ in registries if is_first]
        return replace(self, stream=stream, first=frozenset(first))


_Registries = tuple[tuple[str, str, str], ...]
"""Inputs, fields of decoders, and the connections of their registries."""


def _framed(stream: Stream) -> Iterator[tuple[str, str, DecoderDefinition]]:
    """The decoders whose values have the frame of a registry, with their inputs and fields."""
    for source in stream.inputs:
        for name, decoder in source.decoders.items():
            if decoder.is_framed:
                yield source.id, name, decoder


def _other_registries(stream: Stream, facts: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """The inputs, decoders and registries that are recorded, of decoders that have another registry."""
    for input_id, name, decoder in _framed(stream):
        recorded = _fact_of(facts, f"{input_id}.{name}")
        if recorded is not None and decoder.connection_ids != (recorded["registry"],):
            yield input_id, name, recorded["registry"]


def _fact_of(facts: Mapping[str, Any], where: str) -> Mapping[str, Any] | None:
    """What is recorded of the decoder."""
    return next((fact for key, fact in facts.items() if key.startswith(f"{where} of ")), None)


@dataclass(frozen=True)
class AskedReader:
    """What a schema registry says of a decoder's columns.

    ``decoder`` has its columns, if they are known. ``reader`` is None if the definition has a schema of its own.
    ``before``: the version that the last batch began with, if it is another. ``differences``: of the columns, in words.
    ``found``: the reader's schema, which may not be kept yet.
    """

    decoder: DecoderDefinition
    reader: RecordedReader | None = None
    before: RecordedReader | None = None
    differences: tuple[str, ...] = ()
    found: RegisteredSchema | None = None


def ask_reader(
    stream: Stream,
    source: Input,
    field_name: str,
    *,
    pinned: Mapping[str, Any] | None = None,
    how: Literal["ask", "recorded"] = "ask",
) -> AskedReader:
    """The reader of a decoder of an input, by the field that has it. Nothing is kept.

    Args:
        pinned: the fact of `READERS` that is recorded with a batch.
        how: ask the registry for what is not pinned, or take what batches had before, without a registry.

    Raises as `BatchReaders.of` does.
    """
    decoder = source.decoders[field_name]
    part: Literal["key", "value"] = "key" if field_name == "key_decoder" else "value"
    question = decoder.question
    if question is None:
        return AskedReader(decoder.with_reader(None, part))
    subject = _subject(source, question, part)
    registry = question.registry if pinned is None else pinned["registry"]
    kept = KeptSchemas(KeptValues(decoder.kept_url(stream.folder_url), "look"), registry)
    where = f"{source.id}.{field_name}"
    before = None
    if pinned is not None:
        reader = RecordedReader(pinned["subject"], pinned["version"], pinned["sha256"])
        found = kept.of_reader(reader)
    elif question.version is not None:
        version = kept.of_version(subject, question.version, ask=how == "ask")
        if version is None:
            return AskedReader(decoder)
        reader, found = RecordedReader(subject, question.version, digest_of(version)), version
    elif how == "recorded":
        known = kept.recorded(where, subject)
        if known is None:
            return AskedReader(decoder)
        reader, found = known, kept.of_reader(known)
    else:
        reader, found = kept.newest(subject)
        last = kept.recorded(where, subject)
        before = None if last == reader else last
    made = _with_reader(decoder, found, part, question, f"version {reader.version} of subject {subject!r}")
    former = None if before is None else _column_by(decoder, kept, before, part)
    differences = () if former is None else tuple(column_differences(former, made.column))
    return AskedReader(made, reader, before, differences, found)


def _subject(source: Input, question: SchemaQuestion, part: str) -> str:
    return question.subject or f"{source.topic_names[0]}-{part}"


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
    """The readers of a stream's decoders. ``known``: those that attempts at the batch began with.

    These are known by the decoder, the registry and the subject: a definition that names others has another question.
    ``decoded_by``: those of a batch that was decoded to its end. They stay, whatever the definition names, but for a
    schema of its own. ``first``: the decoders whose records have never been decoded to their end. ``warnings``:
    lines for the log.
    """

    def __init__(self, stream: Stream, known: Mapping[str, Any], decoded_by: Mapping[str, Any] | None) -> None:
        self._given = stream
        self._known = known
        self._decoded_by = decoded_by or {}
        self.warnings: list[str] = []
        self.first: set[str] = set()
        self._asked: dict[str, tuple[str, SchemaQuestion, AskedReader]] = {}
        self.changes: dict[str, dict[str, Any]] = {}
        self.facts: dict[str, Any] = {}
        self.new: dict[str, Any] = {}
        self.stream = stream.model_copy(update={"inputs": tuple(map(self._resolved, stream.inputs))})

    def keep(self) -> None:
        """Keep the schemas of the new readers."""
        for _, question, asked in self._asked.values():
            if asked.found is None:
                continue
            if question.version is not None and asked.reader is not None:
                self._writing(asked).keep_version(asked.reader, asked.found)
            else:
                self._writing(asked).keep(asked.found)

    def record(self) -> None:
        """Record the new readers as those that the last batch began with."""
        for where, question, asked in self._asked.values():
            if asked.reader is not None and question.version is None:
                self._writing(asked).record(where, asked.reader)

    def _writing(self, asked: AskedReader) -> KeptSchemas:
        (registry,) = asked.decoder.connection_ids
        return KeptSchemas(KeptValues(asked.decoder.kept_url(self._given.folder_url)), registry)

    def _resolved(self, source: Input) -> Input:
        changes = {
            name: self._decoder(f"{source.id}.{name}", source, name)
            for name, decoder in source.decoders.items()
            if decoder.is_framed
        }
        return source.model_copy(update=changes) if changes else source

    def _decoder(self, where: str, source: Input, name: str) -> DecoderDefinition:
        (registry,), question = source.decoders[name].connection_ids, source.decoders[name].question
        recorded = _fact_of(self._decoded_by, where)
        fact = f"{where} of {registry}"
        if question is not None:
            fact += f"/{_subject(source, question, name.removesuffix('_decoder'))}"
        pinned = self._known.get(fact)
        if recorded is not None and "subject" in recorded:
            pinned = recorded
        asked = ask_reader(self._given, source, name, pinned=pinned)
        reader = {} if asked.reader is None else asked.reader.to_json()
        self.facts[fact] = {"registry": registry if recorded is None else recorded["registry"], **reader}
        if recorded is None:
            self.first.add(where)
        if pinned is None and recorded is None:
            self._tell_of_another(where, registry)
        if pinned is None and fact not in self._known:
            self.new[fact] = self.facts[fact]
            if question is not None:
                self._asked[fact] = (where, question, asked)
        if asked.reader is not None and asked.before is not None and asked.differences:
            versions = {"version_before": asked.before.version, "version": asked.reader.version}
            change = {"decoder": where, "subject": asked.reader.subject, **versions}
            self.changes[fact] = {**change, "differences": list(asked.differences)}
        if recorded is None or recorded["registry"] == registry:
            return asked.decoder
        self.warnings.append(
            f"{where} takes the ids in its records for those of connection {recorded['registry']!r}, by which the "
            f"batch was decoded before, and not of {registry!r}"
        )
        return asked.decoder.with_registry(recorded["registry"])

    def _tell_of_another(self, where: str, registry: str) -> None:
        former = _fact_of(self._known, where)
        if former is not None and former["registry"] != registry:
            self.warnings.append(
                f"{where} takes the ids in its records for those of connection {registry!r}. The batch began by "
                f"{former['registry']!r}, but no output of it has completed"
            )


def _column_by(
    decoder: DecoderDefinition, kept: KeptSchemas, reader: RecordedReader, part: Literal["key", "value"]
) -> str | None:
    """The column of a decoder that reads by this schema; None if it gives none, so that its batches failed."""
    try:
        return decoder.with_reader(kept.of_reader(reader).schema, part).column
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
