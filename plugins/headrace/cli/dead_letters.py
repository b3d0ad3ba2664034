"""`headrace dead-letters list`, `show` and `replay`: the records that an Elasticsearch output refused."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace.cli.options import AsJson, LedgerUrl, StreamName, batch_time, examples, milliseconds, opened, registered
from headrace.cli.output import echo, print_json, print_table, printable
from headrace.clock import time_text

if TYPE_CHECKING:
    from headrace.elasticsearch.dead_letter_index import LetterFilter, ReplayCounts, StoredLetter
    from headrace.stream import ElasticsearchOutput, Stream
    from headrace.views.dead_letters import DeadLettersOf, ReplayPlan


OutputId = Annotated[
    str | None, typer.Option(help="The id of the Elasticsearch output; needed if the stream has several.")
]


def _checked_index(name: str | None) -> str | None:
    if name is not None:
        from headrace.stream.place_names import check_index_name

        try:
            check_index_name(name)
        except ValueError as error:
            raise typer.BadParameter(f"{name!r} {error}", param_hint="--index") from error
    return name


IndexName = Annotated[
    str | None,
    typer.Option(
        "--index", help="Letters for this index, which a replay of the stream wrote.", callback=_checked_index
    ),
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

_TEXT_SHOWN = 100
# A command fails when Elasticsearch has been unavailable for so many seconds.
_MAX_RETRY_SECONDS = 30.0


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
    from headrace.views.dead_letters import elasticsearch_outputs

    stream, outputs = _outputs(ledger, name, index, lambda stream: elasticsearch_outputs(stream, output))
    narrowing: dict[str, Any] = {"reason": reason, "topic": topic, "partition": partition, "index": index}
    wanted = _filter(stream, batch, since, until, offset, replayed=replayed, **narrowing)
    reported: list[dict[str, Any]] = []
    for declared in outputs:
        letters_of = _letters_of(stream, declared)
        with letters_of.opened() as kept:
            newest, reasons = list(kept.find(wanted, limit, contents=False)), kept.reasons(wanted)
        if as_json:
            letters = [{"id": letter.id, **letter.fields} for letter in newest]
            where = {"index": letters_of.output.dead_letters or None}
            if letters_of.output.dead_letter_topic is not None:
                where["topic"] = letters_of.output.dead_letter_topic.topic
            reported.append({"output": declared.id, **where, "reasons": reasons, "letters": letters})
        else:
            report_list(declared.id, letters_of.output.letters_place, reasons, newest)
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
    from headrace.views.dead_letters import elasticsearch_output

    stream, (declared,) = _outputs(ledger, name, index, lambda stream: [elasticsearch_output(stream, output)])
    with _letters_of(stream, declared).opened() as kept:
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
    from headrace.views.dead_letters import elasticsearch_output

    stream, (declared,) = _outputs(ledger, name, index, lambda stream: [elasticsearch_output(stream, output)])
    narrowing: dict[str, Any] = {"reason": reason, "topic": topic, "partition": partition, "index": index}
    wanted = _filter(stream, batch, since, until, offset, ids=tuple(letter_id or ()), **narrowing)
    letters = _letters_of(stream, declared)
    if not yes:
        plan = letters.plan(wanted)
        planned = {"to_replay": plan.replayable, "left": plan.left, "left_because": plan.left_because}
        print_json(planned) if as_json else report_plan(plan)
        return
    counts = letters.replay(wanted)
    print_json(counts.to_dict()) if as_json else report_counts(counts)
    if counts.replayed < counts.letters:
        raise typer.Exit(1)


def _outputs(
    ledger: str, name: str, index: str | None, chosen: Callable[[Stream], list[ElasticsearchOutput]]
) -> tuple[Stream, list[ElasticsearchOutput]]:
    """The stream, and its ``chosen`` outputs; with an index as they write, or a replay wrote, into that."""
    from headrace.views.dead_letters import output_of_index

    with opened(ledger) as opened_ledger:
        stream = registered(opened_ledger, name)
        outputs = chosen(stream)
        if index is not None:
            outputs = [
                output if output.names.may_be(index) else output_of_index(opened_ledger, stream, output, index)
                for output in outputs
            ]
        return stream, outputs


def _letters_of(stream: Stream, output: ElasticsearchOutput) -> DeadLettersOf:
    from headrace.views.dead_letters import DeadLettersOf

    return DeadLettersOf(stream.name, output, max_retry_seconds=_MAX_RETRY_SECONDS)


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
    if not text.isascii() or not first.isdigit() or not (last or first).isdigit():
        raise typer.BadParameter(f"{text!r} is neither an offset nor a range of offsets", param_hint="--offset")
    if int(first) > int(last or first):
        raise typer.BadParameter(f"{text!r} ends before it begins", param_hint="--offset")
    return int(first), int(last or first)


def report_list(output: str, where: str, reasons: Mapping[str, int], letters: list[StoredLetter]) -> None:
    """Print the letters of one output; ``reasons`` counts all of them, also those not listed."""
    total = sum(reasons.values())
    echo(f"{total:,} dead letters of output {output}, in {where}{': ' if total else ''}{_counted(reasons)}")
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


def report_plan(plan: ReplayPlan) -> None:
    """Print what a replay would do."""
    echo(f"{plan.replayable:,} dead letters would be replayed.")
    _report_left(plan.left_because)
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
