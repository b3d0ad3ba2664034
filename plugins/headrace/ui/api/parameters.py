"""Parameters of requests that several routes have: times, and the cursors of pages."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated

from fastapi import HTTPException, Path, Query

from headrace.ledger.batch_pages import Place

FromTime = Annotated[
    str | None, Query(alias="from", description="The first batch time.", examples=["2026-11-23T06:00:00Z"])
]
UntilTime = Annotated[str | None, Query(description="The first batch time that is left out.")]
BatchTime = Annotated[str, Path(description="ISO 8601, or epoch milliseconds.", examples=["2026-11-23T06:30:00.000Z"])]


def time_ms(text: str, name: str) -> int:
    """Epoch milliseconds of an ISO 8601 time (UTC if it names no zone) or of a number; 422 if it is neither."""
    if text.isascii() and text.isdigit() and len(text) <= 15:
        return int(text)
    try:
        # A "+" that was not encoded arrives as a space.
        at = datetime.fromisoformat(text.replace(" 0", "+0") if text.count(":") > 2 else text)
    except ValueError:
        raise HTTPException(422, f"{name} is neither ISO 8601 nor epoch milliseconds: {text!r}.") from None
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
        return Place(int(time), int(value) if value else None)
    except ValueError:
        raise HTTPException(422, f"{cursor!r} is no cursor: pass the next_cursor of a page.") from None
