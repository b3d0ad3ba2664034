"""The options of the data sources that read batches: the batches' manifests, the input, the number of partitions."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Self

from headrace.batch.manifest import Manifest
from headrace.errors import HeadraceError

_MANIFEST_READERS = 8


class SourceOptionError(HeadraceError):
    """A data source lacks an option, or an option is invalid."""


@dataclass(frozen=True, slots=True)
class SourceOptions:
    """The options of a data source that reads one input's records of one or more batches."""

    manifests: tuple[str, ...]
    input_id: str
    partitions: int

    @classmethod
    def of(cls, source: str, options: Mapping[str, str]) -> Self:
        """Parse options as Spark passes them, with case-insensitive names. Raises SourceOptionError."""
        given = required(source, options, "manifests", "input")
        partitions = _number_of_partitions(source, given.get("numpartitions"))
        return cls(_uris(source, given["manifests"]), given["input"], partitions)

    def load(self) -> list[Manifest]:
        """Load the manifests, several at a time: a window has one per batch, and a remote storage is slow.

        Raises ManifestError.
        """
        if len(self.manifests) < 2:
            return [Manifest.load(uri) for uri in self.manifests]
        with ThreadPoolExecutor(_MANIFEST_READERS) as pool:
            return list(pool.map(Manifest.load, self.manifests))


def required(source: str, options: Mapping[str, str], *names: str) -> dict[str, str]:
    """The options by lower-case names. Raises SourceOptionError if one of ``names`` is missing."""
    given = {str(name).lower(): str(value) for name, value in options.items()}
    missing = [name for name in names if not given.get(name)]
    if missing:
        raise SourceOptionError(f'The "{source}" data source needs the option(s) {", ".join(missing)}.')
    return given


def _uris(source: str, text: str) -> tuple[str, ...]:
    try:
        uris: Sequence[object] | None = json.loads(text)
    except ValueError:
        uris = None
    if not isinstance(uris, list) or not all(isinstance(uri, str) for uri in uris):
        raise SourceOptionError(f'The option manifests of the "{source}" data source must be a JSON list of URIs.')
    return tuple(uris)


def _number_of_partitions(source: str, text: str | None) -> int:
    if text is None:
        return os.cpu_count() or 1
    if not text.isdigit() or int(text) < 1:
        raise SourceOptionError(
            f'The option numPartitions of the "{source}" data source must be 1 or more, not {text!r}.'
        )
    return int(text)
