"""Requests a stream's receiver job of the process that it shares with others, and starts the process if there is none.

The request is the stream's lease, acquired on behalf of that process, which looks for requests and adopts them
(``headrace.spark.shared_job``). So a stream has one job, however many tasks request it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from airflow.sdk.exceptions import AirflowException, AirflowRuntimeError

from headrace.connections import variable_name
from headrace.process_identity import PROCESS, has_ended
from headrace.runs.environment import connection_json

if TYPE_CHECKING:
    from headrace.ledger import Ledger
    from headrace.ledger.tables import JobRow
    from headrace.runs.detached import DetachedProcess
    from headrace.stream import Stream

# From the start of the process until it takes the lease over: spark-submit's start, with time for a busy machine.
_CLAIM_MS = 90_000


def is_request(job: JobRow) -> bool:
    """Whether no process has adopted the job yet."""
    from headrace.ledger.jobs import REQUESTED_OF

    return not job.state.ended and job.attributes.get(REQUESTED_OF) is not None


def request_job(ledger: Ledger, stream: Stream, *, revision: int, holder: str, lease_ms: int) -> None:
    """Request the stream's receiver job of its shared job. Raises LeaseHeldError if the stream has a live job."""
    from headrace.ledger.jobs import REQUESTED_OF
    from headrace.receiver.health import REVISION
    from headrace.spark.versions import current_versions

    ledger.jobs.acquire(
        stream.name,
        holder=holder,
        lease_ms=lease_ms,
        versions=current_versions(),
        attributes={REQUESTED_OF: stream.spark.job, REVISION: revision},
    )


def start_if_absent(
    ledger: Ledger, shared_job: str, *, holder: str, start: Callable[[], DetachedProcess]
) -> DetachedProcess | None:
    """Start the process of a shared job, unless one is alive or being started. ``holder`` names the process.

    Returns the started process. Of several tasks that call this at once, one starts it.
    """
    from headrace.ledger.errors import LeaseHeldError

    job = ledger.shared_jobs.current(shared_job)
    if job is not None and job.alive(ledger.now_ms()):
        if not has_ended(job.attributes.get(PROCESS)):
            return None
        ledger.shared_jobs.end(shared_job, job.epoch)
    try:
        claim = ledger.shared_jobs.acquire(shared_job, holder=holder, lease_ms=_CLAIM_MS)
    except LeaseHeldError:
        return None
    try:
        return start()
    except BaseException:
        ledger.shared_jobs.end(shared_job, claim.epoch)
        raise


def end_claim(ledger: Ledger, shared_job: str, *, holder: str) -> None:
    """End the lease of a process that has ended without a report, so that the next task starts another at once."""
    job = ledger.shared_jobs.current(shared_job)
    if job is not None and job.holder == holder:
        ledger.shared_jobs.end(shared_job, job.epoch)


def connections_of_others(ledger: Ledger, stream: Stream) -> Mapping[str, str]:
    """The connections of the other streams of this one's shared job, as environment variables.

    Without those that are not defined, or that this task may not read: the process refuses the streams that need them.
    """
    from headrace.stream import Stream as AnyStream
    from headrace.stream.model import StreamDefinitionError

    found: dict[str, str] = {}
    for row in ledger.streams.all():
        try:
            other = AnyStream.from_json(row.definition)
        except StreamDefinitionError:
            continue
        if other.name == stream.name or other.spark.job != stream.spark.job:
            continue
        for conn_id in other.connection_ids:
            try:
                found[variable_name(conn_id)] = connection_json(conn_id)
            except (AirflowException, AirflowRuntimeError, PermissionError):
                continue
    return found
