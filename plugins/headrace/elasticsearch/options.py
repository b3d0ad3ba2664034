"""The options of one write to an index: one value, which Spark pickles for the tasks of the write.

They are made from the stream's definition, which has validated the settings, so they are not validated again. This
module imports no definition at run time: Spark's Python workers import it, and need only the value.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from headrace.stream.inputs import KafkaInput
    from headrace.stream.outputs import ElasticsearchOutput

LOG = "log"
KAFKA = "kafka"

VERSION = "version"
"""The name of the prepared column with the values of ``version_from``."""


def id_column(number: int) -> str:
    """The name of a prepared column of ``id_columns``, numbered from 0."""
    return f"id_{number}"


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


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexingOptions:
    """How and where the rows of one write are indexed. ``of`` makes the options of a stream's output."""

    connection: str | None = None
    """An Airflow connection's id, resolved in each process that writes: the only source of credentials."""
    hosts: tuple[str, ...] = ()
    """Instead of a connection: the nodes' URLs, without credentials."""
    index: str
    """One concrete index, or an alias of exactly one that does not roll over. Elasticsearch creates a missing one."""
    dead_letter_index: str
    document_id: DocumentIdKind = DocumentIdKind.RECORD
    id_columns: tuple[str, ...] = ()
    """The columns of column ids; with record ids the columns that distinguish the rows of one record."""
    id_batch_time: bool = False
    """Whether each column id ends with the batch time: for aggregates, which have one row per group and batch. If not,
    the batch time is the document's version, unless ``version_from`` names another."""
    version_from: str | None = None
    """The column of the external version: a whole number or a time that only grows per id."""
    write_method: WriteMethod | None = None
    """By default "create", but "index" for column ids with neither batch time nor version: there a record with an
    existing id is an update, not a repetition."""
    tombstones: TombstonePolicy | None = None
    """By default "delete" for key ids, "dead_letter" for the others."""

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

    stream_name: str = ""
    output_id: str = ""
    replay: str = ""
    """The name of a replay, "" for the stream's own output."""
    batch_time_ms: int | None = None
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
    known_indices: tuple[tuple[str, str | None], ...] = ()
    """The concrete indices, by name and UUID, that the name may stand for: those of the output's earlier batches. None
    are known of an output without earlier batches there, which may create its index."""
    known_letters_index: str | None = None
    """The concrete index to which letters of earlier batches were written, if ``dead_letter_index`` is an alias."""
    through_alias: bool = False
    """Whether the name is an alias, so that the server must refuse to create an index of this name."""
    first_alone: bool = False
    """Whether a task sends a document alone first, to see where it goes."""
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
        *,
        stream_name: str,
        batch_time_ms: int | None,
        attempt: int | None = None,
        report: str = "",
        manifests: Sequence[tuple[str, str]] = (),
        inputs: Sequence[KafkaInput] = (),
        written_before: bool = False,
        withdraw_letters: bool = False,
        known_indices: Sequence[tuple[str, str | None]] = (),
        known_letters_index: str | None = None,
        replay: str = "",
    ) -> Self:
        """The options for writing rows of ``headrace.spark.outputs.documents.prepare_documents`` to an output."""
        ids = output.document_ids
        in_kafka = any(place == KAFKA for place, _ in manifests)
        return cls(
            connection=output.connection,
            hosts=output.hosts,
            index=output.index,
            dead_letter_index=output.dead_letters,
            document_id=DocumentIdKind(ids.kind),
            id_columns=tuple(id_column(number) for number in range(len(id_sources(output)))),
            id_batch_time=ids.kind == "columns" and ids.with_batch_time,
            version_from=VERSION if ids.kind == "key" and ids.version_from else None,
            write_method=None if output.write_method is None else WriteMethod(output.write_method),
            tombstones=None if output.tombstones is None else TombstonePolicy(output.tombstones),
            bulk_bytes=output.bulk_bytes,
            bulk_actions=output.bulk_actions,
            requests_in_flight=output.requests_in_flight,
            max_retry_seconds=output.max_retry_seconds,
            request_timeout_seconds=output.request_timeout_seconds,
            error_kinds=dict(output.error_kinds),
            refresh=output.refresh,
            stream_name=stream_name,
            output_id=output.step,
            batch_time_ms=batch_time_ms,
            attempt=attempt,
            written_before=written_before,
            withdraw_letters=withdraw_letters and attempt is not None,
            known_indices=tuple(known_indices),
            known_letters_index=known_letters_index,
            replay=replay,
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
    def versioned(self) -> bool:
        """Whether documents carry an external version."""
        return self.version_from is not None or self.document_id is DocumentIdKind.KEY or self.versioned_by_batch

    @property
    def versioned_by_batch(self) -> bool:
        """Whether the batch time is the version. Then ids recur from batch to batch, and the newest batch's document
        stays even if an older batch is run again later."""
        return self._ids_recur and self.batch_time_ms is not None

    @property
    def ids_imply_source(self) -> bool:
        """Whether an id and version belong to exactly one source position, or to one group of one batch."""
        return self.version_from is None and not self._ids_recur

    @property
    def method(self) -> WriteMethod:
        """``write_method`` or its default."""
        return self.write_method or (WriteMethod.INDEX if self._ids_recur else WriteMethod.CREATE)

    @property
    def _ids_recur(self) -> bool:
        """Whether different records may have the same id, and no column determines which of them is newer."""
        return self.document_id is DocumentIdKind.COLUMNS and not self.id_batch_time and self.version_from is None

    @property
    def tombstone_policy(self) -> TombstonePolicy:
        """``tombstones`` or its default."""
        if self.tombstones is not None:
            return self.tombstones
        return TombstonePolicy.DELETE if self.document_id is DocumentIdKind.KEY else TombstonePolicy.DEAD_LETTER

    @property
    def deletes(self) -> bool:
        """Whether rows without a document delete the document of their key."""
        return self.tombstone_policy is TombstonePolicy.DELETE


def id_sources(output: ElasticsearchOutput) -> tuple[str, ...]:
    """The transform's columns whose values become the option ``id_columns``."""
    ids = output.document_ids
    if ids.kind == "record":
        return ids.rows
    return ids.columns if ids.kind == "columns" else ()
