"""A stream knows which batch times it has removed, a position where what is kept begins; an index of live positions."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None

_STREAMS = ("removed_from_ms", "removed_until_ms", "removed_files_ms", "history_from")


def upgrade() -> None:
    for name in _STREAMS:
        op.add_column("streams", sa.Column(name, sa.BigInteger(), nullable=False, server_default="0"))
    op.add_column("positions", sa.Column("removed_until_offset", sa.BigInteger(), nullable=True))
    live = sa.text("state != 'ended'")
    op.create_index(
        "ix_positions_live",
        "positions",
        ["stream", "input_id", "topic", "incarnation", "partition"],
        sqlite_where=live,
        postgresql_where=live,
    )


def downgrade() -> None:
    op.drop_index("ix_positions_live", table_name="positions")
    op.drop_column("positions", "removed_until_offset")
    for name in _STREAMS:
        op.drop_column("streams", name)
