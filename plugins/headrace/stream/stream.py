"""`Stream`: the definition of a stream, which is validated as a whole before anything starts; and that of a replay.

A replay runs batches again into other outputs, while the stream itself runs on. The parameters that transforms read are
the stream's own, overridden by those of a run.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from datetime import timedelta
from itertools import combinations
from pathlib import Path
from typing import Any, Self

from pydantic import JsonValue, model_validator

from headrace.errors import Failure, HeadraceError
from headrace.stream.contract import KindDefinition, wrong_values
from headrace.stream.ddl import check_decoded_type
from headrace.stream.decoder import DecoderDefinition
from headrace.stream.fields import StreamFields
from headrace.stream.model import Part, StreamDefinitionError, is_reference, load_reference, milliseconds, references_in
from headrace.stream.outputs import RECORD_COLUMNS, Output
from headrace.stream.secrets import values_with_secrets
from headrace.stream.settings import SparkSettings
from headrace.stream.state import STATE_STEP


class Stream(StreamFields):
    """Kafka topics, cut into batches, transformed and written to outputs.

    The definition is data: `to_json` and `from_json` carry it to another machine unchanged. The constructor refuses a
    definition that cannot run, as Spark's StreamingContext refuses to start. The error names the field and the remedy.

    Raises:
        StreamDefinitionError: a field is missing, unknown or wrong, or the fields do not fit together.
    """

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        texts = list(problems(self))
        if texts:
            raise ValueError("; ".join(texts))
        return self

    def to_json(self) -> str:
        """The definition as JSON, for `from_json` on any machine."""
        return self.model_dump_json()

    @property
    def named_code(self) -> list[str]:
        """What chooses the code that runs, as "field: value": each reference, and Spark's settings that were given."""
        return code_in(self.model_dump(mode="json"))

    @property
    def digest(self) -> str:
        """Eight hexadecimal digits of a hash of the definition."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:8]

    @property
    def without_folders(self) -> Stream:
        """The stream with the files of ``spark.py_files`` without their folders, to compare definitions.

        A git bundle of Airflow has the same file in a folder for each commit, whatever the commit changes.
        """
        paths = [Path(name) for name in self.spark.py_files]
        names = tuple(path.name if path.suffix else "a folder" for path in paths)
        return self.model_copy(update={"spark": self.spark.model_copy(update={"py_files": names})})

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
        if is_reference(source):
            loaded = load_reference(source, "stream")
            if not isinstance(loaded, cls):
                raise StreamDefinitionError(f"{source} is a {type(loaded).__name__}, not a Stream.")
            return loaded
        try:
            return cls.from_json(Path(source).read_text(encoding="utf-8"))
        except OSError as error:
            raise StreamDefinitionError(
                f"The stream's definition {source} cannot be read: {error.strerror}.",
                remedy="Name a JSON file, or module:attribute of a Stream in Python.",
            ) from None


def check_extensions(stream: Stream) -> None:
    """Check the parts of other packages as the processes find them that read the stored definition.

    Their kinds are found by entry points, the classes that they name are imported, and the types of decoded values are
    in Spark's DDL. headrace's own parts are not checked: their imports take a second.

    Raises:
        StreamDefinitionError: a process could not use one of them.
    """
    if Stream.from_json(stream.to_json()) != stream:
        raise StreamDefinitionError(
            f"The definition of stream {stream.name!r} is another one when it is read from its JSON.",
            remedy="Let the entry point of each kind name the class that has it, and give its fields types that JSON "
            "keeps, such as texts, numbers and tuples of them.",
        )
    for where, part in _parts_of_other_packages(stream):
        for name, shape in part.shapes.items():
            reference = getattr(part, name) if shape.names_code else None
            if reference is not None:
                load_reference(reference, f"{name} of {where}")
        if isinstance(part, DecoderDefinition):
            try:
                check_decoded_type(part.column)
            except ValueError as error:
                raise StreamDefinitionError(f"{where} has the column {part.column!r}, which {error}.") from None


def problems(stream: StreamFields) -> Iterator[str]:
    """Yields each problem between fields that are valid by themselves, with the field and the remedy."""
    wrong = list(_wrongly_declared(stream))
    if wrong:
        # The other questions are asked of the same attributes.
        yield from wrong
        return
    yield from _missing_or_double(stream)
    yield from _secrets_of_extensions(stream)
    yield from _columns_beside_problems(stream)
    yield from _subject_problems(stream)
    yield from _leaving_problems(stream)
    for where, part in stream.parts:
        yield from (f"{where}.{text}" for text in part.problems(stream))
    yield from _interval_problems(stream)
    yield from _window_problems(stream)
    yield from _order_problems(stream)
    history = stream.limits.history
    if history is not None and milliseconds(history) < stream.remember_ms:
        yield (
            f"limits.history: {history} is shorter than the log keeps a batch's blocks, {stream.remember_ms} ms "
            "(remember, or what the longest window reaches back); make it longer, or None"
        )
    if len(stream.inputs) > 1 and any(stream.transform_of(output) is None for output in stream.outputs):
        yield "transform: a stream of several inputs needs one, to make one DataFrame of them"
    yield from _receiver_input_problems(stream)
    yield from _delivery_problems(stream)
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


def _wrongly_declared(stream: StreamFields) -> Iterator[str]:
    for where, part in _parts_of_other_packages(stream):
        yield from (f"{where}: {text}" for text in wrong_values(part, stream))


def _secrets_of_extensions(stream: StreamFields) -> Iterator[str]:
    """The fields of headrace's own parts that take any text have checks of their own."""
    for where, part in _parts_of_other_packages(stream):
        named = values_with_secrets(part.model_dump(mode="json"))
        if named:
            yield (
                f"{where}: holds a login or a secret in {', '.join(named)}, and the definition is stored in clear; put "
                "it into an Airflow connection, and give the class a field with the connection's id"
            )


