"""The error of a host that lacks a library of the extra ``registry``."""

from __future__ import annotations

import socket
from typing import Self

from headrace.errors import Failure, HeadraceError


class LibraryMissingError(HeadraceError):
    """A host does not have a library that reads Avro, Protobuf or JSON Schema, or asks a schema registry."""

    failure = Failure.CODE

    @classmethod
    def of(cls, to_do: str, error: ImportError) -> Self:
        """The error of this host. ``to_do``: what it cannot do, such as "decode Avro"."""
        return cls(
            f"The host {socket.gethostname()} cannot {to_do}: {error}.",
            remedy="Install headrace[registry] on it: on all hosts of the Spark application, and where batches run.",
        )
