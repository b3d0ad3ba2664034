"""Checks, before offset ranges are read again, whether Kafka still has all of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from headrace.clock import time_text
from headrace.kafka.errors import RangesGoneError
from headrace.kafka.offset_questions import Kept, OffsetQuestions
from headrace.kafka.offset_ranges import RangeRun, RecordedRange

SHOWN = 20
"""How many ranges an error names."""


def check_available(questions: OffsetQuestions, runs: Sequence[RangeRun]) -> None:
    """Check that Kafka has every offset of ``runs``, in topics with the same ids.

    Raises:
        RangesGoneError: offsets are gone; the text names them by partition, and what Kafka still has.
        RangesUnreadableError: Kafka does not answer.
    """
    ids = questions.topic_ids({run.partition.topic for run in runs})
    same = [run for run in runs if ids[run.partition.topic] == run.partition.topic_id]
    # A topic may be created again just now, since offsets are queried by name: its id is checked again after reading.
    kept = questions.kept(sorted({run.key for run in same}))
    problems: dict[tuple[str, int, int], list[str]] = {}
    for run in runs:
        problem = _other_topic(run, ids[run.partition.topic]) or _not_kept(run, kept.get(run.key))
        if problem is not None:
            where = run.partition
            problems.setdefault((where.topic, where.partition, where.incarnation), []).append(problem)
    if problems:
        raise gone([text for texts in problems.values() for text in texts])


def gone(problems: Sequence[str]) -> RangesGoneError:
    """The error with these problems, one text per range."""
    return RangesGoneError(
        f"Kafka no longer has what is to be read again: {listed(problems)}.",
        remedy="What is gone from the log and from Kafka cannot be had any more.",
    )


def listed(problems: Sequence[str]) -> str:
    """The first ``SHOWN`` texts in one, with the number of the others."""
    more = len(problems) - SHOWN
    return "; ".join(problems[:SHOWN]) + (f"; and {more} more" if more > 0 else "")


def since(kept: Kept) -> str:
    """Text: the first offset that Kafka has of a partition, and the time of its first record."""
    if kept.first_timestamp_ms is None:
        return f"Kafka keeps offsets from {kept.first} on, and no record"
    return f"Kafka keeps offsets from {kept.first} on, records since {time_text(kept.first_timestamp_ms)}"


def _other_topic(run: RangeRun, topic_id: str | None) -> str | None:
    if topic_id == run.partition.topic_id:
        return None
    if topic_id is None:
        return f"{run}: the topic was deleted"
    return f"{run}: the topic was deleted and created again (its id was {run.partition.topic_id}, it is {topic_id})"


def _not_kept(run: RangeRun, kept: Kept | None) -> str | None:
    if kept is None:
        return f"{run}: there is no such partition any more"
    if run.until_offset > kept.end:
        return f"{run}: Kafka's log ends at {kept.end}, it was cut"
    lost = [each for each in run.ranges() if each.weight and each.from_offset < kept.first]
    if not lost:
        return None
    name = f"{run.partition.topic}-{run.partition.partition}"
    until = min(lost[-1].until_offset, kept.first)
    return f"{name} [{lost[0].from_offset}, {until}), {_records(lost)}, is gone: {since(kept)}"


def _records(ranges: Iterable[RecordedRange]) -> str:
    total, counted = 0, True
    for each in ranges:
        total += each.weight
        counted = counted and each.records is not None
    return f"of ranges with {total:,} records" if counted else f"of up to {total:,} records"
