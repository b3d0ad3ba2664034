"""The package as one zip, for executors that do not have it installed.

Executors get the core and the Spark layer: neither the Airflow side, nor the command line, nor the embedded servers.
The libraries below (pyarrow, confluent-kafka, SQLAlchemy ...) must be installed where executors run.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import zipfile
from pathlib import Path

import headrace
from headrace.errors import HeadraceError

# Folders of the package that executors need; whatever stands beside them at the top (stream, blocks ...) goes too.
_LAYERS = ("batching", "indexing", "ledger", "receiving", "spark", "stream", "wal")
# A zip's times must not depend on the checkout, or equal sources would give unequal bytes.
_TIMESTAMP = (1980, 1, 1, 0, 0, 0)


class PackageSourceError(HeadraceError):
    """The package's own sources cannot be read to make the zip."""


def package_zip(cache: Path | None = None, *, root: Path | None = None) -> Path:
    """The zip of the package, named by its content; built once, then found again.

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
        f"headrace/{path.relative_to(root).as_posix()}": path.read_bytes()
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
