"""Limits the size of the receiver job's log: the driver checks it regularly and moves its content to compressed parts.

The file is the standard output of the JVM, the driver and the Python workers. The process that started the job opened
it for appending, and none of them can open another file, so it is copied and then truncated. Lines written between the
copy and the truncation, less than a millisecond, are lost.
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
"""The environment variable with the path of the file to which the job's output goes."""

MAX_BYTES = 16 * 1024 * 1024
KEPT_PARTS = 7
"""The parts kept besides the file itself. At INFO a job writes 40 to 100 MB a day, a tenth of it compressed."""

POLL_SECONDS = 10.0
"""How often the size of the log is looked at."""

logger = logging.getLogger(__name__)


def parts_of(log: Path) -> list[Path]:
    """The compressed parts of a log, the newest first."""
    numbered = [
        (path.name.removeprefix(f"{log.name}.").removesuffix(".gz"), path)
        for path in log.parent.glob(f"{log.name}.*.gz")
    ]
    return [path for number, path in sorted((int(text), path) for text, path in numbered if text.isdigit())]


def rotate(log: Path) -> bool:
    """Move the log's content to a part if it is larger than ``MAX_BYTES``. Deletes the oldest parts.

    If the part cannot be written, the content is dropped: on a full disk the space is more important than the log.
    Returns whether the log was larger.

    Raises:
        OSError: the log is missing, or cannot be truncated.
    """
    if log.stat().st_size <= MAX_BYTES:
        return False
    try:
        for number, path in reversed(list(enumerate(parts_of(log), 1))):
            if number >= KEPT_PARTS:
                path.unlink(missing_ok=True)
            else:
                path.rename(log.with_name(f"{log.name}.{number + 1}.gz"))
        with log.open("rb") as source, gzip.open(log.with_name(f"{log.name}.1.gz"), "wb", compresslevel=1) as part:
            # Lines that are appended during the copy are copied too.
            shutil.copyfileobj(source, part)
    except OSError as error:
        logger.warning("The content of the log %s is dropped, because no part can be written: %s", log, error)
        log.with_name(f"{log.name}.1.gz").unlink(missing_ok=True)
    os.truncate(log, 0)
    return True


@contextlib.contextmanager
def bounded_log() -> Iterator[None]:
    """Limit the size of this process's log during the ``with`` block, if ``LOG_VARIABLE`` names one."""
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
    while not over.wait(POLL_SECONDS):
        try:
            if rotate(log):
                logger.info("The earlier lines of this log are in %s.1.gz.", log)
        except OSError as error:
            logger.warning("The size of the log %s cannot be limited: %s", log, error)
