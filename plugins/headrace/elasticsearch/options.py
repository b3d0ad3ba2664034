"""The options of one write to an index: one value, which Spark pickles for the tasks of the write.

They are made from the stream's definition, which has validated the settings, so they are not validated again. This
module imports no definition at run time: Spark's Python workers import it, and need only the value.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Self

from headrace.elasticsearch import columns
from headrace.elasticsearch.errors import UnsuitableRowsError
from headrace.elasticsearch.target import Target
from headrace.formats.index_names import IndexNames

if TYPE_CHECKING:
    from headrace.stream.inputs import KafkaInput
    from headrace.stream.outputs import ElasticsearchOutput

LOG = "log"
KAFKA = "kafka"


class DocumentIdKind(StrEnum):
    """The source of a document's id (rule 7)."""

    RECORD = "record"
    """``topic+partition+offset``; ``topic+partition+offset+incarnation`` from the topic's second incarnation on.
    A topic's name contains no ``+``, so the two forms cannot be confused. With ``id_columns``, which distinguish the
    rows of one record, ``~`` and their values follow."""
    KEY = "key"
    """The record's key, with its offset (or ``version_from``) as external version: the index holds the latest value."""
    COLUMNS = "columns"
    """The values of ``id_columns``; with several of them, or the batch time, joined by ``+`` (a ``+`` or ``%`` within
    a value is written ``%2B`` or ``%25``)."""


class VersionSource(StrEnum):
    """The source of a document's external version. None: the index counts versions itself."""

    OFFSET = "offset"
    """The record's offset, of one topic whose keys stay in their partitions."""
    COLUMN = "column"
    """A whole number or a time that only grows per id, in the column ``columns.VERSION``."""
    BATCH_TIME = "batch_time"
    """Ids recur from batch to batch, and the newest batch's document stays even if an older batch is run again."""


class WriteMethod(StrEnum):
    """What happens to a document whose id and version are already in the index.

    ``create`` keeps the existing document, so running a batch again changes nothing, not even versions, and costs no
    indexing. ``index`` replaces it. Running a batch again with a *changed* transform needs ``index``: with ``create``
    the old documents would stay and be counted as repeated. With both, an older version never replaces a newer one.
    """

    CREATE = "create"
    INDEX = "index"


class TombstonePolicy(StrEnum):
    """What is done with a null value."""

    DELETE = "delete"
    """Delete the document of that id. Elasticsearch remembers a deleted document's version for ``index.gc_deletes``
    (60 s): replaying an older batch after that brings the document back, until the tombstone is replayed too."""
    IGNORE = "ignore"
    DEAD_LETTER = "dead_letter"


class TruncatePolicy(StrEnum):
    """What is done with the change event of a table that was truncated."""

    APPLY = "apply"
    """Delete all documents of the index with an older version."""
    IGNORE = "ignore"
    DEAD_LETTER = "dead_letter"


