"""Receivers that pause and follow a rate, and batches that are in a file of the stream's history."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("receivers", sa.Column("paused_reason", sa.Text(), nullable=True))
    op.add_column("receivers", sa.Column("max_rate", sa.Float(), nullable=True))
    op.add_column("batches", sa.Column("history", sa.BigInteger(), nullable=False, server_default="0"))
    op.create_index(
        "ix_batches_history",
        "batches",
        ["stream", "batch_time_ms"],
        sqlite_where=sa.text("history <= 0"),
        postgresql_where=sa.text("history <= 0"),
    )


def downgrade() -> None:
    op.drop_index("ix_batches_history", table_name="batches")
    op.drop_column("batches", "history")
    for column in ("max_rate", "paused_reason"):
        op.drop_column("receivers", column)
