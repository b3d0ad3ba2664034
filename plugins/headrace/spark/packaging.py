"""What executors on other hosts get from the application: the package as one archive, a stream's code, its connections.

Executors get the core and the Spark layer: neither the Airflow side, nor the command line, nor the embedded servers.
The libraries below (pyarrow, confluent-kafka, SQLAlchemy ...) must be installed where executors run.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import headrace
from headrace.connections import ENV_PREFIX, FILE_VARIABLE
from headrace.errors import HeadraceError
from headrace.spark.sessions import is_local_master

if TYPE_CHECKING:
    from pyspark import SparkContext

    from headrace.stream import Stream

# Folders of the package that executors need; whatever stands beside them at the top (stream, blocks ...) goes too.
_LAYERS = ("batch", "elasticsearch", "kafka", "ledger", "receiver", "spark", "stream", "wal")
# A zip's times must not depend on the checkout, or equal sources would give unequal bytes.
_TIMESTAMP = (1980, 1, 1, 0, 0, 0)
_CONNECTIONS = "headrace-connections.json"
_MODULE = ".py"
_ARCHIVES = (".zip", ".egg", ".whl")


class PackageSourceError(HeadraceError):
    """The package's own sources cannot be read to make the zip."""


def send_code(context: SparkContext, stream: Stream) -> None:
    """Give an application the package and the files that the stream names, if its executors are elsewhere.

    The package is unpacked as the folder ``headrace`` where Spark keeps an application's files, which is on the path of
    executors' workers and of those by which the driver plans reads. They are the application's, and so are there for
    batches over Spark Connect, too. Files that a session adds are no way: under the plugin every later task has to
    fetch them, and Spark deletes them when the session is closed.

    Raises:
        PackageSourceError: the package is not in plain files.
    """
    if is_local_master(str(context.master)):
        return
    context.addArchive(f"{package_zip()}#{Path(headrace.__file__).parent.name}")
    # Airflow has given them to spark-submit already; Spark refuses one name by two paths.
    brought = {Path(name).name for name in (context.getConf().get("spark.submit.pyFiles") or "").split(",")}
    for file in stream.spark.py_files:
        if "://" not in file and file.endswith((_MODULE, *_ARCHIVES)) and Path(file).name not in brought:
            context.addPyFile(file)


def connections_conf(master: str, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The settings by which executors elsewhere find what `send_connections` sends them: no secret."""
    if is_local_master(master) or not _connections(environment):
        return {}
    return {f"spark.executorEnv.{FILE_VARIABLE}": _CONNECTIONS}


def send_connections(context: SparkContext, environment: Mapping[str, str] = os.environ) -> None:
    """Give executors that are elsewhere the connections in ``environment``, in a file of the application.

    As settings (``spark.executorEnv.…``) they would stand in clear in the application's description, which the cluster
    keeps. The file lies in the driver's temporary folder, which is its user's alone, and in the executors' folders. On
    its way it is as safe as Spark's network is (``spark.authenticate``, ``spark.network.crypto.enabled``).
    """
    found = _connections(environment)
    if is_local_master(str(context.master)) or not found:
        return
    path = Path(str(context._temp_dir)) / _CONNECTIONS
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        json.dump(found, file)
    context.addFile(str(path))


def _connections(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name.startswith(ENV_PREFIX)}


def executors_path(stream: Stream) -> list[str]:
    """What workers of batches over Spark Connect need on their PYTHONPATH: the stream's archives.

    Relative: Spark puts the application's files into the folder in which an executor and its workers run.
    """
    return [Path(file).name for file in stream.spark.py_files if file.endswith(_ARCHIVES)]


def package_zip(cache: Path | None = None, *, root: Path | None = None) -> Path:
    """The zip of what is in the package's folder, named by its content; built once, then found again.

    ``cache`` is a folder of this user only (default: ``$XDG_CACHE_HOME/headrace``), ``root`` the package's folder.
    Raises PackageSourceError when the package is not in plain files (it runs from such a zip itself).
    """
    root = Path(headrace.__file__).parent if root is None else root
    if not root.is_dir():
        raise PackageSourceError(
            f"The package headrace is not in plain files ({root}), so it cannot be packed for executors.",
            remedy="Install headrace in the driver's environment.",
        )
    sources = _sources(root)
    digest = hashlib.sha256()
    for name, content in sources.items():
        digest.update(f"{name}\0{len(content)}\0".encode())
        digest.update(content)
    cache = _default_cache() if cache is None else cache
    cache.mkdir(mode=0o700, parents=True, exist_ok=True)
    target = cache / f"headrace-{digest.hexdigest()[:32]}.zip"
    if not target.exists():
        _build(target, sources)
    return target


def _sources(root: Path) -> dict[str, bytes]:
    files = list(root.glob("*.py"))
    for layer in _LAYERS:
        files += (root / layer).rglob("*.py")
    # Migrations are run by whoever owns the ledger, not by executors.
    return {
        path.relative_to(root).as_posix(): path.read_bytes()
        for path in sorted(files)
        if "migrations" not in path.relative_to(root).parts[:-1]
    }


def _build(target: Path, sources: dict[str, bytes]) -> None:
    descriptor, temporary = tempfile.mkstemp(dir=target.parent, prefix=".headrace-", suffix=".zip")
    try:
        with os.fdopen(descriptor, "wb") as file, zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, content in sources.items():
                information = zipfile.ZipInfo(name, _TIMESTAMP)
                information.compress_type = zipfile.ZIP_DEFLATED
                information.external_attr = 0o644 << 16
                archive.writestr(information, content)
        Path(temporary).replace(target)
    finally:
        Path(temporary).unlink(missing_ok=True)


def _default_cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "headrace"
