"""`headrace trace`: shows one record's way, from Kafka to its documents, or finds records by their key."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace.cli.options import AsJson, LedgerUrl, StreamName, examples, opened, registered
from headrace.cli.output import duration_text, echo, fields_of, print_json, print_table
from headrace.clock import time_text

if TYPE_CHECKING:
    from headrace.stream_context import StreamContext
    from headrace.views.traced import KeySearch, OutputTrace, Record, RecordTrace, TracedBlock


_ONE_OF = "give TOPIC PARTITION OFFSET, or DOCUMENT_ID, or --key KEY"


@examples("trace orders orders 0 17", "trace orders orders+0+17", "trace orders --key cup")
def trace(
    name: StreamName,
    record: Annotated[
        list[str] | None,
        typer.Argument(
            help="The record: its topic, partition and offset, or the id of its document.",
            metavar="[TOPIC PARTITION OFFSET | DOCUMENT_ID]",
        ),
    ] = None,
    *,
    ledger: LedgerUrl,
    key: Annotated[str | None, typer.Option(help="Search for records with this key instead, newest first.")] = None,
    incarnation: Annotated[
        int | None, typer.Option(help="The topic's incarnation; by default the newest that has the offset.", min=1)
    ] = None,
    input_id: Annotated[
        str | None, typer.Option("--input", help="The id of the input, if several have the topic.")
    ] = None,
    limit: Annotated[int, typer.Option(help="With --key: how many records to find.", min=1)] = 10,
    max_records: Annotated[
        int, typer.Option(help="With --key: the search ends after this many records.", min=1)
    ] = 1_000_000,
    max_batches: Annotated[
        int, typer.Option(help="With --key: the search ends after this many batch times.", min=1)
    ] = 10_000,
    kafka: Annotated[
        bool, typer.Option("--kafka", help="With --key: also search batches that only Kafka still has.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show one record's way: its block, its batch, each attempt, and what became of it in each output."""
    from headrace.stream_context import StreamContext

    if (key is None) == (not record):
        raise typer.BadParameter(_ONE_OF)
    if (incarnation is not None or input_id is not None) and (key is not None or len(record or ()) == 1):
        raise typer.BadParameter("--incarnation and --input: only with TOPIC PARTITION OFFSET")
    with opened(ledger) as opened_ledger:
        context = StreamContext(registered(opened_ledger, name), opened_ledger)
        if key is not None:
            search = _search(
                context, key, limit=limit, max_records=max_records, max_batches=max_batches, from_kafka=kafka
            )
            print_json(_plain(search)) if as_json else report_search(search)
            return
        traced = _trace(context, record or [], incarnation, input_id)
    print_json(_plain(traced)) if as_json else report_trace(traced)


def _trace(context: StreamContext, record: list[str], incarnation: int | None, input_id: str | None) -> RecordTrace:
    from headrace.views.trace import trace_document, trace_record
    from headrace.views.trace_location import Coordinates

    match record:
        case [document_id]:
            return trace_document(context, document_id)
        case [topic, partition, offset] if (partition + offset).isascii() and partition.isdigit() and offset.isdigit():
            asked = Coordinates(topic, int(partition), int(offset), incarnation)
            return trace_record(context, asked, input_id=input_id)
    raise typer.BadParameter(f"{' '.join(record)!r} is not a record: {_ONE_OF}")


def _search(context: StreamContext, key: str, **bounds: Any) -> KeySearch:
    """``bounds``: the arguments of `search_key`."""
    from headrace.views.trace_records import search_key

    def progress(line: str) -> None:
        echo(line, err=True)

    return search_key(context, key.encode(), progress=progress, **bounds)


_SHOWN_BYTES = 200


def report_trace(trace: RecordTrace) -> None:
    """Print the trace in sentences and tables."""
    for line in _account(trace):
        echo(line)
    if trace.attempts:
        print_table(
            ("attempt", "at", "replay", "definition", "outputs", "read from", "state", "took", "run", "code", "error"),
            [
                (
                    attempt.number,
                    time_text(attempt.started_at_ms),
                    attempt.target or None,
                    attempt.revision,
                    ", ".join(attempt.outputs),
                    attempt.source,
                    attempt.state,
                    duration_text(attempt.started_at_ms, attempt.ended_at_ms),
                    attempt.run_id,
                    attempt.code_version,
                    attempt.error,
                )
                for attempt in trace.attempts
            ],
        )
    for output in trace.outputs:
        echo(_output(output))


