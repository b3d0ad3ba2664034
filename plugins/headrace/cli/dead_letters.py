"""`headrace dead-letters list`, `show` and `replay`: the records that an Elasticsearch output refused."""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace.cli.options import AsJson, LedgerUrl, StreamName, batch_time, examples, milliseconds, opened, registered
from headrace.cli.output import echo, print_json, print_table, printable
from headrace.clock import time_text
from headrace.errors import HeadraceError

if TYPE_CHECKING:
    from headrace.elasticsearch.administration import Administration
    from headrace.elasticsearch.dead_letter_index import DeadLetterIndex, LetterFilter, ReplayCounts, StoredLetter
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
            newest, reasons = list(kept.find(wanted, limit, contents=False)), kept.reasons(wanted)
        if as_json:
            letters = [{"id": letter.id, **letter.fields} for letter in newest]
            reported.append(
                {"output": declared.id, "index": declared.dead_letters, "reasons": reasons, "letters": letters}
            )
        else:
            report_list(declared.id, declared.dead_letters, reasons, newest)
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
    with opened(ledger) as opened_ledger:
        return registered(opened_ledger, name)


def _outputs(stream: Stream, output: str | None, index: str | None) -> list[ElasticsearchOutput]:
    """The outputs, or a replay's copies of them, which differ only in their index."""
    outputs = elasticsearch_outputs(stream, output)
    return outputs if index is None else [declared.model_copy(update={"index": index}) for declared in outputs]


def _one_output(stream: Stream, output: str | None, index: str | None) -> ElasticsearchOutput:
    outputs = _outputs(stream, output, index)
    if len(outputs) > 1:
        raise NoSuchOutputError(
            f"Stream {stream.name!r} has {len(outputs)} Elasticsearch outputs.",
            remedy=f"Name one with --output: {', '.join(declared.id for declared in outputs)}.",
        )
    return outputs[0]


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


_TEXT_SHOWN = 100


def report_list(output: str, index: str, reasons: Mapping[str, int], letters: list[StoredLetter]) -> None:
    """Print the letters of one output; ``reasons`` counts all of them, also those not listed."""
    total = sum(reasons.values())
    echo(f"{total:,} dead letters of output {output}, in {index}{': ' if total else ''}{_counted(reasons)}")
    if not letters:
        return
    print_table(
        ("id", "batch time", "reason", "text", "replayed"),
        [
            (
                letter.id,
                time_text(letter.fields.get("batch_time")),
                letter.reason.type,
                _short(letter.reason.text),
                time_text(letter.fields.get("replayed_at")),
            )
            for letter in letters
        ],
    )
    if len(letters) < total:
        echo(f"These are {len(letters):,} of them; --limit lists more.")


def report_letter(letter: StoredLetter) -> None:
    """Print every field of one letter, one a line; times in ISO 8601, bytes as text where possible."""
    fields = dict(letter.fields)
    for name in ("batch_time", "timestamp", "replayed_at"):
        if name in fields:
            fields[name] = time_text(fields[name])
    record = letter.record
    if record is not None:
        fields["key"] = _readable(record.key)
        fields["headers"] = ", ".join(f"{name}={_readable(value)}" for name, value in record.headers) or None
    if "value_text" in fields:
        del fields["value"]
    reason = letter.reason
    for name, value in {"id": letter.id, **fields, "reason": f"{reason.type}: {reason.text}"}.items():
        if value is not None:
            echo(f"{name:>18}  {value}")


def plan(letters: Iterable[StoredLetter], cannot: Callable[[StoredLetter], str | None]) -> dict[str, Any]:
    """How many letters a replay would try, and why it would skip the others; ``cannot`` gives the reason."""
    tried = 0
    left: Counter[str] = Counter()
    for letter in letters:
        why = cannot(letter)
        tried += why is None
        left.update([] if why is None else [why])
    return {"to_replay": tried, "left": left.total(), "left_because": dict(left)}


def report_plan(planned: Mapping[str, Any]) -> None:
    """Print the result of `plan`."""
    echo(f"{planned['to_replay']:,} dead letters would be replayed.")
    _report_left(planned["left_because"])
    echo("Nothing is changed yet; --yes replays them.")


def report_counts(counts: ReplayCounts) -> None:
    """Print the outcomes of a replay."""
    documents = counts.documents
    outcomes = {
        "written": documents.created + documents.updated,
        "there already": documents.repeated,
        "there already with other contents": documents.kept,
        "there already and not comparable": documents.uncompared,
        "superseded by a newer one": documents.superseded,
        "deleted": documents.deleted,
        "without a value and ignored": documents.ignored_tombstones,
        "dropped by an ingest pipeline": documents.dropped,
    }
    echo(f"{counts.replayed:,} of {counts.letters:,} dead letters are replayed.")
    reported = ", ".join(f"{number:,} {what}" for what, number in outcomes.items() if number)
    if reported:
        echo(f"Documents: {reported}.")
    if counts.refused:
        echo(f"{counts.refused:,} were refused again: {_counted(counts.refused_because)}")
    if counts.written_anew:
        echo(f"{counts.written_anew:,} were rewritten by a batch meanwhile, and were not changed.")
    _report_left(counts.left_because)


def _report_left(reasons: Mapping[str, int]) -> None:
    for why, number in reasons.items():
        echo(f"{number:,} cannot be replayed: {why}.")


def _counted(reasons: Mapping[str, int]) -> str:
    return ", ".join(f"{number:,} {reason}" for reason, number in reasons.items())


def _short(text: str) -> str:
    line = printable(" ".join(text.split()))
    return line if len(line) <= _TEXT_SHOWN else f"{line[: _TEXT_SHOWN - 1]}…"


def _readable(value: bytes | None) -> str | None:
    return None if value is None else value.decode("utf-8", "backslashreplace")


MAX_RETRY_SECONDS = 30.0
"""A command fails when Elasticsearch has been unavailable for so many seconds."""


class NoSuchOutputError(HeadraceError):
    """The stream has no such Elasticsearch output."""


def elasticsearch_outputs(stream: Stream, output: str | None) -> list[ElasticsearchOutput]:
    """The Elasticsearch output with this id, in a list; None: all Elasticsearch outputs.

    Raises:
        NoSuchOutputError: there is no such output, or it is of another kind.
    """

    outputs = [declared for declared in stream.elasticsearch_outputs if output in (None, declared.id)]
    if not outputs:
        kinds = ", ".join(f"{declared.id} ({declared.kind})" for declared in stream.outputs)
        wanted = "no Elasticsearch output" if output is None else f"no Elasticsearch output {output!r}"
        raise NoSuchOutputError(f"Stream {stream.name!r} has {wanted}; its outputs are {kinds}.")
    return outputs


def administration_of(output: ElasticsearchOutput, *, max_retry_seconds: float = MAX_RETRY_SECONDS) -> Administration:
    """The administration of the output's cluster, to be closed. Raises the errors of looking up its connection."""
    from headrace.elasticsearch.administration import Administration
    from headrace.elasticsearch.transport import Cluster

    return Administration.of(
        Cluster.of(output), timeout_seconds=output.request_timeout_seconds, max_retry_seconds=max_retry_seconds
    )
