"""Answers about what happened: events, gaps and dead letters."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from headrace.ui.api.models.base import Answer, Time, ms


class Event(Answer):
    """An event of a stream."""

    id: int
    at: Time = ms("at")
    kind: str
    batch_time: Time | None = ms("batch_time")
    text: str = Field(description="The event in a few words.")
    payload: dict[str, Any]


class EventPage(Answer):
    """Events, newest first."""

    events: tuple[Event, ...]
    next_before_id: int | None = Field(
        description="Pass it as ``before_id`` to get older ones; null if there are none."
    )


class Gap(Answer):
    """Offsets that were given up."""

    id: int
    at: Time = ms("at")
    input: str
    topic: str
    partition: int
    from_offset: int
    until_offset: int
    reason: str
    batch_time: Time | None = ms("batch_time")


class GapPage(Answer):
    """Gaps, newest first."""

    gaps: tuple[Gap, ...]
    next_before_id: int | None


class DeadLetter(Answer):
    """A record that an output refused."""

    id: str
    at: str | None
    topic: str | None
    partition: int | None
    offset: int | None
    batch_time: str | None
    error_type: str | None
    reason: str | None
    replayed: bool
    value: str | None = Field(description="The beginning of its value as text, if it is text.")


class DeadLetterPage(Answer):
    """Dead letters of one output, newest first."""

    output: str
    index: str
    total: int
    letters: tuple[DeadLetter, ...]
