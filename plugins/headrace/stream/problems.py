"""Validates a stream's definition as a whole: finds fields that do not fit together."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from itertools import combinations

from headrace.stream.fields import StreamFields
from headrace.stream.inputs import ReceiverInput
from headrace.stream.model import milliseconds
from headrace.stream.state import STATE_STEP


def problems(stream: StreamFields) -> Iterator[str]:
    """Yields each problem between fields that are valid by themselves, with the field and the remedy."""
    yield from _missing_or_double(stream)
    for output in stream.outputs:
        yield from output.problems(stream)
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
        if not isinstance(source, ReceiverInput):
            continue
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
    custom = [source.id for source in stream.inputs if isinstance(source, ReceiverInput)]
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
