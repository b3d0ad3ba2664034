"""A request to stop that needs no ledger: a file in the stream's folder.

A receiver job hears from its ledger that it is to stop. One whose ledger is lost would live on, with nothing that it
can store; it looks for this file while its ledger does not answer.
"""

from __future__ import annotations

import json
import logging

from headrace.errors import HeadraceError
from headrace.wal.storage import LogStorage

logger = logging.getLogger(__name__)

PATH = "stop-request.json"


def write_stop_request(folder: LogStorage, reason: str, *, at_ms: int) -> None:
    """Ask the job of the stream with this folder to stop, once its ledger does not answer."""
    folder.write_atomically(PATH, json.dumps({"at_ms": at_ms, "reason": reason}).encode())


def find_stop_request(folder: LogStorage, *, since_ms: int) -> str | None:
    """The reason of a request made after ``since_ms``; None if there is none, or the folder cannot be read.

    A request stays where it is: to a job that has heard of its ledger since, it says nothing.
    """
    try:
        if not folder.exists(PATH):
            return None
        found = json.loads(folder.read(PATH))
        return str(found["reason"]) if int(found["at_ms"]) > since_ms else None
    except (HeadraceError, OSError, ValueError, KeyError, TypeError) as error:
        logger.warning("it is not known whether the job is asked to stop: %s", error)
        return None