def _subject_problems(stream: StreamFields) -> Iterator[str]:
    for source in stream.inputs:
        for field, decoder in source.decoders.items():
            question = decoder.question
            if question is not None and question.subject is None and len(source.topic_names) != 1:
                yield (
                    f"inputs.{source.id}.{field}: the input has no single topic, after which the subject of a schema "
                    "could be named; name the subject of the schema that all records are read by"
                )


def _leaving_problems(stream: StreamFields) -> Iterator[str]:
    """What leaves a window must be what entered it: a newer schema may give a field another default."""
    if stream.state is None or stream.state.window is None:
        return
    for source in stream.inputs:
        for field, decoder in source.decoders.items():
            if decoder.question is not None:
                yield (
                    f"inputs.{source.id}.{field}: the columns come from a registry, and the state has a window, whose "
                    "records would leave it by another schema than they entered by; give the decoder schema_text"
                )


def _columns_beside_problems(stream: StreamFields) -> Iterator[str]:
    for source in stream.inputs:
        if source.key_decoder.beside:
            yield f"inputs.{source.id}.key_decoder: {source.key_decoder.kind} decodes values; name another for keys"
        if taken := sorted(RECORD_COLUMNS.intersection(source.columns_beside)):
            yield (
                f"inputs.{source.id}.value_decoder: gives the column {taken[0]} beside the value, which is one of the "
                "record's own; give it another name"
            )


def _parts_of_other_packages(stream: StreamFields) -> Iterator[tuple[str, KindDefinition]]:
    yield from ((where, part) for where, part in stream.parts if not type(part).__module__.startswith("headrace."))


def _missing_or_double(stream: StreamFields) -> Iterator[str]:
    if not stream.inputs:
        yield "inputs: there is none; name a KafkaInput or a ReceiverInput"
    if not stream.outputs:
        yield "outputs: there is none, so nothing would run; name one, such as ElasticsearchOutput or ConsoleOutput"
    if any(STATE_STEP in (output.id, output.renamed_from) for output in stream.outputs):
        yield f"outputs: the id {STATE_STEP!r} is that of the state's update; give the output another"
    yield from _renamed_to_one(stream)
    # A transform's parameters have "_" where ids have "-".
    parameters = [source.id.replace("-", "_") for source in stream.inputs]
    outputs, listeners = [output.id for output in stream.outputs], [listener.id for listener in stream.listeners]
    for field, ids in (("inputs", parameters), ("outputs", outputs), ("listeners", listeners)):
        double = sorted({name for name in ids if ids.count(name) > 1})
        if double:
            yield f"{field}: the id {', '.join(double)} is used twice; give each its own id"
    yield from _topics_read_twice(stream)


