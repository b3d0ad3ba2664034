"""Moves an output's alias to an index that a replay wrote, or accepts another index."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.batch.places import accept, place_of
from headrace.cli.options import AsJson, LedgerUrl, StreamName, examples, milliseconds, opened, registered
from headrace.cli.output import echo, print_json
from headrace.clock import time_text
from headrace.errors import HeadraceError
from headrace.ledger.states import BatchState

if TYPE_CHECKING:
    from headrace.ledger import Ledger
    from headrace.stream import Stream

_REPORTED = 10
_NO_END_MS = 2**62


class IndexNotAcceptedError(HeadraceError):
    """There is no index to accept, or there is one where none was expected."""


class AliasSwapRefusedError(HeadraceError):
    """The alias is not moved: the new index lacks batches, or there is no such replay."""


@examples("aliases swap orders elasticsearch --to orders-v2 --replay v2")
def swap(
    name: StreamName,
    output: Annotated[str, typer.Argument(help="The id of the stream's Elasticsearch output; its index is an alias.")],
    *,
    to: Annotated[str, typer.Option("--to", help="The index that the replay has written.", metavar="INDEX")],
    replay: Annotated[str, typer.Option(help="The name of the replay, as given to replay_dag.", metavar="NAME")],
    ledger: LedgerUrl,
    until: Annotated[
        str | None,
        typer.Option(help="The last batch time that the new index must have; by default the stream's newest."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Move the alias of an output to the index that a replay wrote, in one request.

    Refused if the index lacks a batch that the output has written since the replay's first one. Batches after --until
    that the index lacks are listed: run them again after the move.
    """
    from headrace.elasticsearch.administration import Administration
    from headrace.elasticsearch.transport import Cluster
    from headrace.views.dead_letters import elasticsearch_output

    with opened(ledger) as opened_ledger:
        declared = elasticsearch_output(registered(opened_ledger, name), output)
        if not declared.names.is_plain:
            raise AliasSwapRefusedError(
                f"The records of output {output!r} of {name!r} have an index each ({declared.index_text}), so no alias "
                "holds all of them.",
                remedy="Let the output name the indices of the replay, and run the batches since then again.",
            )
        until_ms = _NO_END_MS if until is None else milliseconds(until, "--until")
        first_ms = _first_ms(opened_ledger, name, replay)
        missing, _ = _lacking(opened_ledger, name, declared.step, replay, to)
        if too_many := [time_ms for time_ms in missing if first_ms <= time_ms <= until_ms]:
            raise AliasSwapRefusedError(
                f"Index {to!r} lacks {len(too_many)} batch(es) that output {output!r} of {name!r} has written and "
                f"replay {replay!r} has not completed there: {_times(too_many)}.",
                remedy="Backfill the replay's DAG over them. Or give --until with a time before "
                f"{time_text(too_many[0])}, and run the batches after it again when the alias has moved.",
            )
        with Administration.of(
            Cluster.of(declared), timeout_seconds=declared.request_timeout_seconds, max_retry_seconds=0
        ) as administration:
            old = administration.move_alias(declared.index_text, to)
            index = administration.concrete_index(declared.index_text)
        if index is not None:
            place = place_of(declared, index)
            accept(opened_ledger, name, place, by="headrace aliases swap")
        # It is not known into which index these are written. Read before the batches that are written, so that one that
        # began before the alias moved, and ends now, is among either.
        running = [row.batch_time_ms for row in opened_ledger.batches.page(name, _NO_END_MS, [BatchState.RUNNING])]
        missing, abandoned = _lacking(opened_ledger, name, declared.step, replay, to)
    batches = {
        "not_replayed": [time_ms for time_ms in missing if time_ms < first_ms],
        "abandoned": [time_ms for time_ms in abandoned if time_ms >= first_ms],
        "run_again": sorted({time_ms for time_ms in [*missing, *running] if time_ms >= first_ms}),
    }
    if as_json:
        print_json({"alias": declared.index_text, "old_index": old, "new_index": to, **batches})
        return
    echo(f"{declared.index_text} points to {to}" + (" already." if old == to else f"; it pointed to {old}."))
    for kind, explanation in (
        ("not_replayed", f"are older than the replay, so their documents are not in {to}"),
        ("abandoned", f"were abandoned after they were written, so their documents are not in {to}"),
        ("run_again", f"are not in {to}, or may not be. Run them again: backfill the batch DAG over completed runs"),
    ):
        if batches[kind]:
            echo(f"{len(batches[kind])} batch(es) {explanation}: {_times(batches[kind])}.")


