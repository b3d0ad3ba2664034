"""The receiver job's log, bounded: the driver looks at it now and then, and moves what it has into compressed parts.

The file is the standard output of the JVM, the driver and the Python workers, opened for appending by what started the
job. None of them can open another one, so the file stays and is emptied: what they write next stands at its beginning.
Lines that are written in the moment between the copy and that, less than a millisecond, are lost.
"""

from __future__ import annotations

import contextlib
import gzip
import logging
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

LOG_VARIABLE = "HEADRACE_JOB_LOG"
"""In the environment of a job whose output goes into a file: that file."""

MAX_BYTES = 16 * 1024 * 1024
KEPT_PARTS = 7
"""Besides the file itself. At INFO a job writes 40 to 100 MB a day, a tenth of it compressed."""

_LOOK_SECONDS = 10.0

logger = logging.getLogger(__name__)


def parts_of(log: Path) -> list[Path]:
    """The compressed parts of a log, the newest first."""
    numbered = [
        (path.name.removeprefix(f"{log.name}.").removesuffix(".gz"), path)
        for path in log.parent.glob(f"{log.name}.*.gz")
    ]
    return [path for number, path in sorted((int(text), path) for text, path in numbered if text.isdigit())]


def rotate(log: Path, *, max_bytes: int = MAX_BYTES, kept: int = KEPT_PARTS) -> bool:
    """Move what the log has into a part if it is larger than ``max_bytes``; whether it was. The oldest parts go.

    A part that cannot be written is left out: on a full disk the room is worth more than the log.

    Raises:
        OSError: the log is gone, or cannot be emptied.
    """
    if log.stat().st_size <= max_bytes:
        return False
    try:
        for number, path in reversed(list(enumerate(parts_of(log), 1))):
            if number >= kept:
                path.unlink(missing_ok=True)
            else:
                path.rename(log.with_name(f"{log.name}.{number + 1}.gz"))
        with log.open("rb") as source, gzip.open(log.with_name(f"{log.name}.1.gz"), "wb", compresslevel=1) as part:
            # What is written meanwhile is copied too.
            shutil.copyfileobj(source, part)
    except OSError as error:
        logger.warning("What %s held is dropped, since it cannot be kept beside it: %s", log, error)
        log.with_name(f"{log.name}.1.gz").unlink(missing_ok=True)
    os.truncate(log, 0)
    return True


@contextlib.contextmanager
def bounded_log() -> Iterator[None]:
    """Keep this process's log within its bounds for the length of a ``with`` block, if its output goes into one."""
    path = os.environ.get(LOG_VARIABLE)
    if not path or not Path(path).is_file():
        yield
        return
    over = threading.Event()
    thread = threading.Thread(target=_watch, args=(Path(path), over), name="headrace-log", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _watch(log: Path, over: threading.Event) -> None:
    while not over.wait(_LOOK_SECONDS):
        try:
            if rotate(log):
                logger.info("What this log held before is in %s.1.gz.", log)
        except OSError as error:
            logger.warning("The log %s cannot be bounded: %s", log, error)
