"""Sends the package (as one archive), a stream's code and its connections to executors on other hosts.

Executors get the core and the Spark layer, without the Airflow side, the command line and the embedded servers. The
libraries that these need (pyarrow, confluent-kafka, SQLAlchemy ...) must be installed where executors run.
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
from headrace.connections import ALLOWLIST_VARIABLE, ENV_PREFIX, FILE_VARIABLE
from headrace.errors import HeadraceError
from headrace.spark.sessions import is_local_master

if TYPE_CHECKING:
    from pyspark import SparkContext

    from headrace.stream import Stream

# The folders of the package that executors need. The modules at the package's top level are sent too.
_LAYERS = ("batch", "elasticsearch", "formats", "kafka", "ledger", "receiver", "registry", "spark", "stream", "wal")
# The times in the zip must not depend on the checkout: equal sources must give equal bytes.
_TIMESTAMP = (1980, 1, 1, 0, 0, 0)
_CONNECTIONS = "headrace-connections.json"
_MODULE = ".py"
_ARCHIVES = (".zip", ".egg", ".whl")


class PackageSourceError(HeadraceError):
    """The package's own sources cannot be read to make the zip."""


def send_code(spark_context: SparkContext, stream: Stream) -> None:
    """Send an application the package and the files that the stream names, if its executors are on other hosts.

    The package is unpacked as the folder ``headrace`` in the folder of the application's files, which is on the path of
    executors' workers and of the workers with which the driver plans reads. The files belong to the application, so
    batches over Spark Connect can use them too. Files that a session adds do not work: under the plugin every later
    task has to fetch them, and Spark deletes them when the session is closed.

    Raises:
        PackageSourceError: the package is not in plain files.
    """
    if is_local_master(str(spark_context.master)):
        return
    spark_context.addArchive(f"{package_zip()}#{Path(headrace.__file__).parent.name}")
    # Airflow has already given these to spark-submit, and Spark refuses two paths with the same file name.
    brought = {Path(name).name for name in (spark_context.getConf().get("spark.submit.pyFiles") or "").split(",")}
    for file in stream.spark.py_files:
        if "://" not in file and file.endswith((_MODULE, *_ARCHIVES)) and Path(file).name not in brought:
            spark_context.addPyFile(file)


def connections_conf(master: str, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The settings with which remote executors find the file from `send_connections`; they contain no secret."""
    if is_local_master(master) or not _connections(environment):
        return {}
    return {f"spark.executorEnv.{FILE_VARIABLE}": _CONNECTIONS}


def send_connections(spark_context: SparkContext, environment: Mapping[str, str] = os.environ) -> None:
    """Send remote executors the connections in ``environment``, in a file of the application.

    As settings (``spark.executorEnv.…``) they would be in clear text in the application's description, which the
    cluster keeps. The file is in the driver's temporary folder, which only its user can read, and in the executors'
    folders. Its transfer is as safe as Spark's network (``spark.authenticate``, ``spark.network.crypto.enabled``).
    """
    connections = _connections(environment)
    if is_local_master(str(spark_context.master)) or not connections:
        return
    path = Path(str(spark_context._temp_dir)) / _CONNECTIONS
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        json.dump(connections, file)
    spark_context.addFile(str(path))


def _connections(environment: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value for name, value in environment.items() if name.startswith(ENV_PREFIX) or name == ALLOWLIST_VARIABLE
    }


def executors_path(stream: Stream) -> list[str]:
    """The stream's archives, which workers of batches over Spark Connect need on their PYTHONPATH.

    The paths are relative: Spark puts the application's files into the working folder of an executor and its workers.
    """
    return [Path(file).name for file in stream.spark.py_files if file.endswith(_ARCHIVES)]


def package_zip(cache: Path | None = None, *, root: Path | None = None) -> Path:
    """The zip of the package's sources, with a hash of its content in the name; built once, then reused.

    ``cache`` is a folder of this user only (default: ``$XDG_CACHE_HOME/headrace``), ``root`` the package's folder.
    Raises PackageSourceError if the package is not in plain files (for example if it runs from such a zip itself).
    """
    root = Path(headrace.__file__).parent if root is None else root
    if not root.is_dir():
        raise PackageSourceError(
            f"The package headrace is not in plain files ({root}), so it cannot be sent to executors.",
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
    # Executors do not run migrations of the ledger.
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
