"""Which run of Airflow's a task belongs to. The id alone does not tell: a run that was deleted (``airflow db clean``)
may come again by the same id, as a backfill's does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any
from uuid import UUID

if TYPE_CHECKING:
    from airflow.sdk import Context


@dataclass(frozen=True, slots=True)
class RunIdentity:
    """A DAG run since it was last cleared. Attempts keep it, so that the run knows its own work.

    ``clear_number`` is how often it was cleared. ``started`` is when it began since then (ISO 8601), None where Airflow
    does not tell. ``existed_ms`` is the earliest time at which it is known to have been there.
    """

    run_id: str
    clear_number: int = 0
    started: str | None = None
    existed_ms: int | None = field(default=None, compare=False)

    @property
    def attributes(self) -> dict[str, Any]:
        """What an attempt keeps of the run that began it."""
        reported = {"run_id": self.run_id, "clear_number": self.clear_number}
        return reported if self.started is None else {**reported, "run_started": self.started}

    def clear_of(self, attributes: Mapping[str, Any]) -> int | None:
        """The clear in which this run made the attempt with these attributes; None: another run made it."""
        clear = int(attributes.get("clear_number") or 0)
        if attributes.get("run_id") != self.run_id or clear > self.clear_number:
            return None
        # Clearing gives a run another start, so that those of earlier clears cannot be compared.
        started = attributes.get("run_started", self.started)
        return clear if clear < self.clear_number or self.started in (None, started) else None

    def made(self, attributes: Mapping[str, Any]) -> bool:
        """Whether this run made the attempt with these attributes, since it was last cleared."""
        return self.clear_of(attributes) == self.clear_number

    def existed(self, at_ms: int) -> bool:
        """Whether the run was there at this time, as far as it is known."""
        return self.existed_ms is None or self.existed_ms <= at_ms


def run_identity(context: Context) -> RunIdentity:
    """The run that the task of this context belongs to."""
    run = context["dag_run"]
    # Airflow does not tell a task when its run was made. The run's task instances are made with it, and their ids
    # (UUID 7) begin with the time; one that is tried again has another.
    known = [_made_ms(context["ti"].id)]
    started = None
    if run.start_date is not None:
        started = run.start_date.astimezone(UTC).isoformat()
        known.append(_to_ms(run.start_date))
    times = [at_ms for at_ms in known if at_ms is not None]
    return RunIdentity(run.run_id, run.clear_number or 0, started, min(times, default=None))


def of_schedule(context: Mapping[str, Any]) -> bool:
    """Whether the clock has begun the task's run: nobody asked for it, and no backfill."""
    return bool(context["dag_run"].run_type == "scheduled")


def goes_on_by_itself(context: Mapping[str, Any]) -> bool:
    """Whether other runs follow the task's run by themselves: those of the clock, and of what was received."""
    return of_schedule(context) or bool(context["dag_run"].run_type == "asset_triggered")


def _made_ms(task_instance_id: UUID) -> int | None:
    return task_instance_id.int >> 80 if task_instance_id.version == 7 else None


def _to_ms(time: datetime) -> int:
    return int(time.timestamp() * 1000)
