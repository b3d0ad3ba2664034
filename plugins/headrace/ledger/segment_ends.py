"""The column values that close a segment, used by its writer, the writer's successor, and the end of the job."""

from __future__ import annotations

from typing import Any

from sqlalchemy import func, select

from headrace.ledger.models import blocks, segments


def closing(now_ms: int) -> dict[str, Any]:
    """Return the values with which an update of ``segments`` closes segments. Only this reads all of their blocks."""
    latest = select(func.coalesce(func.max(blocks.c.batch_time_ms), 0)).where(
        blocks.c.segment_id == segments.c.segment_id
    )
    return {"closed_at_ms": now_ms, "last_batch_time_ms": latest.scalar_subquery()}
