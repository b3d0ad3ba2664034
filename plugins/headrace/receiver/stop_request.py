"""Requests a receiver job to stop without the ledger, by a file in the stream's folder.

Usually the ledger orders a job to stop. If the ledger is lost, the job would keep running and could store nothing. So
it checks for this file while its ledger does not answer.
"""

from __future__ import annotations

import json
import logging

from headrace.errors import HeadraceError
from headrace.wal.storage import LogStorage

logger = logging.getLogger(__name__)

PATH = "stop-request.json"


def write_stop_request(folder: LogStorage, reason: str, *, at_ms: int) -> None:
    """Request that the job of the stream with this folder stops, if its ledger does not answer."""
    folder.write_atomically(PATH, json.dumps({"at_ms": at_ms, "reason": reason}).encode())


def find_stop_request(folder: LogStorage, *, since_ms: int) -> str | None:
    """Return the reason of a request made after ``since_ms``; None if there is none, or the folder cannot be read.

    A request is never deleted: a job whose ledger has answered since then ignores it.
    """
    try:
        if not folder.exists(PATH):
            return None
        found = json.loads(folder.read(PATH))
        return str(found["reason"]) if int(found["at_ms"]) > since_ms else None
    except (HeadraceError, OSError, ValueError, KeyError, TypeError) as error:
        logger.warning("it is not known whether the job is asked to stop: %s", error)
        return None
