"""`headrace alias swap`: move an output's alias, for readers and the stream itself, to an index that a replay wrote."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.cli.batch_time import milliseconds
from headrace.cli.elasticsearch_outputs import MAX_RETRY_SECONDS, elasticsearch_outputs, registered, transport_to
from headrace.cli.ledger_option import AsJson, LedgerUrl, StreamName, opened
from headrace.cli.output import print_json
from headrace.cli.replayed_index import AliasSwapRefusedError, ReplayedIndex
from headrace.clock import time_text

if TYPE_CHECKING:
    from headrace.elasticsearch.aliases import IndexAlias
    from headrace.stream import ElasticsearchOutput

_REPORTED = 10

alias = typer.Typer(add_completion=False, no_args_is_help=True, help="Move the alias that a stream writes through.")


@dataclasses.dataclass
class Swap:
    """What a swap would do, or has done. Times are batch times, in epoch milliseconds; the range includes ``until_ms``.

    ``missing``: batches of the range that the output has written and the replay has not completed. ``abandoned``: such
    batches that were abandoned since and cannot be replayed; they are not in ``missing``. ``to_run_again``: batches
    after the range that the new index lacks, and batches that are being written.
    """

    stream: str
    output: str
    replay: str
    alias: str
    old_index: str
    new_index: str
    from_ms: int
    until_ms: int
    missing: list[int]
    abandoned: list[int]
    to_run_again: list[int]
    older_batches: bool
    swapped: bool = False


@alias.callback()
def _group() -> None:
    """Move the alias that a stream writes through."""


@alias.command()
def swap(
    name: StreamName,
    output: Annotated[str, typer.Argument(help="The id of the stream's Elasticsearch output; its index is an alias.")],
    *,
    to: Annotated[str, typer.Option("--to", help="The index that the replay has written.", metavar="INDEX")],
    replay: Annotated[str, typer.Option(help="The replay's name, as its DAG has it.", metavar="NAME")],
    ledger: LedgerUrl,
    since: Annotated[
        str | None, typer.Option("--from", help="The first batch time to check; by default the replay's first.")
    ] = None,
    until: Annotated[
        str | None,
        typer.Option(help="The last batch time to check; by default the stream's newest. Run later ones again then."),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do it; otherwise only what would be done is told.")] = False,
    as_json: AsJson = False,
) -> None:
    """Move the alias of an output to the index that a replay wrote, in one step.

    Refused while the replay lacks batches that the output has written: readers would miss their documents.
    """
    with opened(ledger) as found:
        (declared,) = elasticsearch_outputs(registered(found, name), output)
        with _index_alias(declared) as index_alias:
            move = index_alias.plan(to)
            known = ReplayedIndex(found, name, output, replay, to)
            from_ms = known.first_ms if since is None else milliseconds(since, "--from")
            until_ms = known.newest_ms if until is None else milliseconds(until, "--until")
            known.check(from_ms, until_ms)
            plan = Swap(
                name, output, replay, move.alias, move.old, move.new, from_ms, until_ms,
                missing=known.missing(from_ms, until_ms),
                abandoned=known.abandoned(from_ms, until_ms),
                to_run_again=known.to_run_again(from_ms, until_ms),
                older_batches=bool(known.missing(0, from_ms - 1)),
            )  # fmt: skip
            if plan.missing:
                _refuse(plan, as_json=as_json)
            if yes and move.old != move.new:
                index_alias.move(move)
                plan.swapped = True
                # Batches that were written during the move may be in the old index, also batches of the range.
                moved = ReplayedIndex(found, name, output, replay, to)
                plan.to_run_again = sorted({*plan.to_run_again, *moved.to_run_again(from_ms, from_ms - 1)})
    if as_json:
        print_json(plan)
    else:
        _report(plan)


@contextmanager
def _index_alias(output: ElasticsearchOutput) -> Iterator[IndexAlias]:
    from headrace.clock import SystemClock
    from headrace.elasticsearch.aliases import IndexAlias
    from headrace.elasticsearch.options import IndexingOptions

    options = replace(
        IndexingOptions.of(output, stream_name="", batch_time_ms=None), max_retry_seconds=MAX_RETRY_SECONDS
    )
    with transport_to(output) as transport:
        yield IndexAlias(transport, options, clock=SystemClock())


def _refuse(plan: Swap, *, as_json: bool) -> None:
    if as_json:
        print_json(plan)
    raise AliasSwapRefusedError(
        f"Replay {plan.replay!r} has not completed {len(plan.missing)} batch(es) that {plan.stream!r} has written "
        f"from {time_text(plan.from_ms)} to {time_text(plan.until_ms)}: {_times(plan.missing)}.",
        remedy=f"Backfill the replay's DAG over them. Or give --until with a time before {time_text(plan.missing[0])}, "
        "and run the batches after it again once the alias is moved: they write through it.",
    )


def _report(plan: Swap) -> None:
    old, new = plan.old_index, plan.new_index
    span = f"{time_text(plan.from_ms)} to {time_text(plan.until_ms)}"
    if old == new:
        typer.echo(f"{plan.alias} means {new} already.")
    elif plan.swapped:
        typer.echo(f"{plan.alias} means {new}, which holds the batches of {span}; it was {old}.")
    else:
        typer.echo(f"{plan.alias} means {old}; {new} holds the batches of {span}.")
    if plan.older_batches:
        typer.echo(f"Batches before {time_text(plan.from_ms)} were not replayed: their documents are not in {new}.")
    if plan.abandoned:
        typer.echo(
            f"{len(plan.abandoned)} batch(es) were abandoned after they were written, and are not in {new}: "
            f"{_times(plan.abandoned)}. Their documents are in {old} alone."
        )
    if plan.to_run_again:
        typer.echo(
            f"{len(plan.to_run_again)} batch(es) are not in {new}, or may not be: {_times(plan.to_run_again)}. "
            "Run them again once the alias is moved: backfill the stream's batch DAG over them, reprocessing completed."
        )
    if not plan.swapped and old != new:
        typer.echo("Nothing is changed yet; --yes moves the alias.")


def _times(times: Sequence[int]) -> str:
    reported = ", ".join(time_text(at_ms) for at_ms in times[:_REPORTED])
    return reported if len(times) <= _REPORTED else f"{reported} and so on to {time_text(times[-1])}"
