"""Parameters of requests that several routes have: times, and the cursors of pages."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated

from fastapi import HTTPException, Path, Query

from headrace.ledger.timelines import Place

MAX_ID = 2**63 - 1
"""The largest number of the ledger's columns."""
# The years 1653 to 9998: what is reckoned from a time, such as the start of its interval, is in the calendar too.
_FIRST_MS, _LAST_MS = -10_000_000_000_000, 253_370_764_800_000

FromTime = Annotated[
    str | None, Query(alias="from", description="The first batch time.", examples=["2026-11-23T06:00:00Z"])
]
UntilTime = Annotated[str | None, Query(description="The first batch time that is left out.")]
BeforeId = Annotated[int | None, Query(ge=1, le=MAX_ID, description="The ``next_before_id`` of the page before.")]
BatchTime = Annotated[str, Path(description="ISO 8601, or epoch milliseconds.", examples=["2026-11-23T06:30:00.000Z"])]


def time_ms(text: str, name: str) -> int:
    """Epoch milliseconds of an ISO 8601 time (UTC if it names no zone) or of a number; 422 if it is neither, or far
    outside of the times of batches."""
    try:
        found = int(text) if text.isascii() and text.isdigit() and len(text) <= 15 else _of_iso(text)
    except (ValueError, OverflowError):
        raise HTTPException(422, f"{name} is neither ISO 8601 nor epoch milliseconds: {text[:100]!r}.") from None
    if not _FIRST_MS <= found <= _LAST_MS:
        raise HTTPException(422, f"{name} is outside the years 1653 to 9998: {text!r}.")
    return found


def _of_iso(text: str) -> int:
    # A "+" that was not encoded arrives as a space.
    at = datetime.fromisoformat(text.replace(" 0", "+0") if text.count(":") > 2 else text)
    return int((at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp() * 1000)


def optional_ms(text: str | None, name: str) -> int | None:
    """`time_ms`, or None."""
    return None if text is None else time_ms(text, name)


def cursor_of(place: Place | None) -> str | None:
    """The place where a page ended, as text."""
    if place is None:
        return None
    return str(place.batch_time_ms) if place.value is None else f"{place.value}.{place.batch_time_ms}"


def place_of(cursor: str | None) -> Place | None:
    """The reverse of `cursor_of`; 422 if it is no cursor."""
    if cursor is None:
        return None
    value, _, time = cursor.rpartition(".")
    try:
        place = Place(int(time), int(value) if value else None)
    except ValueError:
        place = None
    if place is None or abs(place.batch_time_ms) > MAX_ID or abs(place.value or 0) > MAX_ID:
        raise HTTPException(422, f"{cursor[:100]!r} is no cursor: pass the next_cursor of a page.")
    return place
