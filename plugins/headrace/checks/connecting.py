"""Checks that a stream can reach and use what it needs: ledger, storage, Kafka, topics, indices.

Each check has a time limit, leaves nothing changed, and names the address or path that it checked.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from confluent_kafka import KafkaException

from headrace.batch.readers import ask_reader
from headrace.connections import CONNECTION_PREFIX
from headrace.elasticsearch.document_mapping import document_fields
from headrace.elasticsearch.errors import FieldsUnknownError
from headrace.elasticsearch.mapping_conflicts import FieldFinding, MappedDocuments
from headrace.elasticsearch.transport import Cluster
from headrace.errors import HeadraceError
from headrace.kafka.errors import TopicsNotFoundError
from headrace.kafka.producers import TopicQuestions, client_config
from headrace.kafka.topics import AdminQuestions, TopicWatch
from headrace.ledger import Ledger
from headrace.receiver.receiver import check_receiver_class
from headrace.registry.client import Registry, SubjectUnknownError
from headrace.stream import (
    DeadLetterTopic,
    ElasticsearchOutput,
    Input,
    KafkaInput,
    KafkaOutput,
    ParquetOutput,
    Stream,
)
from headrace.stream.contract import KindDefinition
from headrace.stream.ddl import Column, parse_columns
from headrace.stream.model import load_reference
from headrace.wal.errors import StoredFileExistsError
from headrace.wal.log_storage import LogStorage
from headrace.wal.storage import open_storage

if TYPE_CHECKING:
    from headrace.elasticsearch.administration import Administration
    from headrace.elasticsearch.target import ConcreteIndex

# The time limit of each query: a person waits for the answer.
_SECONDS = 5.0
# In place of what records fill in, in the name of an index.
_SOME_PART = "0"


class ConditionIgnoredError(HeadraceError):
    """The store takes conditional writes and ignores the condition, so replaced writers could overwrite the log."""


@dataclass(frozen=True, slots=True)
class Checked:
    """The result of one check: what was checked, its path or address, and what is wrong. ``error`` None: it passed."""

    name: str
    where: str
    error: str | None = None
    remedy: str | None = None

    def __str__(self) -> str:
        if self.error is None:
            return f"{self.name}: {self.where}"
        return f"{self.name}: {self.where}: {self.error}" + (f" {self.remedy}" if self.remedy else "")


def check_connections(stream: Stream) -> Iterator[Checked]:
    """Run every check of the stream but that of its rights in Kafka (`headrace.checks.kafka_rights`); yields each
    result at once."""
    yield check_ledger(stream)
    yield check_storage(stream)
    for _, part in stream.parts:
        yield from check_part(part)
    yield from check_schemas(stream)
    yield from check_shared_indices(stream)


def check_ledger(stream: Stream) -> Checked:
    """Whether the database answers and would take the outputs; if its SQLite file does not exist yet, whether it
    can be created."""
    url = stream.ledger
    path = Path(urlsplit(url).path.removeprefix("/")) if url.startswith("sqlite") else None

    def open_ledger() -> None:
        if path is not None and not path.exists():
            _require_writable(path.parent)
            return
        with Ledger.open(url, create=False) as ledger:
            ledger.now_ms()
            ledger.streams.check_outputs(stream.name, stream.to_json())

    where = f"connection {url.removeprefix(CONNECTION_PREFIX)}" if url.startswith(CONNECTION_PREFIX) else url
    return _checked("ledger", where, open_ledger)


def check_storage(stream: Stream, name: str = "storage") -> Checked:
    """Whether the stream's folder can be written to and read from."""
    return check_folder(name, stream.storage.url)


def check_part(part: KindDefinition) -> Iterator[Checked]:
    """Run the check that the part's class names (`KindDefinition.check`), such as whether the server answers and lets
    the stream write."""
    if part.check is not None:
        yield from load_reference(part.check, f"check of the kind {part.kind!r}")(part)  # type: ignore[operator]


def check_receiver(source: Input) -> Iterator[Checked]:
    """Whether the class of the input's receivers can be used."""
    yield _checked(f"input {source.id}", str(source.receiver_class), lambda: check_receiver_class(source))


def check_kafka(source: KafkaInput) -> Iterator[Checked]:
    """Whether Kafka answers and has the input's topics."""
    yield from _kafka(f"input {source.id}", source)


