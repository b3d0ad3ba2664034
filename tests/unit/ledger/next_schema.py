"""A headrace whose schema is one migration newer than this one's, so that this one's ledger is an older one."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from headrace.ledger import database

OLDER = database.HEAD
NEWER = "9000"

_MIGRATION = f'''
import sqlalchemy as sa
from alembic import op

revision = "{NEWER}"
down_revision = "{OLDER}"


def upgrade() -> None:
    op.add_column("streams", sa.Column("owner", sa.Text(), nullable=False, server_default="nobody"))
'''


def install_next_schema(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Let `headrace.ledger.database` know another migration, which adds the column ``owner`` to ``streams``."""
    migrations = folder / "migrations"
    shutil.copytree(database.MIGRATIONS, migrations, ignore=shutil.ignore_patterns("__pycache__"))
    (migrations / "versions" / f"{NEWER}_owners.py").write_text(_MIGRATION)
    monkeypatch.setattr(database, "MIGRATIONS", migrations)
    monkeypatch.setattr(database, "HEAD", NEWER)
