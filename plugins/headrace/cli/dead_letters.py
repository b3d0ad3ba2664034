"""`headrace dead-letters list`, `show` and `replay`: the documents that Elasticsearch refused permanently."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace.cli.commands import examples
from headrace.cli.dead_letter_display import plan, report_counts, report_letter, report_list, report_plan
from headrace.cli.elasticsearch_outputs import (
    MAX_RETRY_SECONDS,
    NoSuchOutputError,
    administration_of,
    elasticsearch_outputs,
    registered,
)
from headrace.cli.options import AsJson, LedgerUrl, StreamName, batch_time, milliseconds, opened
from headrace.cli.output import print_json

if TYPE_CHECKING:
    from headrace.elasticsearch.dead_letter_index import DeadLetterIndex, LetterFilter
    from headrace.elasticsearch.options import IndexingOptions
    from headrace.stream import ElasticsearchOutput, Stream

OutputId = Annotated[
    str | None, typer.Option(help="The id of the Elasticsearch output; needed if the stream has several.")
]
IndexName = Annotated[
    str | None, typer.Option("--index", help="Letters for this index, which a replay of the stream wrote.")
]
Batch = Annotated[str | None, typer.Option(help="Only this batch time, in ISO 8601.")]
Since = Annotated[
    str | None, typer.Option("--from", help='Only batch times from this one on: ISO 8601, or "2 hours ago".')
]
Until = Annotated[str | None, typer.Option(help="Only batch times up to this one, inclusive.")]
ReasonType = Annotated[
    str | None, typer.Option("--reason", help="Only letters with this type of reason, as shown by list.")
]
Topic = Annotated[str | None, typer.Option(help="Only records of this topic.")]
Partition = Annotated[int | None, typer.Option(help="Only records of this partition.", min=0)]
Offset = Annotated[
    str | None, typer.Option(help="Only this offset, or this range, inclusive: 100-199.", metavar="OFFSET[-OFFSET]")
]
Replayed = Annotated[bool, typer.Option("--replayed", help="Include letters that were replayed.")]


@examples(
    "dead-letters list orders --from '2 hours ago'",
    "dead-letters list orders --reason document_parsing_exception --json",
)
def list_letters(
    name: StreamName,
    *,
    ledger: LedgerUrl,
    output: OutputId = None,
    index: IndexName = None,
    batch: Batch = None,
    since: Since = None,
    until: Until = None,
    reason: ReasonType = None,
    topic: Topic = None,
    partition: Partition = None,
    offset: Offset = None,
    replayed: Replayed = False,
    limit: Annotated[
        int, typer.Option(help="How many letters to list for each output, newest batch first.", min=1)
    ] = 20,
    as_json: AsJson = False,
) -> None:
    """Count dead letters by reason, and list the newest."""
    stream = _stream(ledger, name)
    wanted = _filter(
        stream, batch, since, until, offset, reason=reason, topic=topic, partition=partition, replayed=replayed
    )
    reported: list[dict[str, Any]] = []
    for declared in _outputs(stream, output, index):
        with _letters_of(stream, declared) as kept:
            found, reasons = list(kept.find(wanted, limit, contents=False)), kept.reasons(wanted)
        if as_json:
            letters = [{"id": letter.id, **letter.fields} for letter in found]
            reported.append(
                {"output": declared.id, "index": declared.dead_letters, "reasons": reasons, "letters": letters}
            )
        else:
            report_list(declared.id, declared.dead_letters, reasons, found)
    if as_json:
        print_json(reported)


@examples("dead-letters show orders orders/elasticsearch/orders/orders+2+1042")
def show(
    name: StreamName,
    letter_id: Annotated[str, typer.Argument(help="The letter's id, as shown by list.", metavar="ID")],
    *,
    ledger: LedgerUrl,
    output: OutputId = None,
    index: IndexName = None,
    value: Annotated[bool, typer.Option("--value", help="Write only the record's value, as bytes.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show all fields of a dead letter."""
    stream = _stream(ledger, name)
    with _letters_of(stream, _one_output(stream, output, index)) as kept:
        letter = kept.get(letter_id)
    if value:
        if letter.record is None:
            raise typer.BadParameter("this letter does not hold its record", param_hint="--value")
        sys.stdout.buffer.write(letter.record.value or b"")
        sys.stdout.buffer.flush()
    elif as_json:
        print_json({"id": letter.id, **letter.fields})
    else:
        report_letter(letter)