def check_topic(output: KafkaOutput) -> Iterator[Checked]:
    """Whether Kafka answers and has the output's topic."""
    yield from _kafka(f"output {output.id}", topic_of(output, output.id))


def topic_of(to: KafkaOutput | DeadLetterTopic, output_id: str) -> KafkaInput:
    """An input that reads the topic of an output, for queries about it."""
    servers = {"connection": to.connection, "bootstrap_servers": to.bootstrap_servers}
    return KafkaInput(id=output_id, topics=(to.topic,), **servers)


def check_parquet(output: ParquetOutput) -> Iterator[Checked]:
    """Whether the output's folder can be written to and read from."""
    yield check_folder(f"output {output.id}", output.path)


def check_folder(name: str, url: str) -> Checked:
    """Whether a folder, or a store, can be written to and read from. ``name``: the name of the result."""
    return _checked(name, url, lambda: _write_and_read(url))


def check_schemas(stream: Stream) -> Iterator[Checked]:
    """Whether the schema registries of the decoders answer, and have the schemas of their columns. Nothing is recorded.

    What a check says has the columns, and how they differ from those of the last batch.
    """
    for source in stream.inputs:
        for field, decoder in source.decoders.items():
            if decoder.is_framed:
                yield _schema_checked(stream, source, field)


def _schema_checked(stream: Stream, source: Input, field: str) -> Checked:
    part, name = field.removesuffix("_decoder"), f"input {source.id}"
    question = source.decoders[field].question
    try:
        asked = ask_reader(stream, source, field, how="ask")
        if question is None:
            (connection,) = source.decoders[field].connection_ids
            registry = Registry.of(connection)
            with contextlib.suppress(SubjectUnknownError):
                # It need not have one: the schema of the columns is the definition's own.
                registry.version(f"{source.topic_names[0] if source.topic_names else source.id}-{part}")
            return Checked(name, f"the schema registry {registry.url} for the {part}: {asked.decoder.column}")
    except HeadraceError as error:
        where = f"the schema registry of connection {question.registry}" if question else "its schema registry"
        return Checked(name, f"{where} for the {part}", error.what, error.remedy)
    reader = asked.reader
    of = f"version {reader.version} of subject {reader.subject} for the {part}: " if reader is not None else ""
    changed = f"; since the last batch {', '.join(asked.differences)}" if asked.differences else ""
    return Checked(name, f"{of}{asked.decoder.column}{changed}")


def check_shared_indices(stream: Stream) -> Iterator[Checked]:
    """Yield each output whose index another output writes too, by an alias or another connection, with the same ids."""
    indices: list[tuple[ElasticsearchOutput, ConcreteIndex]] = []
    # Of outputs whose records have an index each, the definitions are compared.
    outputs = [output for output in stream.elasticsearch_outputs if output.names.is_plain]
    for output in outputs if len(outputs) > 1 else []:
        index = None
        # What is wrong with an output's index is reported for the output.
        with contextlib.suppress(HeadraceError), _administration(Cluster.of(output)) as administration:
            index = administration.concrete_index(output.index_text)
        if index is None or index.uuid is None:
            continue
        for other, its_index in indices:
            if its_index.uuid == index.uuid and other.shares_ids(output):
                yield Checked(
                    f"output {output.id}",
                    f"index {output.index_text}",
                    f"Output {other.id} writes into the same index, {index.name!r}. Their documents have the same ids, "
                    "so one output overwrites those of the other.",
                    "Give each output an index of its own.",
                )
        indices.append((output, index))


