"""Runs a receiver as one function call with a picklable argument, for a Spark task, a thread or a process."""

from __future__ import annotations

import logging
import socket
import threading
from dataclasses import dataclass

from headrace.blocks import ReceiverId
from headrace.ledger import Ledger
from headrace.ledger.errors import JobStoppingError, LeaseLostError, ReceiverRefusedError
from headrace.ledger.models import ScheduledReceiver
from headrace.ledger.states import ReceiverState
from headrace.receiver.garbage_collection import collector_off
from headrace.receiver.heartbeat import LEASE_MS
from headrace.receiver.receiver_factory import OpenClients, ReceiverFactory, open_clients
from headrace.receiver.supervisor import ReceiverReport
from headrace.stream import Stream
from headrace.stream_context import StreamContext

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ReceiverTask:
    """All that a receiver needs. Has no secrets: connections are in the environment of the process that runs it."""

    stream_json: str
    scheduled: ScheduledReceiver
    lease_ms: int = LEASE_MS

    @property
    def receiver_id(self) -> ReceiverId:
        return self.scheduled.receiver_id


def run_receiver(task: ReceiverTask, stop: threading.Event | None = None) -> ReceiverReport:
    """Run one receiver until it is asked to stop, loses its lease, or fails; the report says which.

    Call it once, in its own process (or thread). ``stop`` may be set from another thread; without it the ledger's
    orders stop the receiver. Python's garbage collector is off while the receiver runs.
    """
    stream = Stream.model_validate_json(task.stream_json)
    ledger = Ledger.open(stream.ledger, create=False)
    try:
        with collector_off():
            return receive(StreamContext(stream, ledger), task.scheduled, lease_ms=task.lease_ms, stop=stop)
    finally:
        ledger.close()


def receive(
    context: StreamContext,
    scheduled: ScheduledReceiver,
    *,
    lease_ms: int = LEASE_MS,
    stop: threading.Event | None = None,
    clients: OpenClients = open_clients,
) -> ReceiverReport:
    """Register a scheduled receiver, open it, and run it until ``stop`` is set, the ledger orders a stop, or it cannot
    continue.

    Always returns a report: also if it is refused (``lost``) or could not be opened (``failed``). Its lease is then
    released. ``clients`` opens its clients of Kafka.
    """
    ledger, receiver_id = context.ledger, scheduled.receiver_id
    try:
        lease = ledger.receivers.register(scheduled, host=socket.gethostname(), lease_ms=lease_ms)
    except (LeaseLostError, JobStoppingError, ReceiverRefusedError) as refused:
        logger.error("%s", refused)
        return ReceiverReport(receiver_id, ReceiverState.LOST, error=str(refused))
    try:
        supervisor = ReceiverFactory(context, lease, clients).make()
    except Exception as failure:
        report = ReceiverReport.of_end(receiver_id, failure)
        if report.state is not ReceiverState.LOST:
            try:
                ledger.receivers.release(lease, report.state, report.error, stack=report.stack)
            except Exception:
                logger.exception("receiver %s could not be opened, and its lease not be released", receiver_id)
        return report
    return supervisor.run(stop or threading.Event())
