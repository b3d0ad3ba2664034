"""The outputs of a stream: Elasticsearch, console, Parquet, Kafka and foreach_batch, with their document ids."""

from __future__ import annotations

import posixpath
from collections.abc import Iterator, Mapping
from functools import partial, reduce
from operator import or_
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, NamedTuple, Self
from urllib.parse import unquote, urlsplit

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    NonNegativeInt,
    PositiveFloat,
    SerializeAsAny,
    WrapValidator,
    field_validator,
    model_validator,
)

from headrace.formats.index_names import (
    MAX_NAME_BYTES,
    UTC,
    IndexNames,
    begins_with_dot,
    check_zone,
    illegal_name,
    parse_index,
)
from headrace.secrets import url_holds_secret
from headrace.stream.contract import OUTPUT_SHAPES, KindDefinition, Shape
from headrace.stream.model import (
    Identifier,
    Part,
    Reference,
    Texts,
    check_identifier,
    validate_part,
)
from headrace.stream.place_names import IndexName, RecordIndex, check_no_placeholder
from headrace.stream.secrets import Servers
from headrace.stream.settings import DeadLetterLimit, check_storage_url
from headrace.stream.state import Window

if TYPE_CHECKING:
    from headrace.stream.fields import StreamFields

RECORD_COLUMNS = frozenset(
    {"key", "value", "topic", "partition", "offset", "timestamp", "timestampType", "headers", "incarnation"}
)
"""The columns of records that no transform has changed."""

_SUFFIX = "-dead-letters"


def dead_letters_of(index: str) -> str:
    """The dead-letter index of an output for ``index`` that names none itself."""
    return f"{index}{_SUFFIX}"


def check_dead_letter_index(index: str, given: str | None) -> None:
    """Check that an output's dead letters have a separate index: ``given``, or the name derived from ``index``.

    Raises ValueError.
    """
    if given == index:
        raise ValueError(f"dead_letter_index is the index itself, {index!r}; name another, or leave it out")
    derived = len(dead_letters_of(index).encode())
    if not given and derived > MAX_NAME_BYTES:
        raise ValueError(
            f"dead_letter_index would be <index>{_SUFFIX}, {derived} bytes and more than {MAX_NAME_BYTES}; name another"
        )


def check_host(host: str) -> str:
    """Return the address of an Elasticsearch node if it is valid: a URL, or ``host:port`` for http. Raises
    ValueError."""
    parts = urlsplit(host if "://" in host else f"http://{host}")
    try:
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        usable = False
    if not usable or any(character.isspace() for character in host):
        # The text is not repeated: it may hold a credential.
        raise ValueError("has what is no http or https URL; write https://host:9200")
    return host


def problem_of_deletions(names: IndexNames) -> str | None:
    """Why records without a value could not find the index of the document that they delete; None if they find it."""
    others = [str(each) for each in names.placeholders if each.column not in ("topic", "key")]
    if not others:
        return None
    return (
        f'tombstones "delete" needs an index by topic or key: a record without a value has another {others[0]} '
        'than the document that it deletes, or none; use tombstones "ignore" or "dead_letter"'
    )


Tombstones = Literal["delete", "ignore", "dead_letter"]
Truncates = Literal["apply", "ignore", "dead_letter"]
WriteMethod = Literal["create", "index"]


class _Ids(Part):
    """What the rest asks of a rule for ids, of whichever kind."""

    @property
    def id_columns(self) -> tuple[str, ...]:
        """The columns of the rows whose values are in an id, apart from the record's own coordinates and key."""
        return ()

    @property
    def version_column(self) -> str | None:
        """The column with the version of a document; None if no column of the user's has it."""
        return None

    @property
    def has_batch_time(self) -> bool:
        """Whether an id ends with the batch time."""
        return False

    @property
    def recur(self) -> bool:
        """Whether different records may have the same id, and no column says which of them is newer."""
        return False


class RecordIds(_Ids):
    """``topic+partition+offset``, Kafka Connect's form, with ``+incarnation`` from the topic's second incarnation on.

    ``rows`` names the columns that distinguish the rows of one record, if a transform makes several rows of it: the
    position from ``posexplode``, or the joined row's own key. Their values follow after ``~``. Without ``rows`` a
    record is one document, and a batch with two rows of one record fails.
    """

    kind: Literal["record"] = "record"
    rows: Texts = ()

    @property
    def id_columns(self) -> tuple[str, ...]:
        return self.rows