@examples(
    "dead-letters replay orders --reason document_parsing_exception",
    "dead-letters replay orders --reason document_parsing_exception --yes",
)
def replay(
    name: StreamName,
    *,
    ledger: LedgerUrl,
    letter_id: Annotated[
        list[str] | None, typer.Option("--id", help="Only this letter; may be given several times.")
    ] = None,
    output: OutputId = None,
    index: IndexName = None,
    batch: Batch = None,
    since: Since = None,
    until: Until = None,
    reason: ReasonType = None,
    topic: Topic = None,
    partition: Partition = None,
    offset: Offset = None,
    yes: Annotated[
        bool, typer.Option("--yes", help="Replay the letters; otherwise only print what would be done.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Index the documents of dead letters again, after the index was corrected (a mapping, a field limit).

    A document or newer version that is already in the index stays. The exit code is 1 if letters remain. After the
    decoder or the transform was corrected, run the letters' batches again instead.
    """
    from headrace.clock import SystemClock
    from headrace.elasticsearch.dead_letter_index import DeadLetterIndex, DeadLetterReplay
    from headrace.elasticsearch.transport import Cluster, ElasticsearchTransport

    stream = _stream(ledger, name)
    declared = _one_output(stream, output, index)
    wanted = _filter(
        stream, batch, since, until, offset, reason=reason, topic=topic, partition=partition, ids=tuple(letter_id or ())
    )
    options = _options(stream, declared)
    transport = ElasticsearchTransport(
        Cluster.of(declared), connections=1, timeout_seconds=declared.request_timeout_seconds
    )
    with administration_of(declared) as administration, contextlib.closing(transport):
        kept = DeadLetterIndex(administration, options)
        replaying = DeadLetterReplay(transport, options, kept, clock=SystemClock())
        if not yes:
            planned = plan(kept.find(wanted), replaying.cannot)
            print_json(planned) if as_json else report_plan(planned)
            return
        administration.concrete_index(options.index)
        counts = replaying.replay(kept.find(wanted))
    print_json(counts.to_dict()) if as_json else report_counts(counts)
    if counts.replayed < counts.letters:
        raise typer.Exit(1)


def _stream(ledger: str, name: str) -> Stream:
    with opened(ledger) as found:
        return registered(found, name)


def _outputs(stream: Stream, output: str | None, index: str | None) -> list[ElasticsearchOutput]:
    """The outputs, or a replay's copies of them, which differ only in their index."""
    found = elasticsearch_outputs(stream, output)
    return found if index is None else [each.model_copy(update={"index": index}) for each in found]


def _one_output(stream: Stream, output: str | None, index: str | None) -> ElasticsearchOutput:
    found = _outputs(stream, output, index)
    if len(found) > 1:
        raise NoSuchOutputError(
            f"Stream {stream.name!r} has {len(found)} Elasticsearch outputs.",
            remedy=f"Name one with --output: {', '.join(each.id for each in found)}.",
        )
    return found[0]


def _filter(
    stream: Stream, batch: str | None, since: str | None, until: str | None, offset: str | None, **narrowing: Any
) -> LetterFilter:
    from headrace.elasticsearch.dead_letter_index import LetterFilter

    if batch is not None and (since is not None or until is not None):
        raise typer.BadParameter("give either --batch or --from and --until", param_hint="--batch")
    first, last = _offsets(offset)
    if batch is not None:
        from_ms: int | None = batch_time(batch, "--batch", interval_ms=stream.batch_interval_ms)
        until_ms = from_ms
    else:
        from_ms, until_ms = _time(since, "--from"), _time(until, "--until")
    if from_ms is not None and until_ms is not None and from_ms > until_ms:
        raise typer.BadParameter("--from is later than --until", param_hint="--from")
    return LetterFilter(
        from_ms=from_ms,
        until_ms=until_ms,
        from_offset=first,
        until_offset=last,
        **narrowing,
    )


def _time(text: str | None, option: str) -> int | None:
    return None if text is None else milliseconds(text, option)


def _offsets(text: str | None) -> tuple[int | None, int | None]:
    if text is None:
        return None, None
    first, _, last = text.partition("-")
    if not first.isdigit() or not (last or first).isdigit():
        raise typer.BadParameter(f"{text!r} is neither an offset nor a range of offsets", param_hint="--offset")
    if int(first) > int(last or first):
        raise typer.BadParameter(f"{text!r} ends before it begins", param_hint="--offset")
    return int(first), int(last or first)


def _options(stream: Stream, output: ElasticsearchOutput) -> IndexingOptions:
    from headrace.elasticsearch.options import IndexingOptions

    # The letters have their batch time. The one in the options is used only for new ids, and none are made here.
    options = IndexingOptions.of(output, stream_name=stream.name, batch_time_ms=0)
    return replace(options, max_retry_seconds=min(options.max_retry_seconds, MAX_RETRY_SECONDS))


@contextlib.contextmanager
def _letters_of(stream: Stream, output: ElasticsearchOutput) -> Iterator[DeadLetterIndex]:
    from headrace.elasticsearch.dead_letter_index import DeadLetterIndex

    with administration_of(output) as administration:
        yield DeadLetterIndex(administration, _options(stream, output))
