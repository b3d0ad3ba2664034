"""Alembic's entry: runs on the connection, and in the transaction, that `headrace.ledger.database` hands over."""

from __future__ import annotations

from alembic import context

# All tables: each module adds its own to the metadata.
from headrace.ledger.batches import tables as batch_tables  # noqa: F401
from headrace.ledger.model import Model
from headrace.ledger.receiving import tables as receiving_tables  # noqa: F401

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=Model.metadata,
    # The caller's transaction is the only one: all migrations or none.
    transactional_ddl=False,
    # SQLite cannot alter a table in place.
    render_as_batch=True,
)
context.run_migrations()