def _renamed_to_one(stream: StreamFields) -> Iterator[str]:
    for first, second in combinations(stream.outputs, 2):
        if first.step == second.step and first.id != second.id:
            yield (
                f"outputs.{second.id}: its records are those of {first.id}, since both have the first id "
                f"{first.step!r}; give the output that is new an id which none had, or correct renamed_from"
            )


def _topics_read_twice(stream: StreamFields) -> Iterator[str]:
    for first, second in combinations(stream.kafka_inputs, 2):
        topics = first.topics_shared_with(second)
        if topics:
            yield (
                f"inputs: {first.id} and {second.id} both read {', '.join(topics)}, so that every record would come "
                "twice under one id; read it by one input, which the transform can use as often as it likes"
            )


def _receiver_input_problems(stream: StreamFields) -> Iterator[str]:
    for source in stream.inputs:
        if source.in_kafka is not None:
            continue
        if source.receiver_class is None:
            yield f"inputs.{source.id}: its class names no receiver_class; let it return the class of its receivers"
        if stream.batch_by == "timestamp":
            yield (
                f"batch_by: input {source.id} is no Kafka input, and only Kafka says up to which time everything was "
                'received; leave out batch_by="timestamp"'
            )
        if any(other.matches(source.id) for other in stream.kafka_inputs):
            yield (
                f"inputs: {source.id} is also a topic that another input reads, so that two records would have one "
                "id; give this input another id"
            )


def _delivery_problems(stream: StreamFields) -> Iterator[str]:
    if stream.delivery == "exactly_once":
        return
    if not stream.storage.is_local or stream.storage.shared:
        yield (
            f"delivery: {stream.delivery} saves only the sync of a local disk, and {stream.storage.url} is a store "
            f"that several hosts reach{' (shared=True)' if stream.storage.is_local else ''}; leave delivery out"
        )
    custom = [source.id for source in stream.inputs if source.in_kafka is None]
    if custom and stream.delivery == "at_least_once":
        yield (
            f"delivery: at_least_once reads lost records from Kafka again, and input {custom[0]} is no Kafka input; "
            "leave delivery out"
        )


def _interval_problems(stream: StreamFields) -> Iterator[str]:
    block = (stream.block_interval, "block_interval")
    batch = (stream.batch_interval, "batch_interval")
    multiples: list[tuple[str, timedelta | None, tuple[timedelta, str]]] = [
        ("batch_interval", stream.batch_interval, block),
        ("checkpoint_interval", stream.checkpoint_interval, batch),
    ]
    for output in stream.outputs:
        if output.window is not None:
            multiples.append((f"outputs.{output.id}.window.length", output.window.length, batch))
            multiples.append((f"outputs.{output.id}.window.slide", output.window.slide, batch))
    if stream.state is not None:
        multiples.append(("state.window", stream.state.window, batch))
        multiples.append(("state.timeout", stream.state.timeout, batch))
    for field, value, (unit, of) in multiples:
        if value is not None and value % unit:
            yield f"{field}: {milliseconds(value)} ms is no multiple of {of} ({milliseconds(unit)} ms); make it one"


def _window_problems(stream: StreamFields) -> Iterator[str]:
    if not stream.coalesces:
        return
    for output in stream.outputs:
        if output.window is not None and output.window.slide_ms(stream.batch_interval_ms) != stream.batch_interval_ms:
            yield (
                f"outputs.{output.id}.window.slide: {'coalesce' if stream.coalesce else 'trigger'} leaves out batch "
                "times, and with them the ends of windows; leave slide out, so that every batch ends a window"
            )


def _order_problems(stream: StreamFields) -> Iterator[str]:
    reasons = list(stream.reasons_for_order())
    if stream.ordered is False and reasons:
        yield f"ordered: {reasons[0]}, so batches cannot run in any order; leave ordered out"
    if stream.is_ordered and stream.limits.max_concurrent_batches > 1:
        why = reasons[0] if reasons else "ordered is set"
        yield f"limits.max_concurrent_batches: must be 1, since {why}"


