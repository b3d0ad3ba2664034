"""Where Postgres' data is, when root's folder is closed to the user that Postgres runs as."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from headrace.devstack import postgres
from headrace.devstack.errors import LocalStackError
from headrace.devstack.postgres import PostgresServer


@pytest.fixture
def closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A server's folder below one that only its owner may pass through; this process is taken for root's."""
    monkeypatch.setattr(postgres, "unprivileged_user", lambda: (65534, 65534))
    tmp_path.chmod(0o700)
    return tmp_path / "stack" / "postgres"


def test_data_that_is_elsewhere_is_found_again(closed: Path) -> None:
    data = PostgresServer(closed, port=1).data
    assert closed not in data.parents
    assert PostgresServer(closed, port=2).data == data


def test_a_folder_made_anew_has_no_old_data(closed: Path) -> None:
    data = PostgresServer(closed, port=1).data
    shutil.rmtree(closed)
    assert PostgresServer(closed, port=1).data != data


def test_wiping_a_folder_that_is_not_there_makes_none(closed: Path) -> None:
    PostgresServer(closed, port=1).wipe()
    assert not closed.exists()


def test_a_lost_password_is_reported_and_no_other_one_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stack asks for it before it starts the server."""
    monkeypatch.setattr(postgres, "unprivileged_user", lambda: None)
    server = PostgresServer(tmp_path / "postgres", port=1)
    made = server.password
    server.data.mkdir()
    (server.data / "PG_VERSION").write_text("17")
    assert server.password == made
    server.passfile.unlink()
    with pytest.raises(LocalStackError, match="password of the database"):
        _ = server.password
    assert not server.passfile.exists()
