"""Alembic's entry: runs on the connection, and in the transaction, that `headrace.ledger.schema` hands over."""

from __future__ import annotations

from alembic import context

from headrace.ledger.models import metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    # The caller's transaction is the only one: all migrations or none.
    transactional_ddl=False,
    # SQLite cannot alter a table in place.
    render_as_batch=True,
)
context.run_migrations()