def replayed(stream: Stream, outputs: Mapping[str, Mapping[str, Any]], *, transform: str | None = None) -> Stream:
    """The stream's definition for a replay: only the outputs that ``outputs`` names, with the fields given there.

    The inputs, the intervals and the storage stay the same: a replay reads the same batches.

    Args:
        outputs: the changed fields by output id, such as ``{"elasticsearch": {"index": "flights-v2"}}``.
        transform: replaces the transforms of the stream and of its outputs.

    Raises:
        StreamDefinitionError: an output is unknown or would write where the stream itself writes, a field is wrong,
            or the stream has state, which only its own batches may update.
    """
    if stream.state is not None:
        raise StreamDefinitionError(
            f"Stream {stream.name!r} cannot be replayed: each batch starts from the state that the one before left.",
            remedy="Define a stream of another name over the same topics, with batch_by='timestamp'.",
        )
    unknown = sorted(set(outputs) - {output.id for output in stream.outputs})
    if unknown or not outputs:
        raise StreamDefinitionError(
            f"A replay of stream {stream.name!r} names {', '.join(unknown) or 'no output'}; "
            f"its outputs are {', '.join(output.id for output in stream.outputs)}."
        )
    changed = []
    for output in stream.outputs:
        if output.id not in outputs:
            continue
        fields: dict[str, Any] = {**_given(output), **outputs[output.id]}
        if transform is not None:
            fields["transform"] = transform
        changed.append(type(output)(**fields))
    for problem in _same_places(stream.outputs, changed):
        raise StreamDefinitionError(problem, remedy="Name another place for the replay to write to.")
    return Stream(**{**_given(stream), "outputs": tuple(changed)})


def _given(part: Part) -> dict[str, Any]:
    """The fields that were given, not dumped: a dump of the fields that were set would lack the parts' ``kind``."""
    return {name: getattr(part, name) for name in part.model_fields_set}


def _same_places(live: tuple[Output, ...], replay: list[Output]) -> Iterator[str]:
    for output in replay:
        for place in filter(None, map(output.shared_place, live)):
            yield f"The replay's output {output.id!r} would write to {place}, as the stream does."


PARAMETERS = "parameters"
"""The attribute of an attempt that holds the parameters given by its run."""


def code_in(definition: Mapping[str, JsonValue]) -> list[str]:
    """What chooses the code that runs in the JSON of a definition: `Stream.named_code`. Nothing of it is checked or
    imported."""
    fields = dict(definition)
    given = fields.pop("spark", None)
    default = SparkSettings().model_dump(mode="json")
    settings = given if isinstance(given, dict) else {} if given is None else {"": given}
    return [
        *references_in(fields),
        *(f"spark.{name}: {json.dumps(value)}" for name, value in settings.items() if value != default.get(name)),
    ]


def without_code(definition: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
    """The JSON of a definition without all that `code_in` lists: to keep as a record, not to run."""
    return {name: _without_references(value) for name, value in definition.items() if name != "spark"}


def _without_references(value: JsonValue) -> JsonValue:
    if isinstance(value, dict):
        return {name: _without_references(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_without_references(each) for each in value]
    return None if isinstance(value, str) and is_reference(value) else value


class ParameterError(HeadraceError):
    """A run gives a parameter that the stream does not declare, or parameters that are not an object."""

    failure = Failure.CODE


def merged_parameters(stream: Stream, given: Mapping[str, Any] | None) -> dict[str, Any]:
    """The stream's parameters, overridden by those in ``given``.

    Raises:
        ParameterError: ``given`` has a name that the stream's parameters do not have, holds a secret, or is not a
            mapping.
    """
    if given is None:
        return dict(stream.parameters)
    if not isinstance(given, Mapping):
        raise ParameterError(f"Parameters must be an object of names and values, not a {type(given).__name__}.")
    named = values_with_secrets(dict(given))
    if named:
        raise ParameterError(
            f"The run's parameters hold a login or a secret in {', '.join(named)}, and the ledger, Airflow and their "
            "pages show them in clear.",
            remedy="Leave it out, and let the transform read it from the environment of its process.",
        )
    unknown = sorted(str(name) for name in given if name not in stream.parameters)
    if unknown:
        raise ParameterError(
            f"Stream {stream.name!r} has no parameter {', '.join(unknown)}. "
            f"Its parameters are {', '.join(sorted(stream.parameters)) or 'none'}.",
            remedy="Declare it with a default in the stream's parameters.",
        )
    return {**stream.parameters, **given}


def parse_parameters(text: str) -> dict[str, Any]:
    """Read parameters from JSON text.

    Raises:
        ParameterError: the text is not a JSON object.
    """
    try:
        given = json.loads(text)
    except ValueError as error:
        raise ParameterError(f"The parameters are no JSON: {error}.") from None
    if not isinstance(given, dict):
        raise ParameterError("The parameters must be a JSON object.")
    return given
