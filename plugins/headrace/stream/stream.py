"""`Stream`: the definition of a stream, which is validated as a whole before anything starts; and that of a replay.

A replay runs batches again into other outputs, while the stream itself runs on.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Self, cast

from pydantic import model_validator

from headrace.stream.fields import StreamFields
from headrace.stream.model import Part, StreamDefinitionError, is_reference, load_reference, references_in
from headrace.stream.outputs import Output
from headrace.stream.problems import problems
from headrace.stream.settings import SparkSettings


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

    def load_transform(self, output: Output | None = None) -> Callable[..., Any] | None:
        """Import the transform of an output, or the stream's own.

        Raises:
            StreamDefinitionError: its module cannot be imported or has no such function.
        """
        reference = self.transform if output is None else self.transform_of(output)
        return None if reference is None else cast(Callable[..., Any], load_reference(reference, "transform"))

    def to_json(self) -> str:
        """The definition as JSON, for `from_json` on any machine."""
        return self.model_dump_json()

    @property
    def named_code(self) -> list[str]:
        """What chooses the code that runs, as "field: value": each reference, and Spark's settings that were given."""
        fields = self.model_dump(mode="json")
        given = fields.pop("spark")
        default = SparkSettings().model_dump(mode="json")
        return [
            *references_in(fields),
            *(f"spark.{name}: {json.dumps(value)}" for name, value in given.items() if value != default[name]),
        ]

    @property
    def digest(self) -> str:
        """Eight hexadecimal digits of a hash of the definition."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:8]

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
    places = {place for output in live for place in output.places}
    for output in replay:
        for place in output.places:
            if place in places:
                where = f"{place.kind} {place.name!r}"
                yield f"The replay's output {output.id!r} would write to {where}, as the stream does."