@dataclass(frozen=True, slots=True)
class DocumentColumns:
    """The columns of an output's documents. ``as_recorded``: the documents are the records' own JSON, which may have
    other fields beside them, and other forms of their values."""

    columns: tuple[Column, ...]
    as_recorded: bool

    @classmethod
    def of(
        cls, stream: Stream, output: ElasticsearchOutput, made: str | HeadraceError | None = None
    ) -> DocumentColumns:
        """The columns by the definition; those of a schema registry's schema are asked for.

        Args:
            made: the columns that the output's transform makes, in Spark's DDL, if Spark was asked; or an error that is
                raised.

        Raises:
            FieldsUnknownError: the documents have no known columns, or a transform makes them.
            HeadraceError: a schema registry does not give its schema, as `headrace.batch.readers.ask_reader`.
        """
        transform = stream.transform_of(output)
        if isinstance(made, HeadraceError):
            raise made
        if made is not None:
            return cls(parse_columns(made), as_recorded=False)
        if transform is not None:
            raise FieldsUnknownError(
                f"The columns of output {output.id!r} are made by its transform {transform}: they are known when Spark "
                "has called it.",
                remedy="`streams check --connect --spark` and `mapping` call it, without records.",
            )
        (source,) = stream.inputs
        column = ask_reader(stream, source, "value_decoder", how="ask").decoder.column
        try:
            return cls(parse_columns(column), as_recorded=stream.sends_bytes(output))
        except ValueError:
            raise FieldsUnknownError(
                f"The documents of output {output.id!r} are values of the type {column}, so their fields are not "
                "known.",
                remedy=f"Give input {source.id!r} a decoder with columns, such as JsonDecoder.",
            ) from None


@dataclass(frozen=True, slots=True)
class CheckedColumns:
    """What the index makes of an output's documents.

    ``unknown``: why nothing is known of their fields, or of the index. ``failing``: what is wrong with the rows of the
    transform, so that every batch would fail. ``exists``: whether there is the index; without it, ``fields`` are those
    of an index that its templates make. ``conflicts`` are those of all fields together.
    """

    output: str
    index: str
    exists: bool | None = None
    as_recorded: bool = False
    unknown: str | None = None
    failing: str | None = None
    fields: tuple[FieldFinding, ...] = ()
    conflicts: tuple[str, ...] = ()

    @property
    def checked(self) -> Checked | None:
        """The result as one check; None if it is unknown."""
        name, where = f"output {self.output}, columns", f"index {self.index}"
        if self.unknown is not None or self.failing is not None:
            return None if self.failing is None else Checked(name, where, self.failing)
        new = sum(field.index is None for field in self.fields)
        where = f"{where}, {len(self.fields)} fields, of which the index has {len(self.fields) - new}"
        refused = [f"{field.path!r}: {field.conflict}" for field in self.fields if field.conflict is not None]
        if not refused and not self.conflicts:
            return Checked(name, where)
        return Checked(
            *(name, where, f"The index refuses documents. {'; '.join([*refused, *self.conflicts])}."),
            "Correct the transform or the decoder, or write to a new index (`headrace mapping` makes its mapping).",
        )


def check_columns(stream: Stream, made: Mapping[str, str | HeadraceError]) -> Iterator[CheckedColumns]:
    """Yield, for each Elasticsearch output, what its index makes of the documents.

    ``made``: the columns that transforms make, in Spark's DDL, by output, or why there are none. What keeps an output
    from its server or registry is reported by its own check.
    """
    for output in stream.elasticsearch_outputs:
        by_transform = made.get(output.id)
        if isinstance(by_transform, HeadraceError) and not isinstance(by_transform, FieldsUnknownError):
            yield CheckedColumns(output.id, output.index_text, failing=str(by_transform))
            continue
        for pattern in output.names.patterns:
            try:
                of = DocumentColumns.of(stream, output, by_transform)
                with _administration(Cluster.of(output)) as administration:
                    if output.names.is_plain:
                        administration.concrete_index(pattern)
                    # Of indices that records name, what a new one gets.
                    index = administration.index_mapping(pattern.replace("*", _SOME_PART))
            except HeadraceError as error:
                yield CheckedColumns(output.id, pattern, unknown=str(error))
                continue
            mapped = MappedDocuments(document_fields(of.columns), index, as_recorded=of.as_recorded)
            yield CheckedColumns(
                *(output.id, index.name if output.names.is_plain else pattern, index.exists, of.as_recorded),
                fields=tuple(mapped.fields),
                conflicts=tuple(mapped.conflicts),
            )


def _checked(name: str, where: str, check: Callable[[], object]) -> Checked:
    try:
        check()
    except HeadraceError as error:
        return Checked(name, where, error.what, error.remedy)
    except OSError as error:
        return Checked(name, where, f"{type(error).__name__}: {error}")
    return Checked(name, where)


