"""Creates a ledger's schema in an empty database, and migrates an older one on request.

If several processes open the ledger at once, the first one creates the schema. Only `Ledger.migrate` changes an
existing ledger, since processes of an older headrace may be using it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import Connection

from headrace.ledger.database import Database, read_version
from headrace.ledger.errors import LedgerMissingError, SchemaError

# The newest migration's revision. It is here so that opening a ledger need not import Alembic (a test compares them).
HEAD = "0001"
# The advisory lock that serializes migrations of a Postgres database ("headrace" in ASCII, shortened).
_MIGRATION_LOCK = 0x6865616472
MIGRATION_SECONDS = 600
"""How long a migration's statement may take on Postgres: it may rewrite a table of a large ledger."""
MIGRATIONS = Path(__file__).with_name("migrations")


@dataclass(frozen=True, slots=True)
class Migration:
    """The result of `migrate_schema`: the schema's version before (None: there was no ledger) and after."""

    before: str | None
    after: str


def ensure_schema(database: Database, url: str, *, create: bool) -> None:
    """Check the schema; with ``create``, create it in an empty database. ``url`` is for error texts.

    Raises:
        SchemaError: the schema is older or newer than this version's.
        LedgerMissingError: there is none, and ``create`` is false.
    """
    with database.read() as connection:
        version = read_version(connection)
    if version == HEAD:
        return
    if version is not None:
        raise _another_version(version, url)
    if not create:
        raise LedgerMissingError(
            f"The database at {url} is empty: there is no ledger in it.",
            remedy=f"Unpause the stream's DAGs in Airflow: the first task creates it. Or run `{_command(url)}`.",
        )
    migrate_schema(database, only_empty=url)


def migrate_schema(database: Database, *, only_empty: str | None = None) -> Migration:
    """Migrate the schema to the head, in one transaction.

    Args:
        only_empty: the ledger's URL; if given, only an empty database may be changed.

    Raises:
        SchemaError: the schema is newer than this version knows, or must not be changed.
    """
    with database.write() as connection:
        if not database.is_sqlite:
            _allow_migration(connection)
            connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({_MIGRATION_LOCK})")
        # Another process may have migrated it while this one waited.
        before = read_version(connection)
        if before is not None and before != HEAD and only_empty is not None:
            raise _another_version(before, only_empty)
        if before != HEAD:
            upgrade(connection)
    return Migration(before, HEAD)


def _another_version(version: str, url: str) -> SchemaError:
    what = f"The ledger's schema is {version}, and this version of headrace needs {HEAD}."
    if any(path.stem.split("_")[0] == version for path in (MIGRATIONS / "versions").glob("*.py")):
        return SchemaError(
            what,
            remedy="Stop what the older headrace runs on it (with its own `headrace streams stop NAME`), then run "
            f"`{_command(url)}`.",
        )
    return SchemaError(what, remedy="It was made by a newer headrace: use that version.")


def _command(url: str) -> str:
    return f"headrace ledger migrate --ledger {url}"


def _allow_migration(connection: Connection) -> None:
    from headrace.ledger.postgres_engine import allow_seconds

    allow_seconds(connection, MIGRATION_SECONDS)


def upgrade(connection: Connection) -> None:
    """Run the migrations that the schema lacks, inside the connection's transaction."""
    from alembic import command
    from alembic.config import Config
    from alembic.util.exc import CommandError

    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    config.attributes["connection"] = connection
    try:
        command.upgrade(config, "head")
    except CommandError as error:
        raise SchemaError(
            f"The ledger's schema cannot be brought to {HEAD}: {error}.",
            remedy="It was made by a newer headrace: use that version.",
        ) from error
