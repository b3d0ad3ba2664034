"""The log files of receiver jobs: one for each process that is started, in a folder for each application."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

from airflow.configuration import conf

# A job that cannot start is retried until somebody intervenes, and each try writes a log file.
_KEEP_LOGS = 30


def log_folder(application: str) -> Path:
    """Where the receiver jobs of this application (`Stream.application`) write their logs on this host."""
    folder = conf.get("headrace", "log_folder", fallback="")
    if folder:
        return Path(folder) / application
    return Path(conf.get_mandatory_value("logging", "base_log_folder")) / "headrace" / application


def log_file(application: str) -> Path:
    """The path of a new log file for a job that starts now. Deletes the oldest log files of earlier jobs, and the
    compressed parts of all but the last job."""
    from headrace.spark.job_log import parts_of

    earlier = sorted(log_folder(application).glob("receiver-*.log"))
    for old in earlier[:-1]:
        for part in parts_of(old):
            part.unlink(missing_ok=True)
    for old in earlier[: -_KEEP_LOGS + 1]:
        old.unlink(missing_ok=True)
    return log_folder(application) / f"receiver-{datetime.now(UTC):%Y%m%dT%H%M%S.%fZ}.log"


def newest_log(application: str) -> str | None:
    """The log of the job that was started last on this host."""
    logs = sorted(log_folder(application).glob("receiver-*.log"))
    return str(logs[-1]) if logs else None
