"""Derives the stream definition of a replay: batches run again into other outputs, while the stream itself runs on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from headrace.stream.definition import Stream
from headrace.stream.errors import StreamDefinitionError
from headrace.stream.model import Part
from headrace.stream.outputs import ElasticsearchOutput, KafkaOutput, Output, ParquetOutput


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
    places = {place for output in live for place in _places(output)}
    for output in replay:
        for place in _places(output):
            if place in places:
                yield f"The replay's output {output.id!r} would write to {place[1]} {place[2]!r}, as the stream does."


def _places(output: Output) -> list[tuple[str | tuple[str, ...] | None, str, str]]:
    """Where the output writes: (server, kind of place, name)."""
    if isinstance(output, ElasticsearchOutput):
        where = output.connection or output.hosts
        return [(where, "index", output.index), (where, "index", output.dead_letters)]
    if isinstance(output, KafkaOutput):
        return [(output.connection or output.bootstrap_servers, "topic", output.topic)]
    return [(None, "folder", output.path)] if isinstance(output, ParquetOutput) else []
