"""Storage over fsspec or pyarrow.fs: no append and no rename, an object is written at once or not at all.

fsspec goes first where it has a driver: most can create an object on the condition that there is none. pyarrow.fs
cannot, there ``exclusive`` looks first, and the log's names (epoch and number) must keep two writers apart.
"""

from __future__ import annotations

import builtins
import contextlib
import inspect
import secrets
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.fs as pafs

from headrace.wal.errors import StorageError, StoredFileExistsError, StoredFileMissingError, UnknownStorageError
from headrace.wal.storage import Data, SegmentFile, checked_path, joined

_OBJECT_STORES = {"s3", "gcs", "abfs"}  # pyarrow's names; its other file systems have directories and renames.


class ObjectClient(Protocol):
    """What the two libraries are asked to do; paths are the library's own."""

    def put(self, path: str, data: Data, *, exclusive: bool) -> None: ...
    def get(self, path: str, offset: int, length: int) -> Data: ...
    def size(self, path: str) -> int | None: ...
    def list(self, path: str) -> builtins.list[str]: ...
    def delete(self, path: str) -> None: ...


class ObjectStorage:
    """Objects whose names begin with ``root``."""

    appends = False

    def __init__(self, client: ObjectClient, root: str, url: str) -> None:
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
        with _told("write", path):
            self._client.put(self._full(path), data, exclusive=exclusive)

    def read(self, path: str) -> bytes:
        with self.open(path) as file:
            return bytes(file.read_at(0, file.size))

    def open(self, path: str) -> ObjectFile:
        return ObjectFile(self._client, self._full(path), path, self.size(path))

    def size(self, path: str) -> int:
        with _told("look at", path):
            size = self._client.size(self._full(path))
        if size is None:
            raise StoredFileMissingError(f"There is no object {path!r} in {self.url}.")
        return size

    def exists(self, path: str) -> bool:
        with _told("look at", path):
            return self._client.size(self._full(path)) is not None

    def list(self, prefix: str = "") -> builtins.list[str]:
        checked_path(prefix, empty=True)
        # Libraries differ in leading slashes; what counts is what follows the root.
        root = self._root.strip("/") + "/"
        with _told("list", prefix):
            found = self._client.list(joined(self._root, prefix))
        inside = (path.strip("/").removeprefix(root) for path in found if path.strip("/").startswith(root))
        return sorted(path for path in inside if path.startswith(f"{prefix}/" if prefix else ""))

    def delete(self, path: str) -> bool:
        with _told("delete", path):
            full = self._full(path)
            if self._client.size(full) is None:
                return False
            self._client.delete(full)
            return True

    def sync(self, path: str) -> None:
        self.size(path)

    def truncate(self, path: str, length: int) -> None:
        with self.open(path) as file:
            kept = file.read_at(0, length)
        self.write_atomically(path, kept)

    def _full(self, path: str) -> str:
        return joined(self._root, checked_path(path))


class ObjectFile:
    """An object read in ranges."""

    def __init__(self, client: ObjectClient, full_path: str, name: str, size: int) -> None:
        self._client = client
        self._full_path = full_path
        self._name = name
        self.size = size

    def read_at(self, offset: int, length: int) -> pa.Buffer:
        length = max(0, min(length, self.size - offset))
        if not length:
            return pa.py_buffer(b"")
        with _told(f"read {length} bytes at {offset} of", self._name):
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
    """Any fsspec file system."""

    def __init__(self, filesystem: Any) -> None:
        self._fs = filesystem
        # Drivers that do not know the mode swallow it with their other options, and overwrite.
        put = getattr(filesystem, "_pipe_file", filesystem.pipe_file)
        self._creates_conditionally = "mode" in inspect.signature(put).parameters

    def put(self, path: str, data: Data, *, exclusive: bool) -> None:
        if not exclusive:
            self._fs.pipe_file(path, bytes(data))
        elif self._creates_conditionally:
            self._fs.pipe_file(path, bytes(data), mode="create")
        elif self.size(path) is not None:
            raise FileExistsError(path)
        else:
            self._fs.pipe_file(path, bytes(data))

    def get(self, path: str, offset: int, length: int) -> Data:
        data: bytes = self._fs.cat_file(path, start=offset, end=offset + length)
        return data

    def size(self, path: str) -> int | None:
        self._fs.invalidate_cache()
        try:
            info = self._fs.info(path)
        except FileNotFoundError:
            return None
        return int(info["size"]) if info["type"] == "file" else None

    def list(self, path: str) -> builtins.list[str]:
        self._fs.invalidate_cache()
        try:
            return list(self._fs.find(path))
        except FileNotFoundError:
            return []

    def delete(self, path: str) -> None:
        self._fs.rm_file(path)


