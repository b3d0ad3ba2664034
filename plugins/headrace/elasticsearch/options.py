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

    bulk_bytes: int = 5 * 1024 * 1024
    """The largest size of a request in bytes; a larger single document is a request of its own."""
    bulk_actions: int = 5000
    requests_in_flight: int = 2
    """The number of requests that one task keeps in flight."""
    max_retry_seconds: float = 30.0
    """How long a request may make no progress before the task fails."""
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
            document_id=DocumentIdKind(ids.kind),
            id_columns=tuple(map(columns.id_column, range(len(ids.id_columns)))),
            id_batch_time=ids.has_batch_time,
            version=None if output.version is None else VersionSource(output.version),
            write_method=WriteMethod(output.write_action),
            tombstones=TombstonePolicy(output.tombstone_action),
            truncates=TruncatePolicy(output.truncates),
            truncated_below=truncated_below,
            bulk_bytes=output.bulk_bytes,
            bulk_actions=output.bulk_actions,
            requests_in_flight=output.requests_in_flight,
            max_retry_seconds=output.max_retry_seconds,
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

    def for_task(self, task: int, earlier_tries: int) -> Self:
        """The options for one task of a write. ``earlier_tries``: how often Spark has tried this task before.

        An earlier try may have written documents. ``max_retry_seconds`` is halved with each try, so all tries together
        wait for less than twice ``max_retry_seconds``, however often Spark tries.
        """
        return replace(
            self,
            task=task,
            written_before=self.written_before or earlier_tries > 0,
            max_retry_seconds=self.max_retry_seconds / 2**earlier_tries,
        )

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
