"""The text output of `headrace dead-letters list`, `show` and `replay`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from headrace.cli.output import echo, print_table, printable
from headrace.clock import time_text

if TYPE_CHECKING:
    from headrace.elasticsearch.dead_letter_index import ReplayCounts, StoredLetter

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
        "dropped by a pipeline of Elasticsearch": documents.dropped,
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
