"""`headrace batches preview` and `export`, `replay diff`: what code would write, tried in a local Spark session."""

from __future__ import annotations

import base64
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace.cli.batches import BatchTime
from headrace.cli.options import AsJson, LedgerUrl, StreamName, examples, opened, registered
from headrace.cli.options import batch_time as batch_time_ms
from headrace.cli.output import echo, print_json, print_table
from headrace.clock import time_text
from headrace.connections import export as export_connections

if TYPE_CHECKING:
    from headrace.spark.preview import BatchPreview, OutputPreview
    from headrace.spark.replay_diff import OutputDiff, ReplayDiff
    from headrace.stream_context import StreamContext


@examples(
    "batches preview orders 2026-11-21T14:05Z",
    "batches preview orders 2026-11-21T14:05Z --transform orders:corrected --limit 5",
)
def preview(
    name: StreamName,
    batch_time: BatchTime,
    *,
    ledger: LedgerUrl,
    transform: Annotated[
        str | None, typer.Option(help="Use this transform instead, as module:function.", metavar="MODULE:FUNCTION")
    ] = None,
    output: Annotated[str | None, typer.Option(help="Only the output with this id.")] = None,
    limit: Annotated[int, typer.Option(help="How many rows of each output.", min=1)] = 20,
    as_json: AsJson = False,
) -> None:
    """Show the rows that a batch would write with the present definition and code, and write nothing.

    It reads the batch as an attempt does, in a Spark session of its own on this machine. A module of the current folder
    can be used as transform.
    """
    with stream_context(ledger, name) as context:
        from headrace.spark.preview import preview_batch, with_transform
        from headrace.spark.sessions import local_session
        from headrace.stream_context import StreamContext

        at_ms = batch_time_ms(batch_time, "BATCH_TIME", interval_ms=context.stream.batch_interval_ms)
        changed = StreamContext(with_transform(context.stream, transform, output), context.ledger)
        with _session(local_session("headrace preview", changed.stream.spark.conf)) as open_session:
            shown = preview_batch(changed, at_ms, open_session, output_id=output, limit=limit)
    print_json(_plain(asdict(shown)), without_times=("rows",)) if as_json else _report_preview(shown)


@examples("batches export orders 2026-11-21T14:05Z --to orders.parquet")
def export(
    name: StreamName,
    batch_time: BatchTime,
    *,
    ledger: LedgerUrl,
    to: Annotated[Path, typer.Option(help="The Parquet file to write.", metavar="FILE.parquet", dir_okay=False)],
    input_id: Annotated[
        str | None, typer.Option("--input", help="The id of the input, if the stream has several.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the file if it exists.")] = False,
    as_json: AsJson = False,
) -> None:
    """Write a batch's records to a Parquet file: decoded as the transform gets them, with their bytes from Kafka.

    `headrace.testing.transforms` runs a transform on the file in a test.
    """
    with stream_context(ledger, name) as context:
        from headrace.spark.preview import export_batch
        from headrace.spark.sessions import local_session

        at_ms = batch_time_ms(batch_time, "BATCH_TIME", interval_ms=context.stream.batch_interval_ms)
        with _session(local_session("headrace export", context.stream.spark.conf)) as open_session:
            done = export_batch(context, at_ms, to, open_session, input_id=input_id, overwrite=overwrite)
    if as_json:
        print_json(done)
        return
    bad = f", {done.undecodable:,} of them undecodable," if done.undecodable else ""
    echo(f"{done.records:,} records{bad} of batch {time_text(at_ms)} are in {done.path} ({done.bytes:,} bytes).")


@contextmanager
def stream_context(ledger: str, name: str) -> Iterator[StreamContext]:
    """The registered stream with its open ledger, for a command that runs the stream's code."""
    from headrace.stream_context import StreamContext

    # A transform in the current folder can be imported, as by `headrace streams check`.
    sys.path.insert(0, "")
    with opened(ledger) as opened_ledger:
        stream = registered(opened_ledger, name)
        export_connections(stream.connection_ids)
        yield StreamContext(stream, opened_ledger)


@contextmanager
def _session(opening: Any) -> Iterator[Any]:
    """A function that opens the session when it is first needed; the session is closed at the end."""
    from contextlib import ExitStack

    with ExitStack() as closing:
        yield lambda: closing.enter_context(opening)


def _report_preview(shown: BatchPreview) -> None:
    where = "the log" if shown.source == "log" else "Kafka"
    echo(
        f"Batch {time_text(shown.batch_time_ms)} of {shown.stream}: {shown.records:,} records, read from {where}. "
        "Nothing was written."
    )
    for output in shown.outputs:
        _report_output_preview(output)


