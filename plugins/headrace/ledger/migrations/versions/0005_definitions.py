"""Every definition of a stream stays under its revision, and attempts name the one that they began with."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

Document = sa.JSON(none_as_null=True).with_variant(postgresql.JSONB(none_as_null=True), "postgresql")

_DECLARED = (
    "definition",
    "batch_interval_ms",
    "block_interval_ms",
    "outputs",
    "max_concurrent_batches",
    "ordered",
    "batch_by",
    "allowed_lateness_ms",
)


def upgrade() -> None:
    revisions = op.create_table(
        "stream_revisions",
        sa.Column("stream", sa.Text(), nullable=False),
        sa.Column("revision", sa.Integer(), nullable=False),
        sa.Column("digest", sa.Text(), nullable=False),
        sa.Column("definition", sa.Text(), nullable=False),
        sa.Column("batch_interval_ms", sa.BigInteger(), nullable=False),
        sa.Column("block_interval_ms", sa.BigInteger(), nullable=False),
        sa.Column("outputs", Document, nullable=False),
        sa.Column("max_concurrent_batches", sa.Integer(), nullable=False),
        sa.Column("ordered", sa.Boolean(), nullable=False),
        sa.Column("batch_by", sa.Text(), nullable=False),
        sa.Column("allowed_lateness_ms", sa.BigInteger(), nullable=False),
        sa.Column("created_at_ms", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["stream"], ["streams.name"], name="fk_stream_revisions_streams"),
        sa.PrimaryKeyConstraint("stream", "revision", name="pk_stream_revisions"),
        sa.UniqueConstraint("stream", "digest", name="uq_stream_revisions_stream_digest"),
    )
    op.add_column("streams", sa.Column("declared_at_ms", sa.BigInteger(), nullable=False, server_default="0"))
    op.add_column("batch_attempts", sa.Column("revision", sa.Integer(), nullable=True))
    _keep_the_present_ones(revisions)


def _keep_the_present_ones(revisions: sa.Table) -> None:
    """Earlier ones are lost: a stream's row held the newest alone."""
    # The columns' types make booleans and documents of what the database gives.
    streams = sa.table(
        "streams",
        sa.column("name"),
        sa.column("revision"),
        sa.column("updated_at_ms"),
        *(sa.column(name, revisions.c[name].type) for name in _DECLARED),
    )
    connection = op.get_bind()
    for row in connection.execute(sa.select(streams)).all():
        declared: dict[str, Any] = {name: getattr(row, name) for name in _DECLARED}
        text = json.dumps(declared, separators=(",", ":"), ensure_ascii=False)
        connection.execute(
            revisions.insert().values(
                stream=row.name,
                revision=row.revision,
                digest=hashlib.sha256(text.encode()).hexdigest(),
                created_at_ms=row.updated_at_ms,
                **declared,
            )
        )


def downgrade() -> None:
    op.drop_column("batch_attempts", "revision")
    op.drop_column("streams", "declared_at_ms")
    op.drop_table("stream_revisions")
