"""Parses batch times in command arguments."""

from __future__ import annotations

from datetime import UTC, datetime

import typer

from headrace.clock import time_text


def milliseconds(text: str, option: str) -> int:
    """Parse epoch milliseconds or an ISO 8601 time (UTC if it names no zone) into epoch milliseconds.

    Raises:
        BadParameter: the text is neither; the error names ``option``.
    """
    if text.isdigit():
        return int(text)
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is neither epoch milliseconds nor ISO 8601", param_hint=option) from None
    return int((at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp() * 1000)


def batch_time(text: str, option: str, *, interval_ms: int) -> int:
    """Parse a batch time of a stream with this batch interval into epoch milliseconds.

    Raises:
        BadParameter: the text is not a time, or not a batch time; the error names ``option``, and for the latter the
            nearest batch times.
    """
    batch_time_ms = milliseconds(text, option)
    since = batch_time_ms % interval_ms
    if since:
        before, after = time_text(batch_time_ms - since), time_text(batch_time_ms - since + interval_ms)
        raise typer.BadParameter(
            f"{time_text(batch_time_ms)} is no batch time: the one before it is {before}, the one after it {after}",
            param_hint=option,
        )
    return batch_time_ms
