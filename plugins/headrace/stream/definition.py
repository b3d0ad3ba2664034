"""`Stream`: what a user declares, validated as a whole before anything starts."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, Self, cast
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from headrace.connections import CONNECTION_PREFIX
from headrace.stream.errors import StreamDefinitionError
from headrace.stream.inputs import KafkaInput
from headrace.stream.limits import Limits
from headrace.stream.model import Duration, Identifier, Part, milliseconds
from headrace.stream.outputs import ElasticsearchOutput, KeyIds, Output
from headrace.stream.secrets import url_holds_secret
from headrace.stream.spark import SparkSettings
from headrace.stream.storage import Storage

_REFERENCE = re.compile(r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")


class Stream(Part):
    """Kafka topics, cut into batches, transformed and written to outputs.

    The definition is data: `to_json` and `from_json` carry it to another machine unchanged. A definition that
    cannot run is refused here, as Spark's StreamingContext refuses to start, with the field and the remedy.

    Raises:
        StreamDefinitionError: a field is missing, unknown or wrong, or the fields do not fit together.
    """

    name: Identifier
    inputs: tuple[KafkaInput, ...]
    outputs: tuple[Output, ...]
    transform: str | None = Field(
        default=None, description='"module:function", given a DataFrame for each input by its id, returns one.'
    )
    batch_interval: Duration
    block_interval: Duration = timedelta(milliseconds=200)
    checkpoint_interval: Duration | None = Field(default=None, description="By default the batch interval.")
    remember: Duration | None = Field(
        default=None,
        description="How long the log keeps a batch's blocks after it is checkpointed; by default the batch interval.",
    )
    storage: Storage
    ledger: str = Field(description='A SQLAlchemy URL without a password, or "connection:<Airflow connection id>".')
    limits: Limits = Limits()
    spark: SparkSettings = SparkSettings()

    @field_validator("inputs", "outputs", mode="before")
    @classmethod
    def _one_is_a_list(cls, value: object) -> object:
        return value if isinstance(value, (list, tuple)) else (value,)

    @field_validator("storage", mode="before")
    @classmethod
    def _storage_by_its_url(cls, value: object) -> object:
        return {"url": str(value)} if isinstance(value, (str, Path)) else value

    @field_validator("transform")
    @classmethod
    def _transform_is_a_reference(cls, value: str | None) -> str | None:
        if value is not None and not _REFERENCE.match(value):
            raise ValueError('must be "module:function"')
        return value

    @field_validator("ledger")
    @classmethod
    def _ledger_holds_no_secret(cls, value: str) -> str:
        if value.startswith(CONNECTION_PREFIX):
            if not value.removeprefix(CONNECTION_PREFIX):
                raise ValueError("names no connection after connection:")
            return value
        if url_holds_secret(value):
            raise ValueError(
                "holds a password, and the definition is stored in clear; put the URL into an Airflow connection and "
                "write connection:<its id>, or leave the password to PGPASSWORD or a pgpass file"
            )
        parts = urlsplit(value)
        if parts.scheme.split("+")[0] not in ("sqlite", "postgresql"):
            raise ValueError("must be a sqlite:/// or postgresql+psycopg:// URL, or connection:<Airflow connection id>")
        if parts.scheme.startswith("sqlite") and not parts.path.startswith("//"):
            raise ValueError("must name the file by its absolute path: sqlite:////folder/ledger.db")
        return value

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        problems = list(_problems(self))
        if problems:
            raise ValueError("; ".join(problems))
        return self

    @property
    def batch_interval_ms(self) -> int:
        """Milliseconds from one batch time to the next."""
        return milliseconds(self.batch_interval)

    @property
    def block_interval_ms(self) -> int:
        """Milliseconds after which a receiver cuts a block."""
        return milliseconds(self.block_interval)

    @property
    def checkpoint_interval_ms(self) -> int:
        """Milliseconds from one checkpoint to the next."""
        return milliseconds(self.checkpoint_interval or self.batch_interval)

    @property
    def remember_ms(self) -> int:
        """Milliseconds for which the log keeps the blocks of a batch that is done."""
        return milliseconds(self.remember or self.batch_interval)

    @property
    def receivers(self) -> int:
        """Receivers of all inputs together."""
        return sum(source.receivers for source in self.inputs)

    @property
    def folder_url(self) -> str:
        """The stream's own folder in its storage: log/, manifests/, checkpoints/ and reports/ are below it."""
        return f"{self.storage.url.rstrip('/')}/{self.name}"

    @property
    def connection_ids(self) -> tuple[str, ...]:
        """The Airflow connections that the stream's processes need, each once."""
        named = [source.connection for source in self.inputs]
        named += [output.connection for output in self.outputs if isinstance(output, ElasticsearchOutput)]
        if self.ledger.startswith(CONNECTION_PREFIX):
            named.append(self.ledger.removeprefix(CONNECTION_PREFIX))
        return tuple(dict.fromkeys(name for name in named if name is not None))

    def input(self, input_id: str) -> KafkaInput:
        """The input with this id; KeyError names the ones there are."""
        for source in self.inputs:
            if source.id == input_id:
                return source
        raise KeyError(f"stream {self.name} has no input {input_id!r}, but {', '.join(i.id for i in self.inputs)}")

    def group_of(self, source: KafkaInput) -> str:
        """The consumer group under which lag tools see the input."""
        return source.group or f"headrace-{self.name}-{source.id}"

    def load_transform(self) -> Callable[..., Any] | None:
        """Import the transform.

        Raises:
            StreamDefinitionError: its module cannot be imported or has no such function.
        """
        return None if self.transform is None else cast(Callable[..., Any], _import(self.transform, "transform"))

    def to_json(self) -> str:
        """The definition as JSON, for `from_json` on any machine."""
        return self.model_dump_json()

    @classmethod
    def from_json(cls, text: str) -> Stream:
        """Read a definition that `to_json` wrote.

        Raises:
            StreamDefinitionError: the text is no JSON object, or no valid definition.
        """
        try:
            fields = json.loads(text)
        except ValueError as error:
            raise StreamDefinitionError(f"The stream's definition is no JSON: {error}.") from None
        if not isinstance(fields, dict):
            raise StreamDefinitionError("The stream's definition must be a JSON object.")
        return cls(**fields)

    @classmethod
    def load(cls, source: str) -> Stream:
        """Read a definition from a ``.json`` file or from ``module:attribute``.

        Raises:
            StreamDefinitionError: there is none, or it is not valid.
        """
        if _REFERENCE.match(source):
            found = _import(source, "stream")
            if not isinstance(found, cls):
                raise StreamDefinitionError(f"{source} is a {type(found).__name__}, not a Stream.")
            return found
        try:
            return cls.from_json(Path(source).read_text(encoding="utf-8"))
        except OSError as error:
            raise StreamDefinitionError(
                f"The stream's definition {source} cannot be read: {error.strerror}.",
                remedy="Name a JSON file, or module:attribute of a Stream in Python.",
            ) from None


