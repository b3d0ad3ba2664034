"""The output "ndjson": one file of JSON lines for each batch, in a folder; it is complete or missing.

    <path>/<batch time in ms>.ndjson                   what readers see
    <path>/.claims/<batch time>.<replay>/<attempt>/    the claim of the newest attempt, with its unfinished file

An attempt claims the batch by making its claim, and then takes the claims of earlier attempts away. It publishes by
renaming the file out of its claim, which fails if a later attempt took the claim away. The newest claim stays, so that
an earlier attempt that goes on late does not even claim. So no lock is needed, and the file is always that of the
newest attempt that ended.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal

from pydantic import Field

from headrace.clock import time_text
from headrace.spark.outputs.writer import AttemptReplacedError
from headrace.stream import OutputDefinition
from headrace.stream.outputs import Dataset, OutputPlace

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from headrace.checks.connecting import Checked
    from headrace.spark.outputs.writer import Counts, WrittenBatch
    from headrace.stream.fields import StreamFields

_LINES = "lines"


class NdjsonOutput(OutputDefinition):
    """A file ``<path>/<batch time in ms>.ndjson`` for each batch with records; a batch that runs again replaces it.

    ``path`` is the absolute path of a folder that every host sees where batches run.
    """

    writer = "headrace_ndjson:NdjsonWriter"
    check = "headrace_ndjson:check_folder_of"
    datasets = "headrace_ndjson:datasets_of"

    kind: Literal["ndjson"] = "ndjson"
    id: str = "ndjson"
    path: str = Field(pattern="^/.")

    @property
    def places(self) -> tuple[OutputPlace, ...]:
        return (OutputPlace(None, "folder", self.path),)

    @property
    def description(self) -> tuple[str, str]:
        return "files of JSON lines", f"`{self.path}`"

    def whereabouts(self, batch_time_ms: int) -> str:
        return f"Its rows are in {self.path}/{batch_time_ms}.ndjson."

    def problems(self, stream: StreamFields) -> Iterator[str]:
        others = [
            output.id for output in stream.outputs if output.id != self.id and set(output.places) & {*self.places}
        ]
        if others:
            yield f"outputs.{self.id}.path: {self.path} is also the folder of output {others[0]}; name another"


class NdjsonWriter:
    """Writes the files, in the process of the batch."""

    def __init__(self, output: NdjsonOutput) -> None:
        self._output = output

    def write(self, frame: DataFrame | None, batch: WrittenBatch) -> Counts:
        """Publish the rows. Returns the counts ``rows`` and ``bytes``. Raises AttemptReplacedError."""
        if frame is None:
            return {"rows": 0, "bytes": 0}
        claim = Claim(Path(self._output.path), batch.batch_time_ms, batch.target, batch.attempt)
        claim.take()
        rows = 0
        with claim.open() as file:
            for row in frame.selectExpr("to_json(struct(*)) AS line").toLocalIterator():
                file.write(row["line"].encode() + b"\n")
                rows += 1
            file.flush()
            os.fsync(file.fileno())
            size = file.tell()
        claim.publish()
        return {"rows": rows, "bytes": size}


@dataclass(frozen=True)
class Claim:
    """One attempt at one batch. A replay's ``target`` has attempts of its own; it is "" for the stream itself."""

    path: Path
    batch_time_ms: int
    target: str
    attempt: int

    @property
    def folder(self) -> Path:
        """The folder of the claim."""
        return self.path / ".claims" / f"{self.batch_time_ms}.{self.target}" / str(self.attempt)

    def take(self) -> None:
        """Claim the batch. Raises AttemptReplacedError if a later attempt has."""
        self.folder.mkdir(parents=True, exist_ok=True)
        # Listed after its own claim is made: of two attempts at the same time, at least one sees the other.
        attempts = [int(claim.name) for claim in self.folder.parent.iterdir()]
        if max(attempts) > self.attempt:
            shutil.rmtree(self.folder, ignore_errors=True)
            raise self._replaced()
        for earlier in attempts:
            if earlier < self.attempt:
                # It may be gone: that attempt has seen this one, or a later one has taken it away.
                with contextlib.suppress(FileNotFoundError):
                    taken = self.folder / f"attempt-{earlier}"
                    self.folder.with_name(str(earlier)).rename(taken)
                    shutil.rmtree(taken)

    def open(self) -> BinaryIO:
        """Open the unfinished file. Raises AttemptReplacedError."""
        try:
            return (self.folder / _LINES).open("wb")
        except FileNotFoundError:
            raise self._replaced() from None

    def publish(self) -> None:
        """Make the file visible, in place of an earlier attempt's. Raises AttemptReplacedError."""
        try:
            (self.folder / _LINES).rename(self.path / f"{self.batch_time_ms}.ndjson")
        except FileNotFoundError:
            raise self._replaced() from None
        folder = os.open(self.path, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def _replaced(self) -> AttemptReplacedError:
        batch = time_text(self.batch_time_ms)
        return AttemptReplacedError(
            f"A later attempt at batch {batch} has replaced attempt {self.attempt} in {self.path}."
        )


def check_folder_of(output: NdjsonOutput) -> Iterator[Checked]:
    """What `headrace streams check` asks."""
    from headrace.checks.connecting import check_folder

    yield check_folder(f"output {output.id}", output.path)


def datasets_of(output: NdjsonOutput, counts: Mapping[str, Any], _: object) -> dict[Dataset, int]:
    """The dataset for OpenLineage. The counts of a batch without rows are not the writer's."""
    return {Dataset("file", output.path): counts.get("rows", 0)}
