"""The setting of where a stream keeps its write-ahead log, manifests and checkpoints."""

from __future__ import annotations

from typing import Self
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from headrace.stream.model import Part
from headrace.stream.secrets import url_holds_secret


class LocalCopies(Part):
    """Copies of recent blocks on the disks of the hosts that run receivers, for a log in an object store.

    Each receiver keeps a copy of its newest blocks. A batch's task on the same host reads them instead of the log.
    ``max_bytes`` is the most that the copies of the stream take on a host; the oldest are deleted first. ``folder`` is
    an absolute path, by default the temporary folder of the process (``TMPDIR``, else ``/tmp``). All receivers and
    batches of a host need the same.
    """

    max_bytes: int = Field(default=1 << 30, ge=1 << 20)
    folder: str | None = None

    @field_validator("folder")
    @classmethod
    def _is_absolute(cls, value: str | None) -> str | None:
        if value is not None and not value.startswith("/"):
            raise ValueError("must be an absolute path: receivers and batches start in different folders")
        return value


class Storage(Part):
    """A folder by its absolute path or URL, or an ``s3://`` URL (any store whose fsspec driver creates objects
    conditionally).

    A local path with a Spark master of several hosts is refused, unless ``shared`` says that every host sees the same
    folder there (NFS, for example).
    """

    url: str = Field(min_length=1)
    shared: bool = False
    local_copies: LocalCopies | None = None
    """Copies of recent blocks on the executors' disks; None: no copies. Refused for a log that is itself in a
    folder."""

    @field_validator("url")
    @classmethod
    def _is_absolute(cls, value: str) -> str:
        return check_storage_url(value)

    @model_validator(mode="after")
    def _copies_are_of_a_remote_log(self) -> Self:
        if self.local_copies is not None and self.is_local:
            raise ValueError(
                f"local_copies is for a log in an object store, and {self.url} is a folder, which is read directly; "
                "leave local_copies out"
            )
        return self

    @property
    def is_local(self) -> bool:
        """Whether this is a folder of the machine's own file system."""
        return urlsplit(self.url).scheme in ("", "file")


def check_storage_url(value: str) -> str:
    """The URL or absolute path without a trailing slash. Raises ValueError, which the definition's error repeats."""
    parts = urlsplit(value)
    if not parts.scheme and not value.startswith("/"):
        raise ValueError(
            "must be an absolute path or a URL: the receiver, Spark and Airflow start in different folders"
        )
    if url_holds_secret(value):
        raise ValueError("holds a secret; give the store's credentials through its own environment or profile")
    return value.rstrip("/") or "/"
