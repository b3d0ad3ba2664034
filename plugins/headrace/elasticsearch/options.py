"""The options of the "elasticsearch" sink. Spark passes every option as a string; they are parsed and checked here."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, Json, ValidationError, model_validator

from headrace.elasticsearch.errors import IndexingOptionsError
from headrace.stream.index_names import check_index_name, dead_letters_of


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


def _comma_separated(value: Any) -> Any:
    if isinstance(value, str):
        return tuple(part for part in (part.strip() for part in value.split(",")) if part)
    return value


Names = Annotated[tuple[str, ...], BeforeValidator(_comma_separated)]

_SECRETS = frozenset({"password", "login", "user", "username", "api_key", "apikey", "token", "bearer_token"})


class IndexingOptions(BaseModel):
    """The options of the "elasticsearch" sink. ``from_strings`` reads them from Spark's strings."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    connection: str | None = None
    """An Airflow connection's id, resolved in the process that plans the write: the only source of credentials."""
    hosts: Names = ()
    """Instead of a connection: the nodes' URLs, comma-separated, without credentials."""
    index: str
    """One concrete index, or an alias of exactly one that does not roll over. Elasticsearch creates a missing one."""
    document_id: DocumentIdKind = DocumentIdKind.RECORD
    id_columns: Names = ()
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
    dead_letter_index: str = ""
    """By default the index's name with the suffix "-dead-letters"."""

    bulk_bytes: int = Field(5 * 1024 * 1024, ge=1, le=100 * 1024 * 1024)
    """The largest size of a request in bytes; a larger single document is a request of its own."""
    bulk_actions: int = Field(5000, ge=1, le=100_000)
    requests_in_flight: int = Field(2, ge=1, le=64)
    """The number of requests that one task keeps in flight."""
    max_retry_seconds: float = Field(30.0, ge=0)
    """How long a request may make no progress before the task fails."""
    request_timeout_seconds: float = Field(60.0, gt=0)
    refresh: bool = False
    """Whether to refresh the index once, after all tasks."""
    check_index: bool = True
    """Whether to check before and after the write that the target is one concrete index. Needs the privilege
    view_index_metadata on it."""

    stream: str = ""
    """The stream's name. With the output's id and the batch time (ms) it is for reports and dead letters."""
    output: str = ""
    batch_time: int | None = None
    attempt: int | None = None
    """The number of the attempt at the batch, for dead letters."""
    task: int = 0
    """The number of this task within the write, to distinguish dead letters of otherwise equal rows."""
    withdraw_letters: bool = False
    """Whether to delete, when all tasks have succeeded, the letters that earlier attempts at the batch wrote and this
    one did not: their rows are not dead letters any more."""
    report: str | None = None
    """The URI to which the counts of all tasks are written as JSON when they have succeeded (see ``reports``)."""
    manifest: str | None = None
    """The URI of the batch's manifest, used to find the records of dead letters of transformed rows."""
    originals: Literal["log", "kafka"] = "log"
    """Where these records are read: in the log, or in Kafka if the log no longer has the batch, or never had it."""
    inputs: str | None = None
    """The stream's inputs (``KafkaInput``) as a JSON list, to read records from Kafka."""
    written_before: bool = False
    """Whether an earlier attempt may have written this batch to this output. If so, an existing document with other
    contents is taken as that attempt's and kept; if not, it is another record's, and the write fails."""
    earlier: Json[dict[Literal["log", "kafka"], tuple[str, ...]]] | None = None
    """For a window, the manifests of its other batches: a JSON object with a list for each place of their records."""

    @classmethod
    def from_strings(cls, options: Mapping[str, str]) -> Self:
        """Parse options as Spark passes them. Names are case-insensitive; ``save("name")`` sets the index.

        Raises IndexingOptionsError. Its text never repeats a value.
        """
        given: dict[str, Any] = {name.lower(): value for name, value in options.items()}
        path = given.pop("path", None)
        if path:
            given.setdefault("index", path)
        try:
            return cls.model_validate(given)
        except ValidationError as error:
            raise IndexingOptionsError(_describe(error)) from None

    def for_task(self, task: int, earlier_tries: int) -> Self:
        """The options for one task of a write. ``earlier_tries``: how often Spark has tried this task before.

        An earlier try may have written documents. ``max_retry_seconds`` is halved with each try, so all tries together
        wait for less than twice ``max_retry_seconds``, however often Spark tries.
        """
        return self.model_copy(
            update={
                "task": task,
                "written_before": self.written_before or earlier_tries > 0,
                "max_retry_seconds": self.max_retry_seconds / 2**earlier_tries,
            }
        )

    @property
    def versioned(self) -> bool:
        """Whether documents carry an external version."""
        return self.version_from is not None or self.document_id is DocumentIdKind.KEY or self.versioned_by_batch

    @property
    def versioned_by_batch(self) -> bool:
        """Whether the batch time is the version. Then ids recur from batch to batch, and the newest batch's document
        stays even if an older batch is run again later."""
        return self._ids_recur and self.batch_time is not None

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
        if self.tombstones is not None:
            return self.tombstones
        return TombstonePolicy.DELETE if self.document_id is DocumentIdKind.KEY else TombstonePolicy.DEAD_LETTER

    @property
    def dead_letters(self) -> str:
        """The dead-letter index's name."""
        return self.dead_letter_index or dead_letters_of(self.index)

    @model_validator(mode="after")
    def _agree(self) -> Self:
        for problem in (
            *self._cluster_problems(),
            *self._id_problems(),
            *self._index_problems(),
            *self._original_problems(),
        ):
            raise ValueError(problem)
        return self

    def _original_problems(self) -> list[str]:
        if self.originals == "kafka" and not (self.manifest and self.inputs):
            return ["originals=kafka needs 'manifest' and 'inputs'"]
        if self.earlier and self.earlier.get("kafka") and not self.inputs:
            return ["'earlier' batches in Kafka need 'inputs'"]
        return []

    def _cluster_problems(self) -> list[str]:
        if bool(self.connection) == bool(self.hosts):
            return ["give either 'connection' (an Airflow connection's id) or 'hosts'"]
        if any("@" in host for host in self.hosts):
            return ["'hosts' may hold no credentials, since options are shown in plans; use 'connection'"]
        return []

    def _id_problems(self) -> list[str]:
        problems = []
        by_columns = self.document_id is DocumentIdKind.COLUMNS
        if by_columns and not self.id_columns:
            problems.append("document_id=columns needs 'id_columns'")
        if self.id_columns and self.document_id is DocumentIdKind.KEY:
            problems.append("'id_columns' go with document_id=columns or record: a key has one document")
        if self.withdraw_letters and (self.attempt is None or self.batch_time is None):
            problems.append("'withdraw_letters' needs 'batch_time' and 'attempt'")
        if self.id_batch_time and (not by_columns or self.batch_time is None):
            problems.append("'id_batch_time' goes with document_id=columns, and needs 'batch_time'")
        if self.version_from and self.document_id is DocumentIdKind.RECORD:
            problems.append("'version_from' means nothing for record ids: a record has one version")
        if self.tombstones is TombstonePolicy.DELETE and self.document_id is not DocumentIdKind.KEY:
            problems.append("tombstones=delete goes with document_id=key: a tombstone has nothing but its key")
        if self.write_method is WriteMethod.CREATE and self._ids_recur:
            problems.append("write_method=create with column ids needs 'id_batch_time' or 'version_from'")
        return problems

    def _index_problems(self) -> list[str]:
        problems = []
        for option, name in (("index", self.index), ("dead_letter_index", self.dead_letters)):
            try:
                check_index_name(name)
            except ValueError as error:
                problems.append(f"{option!r} {error}")
        if self.dead_letters == self.index:
            problems.append("'dead_letter_index' has to differ from 'index'")
        return problems


def _describe(error: ValidationError) -> str:
    problems = []
    for detail in error.errors(include_url=False, include_context=False, include_input=False):
        name = str(detail["loc"][0]) if detail["loc"] else ""
        if detail["type"] == "extra_forbidden":
            problems.append(_unknown(name))
        elif detail["type"] == "missing":
            problems.append(f"{name!r} is missing")
        else:
            problems.append(f"{name!r}: {detail['msg']}" if name else detail["msg"].removeprefix("Value error, "))
    return f"The elasticsearch sink's options do not make sense: {'; '.join(problems)}."


def _unknown(name: str) -> str:
    if name in _SECRETS:
        return f"{name!r} may not be an option, since options are shown in plans: put it into the connection"
    near = difflib.get_close_matches(name, IndexingOptions.model_fields, n=1)
    return f"{name!r} is no option" + (f" (is {near[0]!r} meant?)" if near else "")