class KeyIds(_Ids):
    """The record's key: one document per key. A version keeps an older value from replacing a newer one.

    The version is the offset, or the column ``version_from``, which must grow with every change of a key: an
    offset of another partition or of a re-created topic is no version (rule 7 of the design).
    """

    kind: Literal["key"] = "key"
    version_from: str | None = None

    @property
    def version_column(self) -> str | None:
        return self.version_from


class ColumnIds(_Ids):
    """The values of named columns, joined by ``+``; with the batch time for the results of an aggregate.

    Without the batch time, a document is that of the newest batch with its id. The batch time is then its version, so
    that an older batch that is run again does not overwrite it.
    """

    kind: Literal["columns"] = "columns"
    columns: tuple[str, ...] = Field(min_length=1)
    with_batch_time: bool = True

    @property
    def id_columns(self) -> tuple[str, ...]:
        return self.columns

    @property
    def has_batch_time(self) -> bool:
        return self.with_batch_time

    @property
    def recur(self) -> bool:
        return not self.with_batch_time


TopicName = Annotated[
    str,
    BeforeValidator(partial(check_no_placeholder, what="topic")),
    Field(pattern=r"^[a-zA-Z0-9._-]{1,249}$"),
]


class DeadLetterTopic(Part):
    """A Kafka topic for the dead letters of an output. It must exist.

    The cluster is given by ``connection``, the id of an Airflow connection of type ``kafka``, or by
    ``bootstrap_servers`` if no secret is needed.
    """

    topic: TopicName
    connection: str | None = None
    bootstrap_servers: Servers | None = None

    @model_validator(mode="after")
    def _says_where(self) -> Self:
        _check_one_cluster(self.connection, self.bootstrap_servers)
        return self

    @property
    def place(self) -> OutputPlace:
        """Where the letters are, to compare it with the places of outputs."""
        return _topic_place(self)


DocumentIds = Annotated[RecordIds | KeyIds | ColumnIds, Field(discriminator="kind")]


class OutputPlace(NamedTuple):
    """Where an output writes. Two outputs with an equal place would write into each other's.

    ``server`` is a connection, or addresses; None for a folder of this machine. ``kind`` and ``name`` say what the
    place is, for people: "index" and its name.
    """

    server: str | tuple[str, ...] | None
    kind: str
    name: str


class Dataset(NamedTuple):
    """A dataset by OpenLineage's conventions: the namespace is the server, the name the topic, index or path."""

    namespace: str
    name: str


