"""Batches by timestamp and built from Kafka, attempts at single outputs, replays, and runs without a date."""

from __future__ import annotations

import json

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

Document = sa.JSON(none_as_null=True).with_variant(postgresql.JSONB(none_as_null=True), "postgresql")


def upgrade() -> None:
    op.add_column("streams", sa.Column("batch_by", sa.Text(), nullable=False, server_default="arrival"))
    op.add_column("streams", sa.Column("allowed_lateness_ms", sa.BigInteger(), nullable=False, server_default="0"))
    op.add_column("positions", sa.Column("watermark_ms", sa.BigInteger(), nullable=False, server_default="0"))
    op.add_column("positions", sa.Column("drained_ms", sa.BigInteger(), nullable=False, server_default="0"))
    op.add_column("blocks", sa.Column("event_time_ms", sa.BigInteger(), nullable=True))
    op.add_column("batches", sa.Column("late_records", sa.BigInteger(), nullable=False, server_default="0"))
    op.add_column("batches", sa.Column("built", sa.Boolean(), nullable=False, server_default=sa.false()))
    op.add_column("batches", sa.Column("required", Document, nullable=True))
    op.add_column("batches", sa.Column("steps", Document, nullable=True))
    _fence_running_attempts()
    _set_steps()
    op.drop_index("ix_batches_cleaned", table_name="batches")
    op.create_index(
        "ix_batches_uncleaned",
        "batches",
        ["stream", "batch_time_ms"],
        sqlite_where=sa.text("cleaned_at_ms IS NULL"),
        postgresql_where=sa.text("cleaned_at_ms IS NULL"),
    )
    op.add_column("batch_attempts", sa.Column("target", sa.Text(), nullable=False, server_default=""))
    op.add_column("batch_attempts", sa.Column("source", sa.Text(), nullable=False, server_default="log"))
    op.add_column("batch_attempts", sa.Column("replay_revision", sa.Integer(), nullable=True))
    op.add_column("batch_attempts", sa.Column("code_version", sa.Text(), nullable=True))
    _add_last_batch_times()
    op.drop_index("uq_batch_attempts_running", table_name="batch_attempts")
    # Only this table is made anew in SQLite, and none refers to it: the others could not be dropped for their copies.
    with op.batch_alter_table("batch_outputs") as table:
        table.add_column(sa.Column("target", sa.Text(), nullable=False, server_default=""))
        table.add_column(sa.Column("state", sa.String(16), nullable=False, server_default="completed"))
        table.add_column(sa.Column("error", sa.Text(), nullable=True))
        table.add_column(sa.Column("code_version", sa.Text(), nullable=True))
        table.alter_column("recorded_at_ms", existing_type=sa.BigInteger(), nullable=True)
    _insert_unrecorded_outputs()
    op.create_index(
        "uq_batch_outputs_running",
        "batch_outputs",
        ["stream", "batch_time_ms", "target", "output_id"],
        unique=True,
        sqlite_where=sa.text("state = 'running'"),
        postgresql_where=sa.text("state = 'running'"),
    )
    _create_replays()
    op.create_table(
        "batch_runs",
        sa.Column("stream", sa.Text(), nullable=False),
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("batch_time_ms", sa.BigInteger(), nullable=False),
        sa.Column("at_ms", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["stream"], ["streams.name"], name="fk_batch_runs_streams"),
        sa.PrimaryKeyConstraint("stream", "run_id", name="pk_batch_runs"),
    )
    op.create_index("ix_batch_runs_batch", "batch_runs", ["stream", "batch_time_ms"])


def _fence_running_attempts() -> None:
    """Their processes know nothing of the rows that outputs get here: they would end, and leave these running."""
    op.execute("UPDATE batch_attempts SET state = 'fenced', ended_at_ms = heartbeat_ms WHERE state = 'running'")
    op.execute("UPDATE batches SET state = 'allocated' WHERE state = 'running'")


def _set_steps() -> None:
    """The steps by which batches completed, also those that failed since, when they were run again. A batch of a
    ledger that was rebuilt has no attempts.
    """
    op.execute(
        "UPDATE batches SET steps = (SELECT a.outputs FROM batch_attempts a WHERE a.stream = batches.stream"
        " AND a.batch_time_ms = batches.batch_time_ms AND a.state = 'completed' ORDER BY a.number DESC LIMIT 1)"
        " WHERE state <> 'abandoned'"
    )
    op.execute(
        "UPDATE batches SET steps = (SELECT s.outputs FROM streams s WHERE s.name = batches.stream)"
        " WHERE state = 'completed' AND steps IS NULL"
    )


def _add_last_batch_times() -> None:
    op.add_column("segments", sa.Column("last_batch_time_ms", sa.BigInteger(), nullable=True))
    op.execute(
        "UPDATE segments SET last_batch_time_ms = (SELECT coalesce(max(b.batch_time_ms), 0) FROM blocks b"
        " WHERE b.segment_id = segments.segment_id) WHERE closed_at_ms IS NOT NULL AND removed_at_ms IS NULL"
    )
    op.create_index(
        "ix_segments_closed",
        "segments",
        ["stream", "last_batch_time_ms", "segment_id"],
        sqlite_where=sa.text("removed_at_ms IS NULL"),
        postgresql_where=sa.text("removed_at_ms IS NULL"),
    )
    op.create_index(
        "ix_segments_removing",
        "segments",
        ["stream", "segment_id"],
        sqlite_where=sa.text("removed_at_ms IS NULL AND removing_at_ms IS NOT NULL"),
        postgresql_where=sa.text("removed_at_ms IS NULL AND removing_at_ms IS NOT NULL"),
    )


