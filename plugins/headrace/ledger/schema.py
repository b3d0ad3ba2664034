"""Brings a database's schema to the head, once, however many processes open it at the same time."""

from __future__ import annotations

from pathlib import Path

from sqlalchemy import Connection

from headrace.ledger.database import Database, read_version
from headrace.ledger.errors import SchemaError

# The newest migration's revision, written here so that opening a ledger need not import Alembic (a test compares them).
HEAD = "0004"
# Two processes that migrate a Postgres database at once queue at this advisory lock ("headrace" in ASCII, shortened).
_MIGRATION_LOCK = 0x6865616472
MIGRATION_SECONDS = 600
"""How long a statement of a migration may take on Postgres: one that rewrites a table of a large ledger."""
MIGRATIONS = Path(__file__).with_name("migrations")


def ensure_schema(database: Database, *, migrate: bool) -> None:
    """Check the schema, and with ``migrate`` bring it to the head in one transaction.

    Raises:
        SchemaError: the schema is older and ``migrate`` is false, or it is newer than this version knows.
    """
    with database.read() as connection:
        version = read_version(connection)
    if version == HEAD:
        return
    if not migrate:
        raise SchemaError(
            f"The ledger's schema is {version or 'empty'}, this version of headrace needs {HEAD}.",
            remedy="Stop what an older headrace runs on it, then run a task of one of the stream's DAGs, any of which "
            "migrates it, or open it once with Ledger.open(url).",
        )
    with database.write() as connection:
        if not database.is_sqlite:
            _allow_migration(connection)
            connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({_MIGRATION_LOCK})")
        if read_version(connection) != HEAD:
            upgrade(connection)


def _allow_migration(connection: Connection) -> None:
    from headrace.ledger.postgres_engine import allow_seconds

    allow_seconds(connection, MIGRATION_SECONDS)


def upgrade(connection: Connection, revision: str = "head") -> None:
    """Run the migrations, up to ``revision``, inside the connection's transaction."""
    from alembic import command
    from alembic.config import Config
    from alembic.util.exc import CommandError

    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    config.attributes["connection"] = connection
    try:
        command.upgrade(config, revision)
    except CommandError as error:
        raise SchemaError(
            f"The ledger's schema cannot be brought to {HEAD}: {error}.",
            remedy="It was made by a newer headrace: use that version.",
        ) from error
