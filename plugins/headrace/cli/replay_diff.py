"""`headrace replay diff`: what another version of the code would change in the documents of past batches."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.cli.batch_preview import stream_context
from headrace.cli.commands import examples
from headrace.cli.options import AsJson, LedgerUrl, StreamName
from headrace.cli.options import batch_time as batch_time_ms
from headrace.cli.output import echo, print_json, print_table
from headrace.clock import time_text

if TYPE_CHECKING:
    from headrace.spark.replay_diff import OutputDiff, ReplayDiff


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
        from headrace.spark.local_session import local_session
        from headrace.spark.replay_diff import diff_replay

        interval_ms = context.stream.batch_interval_ms
        from_ms = batch_time_ms(since, "--from", interval_ms=interval_ms)
        to_ms = batch_time_ms(until, "--until", interval_ms=interval_ms)
        with (
            tempfile.TemporaryDirectory(prefix="headrace-diff-") as folder,
            local_session("headrace replay diff", context.stream.spark.conf) as spark,
        ):
            found = diff_replay(
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
    print_json(found) if as_json else _report(found)


def _report(found: ReplayDiff) -> None:
    echo(
        f"{found.batches:,} batches of {found.stream} from {time_text(found.from_ms)} to {time_text(found.to_ms)}: "
        f"{found.records:,} records. Nothing was written."
    )
    for unread in found.not_read:
        echo(f"Not read: {unread}")
    for output in found.outputs:
        _report_output(output)


def _report_output(output: OutputDiff) -> None:
    before, after = (each or "no transform" for each in (output.transform_before, output.transform_after))
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
            ("document id", "fields", "before", "after"),
            [(each.id, ", ".join(each.fields) or None, each.before, each.after) for each in output.examples],
        )


def _report_collisions(output: OutputDiff) -> None:
    of_versions = {"before": output.collisions_before, "after": output.collisions_after}
    if not any(each.number for each in of_versions.values()):
        return
    numbers = " and ".join(f"{each.number:,} {version}" for version, each in of_versions.items())
    echo(f"Ids that several rows of one batch have, so that its run fails: {numbers}.")
    rows = [(version, each) for version, collisions in of_versions.items() for each in collisions.examples]
    if rows:
        print_table(
            ("version", "document id", "batch", "rows"),
            [(version, each.id, time_text(each.batch_time_ms), f"{each.rows:,}") for version, each in rows],
        )