def _write_and_read(url: str) -> None:
    """Raises HeadraceError or OSError. Does not create a missing folder: it must belong to the user that runs
    the stream."""
    parts = urlsplit(url)
    folder = Path(unquote(parts.path) if parts.scheme == "file" else url)
    if parts.scheme in ("", "file") and not folder.exists():
        _require_writable(folder)
        return
    storage, name, data = open_storage(url), f"headrace-check-{secrets.token_hex(8)}", b"headrace"
    storage.write_atomically(name, data, exclusive=True)
    try:
        if storage.read(name) != data:
            raise OSError(f"{url} returns other bytes than were written to it")
        _require_refusal(storage, name)
    finally:
        storage.delete(name)


def _require_refusal(storage: LogStorage, name: str) -> None:
    """Raises ConditionIgnoredError if the store overwrites an existing object in a conditional write."""
    try:
        storage.write_atomically(name, b"another", exclusive=True)
    except StoredFileExistsError:
        return
    raise ConditionIgnoredError(
        f"{storage.url} ignores the condition of a conditional write: it overwrites an existing object.",
        remedy="Use a store that honours conditional writes (If-None-Match), or a folder of a file system.",
    )


def _require_writable(folder: Path) -> None:
    """Raises OSError if the folder cannot be created."""
    there = next(path for path in (folder, *folder.parents) if path.exists())
    if not there.is_dir():
        raise NotADirectoryError(f"{there} is a file, so {folder} cannot be created")
    if not os.access(there, os.W_OK | os.X_OK):
        raise PermissionError(f"this user may not write to {there}, so {folder} cannot be created")


def _kafka(name: str, source: KafkaInput) -> Iterator[Checked]:
    where = source.bootstrap_servers or f"connection {source.connection}"
    refused: dict[str, TopicsNotFoundError] = {}
    try:
        asking = AdminQuestions(source, quiet=True)
        where = asking.servers
        try:
            topics, missing = TopicWatch(asking.admin, source).topics(refused)
        except KafkaException as error:
            raise asking.not_asked(error) from error
    except HeadraceError as error:
        yield Checked(name, where, error.what, error.remedy)
        return
    yield Checked(name, where)
    for seen in topics:
        yield Checked(f"{name}, topic {seen.topic}", f"{where}, {seen.partitions} partitions")
    for topic in missing:
        yield Checked(f"{name}, topic {topic}", where, "The topic does not exist.", "Create it, or correct its name.")
    for topic, refusal in refused.items():
        yield Checked(f"{name}, topic {topic}", where, refusal.what, refusal.remedy)
    if source.topic_pattern is not None and not topics:
        yield Checked(name, where, f"No topic matches the pattern {source.topic_pattern!r}.")


def check_elasticsearch(output: ElasticsearchOutput) -> Iterator[Checked]:
    """Whether the search server answers, and lets the stream write to the index. The result names the server."""
    name = f"output {output.id}"
    where = ", ".join(output.hosts) or f"connection {output.connection}"
    try:
        cluster = Cluster.of(output)
    except HeadraceError as error:
        yield Checked(name, where, error.what, error.remedy)
        return
    nodes = ", ".join(map(str, cluster.nodes))
    with _administration(cluster) as administration:
        checked = _checked(name, nodes, lambda: administration.check_writable(output))
        server = "" if administration.server is None else f" ({administration.server})"
    yield replace(checked, where=f"{nodes}{server}, index {output.index_text}")
    if output.dead_letter_topic is not None:
        yield from _letter_topic(output, output.dead_letter_topic)


def _letter_topic(output: ElasticsearchOutput, to: DeadLetterTopic) -> Iterator[Checked]:
    """Whether Kafka answers, and has a topic that keeps all letters."""
    name = f"output {output.id}, dead letters"
    for checked in _kafka(name, topic_of(to, output.id)):
        yield checked
        if checked.error is not None:
            return
    if TopicQuestions(client_config(to.connection, to.bootstrap_servers), to.topic, seconds=_SECONDS).is_compacted():
        yield Checked(
            f"{name}, topic {to.topic}",
            "its cleanup.policy",
            "The topic is compacted: of the dead letters with one key Kafka would keep the last one.",
            "Set its cleanup.policy to delete, or name another dead_letter_topic.",
        )


def _administration(cluster: Cluster) -> Administration:
    from headrace.elasticsearch.administration import Administration

    return Administration.of(cluster, timeout_seconds=_SECONDS, max_retry_seconds=0)
