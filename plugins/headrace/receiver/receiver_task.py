"""A receiver as one function call that pickles: what a Spark task, a thread or a process runs."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass

from headrace.blocks import ReceiverId
from headrace.ledger import Ledger
from headrace.ledger.rows import JobLease
from headrace.receiver.garbage import collector_at_rest
from headrace.receiver.supervisor import LEASE_MS, ReceiverReport, ReceiverSupervisor
from headrace.stream import Stream
from headrace.wal.storage import open_storage

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ReceiverTask:
    """All that a receiver needs. Holds no secret: connections are in the environment of the process that runs it."""

    stream_json: str
    receiver_id: ReceiverId
    job_lease: JobLease
    lease_ms: int = LEASE_MS


def run_receiver(task: ReceiverTask, stop: threading.Event | None = None) -> ReceiverReport:
    """Run one receiver until it is asked to stop, has lost its lease, or has failed; the report says which.

    Call it in a process (or thread) of its own, once. ``stop`` may be set from another thread; without it the
    ledger's orders stop the receiver. Where it is the process's main work, Python's garbage collector rests.
    """
    stream = Stream.model_validate_json(task.stream_json)
    ledger = Ledger.open(stream.ledger, create=False)
    try:
        supervisor = ReceiverSupervisor(
            stream,
            task.receiver_id,
            ledger,
            open_storage(stream.folder_url),
            task.job_lease,
            lease_ms=task.lease_ms,
        )
        with collector_at_rest():
            return supervisor.run(stop)
    finally:
        ledger.close()