class ArrowClient:
    """Any pyarrow.fs file system (S3, GCS, Azure and HDFS without further packages)."""

    def __init__(self, filesystem: pafs.FileSystem) -> None:
        self._fs = filesystem

    def put(self, path: str, data: Data, *, exclusive: bool) -> None:
        if exclusive and self.size(path) is not None:
            raise FileExistsError(path)
        if self._fs.type_name in _OBJECT_STORES:
            # An object appears when its upload is completed.
            self._write(path, data)
            return
        directory, _, name = path.rpartition("/")
        if directory:
            self._fs.create_dir(directory, recursive=True)
        temporary = joined(directory, f".{name}.{secrets.token_hex(8)}.tmp")
        self._write(temporary, data)
        self._fs.move(temporary, path)

    def _write(self, path: str, data: Data) -> None:
        with self._fs.open_output_stream(path) as stream:
            stream.write(data)

    def get(self, path: str, offset: int, length: int) -> Data:
        with self._fs.open_input_file(path) as file:
            return file.read_at(length, offset)

    def size(self, path: str) -> int | None:
        info = self._fs.get_file_info(path)
        return int(info.size) if info.type == pafs.FileType.File else None

    def list(self, path: str) -> builtins.list[str]:
        selector = pafs.FileSelector(path, allow_not_found=True, recursive=True)
        files = (info for info in self._fs.get_file_info(selector) if info.type == pafs.FileType.File)
        return [info.path for info in files if not info.base_name.startswith(".")]

    def delete(self, path: str) -> None:
        self._fs.delete_file(path)


def open_object_storage(url: str) -> ObjectStorage:
    """The storage at ``url``; UnknownStorageError when neither library has a driver for its scheme."""
    import fsspec

    checked_path(url.split("://", 1)[1].strip("/"), empty=True)
    try:
        filesystem, root = fsspec.core.url_to_fs(url)
        return ObjectStorage(FsspecClient(filesystem), root, url)
    except (ImportError, ValueError):
        # No driver for it, or one whose package is not installed.
        pass
    try:
        arrow_filesystem, root = pafs.FileSystem.from_uri(url)
        return ObjectStorage(ArrowClient(arrow_filesystem), root, url)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, ImportError) as error:
        scheme = url.split("://", 1)[0]
        raise UnknownStorageError(
            f"No file system is known for {scheme}:// ({error}).",
            remedy=f"Install fsspec's driver for {scheme}, or use a path, file://, s3://, gs://, abfs:// or hdfs://.",
        ) from error


@contextlib.contextmanager
def _told(action: str, path: str) -> Iterator[None]:
    """Turns what the libraries raise into the storage's errors."""
    try:
        yield
    except StorageError:
        raise
    except FileExistsError as error:
        raise StoredFileExistsError(f"There is an object {path!r} already.") from error
    except FileNotFoundError as error:
        raise StoredFileMissingError(f"There is no object {path!r}.") from error
    except Exception as error:
        # Drivers raise their vendors' own exceptions.
        raise StorageError(f"The storage cannot {action} {path!r}: {type(error).__name__}: {error}.") from error
