"""Identifies the DAG run that a task belongs to. The run id alone is not enough: after a run was deleted (``airflow db
clean``), a new run may have the same id, as a backfill's does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from airflow.sdk import Context


@dataclass(frozen=True, slots=True)
class RunIdentity:
    """A DAG run since it was last cleared. Attempts record it, so that the run can find its own attempts.

    ``clear_number`` is how often it was cleared. ``started`` is when it began after that (ISO 8601), None if Airflow
    does not report it.
    """

    run_id: str
    clear_number: int = 0
    started: str | None = None

    @property
    def attributes(self) -> dict[str, Any]:
        """The attributes by which an attempt records the run that began it."""
        reported = {"run_id": self.run_id, "clear_number": self.clear_number}
        return reported if self.started is None else {**reported, "run_started": self.started}

    def clear_of(self, attributes: Mapping[str, Any]) -> int | None:
        """The ``clear_number`` at which this run made the attempt with these attributes; None if another run did."""
        clear = int(attributes.get("clear_number") or 0)
        if attributes.get("run_id") != self.run_id or clear > self.clear_number:
            return None
        # Clearing gives a run another start time, so start times are compared only within the same clear.
        started = attributes.get("run_started", self.started)
        return clear if clear < self.clear_number or self.started in (None, started) else None

    def made(self, attributes: Mapping[str, Any]) -> bool:
        """Whether this run made the attempt with these attributes, since it was last cleared."""
        return self.clear_of(attributes) == self.clear_number


def run_identity(context: Context) -> RunIdentity:
    """The run that the task of this context belongs to."""
    run = context["dag_run"]
    started = None if run.start_date is None else run.start_date.astimezone(UTC).isoformat()
    return RunIdentity(run.run_id, run.clear_number or 0, started)


def of_schedule(context: Mapping[str, Any]) -> bool:
    """Whether the schedule started the task's run, not a person or a backfill."""
    return bool(context["dag_run"].run_type == "scheduled")


def is_automatic(context: Mapping[str, Any]) -> bool:
    """Whether the schedule or an asset event started the task's run, so that other runs follow it without a request."""
    return of_schedule(context) or bool(context["dag_run"].run_type == "asset_triggered")