@examples(
    "aliases accept orders elasticsearch",
    "aliases accept orders elasticsearch --create",
    "aliases accept orders elasticsearch --index orders-2026.11.30",
)
def accept_index(
    name: StreamName,
    output: Annotated[str, typer.Argument(help="The id of the stream's Elasticsearch output.")],
    *,
    ledger: LedgerUrl,
    create: Annotated[
        bool, typer.Option(help="There is no such index, and the next batch is to create it by its name.")
    ] = False,
    replay: Annotated[
        str, typer.Option(help="The name of a replay, whose index it is; by default the stream's own.", metavar="NAME")
    ] = "",
    index: Annotated[
        str | None, typer.Option(help="Which index, where each record has its own.", metavar="NAME")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Let an output write to the index that its name stands for now, though its earlier batches are in another one.

    Batches fail with TargetChangedError until then. Documents of earlier batches are not copied: run these batches
    again, or replay them, if the index needs them.
    """
    from headrace.elasticsearch.administration import Administration
    from headrace.elasticsearch.transport import Cluster
    from headrace.views.dead_letters import elasticsearch_output

    with opened(ledger) as opened_ledger:
        stream = registered(opened_ledger, name)
        if replay:
            stream = _replayed(opened_ledger, stream, replay)
        # An error names the output by its first id.
        declared = elasticsearch_output(
            stream, {step: id_ for id_, step in stream.step_of_id.items()}.get(output, output)
        )
        if index is not None and declared.names.may_be(index):
            declared = declared.at(index)
        elif index is not None or not declared.names.is_plain:
            raise IndexNotAcceptedError(
                f"The index of output {declared.id!r} is {declared.index_text}"
                + (", so each record has its own." if index is None else f", and {index!r} is none of a record."),
                remedy="Name one of its indices with --index.",
            )
        with Administration.of(
            Cluster.of(declared), timeout_seconds=declared.request_timeout_seconds, max_retry_seconds=0
        ) as administration:
            concrete = administration.concrete_index(declared.index_text)
        if (concrete is None) != create:
            raise IndexNotAcceptedError(
                f"There is no index or alias {declared.index_text!r}."
                if concrete is None
                else f"{declared.index_text!r} exists, so that no batch is to create it.",
                remedy="Create it, or give --create, and the next batch creates an index of this name."
                if concrete is None
                else "Leave out --create to accept it.",
            )
        place = place_of(declared, concrete)
        accept(opened_ledger, name, place, by="headrace aliases accept", target=replay)
    if as_json:
        print_json(place)
    else:
        there = "which the next batch creates" if concrete is None else f"which is {concrete.name} now"
        echo(f"Output {declared.id} of {name} writes to {declared.index_text}, {there}.")


def _replayed(ledger: Ledger, stream: Stream, replay: str) -> Stream:
    """The stream by the newest definition of the replay."""
    from headrace.stream import Stream

    rows = [row for row in ledger.results.replay_definitions(stream.name) if row.target == replay]
    if not rows:
        raise IndexNotAcceptedError(
            f"Stream {stream.name!r} has no replay {replay!r}.", remedy="Give the name that replay_dag was given."
        )
    return Stream.from_json(rows[-1].definition)


def _first_ms(ledger: Ledger, stream_name: str, replay: str) -> int:
    """The replay's first batch time."""
    rows = ledger.replays.between(stream_name, replay, 0, _NO_END_MS)
    if not rows:
        raise AliasSwapRefusedError(
            f"Stream {stream_name!r} has no replay {replay!r}.", remedy="Give the name that replay_dag was given."
        )
    return rows[0].batch_time_ms


def _lacking(ledger: Ledger, stream_name: str, step: str, replay: str, index: str) -> tuple[list[int], list[int]]:
    """The batch times that the output has written and the replay has not written, or not completed, into ``index``.

    Those that can be replayed come first; then those that cannot, because they were abandoned.
    """
    from headrace.stream import Stream

    rows = ledger.replays.between(stream_name, replay, 0, _NO_END_MS)
    completed = {row.batch_time_ms for row in rows if row.state is BatchState.COMPLETED}
    by_definition = ledger.replays.written_by(stream_name, replay, step, 0, _NO_END_MS)
    into_index = {
        definition: any(
            output.step == step and getattr(output, "index", None) == index
            for output in Stream.from_json(definition).outputs
        )
        for definition in set(by_definition.values())
    }
    there = {time_ms for time_ms, definition in by_definition.items() if into_index[definition]} & completed
    lacking = {
        time_ms: state
        for time_ms, state in ledger.batches.written(stream_name, step, 0, _NO_END_MS).items()
        if time_ms not in there
    }
    missing = sorted(time_ms for time_ms, state in lacking.items() if state is not BatchState.ABANDONED)
    return missing, sorted(lacking.keys() - set(missing))


def _times(times: Sequence[int]) -> str:
    reported = ", ".join(time_text(time_ms) for time_ms in times[:_REPORTED])
    return reported if len(times) <= _REPORTED else f"{reported} and so on to {time_text(times[-1])}"