def _report_output_preview(output: OutputPreview) -> None:
    by = "no transform" if output.transform is None else output.transform
    echo(f"\nOutput {output.output_id} ({output.kind}, {by}):")
    if output.skipped is not None:
        echo(f"It would write nothing: {output.skipped}.")
        return
    if output.undecodable:
        first = output.undecodable_records[0]
        echo(
            f"{output.undecodable:,} records do not decode. The first is {first.topic} {first.partition} "
            f"{first.offset}: {first.reason}"
        )
    if output.documents is not None:
        print_table(
            ("index", "document id", "version", "document", "dead letter because"),
            [
                (
                    document.index,
                    document.id,
                    None if document.version is None else str(document.version),
                    "deleted" if document.document is None and document.rejected is None else document.document,
                    None if document.rejected is None else f"{document.rejected.type}: {document.rejected.text}",
                )
                for document in output.documents
            ],
        )
    else:
        names = list(output.rows[0]) if output.rows else []
        if names:
            print_table(names, [[_cell(row[name]) for name in names] for row in output.rows])
    if output.more:
        echo("There are more rows: --limit shows more.")
    elif not output.rows:
        echo("No rows.")


def _cell(value: Any) -> object:
    plain = _plain(value)
    return None if plain is None else str(plain)


def _plain(value: Any) -> Any:
    """Rows as JSON values. Bytes become text if they are UTF-8, else base64; other values that JSON lacks become their
    ``str``."""
    if isinstance(value, dict):
        return {str(name): _plain(field) for name, field in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(element) for element in value]
    if isinstance(value, bytes | bytearray):
        try:
            return bytes(value).decode()
        except UnicodeDecodeError:
            return base64.b64encode(value).decode()
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


@examples(
    "replay diff orders --from 2026-11-21T14:00Z --until 2026-11-21T15:00Z --transform orders_v2:corrected",
)
def diff(
    name: StreamName,
    *,
    ledger: LedgerUrl,
    since: Annotated[str, typer.Option("--from", help="The first batch time, in ISO 8601.")],
    until: Annotated[str, typer.Option(help="The last batch time, inclusive.")],
    transform: Annotated[
        str, typer.Option(help="The transform to compare with, as module:function.", metavar="MODULE:FUNCTION")
    ],
    output: Annotated[str | None, typer.Option(help="Only the Elasticsearch output with this id.")] = None,
    limit: Annotated[int, typer.Option(help="How many examples of each kind.", min=0)] = 10,
    as_json: AsJson = False,
) -> None:
    """Show which documents of past batches another transform would add, change or remove, and write nothing.

    It reads each batch twice in a Spark session of its own on this machine: with the present definition and code, and
    with the other transform, which can be in a module of the current folder. The documents are in temporary files
    until it ends.
    """
    with stream_context(ledger, name) as context:
        from headrace.spark.replay_diff import diff_replay
        from headrace.spark.sessions import local_session

        interval_ms = context.stream.batch_interval_ms
        from_ms = batch_time_ms(since, "--from", interval_ms=interval_ms)
        to_ms = batch_time_ms(until, "--until", interval_ms=interval_ms)
        with (
            tempfile.TemporaryDirectory(prefix="headrace-diff-") as folder,
            local_session("headrace replay diff", context.stream.spark.conf) as spark,
        ):
            compared = diff_replay(
                context,
                spark,
                Path(folder),
                transform=transform,
                from_ms=from_ms,
                to_ms=to_ms,
                output_id=output,
                limit=limit,
                progress=lambda what: echo(f"{name}: {what}", err=True),
            )
    print_json(compared) if as_json else _report_diff(compared)


def _report_diff(compared: ReplayDiff) -> None:
    echo(
        f"{compared.batches:,} batches of {compared.stream} from {time_text(compared.from_ms)} to "
        f"{time_text(compared.to_ms)}: {compared.records:,} records. Nothing was written."
    )
    for unread in compared.not_read:
        echo(f"Not read: {unread}")
    for output in compared.outputs:
        _report_output_diff(output)


def _report_output_diff(output: OutputDiff) -> None:
    before, after = (transform or "no transform" for transform in (output.transform_before, output.transform_after))
    echo(f"\nOutput {output.output_id}, {before} and {after}:")
    fields = ", ".join(f"{name} {number:,}" for name, number in output.changed_fields.items())
    print_table(
        ("documents", "number", "fields"),
        [
            ("new", f"{output.new:,}", None),
            ("changed", f"{output.changed:,}", fields or None),
            ("gone", f"{output.gone:,}", None),
            ("same", f"{output.same:,}", None),
        ],
    )
    if output.rejected_before or output.rejected_after:
        echo(f"Rows that would be dead letters: {output.rejected_before:,}, and {output.rejected_after:,}.")
    _report_collisions(output)
    if output.examples:
        echo("Examples:")
        print_table(
            ("index", "document id", "fields", "before", "after"),
            [
                (example.index, example.id, ", ".join(example.fields) or None, example.before, example.after)
                for example in output.examples
            ],
        )


def _report_collisions(output: OutputDiff) -> None:
    of_versions = {"before": output.collisions_before, "after": output.collisions_after}
    if not any(collisions.number for collisions in of_versions.values()):
        return
    numbers = " and ".join(f"{collisions.number:,} {version}" for version, collisions in of_versions.items())
    echo(f"Ids that several rows of one batch share, which would fail its run: {numbers}.")
    rows = [(version, example) for version, collisions in of_versions.items() for example in collisions.examples]
    if rows:
        print_table(
            ("version", "document id", "batch", "rows"),
            [(version, example.id, time_text(example.batch_time_ms), f"{example.rows:,}") for version, example in rows],
        )
