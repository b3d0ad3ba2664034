"""Storage in an object store, over fsspec: no append and no rename; an object is written as a whole or not at all.

The store must be able to create an object only if it does not exist (S3's ``If-None-Match: *``). So a writer that was
replaced cannot overwrite its successor's objects. A check before the write would leave a race.
"""

from __future__ import annotations

import contextlib
import inspect
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

import pyarrow as pa

from headrace.wal.errors import StorageError, StoredFileExistsError, StoredFileMissingError, UnknownStorageError
from headrace.wal.log_storage import Data, SegmentFile, checked_path, joined

_STORES = frozenset({"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "memory"})
"""The schemes of stores with conditional creation. Others have directories and appends, for which fsspec guarantees too
little."""


class ObjectStorage:
    """Objects whose names begin with ``root``."""

    appends = False

    def __init__(self, client: FsspecClient, root: str, url: str) -> None:
        self._client = client
        self._root = root.rstrip("/")
        self.url = url.rstrip("/")

    def below(self, path: str) -> ObjectStorage:
        checked_path(path, empty=True)
        return ObjectStorage(self._client, joined(self._root, path), joined(self.url, path))

    def create_segment(self, path: str) -> SegmentFile:
        raise StorageError(
            f"{self.url} cannot append to {path!r}.",
            remedy="Write whole objects, as the log does there.",
        )

    def write_atomically(self, path: str, data: Data, *, exclusive: bool = False) -> None:
        with _reported("write", path):
            self._client.put(self._full(path), data, exclusive=exclusive)

    def read(self, path: str) -> bytes:
        with self.open(path) as file:
            return bytes(file.read_at(0, file.size))

    def open(self, path: str) -> ObjectFile:
        return ObjectFile(self._client, self._full(path), path, self.size(path))

    def size(self, path: str) -> int:
        with _reported("check", path):
            size = self._client.size(self._full(path))
        if size is None:
            raise StoredFileMissingError(f"There is no object {path!r} in {self.url}.")
        return size

    def exists(self, path: str) -> bool:
        with _reported("check", path):
            return self._client.size(self._full(path)) is not None

    def paths(self, prefix: str = "") -> list[str]:
        checked_path(prefix, empty=True)
        # Libraries differ in leading slashes, so the root is compared without them.
        root = self._root.strip("/") + "/"
        with _reported("list", prefix):
            listed = self._client.paths(joined(self._root, prefix))
        inside = (path.strip("/").removeprefix(root) for path in listed if path.strip("/").startswith(root))
        return sorted(path for path in inside if path.startswith(f"{prefix}/" if prefix else ""))

    def delete(self, path: str) -> bool:
        with _reported("delete", path):
            full = self._full(path)
            if self._client.size(full) is None:
                return False
            try:
                self._client.delete(full)
            except FileNotFoundError:
                # Another cleanup has deleted it meanwhile.
                return False
            return True

    def remove_partial_writes(self, older_than_s: float) -> int:  # noqa: ARG002
        """Does nothing: an object is stored as a whole or not at all, so there are no partial writes."""
        return 0

    def sync(self, path: str) -> None:
        self.size(path)

    def truncate(self, path: str, length: int) -> None:
        with self.open(path) as file:
            kept = file.read_at(0, length)
        self.write_atomically(path, kept)

    def _full(self, path: str) -> str:
        return joined(self._root, checked_path(path))


CALL_SECONDS = 300.0
"""How long an object storage has for a call that moves no bytes."""
LISTING_SECONDS = 900.0
"""How long it has for the list of a stream's objects."""
# The slowest link on which a read may take longer.
_BYTES_PER_SECOND = 16 * 1024


class ObjectFile:
    """An object, read by byte ranges."""

    def __init__(self, client: FsspecClient, full_path: str, name: str, size: int) -> None:
        self._client = client
        self._full_path = full_path
        self._name = name
        self.size = size

    def read_at(self, offset: int, length: int) -> pa.Buffer:
        length = max(0, min(length, self.size - offset))
        if not length:
            return pa.py_buffer(b"")
        with _reported(f"read {length} bytes at {offset} of", self._name):
            return pa.py_buffer(self._client.get(self._full_path, offset, length))

    def close(self) -> None:
        """Nothing is held open between two reads."""

    def __enter__(self) -> ObjectFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class FsspecClient:
    """The calls to an fsspec file system.

    A `put` has ``write_timeout_s`` seconds, with the driver's own retries. These alone may take minutes: s3fs waits
    15 s for an answer and tries five times, and botocore tries each of them again. None: no bound of ours. A driver
    without asyncio (memory) cannot be interrupted. Other calls have `CALL_SECONDS`, or `LISTING_SECONDS`, and what
    their bytes take.
    """

    def __init__(self, filesystem: Any, write_timeout_s: float | None = None) -> None:
        self._fs = filesystem
        self._write_timeout_s = write_timeout_s if filesystem.async_impl else None

    def put(self, path: str, data: Data, *, exclusive: bool) -> None:
        """Write an object. With ``exclusive``, raises FileExistsError if there is one with other bytes. One with the
        same bytes counts as written: drivers retry by themselves when a response is lost, and the first try may have
        been stored. Raises TimeoutError; the object may then be stored or not, now or later."""
        began = time.monotonic()
        try:
            self._put(path, bytes(data), exclusive=exclusive)
        except TimeoutError as error:
            seconds = time.monotonic() - began
            raise TimeoutError(f"no answer in {seconds:.1f} s; the object may be stored all the same") from error

    def _put(self, path: str, data: bytes, *, exclusive: bool) -> None:
        limit = self._limit()
        if not exclusive:
            self._fs.pipe_file(path, data, **limit())
            return
        try:
            self._fs.pipe_file(path, data, mode="create", **limit())
        except OSError as error:
            # Not every server reports which condition failed; s3fs then raises another error.
            if not isinstance(error, FileExistsError) and "condition" not in str(error):
                raise
            if self.size(path, **limit()) != len(data) or self.get(path, 0, len(data), **limit()) != data:
                raise FileExistsError(path) from error

    def _limit(self) -> Callable[[], dict[str, float]]:
        """A function that returns the time that is left of ``write_timeout_s`` from now on, as fsspec's parameter."""
        if self._write_timeout_s is None:
            return dict
        until = time.monotonic() + self._write_timeout_s
        # fsspec takes 0 for no limit.
        return lambda: {"timeout": max(0.1, until - time.monotonic())}

    def _in_all(self, seconds: float) -> dict[str, float]:
        return {"timeout": seconds} if self._fs.async_impl else {}

    def get(self, path: str, offset: int, length: int, **limit: float) -> Data:
        # The timeout of a read begins again with each byte.
        limit = limit or self._in_all(CALL_SECONDS + length / _BYTES_PER_SECOND)
        data: bytes = self._fs.cat_file(path, start=offset, end=offset + length, **limit)
        return data

    def size(self, path: str, **limit: float) -> int | None:
        self._fs.invalidate_cache()
        try:
            info = self._fs.info(path, **(limit or self._in_all(CALL_SECONDS)))
        except FileNotFoundError:
            return None
        return int(info["size"]) if info["type"] == "file" else None

    def paths(self, path: str) -> list[str]:
        self._fs.invalidate_cache()
        try:
            return list(self._fs.find(path, **self._in_all(LISTING_SECONDS)))
        except FileNotFoundError:
            return []

    def delete(self, path: str) -> None:
        self._fs.rm_file(path, **self._in_all(CALL_SECONDS))


def open_object_storage(url: str, write_timeout_s: float | None = None) -> ObjectStorage:
    """Open the storage at ``url``. ``write_timeout_s`` as in `headrace.wal.storage.open_storage`.

    Raises:
        UnknownStorageError: no store of its scheme creates objects conditionally, or the driver's package is missing or
            too old to do so.
    """
    import fsspec

    checked_path(url.split("://", 1)[1].strip("/"), empty=True)
    scheme = url.split("://", 1)[0]
    if scheme not in _STORES:
        raise UnknownStorageError(
            f"A log cannot be kept at {scheme}://: no store of that scheme is known to create an object only where "
            "there is none, so a writer that was replaced could overwrite what its successor wrote.",
            remedy="Use s3://, gs:// or abfs://, or a folder of a file system (declared shared where it is mounted).",
        )
    try:
        driver = fsspec.get_filesystem_class(scheme)
    except (ImportError, ValueError) as error:
        # No driver for it, or one whose package is not installed.
        raise UnknownStorageError(
            f"fsspec's driver for {scheme}:// cannot be loaded: {error}",
            remedy="Install it: s3fs for s3://, gcsfs for gs://, adlfs for abfs://.",
        ) from error
    # A driver that does not know ``mode`` ignores it like any other option, and overwrites.
    if "mode" not in inspect.signature(getattr(driver, "_pipe_file", driver.pipe_file)).parameters:
        raise UnknownStorageError(
            f"{driver.__name__}, fsspec's driver for {scheme}://, cannot create an object only where there is none.",
            remedy="Install a newer version of its package.",
        )
    filesystem, root = fsspec.core.url_to_fs(url)
    return ObjectStorage(FsspecClient(filesystem, write_timeout_s), root, url)


@contextlib.contextmanager
def _reported(action: str, path: str) -> Iterator[None]:
    """Turns the libraries' exceptions into the storage's errors."""
    try:
        yield
    except StorageError:
        raise
    except FileExistsError as error:
        raise StoredFileExistsError(f"There is an object {path!r} already.") from error
    except FileNotFoundError as error:
        raise StoredFileMissingError(f"There is no object {path!r}.") from error
    except Exception as error:
        # Drivers raise their vendors' own exceptions. fsspec's own timeout says nothing.
        why = str(error) or ("no answer in its time" if isinstance(error, TimeoutError) else "it says nothing more")
        raise StorageError(f"The storage cannot {action} {path!r}: {type(error).__name__}: {why}.") from error
