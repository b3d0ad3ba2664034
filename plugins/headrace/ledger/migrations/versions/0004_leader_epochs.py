"""Positions know in which leader epoch their last records were written."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("positions", sa.Column("leader_epoch", sa.Integer(), nullable=True))
    op.add_column("positions", sa.Column("epoch_end_offset", sa.BigInteger(), nullable=True))


def downgrade() -> None:
    for column in ("epoch_end_offset", "leader_epoch"):
        op.drop_column("positions", column)
