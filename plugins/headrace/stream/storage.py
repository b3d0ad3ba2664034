"""The setting of where a stream keeps its write-ahead log, manifests and checkpoints."""

from __future__ import annotations

from urllib.parse import urlsplit

from pydantic import Field, field_validator

from headrace.stream.model import Part
from headrace.stream.secrets import url_holds_secret


class Storage(Part):
    """A folder by its absolute path or URL, or an ``s3://`` URL (any store whose fsspec driver creates objects
    conditionally).

    A local path with a Spark master of several hosts is refused, unless ``shared`` says that every host sees the same
    folder there (NFS, for example).
    """

    url: str = Field(min_length=1)
    shared: bool = False

    @field_validator("url")
    @classmethod
    def _is_absolute(cls, value: str) -> str:
        return check_storage_url(value)

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