def _problems(stream: Stream) -> Iterator[str]:
    """What each field allows but the whole does not, each with its field and remedy."""
    yield from _missing_or_double(stream)
    yield from _interval_problems(stream)
    if stream.transform is None and len(stream.inputs) > 1:
        yield "transform: a stream of several inputs needs one, to make one DataFrame of them"
    if stream.storage.is_local and not stream.storage.shared and not stream.spark.is_local:
        yield (
            f"storage: {stream.storage.url} is a folder of one machine, but spark.master "
            f"{stream.spark.master or stream.spark.connection} has several; use a store that all of them reach, "
            "or set shared=True if the folder is mounted on each"
        )
    slots = stream.spark.task_slots()
    if slots is not None and slots < stream.receivers + 1:
        yield (
            f"spark.master: {stream.spark.master} runs {slots} tasks at once, but {stream.receivers} receivers hold "
            f"one each and a batch needs another; give at least {stream.receivers + 1} cores, "
            "or leave master out on one machine"
        )


def _missing_or_double(stream: Stream) -> Iterator[str]:
    if not stream.inputs:
        yield "inputs: there is none; name a KafkaInput"
    if not stream.outputs:
        yield "outputs: there is none, so nothing would run; name one, such as ElasticsearchOutput or ConsoleOutput"
    for field, parts in (("inputs", stream.inputs), ("outputs", stream.outputs)):
        ids = [part.id for part in parts]
        double = sorted({name for name in ids if ids.count(name) > 1})
        if double:
            yield f"{field}: the id {', '.join(double)} is used twice; give each its own id"
    for output in stream.outputs:
        if isinstance(output, ElasticsearchOutput) and isinstance(output.document_ids, KeyIds):
            topics = {topic for source in stream.inputs for topic in source.topics}
            patterns = [source for source in stream.inputs if source.topic_pattern is not None]
            if (len(topics) > 1 or patterns or len(stream.inputs) > 1) and output.document_ids.version_from is None:
                yield (
                    f"outputs.{output.id}.document_ids: key ids with offsets as versions need a single topic, "
                    "since offsets of different topics do not order; name a column that grows with every change "
                    "in version_from"
                )


def _interval_problems(stream: Stream) -> Iterator[str]:
    for field, value in (
        ("batch_interval", stream.batch_interval),
        ("checkpoint_interval", stream.checkpoint_interval),
    ):
        unit, of = (
            (stream.block_interval, "block_interval")
            if field == "batch_interval"
            else (stream.batch_interval, "batch_interval")
        )
        if value is not None and value % unit:
            yield f"{field}: {milliseconds(value)} ms is no multiple of {of} ({milliseconds(unit)} ms); make it one"


def _import(reference: str, what: str) -> object:
    module_name, _, attribute = reference.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise StreamDefinitionError(
            f"The {what} {reference} cannot be imported: {error}.",
            remedy="Put its file or package into spark.py_files, or install it where headrace runs.",
        ) from error
    try:
        return getattr(module, attribute)
    except AttributeError:
        raise StreamDefinitionError(f"The module {module_name} has no {attribute!r} to be the {what}.") from None