def _insert_unrecorded_outputs() -> None:
    """An attempt that runs, failed or was fenced has had its recorded outputs only: the others are part of it too."""
    attempts = sa.table(
        "batch_attempts",
        *(sa.column(name) for name in ("stream", "batch_time_ms", "number", "state", "ended_at_ms", "error")),
        sa.column("outputs", Document),
    )
    outputs = sa.table(
        "batch_outputs",
        *(sa.column(name) for name in ("stream", "batch_time_ms", "attempt", "output_id", "state", "error")),
        sa.column("recorded_at_ms"),
        sa.column("counts", Document),
    )
    connection = op.get_bind()
    rows = []
    for attempt in connection.execute(sa.select(attempts).where(attempts.c.state != "completed")).all():
        recorded = set(
            connection.execute(
                sa.select(outputs.c.output_id).where(
                    outputs.c.stream == attempt.stream,
                    outputs.c.batch_time_ms == attempt.batch_time_ms,
                    outputs.c.attempt == attempt.number,
                )
            ).scalars()
        )
        ids = json.loads(attempt.outputs) if isinstance(attempt.outputs, str) else attempt.outputs
        rows += [
            {
                "stream": attempt.stream,
                "batch_time_ms": attempt.batch_time_ms,
                "attempt": attempt.number,
                "output_id": output_id,
                "state": attempt.state,
                "error": attempt.error,
                "recorded_at_ms": attempt.ended_at_ms,
                "counts": {},
            }
            for output_id in ids
            if output_id not in recorded
        ]
    if rows:
        connection.execute(sa.insert(outputs), rows)


def _create_replays() -> None:
    op.create_table(
        "replay_definitions",
        sa.Column("stream", sa.Text(), nullable=False),
        sa.Column("target", sa.Text(), nullable=False),
        sa.Column("revision", sa.Integer(), nullable=False),
        sa.Column("definition", sa.Text(), nullable=False),
        sa.Column("created_at_ms", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["stream"], ["streams.name"], name="fk_replay_definitions_streams"),
        sa.PrimaryKeyConstraint("stream", "target", "revision", name="pk_replay_definitions"),
    )
    op.create_table(
        "replays",
        sa.Column("stream", sa.Text(), nullable=False),
        sa.Column("target", sa.Text(), nullable=False),
        sa.Column("batch_time_ms", sa.BigInteger(), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("revision", sa.Integer(), nullable=False),
        sa.Column("outputs", Document, nullable=False),
        sa.Column("code_version", sa.Text(), nullable=True),
        sa.Column("started_at_ms", sa.BigInteger(), nullable=False),
        sa.Column("completed_at_ms", sa.BigInteger(), nullable=True),
        sa.Column("error", sa.Text(), nullable=True),
        sa.ForeignKeyConstraint(["stream"], ["streams.name"], name="fk_replays_streams"),
        sa.ForeignKeyConstraint(
            ["stream", "batch_time_ms"], ["batches.stream", "batches.batch_time_ms"], name="fk_replays_batches"
        ),
        sa.PrimaryKeyConstraint("stream", "target", "batch_time_ms", name="pk_replays"),
    )


def downgrade() -> None:
    for table in ("batch_runs", "replays", "replay_definitions"):
        op.drop_table(table)
    op.drop_index("uq_batch_outputs_running", table_name="batch_outputs")
    outputs = sa.table("batch_outputs", sa.column("state"), sa.column("target"))
    attempts = sa.table("batch_attempts", sa.column("state"), sa.column("target"))
    op.execute(sa.delete(outputs).where(sa.or_(outputs.c.state != "completed", outputs.c.target != "")))
    op.execute(sa.delete(attempts).where(attempts.c.target != ""))
    # Several may run a batch at once, which the older schema knows nothing of.
    op.execute(sa.update(attempts).where(attempts.c.state == "running").values(state="fenced"))
    with op.batch_alter_table("batch_outputs") as change:
        change.alter_column("recorded_at_ms", existing_type=sa.BigInteger(), nullable=False)
        for column in ("target", "state", "error", "code_version"):
            change.drop_column(column)
    op.drop_index("ix_batches_uncleaned", table_name="batches")
    op.create_index("ix_batches_cleaned", "batches", ["stream", "cleaned_at_ms", "batch_time_ms"])
    for index in ("ix_segments_removing", "ix_segments_closed"):
        op.drop_index(index, table_name="segments")
    for name, columns in (
        ("segments", ("last_batch_time_ms",)),
        ("batch_attempts", ("target", "source", "replay_revision", "code_version")),
        ("batches", ("late_records", "built", "required", "steps")),
        ("blocks", ("event_time_ms",)),
        ("positions", ("watermark_ms", "drained_ms")),
        ("streams", ("batch_by", "allowed_lateness_ms")),
    ):
        for column in columns:
            op.drop_column(name, column)
    op.create_index(
        "uq_batch_attempts_running",
        "batch_attempts",
        ["stream", "batch_time_ms"],
        unique=True,
        sqlite_where=sa.text("state = 'running'"),
        postgresql_where=sa.text("state = 'running'"),
    )
