"""Replaces a receiver job that runs with older versions than the current task: once, with an orderly stop.

A job outlives the tasks that start it, so after an upgrade it still runs the old installation. Batches of another
version cannot run in its application: functions are sent there by cloudpickle, and the log's reader with them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from packaging.version import InvalidVersion, Version

from headrace.runs.receiver_job import newest_job

if TYPE_CHECKING:
    from headrace.ledger import Ledger

# While only some workers are upgraded, an older one may start the job again. That job then stays for this time.
SETTLED_MS = 300_000
# The first of these versions that differs decides which of two processes is newer.
_ORDER = ("headrace", "pyspark", "python")


def is_newer(ours: Mapping[str, str], theirs: Mapping[str, str]) -> bool:
    """Whether ``ours`` are newer versions than ``theirs``. Never true in both directions, so two jobs never replace
    each other in turns."""
    for name in _ORDER:
        if ours.get(name) != theirs.get(name):
            try:
                return Version(ours.get(name, "")) > Version(theirs.get(name, ""))
            except InvalidVersion:
                return False
    return False


def replace_older_job(ledger: Ledger, stream: str) -> str | None:
    """Ask the stream's job to stop if it is older than this process, so that its DAG starts the next one.

    A job is asked once, not before it has run for ``SETTLED_MS``, and not if the stream should be stopped.

    Returns:
        Why a batch should wait for the next job; None if no job is being replaced by one of this version.
    """
    from headrace.ledger.states import DesiredState
    from headrace.spark.versions import REPLACED_BY, current_versions, differences

    job = newest_job(ledger, stream)
    ours = current_versions()
    if job is None or not job.alive(ledger.now_ms()) or not job.versions or not is_newer(ours, job.versions):
        return None
    different = "; ".join(differences(job.versions, ours))
    if job.stop_requested_at_ms is None:
        if ledger.now_ms() - job.acquired_at_ms < SETTLED_MS:
            return None
        if ledger.streams.get(stream).desired_state is DesiredState.STOPPED:
            return None
        reason = f"it is replaced by a job of a newer version: {different}"
        job = ledger.jobs.request_stop(stream, reason, epoch=job.epoch, attributes={REPLACED_BY: ours})
    if job is None or REPLACED_BY not in job.attributes:
        return None
    return f"The receiver job (epoch {job.epoch}) is being replaced by one of this version: {different}."
