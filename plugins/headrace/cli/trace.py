"""`headrace trace`: shows one record's way, from Kafka to its documents, or finds records by their key."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace.cli.commands import examples
from headrace.cli.elasticsearch_outputs import registered
from headrace.cli.options import AsJson, LedgerUrl, StreamName, opened
from headrace.cli.output import echo, print_json
from headrace.cli.trace_display import report_search, report_trace, search_fields, trace_fields

if TYPE_CHECKING:
    from headrace.stream_context import StreamContext
    from headrace.trace.models import KeySearch, RecordTrace

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
    with opened(ledger) as found:
        context = StreamContext(registered(found, name), found)
        if key is not None:
            search = _search(
                context, key, limit=limit, max_records=max_records, max_batches=max_batches, from_kafka=kafka
            )
            print_json(search_fields(search)) if as_json else report_search(search)
            return
        traced = _trace(context, record or [], incarnation, input_id)
    print_json(trace_fields(traced)) if as_json else report_trace(traced)


def _trace(context: StreamContext, record: list[str], incarnation: int | None, input_id: str | None) -> RecordTrace:
    from headrace.trace.positions import Coordinates
    from headrace.trace.trace import trace_document, trace_record

    match record:
        case [document_id]:
            return trace_document(context, document_id)
        case [topic, partition, offset] if partition.isdecimal() and offset.isdecimal():
            asked = Coordinates(topic, int(partition), int(offset), incarnation)
            return trace_record(context, asked, input_id=input_id)
    raise typer.BadParameter(f"{' '.join(record)!r} is not a record: {_ONE_OF}")


def _search(context: StreamContext, key: str, **bounds: Any) -> KeySearch:
    """``bounds``: the arguments of `search_key`."""
    from headrace.trace.key_search import search_key

    def progress(line: str) -> None:
        echo(line, err=True)

    return search_key(context, key.encode(), progress=progress, **bounds)
