"""A receiver job that runs with older versions than the task that looks at it: it is replaced once, and in order.

A job outlives the tasks that start it, so after an upgrade it runs with what was installed before. Batches of another
version cannot run in its application: functions travel there by cloudpickle, and the log's reader with them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from packaging.version import InvalidVersion, Version

if TYPE_CHECKING:
    from headrace.ledger import Ledger

# While only some workers are upgraded, an older one may start the job again. That job then stays for a while.
SETTLED_MS = 300_000
# What decides which of two processes is newer; the first that differs.
_ORDER = ("headrace", "pyspark", "python")


def is_newer(ours: Mapping[str, str], theirs: Mapping[str, str]) -> bool:
    """Whether these versions are newer than those, so that of two that differ one is: they never replace each other."""
    for name in _ORDER:
        if ours.get(name) != theirs.get(name):
            try:
                return Version(ours.get(name, "")) > Version(theirs.get(name, ""))
            except InvalidVersion:
                return False
    return False


def replace_older_job(ledger: Ledger, stream: str) -> str | None:
    """Ask the stream's job to stop where it is older than this process, so that its DAG starts the next one.

    It is asked once an epoch, not before it has lived for ``SETTLED_MS``, and not where the stream is to be stopped.

    Returns:
        Why a batch had better wait for the next job; None where no job is being replaced by one of this version.
    """
    from headrace.ledger.states import DesiredState
    from headrace.spark.versions import REPLACED_BY, current_versions, differences

    job = ledger.jobs.current(stream)
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
