"""Batch times as commands take them."""

from __future__ import annotations

from datetime import UTC, datetime

import typer


def milliseconds(text: str, option: str) -> int:
    """Epoch milliseconds, from themselves or from ISO 8601 (in UTC where it names no zone).

    Raises:
        BadParameter: it is neither; ``option`` is named.
    """
    if text.isdigit():
        return int(text)
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is neither epoch milliseconds nor ISO 8601", param_hint=option) from None
    return int((at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp() * 1000)