@dataclass(frozen=True, slots=True, kw_only=True)
class LetterTopic:
    """The topic that the dead letters of a write go to, in place of an index."""

    topic: str
    connection: str | None = None
    """An Airflow connection's id, as that of the index; or ``bootstrap_servers``."""
    bootstrap_servers: str | None = None
    began_ms: int = 0
    """When the write began, in epoch milliseconds: it tells apart what several attempts say of one letter."""
    read_topics: tuple[str, ...] = ()
    """The ids of topics of this name that the batch has records of. Letters never go to one of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexingOptions:
    """How and where the rows of one write are indexed. ``of`` makes the options of a stream's output."""

    connection: str | None = None
    """An Airflow connection's id, resolved in each process that writes: the only source of credentials."""
    hosts: tuple[str, ...] = ()
    """Instead of a connection: the nodes' URLs, without credentials."""
    target: Target
    """That of all rows. With ``names`` its name is their text, and no document goes there."""
    names: IndexNames | None = None
    """Where each row has an index of its own; None: ``target`` is that of all rows."""
    targets: Mapping[str, Target] | None = None
    """The targets of the batch's names, once they are known. Nothing is sent before."""
    max_indices: int = 100
    """The most indices of a batch."""
    create_index: bool = True
    """Whether an index that is missing may be created, by the first document."""
    letters_names: frozenset[str] = frozenset()
    """The names of the stream's dead-letter indices: no row may have them."""
    document_id: DocumentIdKind = DocumentIdKind.RECORD
    id_columns: tuple[str, ...] = ()
    """The columns of column ids; with record ids the columns that distinguish the rows of one record."""
    id_batch_time: bool = False
    """Whether each column id ends with the batch time: for aggregates, which have one row per group and batch."""
    version: VersionSource | None = None
    write_method: WriteMethod = WriteMethod.CREATE
    tombstones: TombstonePolicy = TombstonePolicy.DEAD_LETTER
    truncates: TruncatePolicy = TruncatePolicy.DEAD_LETTER
    truncated_below: int = 0
    """The version below which truncates of earlier batches have left no document. Older rows are superseded."""
    truncated_below_then: int = 0
    """The same, without truncates of later batch times. It is only recorded."""

    bulk_bytes: int = 5 * 1024 * 1024
    """The largest size of a request in bytes; a larger single document is a request of its own."""
    bulk_actions: int = 5000
    requests_in_flight: int = 2
    """The number of requests that one task keeps in flight."""
    max_retry_seconds: float = 30.0
    """How long a request may make no progress before the task fails."""
    max_throttled_seconds: float = 300.0
    """How long a request may get nothing but 429 before the task fails."""
    max_requests_per_second: float | None = None
    """The ceiling of requests: of the write, or of one task of it (`for_task`)."""
    max_bytes_per_second: float | None = None
    """The same of the bytes of their bodies."""
    request_timeout_seconds: float = 60.0
    error_kinds: Mapping[str, str] = field(default_factory=dict)
    """The kinds (`headrace.elasticsearch.error_kinds.ErrorKind`) of types of errors, where they are not the table's."""
    refresh: bool = False
    """Whether to refresh the index once, after all tasks."""

    batch_time_ms: int
    attempt: int | None = None
    """The number of the attempt at the batch, for dead letters."""
    task: int = 0
    """The number of this task within the write, to distinguish dead letters of otherwise equal rows."""
    written_before: bool = False
    """Whether an earlier attempt may have written this batch to this output. If so, an existing document with other
    contents is taken as that attempt's and kept; if not, it is another record's, and the write fails."""
    withdraw_letters: bool = False
    """Whether to delete, when all tasks have succeeded, the letters that earlier attempts at the batch wrote and this
    one did not: their rows are not dead letters any more."""
    letter_topic: LetterTopic | None = None
    """Where dead letters go; None: to the target's dead-letter index."""
    report: str = ""
    """The URI to which the counts of all tasks are written as JSON when they have succeeded; the sink needs it."""
    manifests: tuple[tuple[str, str], ...] = ()
    """The manifests in which the records of dead letters of transformed rows are looked up, in this order. Each is the
    place of its records, `LOG` or `KAFKA`, and its URI."""
    inputs: tuple[dict[str, Any], ...] = ()
    """The stream's inputs (``KafkaInput``) as JSON values, if a manifest's records are in Kafka."""

    @classmethod
    def of(
        cls,
        output: ElasticsearchOutput,
        target: Target,
        *,
        batch_time_ms: int,
        attempt: int | None = None,
        report: str = "",
        manifests: Sequence[tuple[str, str]] = (),
        inputs: Sequence[KafkaInput] = (),
        written_before: bool = False,
        withdraw_letters: bool = False,
        truncated_below: int = 0,
        truncated_below_then: int = 0,
        letters_names: Iterable[str] = (),
        began_ms: int = 0,
        read_topics: Sequence[str] = (),
    ) -> Self:
        """The options for writing rows of ``headrace.spark.outputs.documents.prepare_documents`` to an output's target.

        The output decides how documents of its ids are written; the options only say what it has decided.
        """
        ids, topic = output.document_ids, output.dead_letter_topic
        in_kafka = any(place == KAFKA for place, _ in manifests)
        return cls(
            connection=output.connection,
            hosts=output.hosts,
            target=target,
            names=None if output.names.is_plain else output.names,
            max_indices=output.max_indices,
            create_index=output.create_index,
            letters_names=frozenset({output.dead_letters, *letters_names} - {""}),
            document_id=DocumentIdKind(ids.kind),
            id_columns=tuple(map(columns.id_column, range(len(ids.id_columns)))),
            id_batch_time=ids.has_batch_time,
            version=None if output.version is None else VersionSource(output.version),
            write_method=WriteMethod(output.write_action),
            tombstones=TombstonePolicy(output.tombstone_action),
            truncates=TruncatePolicy(output.truncates),
            truncated_below=truncated_below,
            truncated_below_then=truncated_below_then,
            bulk_bytes=output.bulk_bytes,
            bulk_actions=output.bulk_actions,
            requests_in_flight=output.requests_in_flight,
            max_retry_seconds=output.max_retry_seconds,
            max_throttled_seconds=output.max_throttled_seconds,
            max_requests_per_second=output.max_requests_per_second,
            max_bytes_per_second=output.max_bytes_per_second,
            request_timeout_seconds=output.request_timeout_seconds,
            error_kinds=dict(output.error_kinds),
            refresh=output.refresh,
            batch_time_ms=batch_time_ms,
            attempt=attempt,
            written_before=written_before,
            withdraw_letters=withdraw_letters and attempt is not None,
            letter_topic=None
            if topic is None
            else LetterTopic(**topic.model_dump(), began_ms=began_ms, read_topics=tuple(read_topics)),
            report=report,
            manifests=tuple(manifests),
            inputs=tuple(source.model_dump(mode="json") for source in inputs) if in_kafka else (),
        )

    @property
    def has_ceiling(self) -> bool:
        """Whether requests or their bytes are limited."""
        return self.max_requests_per_second is not None or self.max_bytes_per_second is not None

    def for_task(self, task: int, earlier_tries: int, tasks: int = 1) -> Self:
        """The options for one task of a write. ``earlier_tries``: how often Spark has tried this task before.
        ``tasks``: the most tasks of the write that run at once, of which each has an equal share of the ceiling.

        An earlier try may have written documents. ``max_retry_seconds`` is halved with each try, so all tries together
        wait for less than twice ``max_retry_seconds``, however often Spark tries. So is ``max_throttled_seconds``.

        A request is no larger than what the ceiling of bytes allows in a second, or in the time from one request to the
        next if that is longer.
        """
        requests, number = self.max_requests_per_second, self.max_bytes_per_second
        requests, number = requests and requests / tasks, number and number / tasks
        seconds = max(1.0, 1 / requests) if requests else 1.0
        return replace(
            self,
            task=task,
            written_before=self.written_before or earlier_tries > 0,
            max_retry_seconds=self.max_retry_seconds / 2**earlier_tries,
            max_throttled_seconds=self.max_throttled_seconds / 2**earlier_tries,
            max_requests_per_second=requests,
            max_bytes_per_second=number,
            bulk_bytes=max(1, min(self.bulk_bytes, int(number * seconds))) if number else self.bulk_bytes,
        )

    @property
    def watched(self) -> tuple[Target, ...]:
        """The targets to which documents of the batch may go."""
        return (self.target,) if self.names is None else tuple((self.targets or {}).values())

    def with_targets(self, targets: Iterable[Target]) -> Self:
        """The options with what is known of these targets now."""
        if self.names is None:
            (target,) = targets
            return replace(self, target=target)
        return replace(self, targets={target.name: target for target in targets})

    def target_of(self, name: str) -> Target:
        """The target of a row with this name. Raises UnsuitableRowsError if the batch did not have the name before."""
        if self.targets is None:
            return self.target.at(name)
        if name not in self.targets:
            raise UnsuitableRowsError(
                f"A row belongs in index {name!r}, which no row of the batch had when its names were read before.",
                remedy="Let the transform give the same rows each time, and run the batch again.",
            )
        return self.targets[name]

    @property
    def ids_imply_source(self) -> bool:
        """Whether an id and version belong to exactly one source position, or to one group of one batch."""
        return self.version in (None, VersionSource.OFFSET)

    @property
    def needed_columns(self) -> tuple[str, ...]:
        """The columns, besides the document, that rows must have."""
        version = columns.VERSION if self.version is VersionSource.COLUMN else None
        return columns.columns_of_ids(self.document_id, self.id_columns, version)

    def check_columns(self, names: Iterable[str]) -> None:
        """Raise UnsuitableRowsError unless rows with these columns can be indexed."""
        have, index = tuple(names), self.target.name
        missing = [name for name in self.needed_columns if name not in have]
        if missing:
            raise UnsuitableRowsError(
                f"The rows for index {index!r} have no column {', '.join(map(repr, missing))}, which "
                f"document_id={self.document_id.value} needs; they have {', '.join(map(repr, have))}.",
                remedy="Let the transform keep these columns, or choose other document ids.",
            )
        documents = [name for name in (columns.VALUE, columns.DOCUMENT) if name in have]
        if len(documents) != 1:
            raise UnsuitableRowsError(
                f"The rows for index {index!r} have {'both' if documents else 'neither'} 'value' "
                f"{'and' if documents else 'nor'} 'document'; exactly one of them is the document.",
                remedy="Pass the DataFrame through headrace.spark.outputs.documents.prepare_documents.",
            )

    @property
    def deletes(self) -> bool:
        """Whether rows without a document delete the document of their key."""
        return self.tombstones is TombstonePolicy.DELETE
