"""How a segment is closed, by whoever closes it: its writer, its writer's successor, or the end of its job."""

from __future__ import annotations

from typing import Any

from sqlalchemy import func, select

from headrace.ledger.tables import blocks, segments


def closing(now_ms: int) -> dict[str, Any]:
    """The values by which an update of ``segments`` closes one: its blocks are looked through this once."""
    latest = select(func.coalesce(func.max(blocks.c.batch_time_ms), 0)).where(
        blocks.c.segment_id == segments.c.segment_id
    )
    return {"closed_at_ms": now_ms, "last_batch_time_ms": latest.scalar_subquery()}