class OutputDefinition(KindDefinition):
    """The base class of outputs: what a user writes in a stream's definition, and what headrace asks of an output.

    A class has a field ``id`` (an `Identifier`), and names its `writer`. All else has a default here. Outputs are
    written independently: each may have its own transform, and its success is recorded separately.
    """

    shapes: ClassVar[Mapping[str, Shape]] = OUTPUT_SHAPES

    writer: ClassVar[str]
    """The class that writes batches (``headrace.spark.outputs.writer.OutputWriter``), as "module:Class"."""

    datasets: ClassVar[str | None] = None
    """The datasets for OpenLineage, as "module:function": ``function(output, counts, find_connection)`` returns the
    number of rows written by `Dataset`. ``counts`` are those of the writer, ``find_connection`` returns an Airflow
    connection by its id. None: it writes no dataset."""

    keeps_undecodable: ClassVar[bool] = False
    """Whether the writer keeps records that do not decode (`WrittenBatch.undecodable`), such as dead letters."""

    sends_bytes: ClassVar[bool] = False
    """Whether rows without a transform are wanted as the bytes from Kafka instead of decoded: parsing and serialising
    them again would gain nothing."""

    writes_json: ClassVar[bool] = False
    """Whether what it writes is JSON, so that it gets bytes only of a decoder whose bytes are JSON
    (`DecoderDefinition.bytes_are_json`)."""

    reads_all_rows: ClassVar[bool] = True
    """Whether the writer reads all rows. Rows that several such outputs read are computed once, and kept meanwhile."""

    writes_empty_batches: ClassVar[bool] = False
    """Whether a batch without rows is written without Spark too, such as a heading that is printed."""

    transform: Reference | None = Field(
        default=None, description='"module:function" of this output alone; by default the stream\'s transform.'
    )
    window: Window | None = Field(default=None, description="Also read the records of earlier batches.")
    renamed_from: Identifier | None = Field(
        default=None,
        description="The first id of an output that was renamed. What was written to it is recorded under that id.",
    )
    kind: str
    id: Identifier

    @field_validator("id")
    @classmethod
    def _id_is_an_identifier(cls, value: str) -> str:
        # A class of another package may give its id the type str.
        return check_identifier(value)

    @property
    def step(self) -> str:
        """The name under which the ledger, Kafka, Parquet folders and dead letters know the output: its first id.

        So the records of what was written stay with the place, and every definition, old or new, finds them.
        """
        return self.renamed_from or str(self.id)

    @property
    def places(self) -> tuple[OutputPlace, ...]:
        """Where it writes. A replay to a place of the stream's own outputs is refused."""
        return ()

    def shared_place(self, other: OutputDefinition) -> str | None:
        """A place to which both would write, for people; None if there is none."""
        return next((f"{place.kind} {place.name!r}" for place in self.places if place in other.places), None)

    def whereabouts(self, batch_time_ms: int) -> str:  # noqa: ARG002 - for subclasses
        """A sentence that says where the rows of a written batch are, for `headrace trace`."""
        return f"Its rows were given to the writer {self.writer}."

    @property
    def functions(self) -> tuple[str, ...]:
        """The user's functions that the writer calls with a DataFrame and a `BatchContext`, as "module:function"."""
        return ()

    def reasons_for_order(self) -> Iterator[str]:
        """Yields a clause, to follow the output's name, for each property that needs batches in their order."""
        yield from ()

    @property
    def takes_rows_without_records(self) -> bool:
        """Whether the output can use rows that a transform makes from a batch without records, such as a count of 0."""
        return True

    @property
    def takes_blocks(self) -> bool:
        """Whether the writer can take blocks of the log in place of rows (`BlockWriter`)."""
        return False

    @property
    def needs_incarnation(self) -> bool:
        """Whether what is written depends on the incarnation of a record's topic."""
        return False

    @property
    def versions_by_offset(self) -> bool:
        """Whether the offset of a record is the version of its key, so that keys must stay in their partitions."""
        return False

    @property
    def deletes_by_key(self) -> bool:
        """Whether records without a value delete documents. Elasticsearch forgets a deleted document's version
        (``index.gc_deletes``, a minute by default), so an older batch that is written later restores the document."""
        return False


