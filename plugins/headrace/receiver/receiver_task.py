"""Runs a receiver as one function call with a picklable argument, for a Spark task, a thread or a process."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass

from headrace.blocks import ReceiverId
from headrace.ledger import Ledger
from headrace.ledger.models import JobLease
from headrace.receiver.garbage import collector_at_rest
from headrace.receiver.supervisor import LEASE_MS, ReceiverReport, ReceiverSupervisor
from headrace.stream import Stream
from headrace.wal.storage import open_storage

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ReceiverTask:
    """All that a receiver needs. Has no secrets: connections are in the environment of the process that runs it."""

    stream_json: str
    receiver_id: ReceiverId
    job_lease: JobLease
    lease_ms: int = LEASE_MS


def run_receiver(task: ReceiverTask, stop: threading.Event | None = None) -> ReceiverReport:
    """Run one receiver until it is asked to stop, loses its lease, or fails; the report says which.

    Call it once, in its own process (or thread). ``stop`` may be set from another thread; without it the ledger's
    orders stop the receiver. Python's garbage collector is off while the receiver runs.
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
