"""A receiver job's sign of life in its stream's folder, for a process that has lost its ledger, or has another one.

A job that receives nothing writes no block, and without batches no checkpoint. Its sign shows all the same that it
runs. The job rewrites it every third of its lease while its ledger answers, and deletes it when it has stopped.
"""

from __future__ import annotations

import json
import logging
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from headrace.errors import HeadraceError
from headrace.ledger.models import JobLease
from headrace.stream_context import StreamContext
from headrace.wal.errors import StoredFileMissingError
from headrace.wal.storage import LogStorage

logger = logging.getLogger(__name__)

PATH = "receiver-job.json"
"""Below the stream's folder."""

# How long the end of a job waits until its sign is deleted. If it is not, a recovery waits for the lease.
_DELETE_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class JobSign:
    """The receiver job was alive at ``written_ms``, by its ledger's clock. Its lease lasts for ``lease_ms``."""

    written_ms: int
    lease_ms: int


def write_sign(folder: LogStorage, lease: JobLease, now_ms: int) -> None:
    """Write the sign of the job that holds ``lease``. ``now_ms``: the ledger's time. Raises StorageError, OSError."""
    content = {"epoch": lease.epoch, "written_ms": now_ms, "lease_ms": lease.lease_ms}
    folder.write_atomically(PATH, json.dumps(content).encode())


def find_sign(folder: LogStorage) -> JobSign | None:
    """Return the sign in the stream's folder. None: there was no job, or the last one has stopped.

    Raises:
        ValueError: the file is damaged.
        StorageError, OSError: the store cannot be read.
    """
    try:
        found = json.loads(folder.read(PATH))
    except StoredFileMissingError:
        return None
    try:
        return JobSign(int(found["written_ms"]), int(found["lease_ms"]))
    except (KeyError, TypeError) as error:
        raise ValueError(f"{PATH} is no sign of a receiver job: {error!r}") from error


class JobSignWriter:
    """Keeps the sign of a running job. A thread writes, so that a slow store does not delay the job's lease."""

    def __init__(self, context: StreamContext, lease: JobLease) -> None:
        self._context = context
        self._lease = lease
        self._next_write = 0.0
        self._writing: Future[None] | None = None
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="headrace-job-sign")

    def write_if_due(self, now_ms: int) -> None:
        """Begin to write the sign every third of the lease. ``now_ms``: the ledger's time, as it has just answered."""
        now = self._context.clock.monotonic()
        if now < self._next_write or not (self._writing is None or self._writing.done()):
            return
        self._next_write = now + self._lease.lease_ms / 3000
        self._writing = self._pool.submit(self._write, now_ms)

    def delete(self) -> None:
        """Delete the sign: the job has stopped, and all of its receivers have ended."""
        try:
            self._pool.submit(self._context.storage.delete, PATH).result(_DELETE_SECONDS)
        except (HeadraceError, OSError) as error:
            logger.warning("the sign of the receiver job in %s was not deleted: %s", self._context.storage.url, error)

    def close(self) -> None:
        """Write no more."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _write(self, now_ms: int) -> None:
        try:
            write_sign(self._context.storage, self._lease, now_ms)
        except (HeadraceError, OSError) as error:
            logger.warning("the sign of the receiver job was not written: %s", error)
