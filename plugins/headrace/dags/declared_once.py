"""A stream is declared by one DAG file: a second file with its name gets an import error.

Airflow parses each file in a process of its own, which has no database, and takes two files with the same DAG ids
without a word: their DAGs replace each other at every parse. So the files themselves are compared. A factory writes
down, in ``headrace/streams`` below AIRFLOW_HOME, which file declares the stream, and refuses another one while that
file is as it was. A file that was deleted declares nothing; one that was changed has ten minutes to be parsed again.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Self

from headrace.stream.errors import StreamDefinitionError

if TYPE_CHECKING:
    from headrace.stream import Stream

# How Airflow names the modules of DAG files.
_DAG_FILE_MODULE = "unusual_prefix_"
# The DAG processor parses a file again every half minute, and one that was changed at once.
_CHANGED_FOR_SECONDS = 600.0
_WRITTEN_FOR_SECONDS = 60.0


@dataclass(frozen=True)
class Declaration:
    """A file that declares a stream by a factory ("receiver" or "batches"), as it was when it was parsed."""

    file: str
    modified_ns: int
    size: int
    kind: str
    digest: str
    parsed_at: float

    @classmethod
    def of(cls, file: str, stream: Stream, kind: str) -> Self:
        """That of a file which is being parsed."""
        found = Path(file).stat()
        return cls(file, found.st_mtime_ns, found.st_size, kind, stream.digest, time.time())

    def holds(self) -> bool:
        """Whether the file still declares the stream, as far as can be known without parsing it."""
        try:
            found = Path(self.file).stat()
        except OSError:
            return False
        unchanged = (found.st_mtime_ns, found.st_size) == (self.modified_ns, self.size)
        return unchanged or time.time() - self.parsed_at < _CHANGED_FOR_SECONDS

    def excludes(self, other: Self) -> bool:
        """Whether the other one cannot stand beside this one.

        One file may have the receiver DAG and another one the batch DAG, by the same definition.
        """
        if self.file == other.file:
            return False
        return self.kind == other.kind or self.digest != other.digest


def declare_once(stream: Stream, kind: str) -> None:
    """Note that the DAG file that is being parsed declares this stream. Elsewhere than in the DAG processor: nothing.

    Raises:
        StreamDefinitionError: another DAG file declares a stream of this name.
    """
    file = _parsed_file()
    if file is None:
        return
    notes = _notes(stream.name)
    mine = Declaration.of(file, stream, kind)
    known = _read(notes)
    for each in known:
        if each.excludes(mine) and each.holds():
            raise StreamDefinitionError(
                f"Stream {stream.name!r} is declared by another DAG file, {each.file}: two files with one stream name "
                "would register their definitions in turns, and run each other's batches.",
                remedy="Give this stream another name and another storage, or delete one of the two files.",
            )
    kept = [each for each in known if (each.file, each.kind) != (mine.file, mine.kind) and each.holds()]
    before = [each for each in known if (each.file, each.kind) == (mine.file, mine.kind)]
    if len(before) + len(kept) == len(known) and before and _is_fresh(before[0], mine):
        return
    with suppress(OSError):
        # A folder that cannot be written must not keep a DAG from being parsed.
        _write(notes, [*kept, mine])


def _is_fresh(before: Declaration, now: Declaration) -> bool:
    same = (before.modified_ns, before.size, before.digest) == (now.modified_ns, now.size, now.digest)
    return same and now.parsed_at - before.parsed_at < _WRITTEN_FOR_SECONDS


def _parsed_file() -> str | None:
    """The DAG file that the DAG processor is parsing; None in a task, a command, a test."""
    runner = sys.modules.get("airflow.sdk.execution_time.task_runner")
    if getattr(runner, "SUPERVISOR_COMMS", None) is None:
        return None
    from airflow.sdk import get_parsing_context

    if get_parsing_context().dag_id is not None:
        # A task parses its DAG's file too, in the version of its run.
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
            json.dump([asdict(each) for each in declarations], file)
        Path(temporary).replace(notes)
    finally:
        Path(temporary).unlink(missing_ok=True)
