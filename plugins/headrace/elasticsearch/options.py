"""What the sink can be told. Every option arrives as a string, as Spark passes them, and is checked here."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, Json, ValidationError, model_validator

from headrace.elasticsearch.errors import IndexingOptionsError
from headrace.stream.index_names import check_index_name, dead_letters_of


class DocumentIdKind(StrEnum):
    """Where a document's id comes from (rule 7)."""

    RECORD = "record"
    """``topic+partition+offset``; ``topic+partition+offset+incarnation`` from the topic's second incarnation on.
    A topic's name holds no ``+``, so the two forms cannot be mistaken for each other. With ``id_columns``, which tell
    the rows of one record apart, their values follow after ``~``."""
    KEY = "key"
    """The record's key, with its offset (or ``version_from``) as external version: the index holds the latest value."""
    COLUMNS = "columns"
    """The values of ``id_columns``; with several of them, or the batch time, joined by ``+`` (a ``+`` or ``%`` within
    a value is written ``%2B`` or ``%25``)."""


class WriteMethod(StrEnum):
    """What a document meets when its id and version are in the index already.

    ``create`` leaves what is there, so running a batch again changes nothing, not even versions, and costs no
    indexing. ``index`` replaces it, which is what processing a batch again with a *changed* transform needs: with
    ``create`` the old documents would stay and be counted as repeated. An older version never replaces a newer one
    under either.
    """

    CREATE = "create"
    INDEX = "index"


class TombstonePolicy(StrEnum):
    """What a null value means."""

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
    """The options of the "elasticsearch" sink. ``from_strings`` reads them from Spark's."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    connection: str | None = None
    """An Airflow connection's id, resolved where the write is planned; credentials come from nowhere else."""
    hosts: Names = ()
    """Or the nodes' URLs, comma-separated, without credentials."""
    index: str
    """One concrete index, or an alias of exactly one that does not roll over. Elasticsearch creates a missing one."""
    document_id: DocumentIdKind = DocumentIdKind.RECORD
    id_columns: Names = ()
    """The columns of column ids; with record ids those that tell the rows of one record apart."""
    id_batch_time: bool = False
    """Whether the batch time ends each column id: for aggregates, whose rows are one per group and batch. Otherwise it
    is the document's version, unless ``version_from`` names another."""
    version_from: str | None = None
    """A column with a whole number or a time that only grows per id: the external version."""
    write_method: WriteMethod | None = None
    """By default "create", but "index" for column ids with neither batch time nor version: there another record of the
    same id is news, not a repetition."""
    tombstones: TombstonePolicy | None = None
    """By default "delete" for key ids, "dead_letter" for the others."""
    dead_letter_index: str = ""
    """By default the index's name and "-dead-letters"."""

    bulk_bytes: int = Field(5 * 1024 * 1024, ge=1, le=100 * 1024 * 1024)
    """A request's size in bytes; one document larger than that is a request of its own."""
    bulk_actions: int = Field(5000, ge=1, le=100_000)
    requests_in_flight: int = Field(2, ge=1, le=64)
    """Requests that one task keeps in flight at once."""
    max_retry_seconds: float = Field(30.0, ge=0)
    """How long a request may make no progress before the task fails."""
    request_timeout_seconds: float = Field(60.0, gt=0)
    refresh: bool = False
    """Whether to refresh the index once, after all tasks."""
    check_index: bool = True
    """Whether to ask before and after what the index is; needs the privilege view_index_metadata on it."""

    stream: str = ""
    """The stream's name, the output's id and the batch time (ms), for reports and dead letters."""
    output: str = ""
    batch_time: int | None = None
    attempt: int | None = None
    """Which attempt at the batch this is, for dead letters."""
    task: int = 0
    """Which of the tasks that write together this is, for dead letters of rows that nothing else tells apart."""
    withdraw_letters: bool = False
    """Whether to delete, when all tasks have succeeded, the letters that earlier attempts at the batch left and this
    one did not write: their rows are no dead letters any more."""
    report: str | None = None
    """A URI to which the counts of all tasks are written as JSON when they have succeeded (see ``reports``)."""
    manifest: str | None = None
    """The batch's manifest, by which dead letters of transformed rows find their records."""
    originals: Literal["log", "kafka"] = "log"
    """Where they find them: Kafka is read again where the log has let the batch go, or never had it."""
    inputs: str | None = None
    """The stream's inputs (``KafkaInput``) as a JSON list, for what is found in Kafka."""
    written_before: bool = False
    """Whether an earlier attempt may have written this batch to this output. A document that is in the index with
    other contents is then its work, and is kept; otherwise it is another record's, and the write fails."""
    earlier: Json[dict[Literal["log", "kafka"], tuple[str, ...]]] | None = None
    """With a window the manifests of its other batches, as a JSON object of lists by where their records are."""

    @classmethod
    def from_strings(cls, options: Mapping[str, str]) -> Self:
        """Options as Spark passes them; names are case-insensitive, ``save("name")`` names the index.

        Raises IndexingOptionsError, whose text never repeats a value.
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
        """The options of one of the tasks that write together, which Spark has tried so often before.

        What an earlier try wrote is there. Each try is as patient as half of the one before, so that together they wait
        for less than twice ``max_retry_seconds``, however often Spark tries.
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
        """Whether the batch time is the version: ids recur from batch to batch, and the newest batch's document is to
        stay, also when an older batch is run again after it."""
        return self._ids_recur and self.batch_time is not None

    @property
    def ids_imply_source(self) -> bool:
        """Whether one source position, or one group of one batch, alone gives a document its id and version."""
        return self.version_from is None and not self._ids_recur

    @property
    def method(self) -> WriteMethod:
        """``write_method`` or its default."""
        return self.write_method or (WriteMethod.INDEX if self._ids_recur else WriteMethod.CREATE)

    @property
    def _ids_recur(self) -> bool:
        """Whether different records have the same id, and no column tells which of them is the newer."""
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
