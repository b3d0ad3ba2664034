"""The tables of streams, their revisions, and their receiver jobs."""

from __future__ import annotations

from sqlalchemy import BigInteger, Boolean, Column, Integer, PrimaryKeyConstraint, Table, Text, UniqueConstraint

from headrace.ledger.states import DesiredState, JobState
from headrace.ledger.tables.columns import Document, metadata, state_column, stream_column

streams = Table(
    "streams",
    metadata,
    Column("name", Text, primary_key=True),
    Column("definition", Text, nullable=False),
    Column("revision", Integer, nullable=False),
    Column("batch_interval_ms", BigInteger, nullable=False),
    Column("block_interval_ms", BigInteger, nullable=False),
    Column("outputs", Document, nullable=False),
    Column("max_concurrent_batches", Integer, nullable=False),
    Column("ordered", Boolean, nullable=False),
    Column("batch_by", Text, nullable=False),
    Column("allowed_lateness_ms", BigInteger, nullable=False),
    Column("zero_time_ms", BigInteger, nullable=False),
    Column("sealed_until_ms", BigInteger, nullable=False),
    Column("desired_state", state_column(DesiredState), nullable=False),
    Column("job_epoch", BigInteger, nullable=False),
    Column("created_at_ms", BigInteger, nullable=False),
    Column("updated_at_ms", BigInteger, nullable=False),
    # The time of the newest definition's source (its DAG version); 0 if unknown.
    Column("declared_at_ms", BigInteger, nullable=False, default=0, server_default="0"),
    # The first and the last removed batch time (0: none), the batch time up to which their files are deleted too, and
    # the number of the oldest history file that is still needed.
    Column("removed_from_ms", BigInteger, nullable=False, default=0),
    Column("removed_until_ms", BigInteger, nullable=False, default=0),
    Column("removed_files_ms", BigInteger, nullable=False, default=0),
    Column("history_from", BigInteger, nullable=False, default=0),
)

# Every definition that the stream has had. The newest one is also in the columns of ``streams``.
stream_revisions = Table(
    "stream_revisions",
    metadata,
    stream_column(),
    Column("revision", Integer, nullable=False),
    Column("digest", Text, nullable=False),
    Column("definition", Text, nullable=False),
    Column("batch_interval_ms", BigInteger, nullable=False),
    Column("block_interval_ms", BigInteger, nullable=False),
    Column("outputs", Document, nullable=False),
    Column("max_concurrent_batches", Integer, nullable=False),
    Column("ordered", Boolean, nullable=False),
    Column("batch_by", Text, nullable=False),
    Column("allowed_lateness_ms", BigInteger, nullable=False),
    Column("created_at_ms", BigInteger, nullable=False),
    PrimaryKeyConstraint("stream", "revision"),
    UniqueConstraint("stream", "digest"),
)

receiver_jobs = Table(
    "receiver_jobs",
    metadata,
    stream_column(),
    Column("epoch", BigInteger, nullable=False),
    Column("holder", Text, nullable=False),
    Column("state", state_column(JobState), nullable=False),
    Column("acquired_at_ms", BigInteger, nullable=False),
    Column("lease_ms", BigInteger, nullable=False),
    Column("lease_until_ms", BigInteger, nullable=False),
    Column("heartbeat_ms", BigInteger, nullable=False),
    Column("versions", Document, nullable=False),
    Column("attributes", Document, nullable=False),
    Column("stop_requested_at_ms", BigInteger),
    Column("stop_reason", Text),
    Column("ended_at_ms", BigInteger),
    Column("error", Text),
    PrimaryKeyConstraint("stream", "epoch"),
)