class ElasticsearchOutput(OutputDefinition):
    """An Elasticsearch index.

    The cluster is given by ``connection``, the id of an Airflow connection of type ``elasticsearch``, or by ``hosts``
    (URLs) if no secret is needed. A record that Elasticsearch refuses permanently goes to ``dead_letter_index``
    (``<index>-dead-letters`` by default) or to ``dead_letter_topic``, with its coordinates, the reason and the original
    bytes.
    """

    writer: ClassVar[str] = "headrace.spark.outputs.elasticsearch:ElasticsearchOutputWriter"
    check: ClassVar[str | None] = "headrace.checks.connecting:check_elasticsearch"
    datasets: ClassVar[str | None] = "headrace.lineage:index_datasets"
    keeps_undecodable: ClassVar[bool] = True
    sends_bytes: ClassVar[bool] = True
    writes_json: ClassVar[bool] = True

    kind: Literal["elasticsearch"] = "elasticsearch"
    id: Identifier = "elasticsearch"
    connection: str | None = None
    hosts: Texts = ()
    index: RecordIndex
    index_zone: Annotated[str, AfterValidator(check_zone)] = Field(
        default=UTC, description="The time zone of the times in the names of indices, by its IANA name."
    )
    max_indices: int = Field(
        default=100,
        ge=1,
        le=1000,
        description="The most indices of one batch, where each record has its own. A batch with more fails before "
        "anything is sent.",
    )
    create_index: bool = Field(
        default=True, description="Whether an index that is missing is created, with the templates of the server."
    )
    require_alias: bool = Field(default=False, description="Whether documents go to aliases only.")
    document_ids: DocumentIds = RecordIds()
    tombstones: Tombstones | None = Field(
        default=None, description='Records without a value; by default "delete" with key ids, else "dead_letter".'
    )
    truncates: Truncates = Field(
        default="dead_letter",
        description="Change events that say that the table was truncated. apply deletes all documents of the index "
        "whose version is older, so it needs key ids with version_from.",
    )
    write_method: WriteMethod | None = Field(
        default=None,
        description="create keeps an existing document, so that a repeated batch changes nothing; index replaces it, "
        "for example after the transform has changed. By default create; index for ids of columns without the batch "
        "time.",
    )
    dead_letter_index: IndexName | None = None
    dead_letter_topic: DeadLetterTopic | None = Field(
        default=None, description="A Kafka topic for the dead letters, in place of an index."
    )
    dead_letter_limit: DeadLetterLimit = DeadLetterLimit()
    bulk_bytes: int = Field(default=5 * 1024 * 1024, ge=1, le=100 * 1024 * 1024)
    bulk_actions: int = Field(default=5_000, ge=1, le=100_000)
    requests_in_flight: int = Field(default=2, ge=1, le=64)
    request_timeout_seconds: PositiveFloat = 60.0
    max_retry_seconds: PositiveFloat = 30.0
    max_throttled_seconds: PositiveFloat = 300.0
    max_requests_per_second: PositiveFloat | None = Field(
        default=None,
        description="The ceiling of all requests of the tasks that write a batch, for a cluster that others use too. "
        "Each task has an equal share.",
    )
    max_bytes_per_second: int | None = Field(
        default=None, ge=1, description="The same of the bytes of their bodies, before compression."
    )
    error_kinds: dict[str, Literal["document", "passing", "credential", "index"]] = Field(
        default_factory=dict,
        description="The kinds of the server's errors by type, where headrace's own do not fit. An error of a document "
        "makes a dead letter, a passing one is tried again, those of the credential and the index fail the batch.",
    )
    refresh: bool = False

    @field_validator("hosts")
    @classmethod
    def _hosts_hold_no_secret(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if any("@" in host or url_holds_secret(host) for host in value):
            raise ValueError("hold a login; put it into an Airflow connection and name that in connection")
        return tuple(check_host(host) for host in value)

    @field_validator("error_kinds")
    @classmethod
    def _conflicts_have_no_kind(cls, value: dict[str, str]) -> dict[str, str]:
        if named := sorted(type_ for type_ in value if not type_.strip() or "version_conflict" in type_):
            raise ValueError(
                f"gives a kind to {named[0]!r}; a version conflict is settled by comparing the documents, and every "
                "other error is named by its type"
            )
        return value

    @model_validator(mode="after")
    def _says_where_and_how(self) -> Self:
        if (self.connection is None) == (not self.hosts):
            raise ValueError("name either connection (an Airflow connection id) or hosts")
        if self.dead_letter_topic is not None:
            if self.dead_letter_index is not None:
                raise ValueError("name either dead_letter_index or dead_letter_topic")
        elif self.names.is_plain or self.dead_letter_index is None:
            check_dead_letter_index(self.names.common or self.step, self.dead_letter_index)
        if self.truncates == "apply" and not self.names.is_plain:
            raise ValueError('truncates "apply" needs one index: the documents of a table would be in several')
        if self.tombstone_action == "delete" and (problem := problem_of_deletions(self.names)):
            raise ValueError(problem)
        if self.write_method == "create" and self.document_ids.recur:
            raise ValueError('write_method "create" would keep the first value of each id forever; use "index"')
        if self.tombstones == "delete" and not isinstance(self.document_ids, KeyIds):
            raise ValueError(
                'tombstones "delete" needs document_ids by key: no other id is shared with the document to delete'
            )
        if self.truncates == "apply" and not (isinstance(self.document_ids, KeyIds) and self.document_ids.version_from):
            raise ValueError(
                'truncates "apply" needs document_ids by key with version_from="position": what is older than the '
                "truncate is known by the versions of the documents"
            )
        return self

    @property
    def names(self) -> IndexNames:
        """The index of each record."""
        return parse_index(self.index, self.index_zone)

    @property
    def index_text(self) -> str:
        """The name of the index; with placeholders as the definition has it, of a mapping its JSON."""
        return self.index if isinstance(self.index, str) else self.names.text

    def at(self, name: str) -> Self:
        """The output for the rows of one index, named so."""
        if self.index == name:
            return self
        return self.model_copy(update={"index": name, "dead_letter_index": self.dead_letters or None})

    @property
    def tombstone_action(self) -> Tombstones:
        """What happens to records without a value."""
        if self.tombstones is not None:
            return self.tombstones
        return "delete" if isinstance(self.document_ids, KeyIds) else "dead_letter"

    @property
    def write_action(self) -> WriteMethod:
        """What happens to a document whose id and version are already in the index. "index" where ids recur: there a
        record with an existing id is an update, not a repetition."""
        return self.write_method or ("index" if self.document_ids.recur else "create")

    @property
    def version(self) -> Literal["offset", "column", "batch_time"] | None:
        """What the external version of a document is; None if the index counts versions itself."""
        if self.document_ids.version_column is not None:
            return "column"
        if isinstance(self.document_ids, KeyIds):
            return "offset"
        return "batch_time" if self.document_ids.recur else None

    @property
    def places(self) -> tuple[OutputPlace, ...]:
        where = self.connection or self.hosts
        topic = self.dead_letter_topic
        letters = OutputPlace(where, "index", self.dead_letters) if topic is None else topic.place
        return OutputPlace(where, "index", self.index_text), letters

    def shared_place(self, other: OutputDefinition) -> str | None:
        if shared := super().shared_place(other):
            return shared
        if not (isinstance(other, ElasticsearchOutput) and self.shares_cluster(other)):
            return None
        if not self.names.may_meet(other.names, one_row=True):
            return None
        return f"index {self.index_text!r}, which may be one of {other.index_text!r}"

    @property
    def description(self) -> tuple[str, str]:
        where = f"connection `{self.connection}`" if self.connection else ", ".join(self.hosts)
        return f"Elasticsearch, {where}", f"index `{self.index_text}`, ids by {self.document_ids.kind}"

    @property
    def connection_ids(self) -> tuple[str, ...]:
        of_letters = None if self.dead_letter_topic is None else self.dead_letter_topic.connection
        return tuple(conn_id for conn_id in (self.connection, of_letters) if conn_id is not None)

    def problems(self, stream: StreamFields) -> Iterator[str]:
        if self.dead_letter_topic is not None:
            yield from _own_topic_problems("dead_letter_topic", self.dead_letter_topic, stream)
            for sender in stream.kafka_outputs:
                if self.dead_letter_topic.place in sender.places:
                    # Who reads the topic would take dead letters for rows.
                    yield f"dead_letter_topic: {sender.topic} is the topic of output {sender.id}; name another"
        yield from self._version_problems(stream)
        yield from self._id_column_problems(stream)
        yield from self._name_problems(stream)
        others = [other for other in stream.elasticsearch_outputs if other is not self]
        for other in others:
            # Readers of the index would get dead letters as documents, and its mapping would refuse most of them.
            if self.dead_letters == other.index_text and self.shares_cluster(other):
                yield (f"dead_letter_index: {self.dead_letters} is the index of output {other.id}; name another")
        for earlier in stream.elasticsearch_outputs[: stream.elasticsearch_outputs.index(self)]:
            if earlier.shares_cluster(self) and earlier.shares_ids(self) and self._may_meet(earlier, stream):
                is_one = self.names.is_plain and earlier.names.is_plain
                yield (
                    f"index: {self.index_text} {'is also' if is_one else 'may also be'} the index of output "
                    f"{earlier.id}{'' if is_one else f' ({earlier.index_text})'}, and their "
                    "documents would have the same ids, so that those of one output are lost; give each an index of "
                    "its own, or make one output whose transform returns the rows of both, with ids that differ, such "
                    'as RecordIds(rows="column")'
                )

    def _may_meet(self, other: ElasticsearchOutput, stream: StreamFields) -> bool:
        """Whether documents of both, with the same id, may be in one index."""
        topics = _known_topics(stream)
        mine, theirs = self.names, other.names
        if topics is not None:
            mine, theirs = mine.of_topics(topics), theirs.of_topics(topics)
        # Then documents of one id are of the same row, with the same columns.
        same_columns = stream.transform_of(self) == stream.transform_of(other)
        one_row = same_columns and isinstance(self.document_ids, RecordIds) and self.document_ids == other.document_ids
        return mine.may_meet(theirs, one_row=one_row)

    def _name_problems(self, stream: StreamFields) -> Iterator[str]:
        names, topics = self.names, _known_topics(stream)
        if stream.transform_of(self) is None:
            of_records = RECORD_COLUMNS.union(*(source.columns_beside for source in stream.inputs))
            if missing := [name for name in names.columns if name not in of_records]:
                yield (
                    f"index: names the column {', '.join(missing)}, which records do not have as they come, and no "
                    "transform makes it; give the output a transform"
                )
            no_times = RECORD_COLUMNS - {"timestamp"}
            if wrong := [str(each) for each in names.placeholders if each.time_format and each.column in no_times]:
                yield (
                    f"index: has {', '.join(wrong)}, and that column of records is no time; leave out the format, or "
                    "write {timestamp:%Y.%m.%d} for the record's time"
                )
        if topics is None or names.is_plain:
            return
        without = [topic for topic in topics if names.template_of(topic) is None]
        if without:
            yield f"index: names none for topic {', '.join(without)}, which the stream reads"
        if unread := [topic for topic, _ in names.by_topic if topic not in topics]:
            yield f"index: names one for topic {', '.join(unread)}, which no input of the stream reads"
        for topic, template in names.of_topics(topics).by_topic:
            # A placeholder that is left is filled in by each record.
            name = "".join(part if isinstance(part, str) else "0" for part in template)
            why = illegal_name(name)
            if why is None and begins_with_dot(template) and not begins_with_dot(names.template_of(topic) or template):
                why = "it begins with a dot, as the indices of the server do"
            if why is not None:
                yield (
                    f"index: for topic {topic} {name!r} is no name for an index: {why}; name one for each topic: "
                    'index={"topic": "index"}'
                )

    def _version_problems(self, stream: StreamFields) -> Iterator[str]:
        if not self.versions_by_offset:
            return
        topics = {topic for source in stream.kafka_inputs for topic in source.topics}
        patterns = [source for source in stream.kafka_inputs if source.topic_pattern is not None]
        if len(topics) > 1 or patterns or len(stream.inputs) > 1:
            yield (
                "document_ids: key ids with offsets as versions need a single topic, "
                "since offsets of different topics do not order; name a column that grows with every change "
                "in version_from"
            )
        several = [source.id for source in stream.inputs if source.in_kafka is None and source.receivers > 1]
        if several:
            yield (
                f"document_ids: key ids with offsets as versions need one receiver, since the "
                f"offsets of two receivers of input {several[0]} do not order; name a column that grows with every "
                "change in version_from"
            )

    def _id_column_problems(self, stream: StreamFields) -> Iterator[str]:
        if stream.transform_of(self) is not None:
            return
        ids = self.document_ids
        named = [*ids.id_columns, *([ids.version_column] if ids.version_column else [])]
        of_records = RECORD_COLUMNS.union(*(source.columns_beside for source in stream.inputs))
        missing = [name for name in named if name not in of_records]
        if missing:
            yield (
                f"document_ids: names the column {', '.join(missing)}, which records do not have "
                "as they come, and no transform makes it; give the output a transform"
            )

    def reasons_for_order(self) -> Iterator[str]:
        if self.document_ids.recur:
            yield "replaces documents of earlier batches"
        if self.deletes_by_key:
            yield "deletes documents by key"
        if self.truncates == "apply":
            yield "applies truncates of the table"

    @property
    def takes_blocks(self) -> bool:
        """Whether the ids are made of what the log has of a record."""
        ids = self.document_ids
        if not RECORD_COLUMNS.issuperset(self.names.columns):
            return False
        return self.versions_by_offset or (isinstance(ids, RecordIds) and not ids.rows)

    @property
    def needs_incarnation(self) -> bool:
        """Whether ids or versions depend on the incarnation. Otherwise it only finds the record of a dead letter."""
        return self.versions_by_offset or isinstance(self.document_ids, RecordIds)

    @property
    def versions_by_offset(self) -> bool:
        return self.version == "offset"

    @property
    def takes_rows_without_records(self) -> bool:
        """Whether ids come from columns: rows that are made without records have no coordinates for other ids."""
        return isinstance(self.document_ids, ColumnIds)

    @property
    def deletes_by_key(self) -> bool:
        return self.tombstone_action == "delete" or self.truncates == "apply"

    @property
    def dead_letters(self) -> str:
        """The dead-letter index; "" if the letters go to a topic. Where each record has an index of its own, it is
        named by what these have in common, or by the output."""
        if self.dead_letter_topic is not None:
            return ""
        return self.dead_letter_index or dead_letters_of(self.names.common or self.step)

    @property
    def letters_place(self) -> str:
        """Where the dead letters are, for people."""
        return f"topic {self.dead_letter_topic.topic}" if self.dead_letter_topic else self.dead_letters

    def shares_cluster(self, other: ElasticsearchOutput) -> bool:
        """Whether both have the same connection or a common host; the definition shows no other way to the same
        cluster."""
        if self.connection is not None:
            return self.connection == other.connection
        return not {host_address(host) for host in self.hosts}.isdisjoint(host_address(host) for host in other.hosts)

    def shares_ids(self, other: ElasticsearchOutput) -> bool:
        """Whether documents of both may have the same ids, so that the outputs need an index each."""
        mine, theirs = self.document_ids, other.document_ids
        if isinstance(mine, RecordIds) and isinstance(theirs, RecordIds):
            # Only ids with rows hold a "~".
            return bool(mine.rows) == bool(theirs.rows)
        if isinstance(mine, ColumnIds) and isinstance(theirs, ColumnIds):
            return mine == theirs
        columns = _as_columns(mine)
        return mine.kind == theirs.kind or (columns is not None and columns == _as_columns(theirs))


def _known_topics(stream: StreamFields) -> list[str] | None:
    """The topics of the stream; None if a pattern decides which they are."""
    if any(source.topic_pattern is not None for source in stream.kafka_inputs):
        return None
    return [topic for source in stream.inputs for topic in source.topic_names]


def _as_columns(ids: RecordIds | KeyIds | ColumnIds) -> tuple[str, ...] | None:
    """The columns whose values, joined, are these ids; None if they are no columns of the record alone."""
    if isinstance(ids, ColumnIds):
        return None if ids.with_batch_time else ids.columns
    if isinstance(ids, KeyIds):
        return ("key",)
    return None if ids.rows else ("topic", "partition", "offset")


def host_address(text: str) -> str:
    """The address with its port, so that two ways to write it are equal."""
    parts = urlsplit((text if "://" in text else f"http://{text}").rstrip("/").lower())
    return f"{parts.scheme}://{parts.hostname}:{parts.port or {'http': 80, 'https': 443}[parts.scheme]}{parts.path}"


class ConsoleOutput(OutputDefinition):
    """Prints the first rows of every batch in the form of Spark Streaming's ``print()``, to the log of the output's
    task."""

    writer: ClassVar[str] = "headrace.spark.outputs.functions:ConsoleWriter"
    reads_all_rows: ClassVar[bool] = False
    writes_empty_batches: ClassVar[bool] = True

    kind: Literal["console"] = "console"
    id: Identifier = "console"
    rows: NonNegativeInt = 10

    def whereabouts(self, batch_time_ms: int) -> str:  # noqa: ARG002 - one log has all batches
        return f"Up to {self.rows} rows were printed to the log of the output's task."


class ParquetOutput(OutputDefinition):
    """Parquet files in ``<path>/batch_time=<epoch milliseconds>/``, which appear together or not at all.

    ``path`` is the absolute path or file:// URL of a folder that every Spark host sees (a shared one if there are
    several hosts). A batch that runs again replaces its own files. Object stores are refused: they have no rename, so
    readers would see a batch grow file by file.
    """

    writer: ClassVar[str] = "headrace.spark.outputs.parquet:ParquetWriter"
    check: ClassVar[str | None] = "headrace.checks.connecting:check_parquet"
    datasets: ClassVar[str | None] = "headrace.lineage:folder_datasets"

    kind: Literal["parquet"] = "parquet"
    id: Identifier = "parquet"
    path: str = Field(min_length=1)
    compression: Literal["zstd", "snappy", "none"] = "zstd"

    @field_validator("path")
    @classmethod
    def _path_is_a_folder(cls, value: str) -> str:
        value = check_no_placeholder(check_storage_url(value), "folder")
        parts = urlsplit(value)
        if parts.scheme not in ("", "file") or parts.netloc not in ("", "localhost"):
            raise ValueError(
                f"is in a store of {parts.scheme or parts.netloc}, where a batch's files cannot appear together; name "
                "a folder of a file system, or use foreach_batch with a table format (Delta, Iceberg)"
            )
        return value

    @property
    def places(self) -> tuple[OutputPlace, ...]:
        return (OutputPlace(None, "folder", self.folder),)

    @property
    def description(self) -> tuple[str, str]:
        return "Parquet files", f"`{self.path}`"

    def whereabouts(self, batch_time_ms: int) -> str:
        return f"Its rows are in {self.path.rstrip('/')}/batch_time={batch_time_ms}/."

    def problems(self, stream: StreamFields) -> Iterator[str]:
        for earlier in stream.outputs[: stream.outputs.index(self)]:
            if isinstance(earlier, ParquetOutput) and earlier.folder == self.folder:
                yield (
                    f"path: {self.path} is also the folder of output {earlier.id}, and each replaces "
                    "a batch's files there; give each a folder of its own"
                )

    @property
    def folder(self) -> str:
        """The path of the folder, in one spelling of those that ``path`` may have."""
        parts = urlsplit(self.path)
        return posixpath.normpath(unquote(parts.path) if parts.scheme == "file" else self.path)


class KafkaOutput(OutputDefinition):
    """A Kafka topic. Each row is sent with its column ``value``, and ``key`` and ``headers`` if it has these columns.

    A batch is one transaction, so a consumer with ``isolation.level=read_committed`` sees all of it or nothing. A batch
    is sent to a topic once: when it is run again, it counts as ``repeated``. ``transaction_timeout_seconds`` is how
    long sending a batch may take, at most the brokers' ``transaction.max.timeout.ms`` (15 minutes by default).
    """

    writer: ClassVar[str] = "headrace.spark.outputs.kafka:KafkaWriter"
    check: ClassVar[str | None] = "headrace.checks.connecting:check_topic"
    datasets: ClassVar[str | None] = "headrace.lineage:topic_datasets"
    sends_bytes: ClassVar[bool] = True

    kind: Literal["kafka"] = "kafka"
    id: Identifier = "kafka"
    connection: str | None = None
    bootstrap_servers: Servers | None = None
    topic: TopicName
    transaction_timeout_seconds: PositiveFloat = 60.0

    @model_validator(mode="after")
    def _says_where(self) -> Self:
        _check_one_cluster(self.connection, self.bootstrap_servers)
        return self

    @property
    def places(self) -> tuple[OutputPlace, ...]:
        return (_topic_place(self),)

    @property
    def description(self) -> tuple[str, str]:
        where = f"connection `{self.connection}`" if self.connection else f"`{self.bootstrap_servers}`"
        return f"Kafka, {where}", f"topic `{self.topic}`"

    def whereabouts(self, batch_time_ms: int) -> str:  # noqa: ARG002 - one topic has all batches
        return f"Its rows were sent to topic {self.topic}, in one transaction."

    @property
    def connection_ids(self) -> tuple[str, ...]:
        return () if self.connection is None else (self.connection,)

    def problems(self, stream: StreamFields) -> Iterator[str]:
        yield from _own_topic_problems("topic", self, stream)


def _check_one_cluster(connection: str | None, bootstrap_servers: str | None) -> None:
    if (connection is None) == (bootstrap_servers is None):
        raise ValueError("name either connection (an Airflow connection id) or bootstrap_servers")


def _topic_place(to: KafkaOutput | DeadLetterTopic) -> OutputPlace:
    return OutputPlace(to.connection or to.bootstrap_servers, "topic", to.topic)


def _own_topic_problems(field: str, to: KafkaOutput | DeadLetterTopic, stream: StreamFields) -> Iterator[str]:
    for source in stream.kafka_inputs:
        if source.matches(to.topic) and source.reads_from(to.connection, to.bootstrap_servers):
            yield (
                f"{field}: input {source.id} reads {to.topic}, so the stream would receive "
                "what it sends, without end; send to another topic"
            )


class ForeachBatchOutput(OutputDefinition):
    """Any other output: ``function`` ("module:function") is called with the batch's DataFrame and its `BatchContext`.

    If it has a parameter ``undecodable``, it also gets the records that cannot be decoded: a DataFrame for each input
    id. It may be called more than once for a batch: for a retry, a repeat, a crash before its success is recorded, or
    after a failure by a later batch's run. So writing again must give the same result, for example under a name with
    ``batch.batch_time``. It may return a mapping of counts, which the ledger keeps. An exception fails only this
    output.
    """

    writer: ClassVar[str] = "headrace.spark.outputs.functions:ForeachBatchWriter"

    kind: Literal["foreach_batch"] = "foreach_batch"
    id: Identifier = "foreach_batch"
    function: Reference

    @property
    def description(self) -> tuple[str, str]:
        return "function", f"`{self.function}`"

    def whereabouts(self, batch_time_ms: int) -> str:  # noqa: ARG002 - the function decides where
        return f"Its rows were given to {self.function}."

    @property
    def functions(self) -> tuple[str, ...]:
        return (self.function,)


_BUILT_IN = (ElasticsearchOutput, ConsoleOutput, ParquetOutput, KafkaOutput, ForeachBatchOutput)

if TYPE_CHECKING:
    Output = OutputDefinition
else:
    Output = Annotated[
        Annotated[reduce(or_, _BUILT_IN), Field(discriminator="kind")],
        WrapValidator(partial(validate_part, OutputDefinition, _BUILT_IN, "headrace.outputs")),
        # An output of another package is none of the union.
        SerializeAsAny(),
    ]
