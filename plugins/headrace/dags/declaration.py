"""How the DAGs of a stream declare it: their common settings, its description, and that one file alone declares it.

A second DAG file with the same stream name gets an import error. Airflow parses each file in a separate process without
a database, and accepts two files with the same DAG ids without an error: their DAGs replace each other at every parse.
So the files themselves are compared. A factory records, in ``headrace/streams`` below AIRFLOW_HOME, which file declares
the stream, and refuses another file while the recorded one is unchanged. A deleted file declares nothing; a changed
file has ten minutes to be parsed again.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Self

from headrace.stream.model import StreamDefinitionError

if TYPE_CHECKING:
    from headrace.stream import Stream


# Airflow needs a start date to schedule a DAG. It has to be the same at every parse, or the DAG would change at every
# parse. The timetable decides which batches are run. Airflow makes no tasks for a run that is triggered for an earlier
# date, and the run succeeds: batch times begin here.
START_DATE = datetime(1970, 1, 1, tzinfo=UTC)


def tags(stream: Stream, kind: str) -> list[str]:
    """The tags of a stream's DAGs, to filter by in the UI."""
    return ["headrace", kind, f"stream:{stream.name}"]


def declaration(stream: Stream, kind: str) -> str:
    """The JSON documentation of one task of each DAG: the stream's name, and its ledger as the user wrote it.

    Airflow keeps it with the serialised DAG, where the API server finds the stream and its ledger without importing the
    DAG's file. A ledger's URL has no secret: a stream's definition is refused if it has one.
    """
    return json.dumps({"headrace": {"stream": stream.name, "ledger": stream.ledger, "kind": kind}})


def describe(stream: Stream) -> str:
    """The stream in Markdown, for a DAG's page."""
    interval = stream.batch_interval.total_seconds()
    lines = [
        f"Every {interval:g} s by {stream.batch_by}, blocks of {stream.block_interval_ms} ms.",
        "",
        "| | | |",
        "| --- | --- | --- |",
    ]
    for source in stream.inputs:
        where, what = source.description
        lines.append(f"| from | {where} | {', '.join(filter(None, (what, f'{source.receivers} receiver(s)')))} |")
    if stream.transform:
        lines.append(f"| through | `{stream.transform}` | |")
    if stream.state:
        lines.append(f"| state | `{stream.state.update}` | |")
    for output in stream.outputs:
        where, what = output.description
        if output.transform:
            what = ", ".join(filter(None, (what, f"through `{output.transform}`")))
        if output.window:
            what = ", ".join(filter(None, (what, f"of the last {output.window.length.total_seconds():g} s")))
        lines.append(f"| to `{output.id}` | {where} | {what} |")
    lines += [
        f"| log | `{stream.storage.url}` | kept {stream.remember_ms // 1000} s after the checkpoint |",
        f"| ledger | `{stream.ledger}` | |",
        # With the digest, every change of the definition, in whatever field, makes a new DAG version in Airflow. A run
        # keeps the code of its version, and the ledger orders definitions by the time of their DAG versions.
        f"| definition | `{stream.digest}` | |",
    ]
    return "\n".join(lines)


# The prefix that Airflow gives to the module names of DAG files.
_DAG_FILE_MODULE = "unusual_prefix_"
# The DAG processor parses a file again every half minute, and a changed file at once.
_CHANGED_FOR_SECONDS = 600.0
_WRITTEN_FOR_SECONDS = 60.0


@dataclass(frozen=True)
class Declaration:
    """A DAG file that declares a stream, as it was when it was parsed; ``kind`` is "receiver" or "batches"."""

    file: str
    modified_ns: int
    size: int
    kind: str
    digest: str
    parsed_at: float

    @classmethod
    def of(cls, file: str, stream: Stream, kind: str) -> Self:
        """The declaration of a file that is being parsed now."""
        stat = Path(file).stat()
        return cls(file, stat.st_mtime_ns, stat.st_size, kind, stream.digest, time.time())

    def holds(self) -> bool:
        """Whether the file still declares the stream, as far as can be determined without parsing it."""
        try:
            stat = Path(self.file).stat()
        except OSError:
            return False
        unchanged = (stat.st_mtime_ns, stat.st_size) == (self.modified_ns, self.size)
        return unchanged or time.time() - self.parsed_at < _CHANGED_FOR_SECONDS

    def excludes(self, other: Self) -> bool:
        """Whether the two declarations conflict.

        One file may have the receiver DAG and another one the batch DAG, with the same definition.
        """
        if self.file == other.file:
            return False
        return self.kind == other.kind or self.digest != other.digest


def declare_once(stream: Stream, kind: str) -> None:
    """Record that the DAG file being parsed declares this stream. Does nothing outside the DAG processor.

    Raises:
        StreamDefinitionError: another DAG file declares a stream of this name.
    """
    file = _parsed_file()
    if file is None:
        return
    notes = _notes(stream.name)
    mine = Declaration.of(file, stream, kind)
    known = _read(notes)
    for other in known:
        if other.excludes(mine) and other.holds():
            raise StreamDefinitionError(
                f"Stream {stream.name!r} is declared by another DAG file, {other.file}: two files with one stream name "
                "would register their definitions in turns, and run each other's batches.",
                remedy="Give this stream another name and another storage, or delete one of the two files.",
            )
    kept = [other for other in known if (other.file, other.kind) != (mine.file, mine.kind) and other.holds()]
    before = [other for other in known if (other.file, other.kind) == (mine.file, mine.kind)]
    if len(before) + len(kept) == len(known) and before and _is_fresh(before[0], mine):
        return
    with suppress(OSError):
        # A folder that cannot be written must not prevent the DAG from being parsed.
        _write(notes, [*kept, mine])


def _is_fresh(before: Declaration, now: Declaration) -> bool:
    same = (before.modified_ns, before.size, before.digest) == (now.modified_ns, now.size, now.digest)
    return same and now.parsed_at - before.parsed_at < _WRITTEN_FOR_SECONDS


def _parsed_file() -> str | None:
    """The DAG file that the DAG processor is parsing; None in a task, a command or a test."""
    runner = sys.modules.get("airflow.sdk.execution_time.task_runner")
    if getattr(runner, "SUPERVISOR_COMMS", None) is None:
        return None
    from airflow.sdk import get_parsing_context

    if get_parsing_context().dag_id is not None:
        # A task parses its DAG's file too, in its run's version.
        return None
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if str(frame.f_globals.get("__name__")).startswith(_DAG_FILE_MODULE):
            return os.path.realpath(str(frame.f_globals["__file__"]))
        frame = frame.f_back
    return None


def _notes(name: str) -> Path:
    from airflow.configuration import AIRFLOW_HOME

    return Path(AIRFLOW_HOME) / "headrace" / "streams" / f"{name}.json"


def _read(notes: Path) -> list[Declaration]:
    try:
        return [Declaration(**fields) for fields in json.loads(notes.read_text(encoding="utf-8"))]
    except (OSError, ValueError, TypeError):
        return []


def _write(notes: Path, declarations: list[Declaration]) -> None:
    notes.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=notes.parent, prefix=f".{notes.name}-")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump([asdict(declaration) for declaration in declarations], file)
        Path(temporary).replace(notes)
    finally:
        Path(temporary).unlink(missing_ok=True)