def report_search(search: KeySearch) -> None:
    """Print the records that have the key, and how far the search looked."""
    if search.matches:
        print_table(
            ("topic", "partition", "offset", "incarnation", "timestamp", "batch time", "value bytes"),
            [
                (
                    match.position.partition.topic,
                    str(match.position.partition.partition),
                    str(match.position.offset),
                    match.position.partition.incarnation,
                    time_text(match.timestamp_ms),
                    time_text(match.batch_time_ms),
                    match.value_bytes,
                )
                for match in search.matches
            ],
        )
    times = "" if search.from_ms is None else f", from {time_text(search.until_ms)} back to {time_text(search.from_ms)}"
    echo(
        f"{len(search.matches)} record(s) with this key. Searched {search.searched_records:,} records in "
        f"{search.searched_batches:,} batch times{times}. {search.ended}"
    )


def _account(trace: RecordTrace) -> Iterator[str]:
    place, record = trace.position, trace.record
    partition = place.partition
    yield (
        f"Record {place.offset} of {partition.topic}, partition {partition.partition} (input {place.input_id}, "
        f"incarnation {partition.incarnation}, topic id {partition.topic_id})."
    )
    yield trace.text
    if record is not None:
        yield from _record(record)
    elif trace.record_problem is not None:
        yield f"The record could not be read. {trace.record_problem}"
    if trace.block is not None:
        yield _block(trace.block)
    batch = trace.batch
    if batch is not None:
        read = "" if batch.source is None else f" Run again, it is read from {_SOURCES[batch.source]}."
        yield (
            f"Batch {time_text(batch.batch_time_ms)}: {batch.state}, {batch.records:,} records, allocated at "
            f"{time_text(batch.allocated_at_ms)} with definition {batch.revision}, completed at "
            f"{time_text(batch.completed_at_ms)}.{read}"
        )
        if batch.error:
            yield f"The batch's error: {batch.error}"
    for other in trace.elsewhere:
        of = other.partition
        yield (
            f"The same offset was also received as incarnation {of.incarnation} of the topic in input "
            f"{other.input_id}: --incarnation {of.incarnation} --input {other.input_id}."
        )


_SOURCES = {"log": "the log", "kafka": "Kafka"}


def _record(record: Record) -> Iterator[str]:
    # A record of a custom receiver without a timestamp has that of its storing, and this type.
    kind = "appended to Kafka's log, or stored by a custom receiver," if record.timestamp_type == 1 else "created"
    yield f"Record: {kind} at {time_text(record.timestamp_ms)}; read from {_SOURCES[record.read_from]}."
    yield f"Key: {_bytes(record.key)}"
    yield f"Value: {_bytes(record.value)}"
    for header in record.headers:
        yield f"Header {header.key}: {_bytes(header.value)}"


def _block(block: TracedBlock) -> str:
    text = (
        f"Block: {block.length:,} bytes at {block.offset} of segment {block.segment}, offsets "
        f"[{block.from_offset}, {block.until_offset}) of the partition."
    )
    if block.receiver is not None:
        text += (
            f" Receiver {block.receiver} cut it in epoch {block.epoch} (sequence {block.sequence}) at "
            f"{time_text(block.cut_time_ms)}; the ledger has it since {time_text(block.added_at_ms)}."
        )
    return text if block.in_log else f"{text} The log does not have the segment any more."


def _output(output: OutputTrace) -> str:
    replay = f" of replay {output.target}" if output.target else ""
    by = [] if output.attempt is None else [f"attempt {output.attempt}"]
    by += [] if output.revision is None else [f"definition {output.revision}"]
    by += [] if not output.code_version else [output.code_version]
    handled = f" ({', '.join(by)})" if by else ""
    return f"Output {output.output_id}{replay}, {output.kind}{handled}: {output.text}"


def _bytes(data: bytes | None) -> str:
    if data is None:
        return "none"
    more = f" … ({len(data):,} bytes)" if len(data) > _SHOWN_BYTES else ""
    try:
        return data[:_SHOWN_BYTES].decode() + more
    except UnicodeDecodeError:
        return f"{data[:_SHOWN_BYTES]!r}{more}"


def _plain(value: Any) -> Any:
    """JSON values. Bytes are text if they are UTF-8, otherwise base64 in a field ``…_base64``."""
    value = fields_of(value) or value
    if isinstance(value, dict):
        plain: dict[str, Any] = {}
        for name, field in value.items():
            if isinstance(field, bytes):
                text = _text(field)
                plain |= {name: text} if text is not None else {f"{name}_base64": base64.b64encode(field).decode()}
            else:
                plain[name] = _plain(field)
        return plain
    return [_plain(element) for element in value] if isinstance(value, list | tuple) else value


def _text(data: bytes) -> str | None:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return None
