"""Measures how long each step of a batch takes, from Airflow's task instances."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from statistics import median
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.ledger.batches.tables import BatchRow

STEPS = ("await_blocks", "allocate_blocks", "generate_batch", "checkpoint", "cleanup")
WAITING = "before the run"
"""From the batch time to the start of its first task: the scheduler, and batches before it."""
BETWEEN = "between tasks"

_PAGE = 100


@dataclass(frozen=True, slots=True)
class BatchTiming:
    """Seconds of one batch, from its batch time to the end of its last task: in total and by step."""

    batch_time_ms: int
    records: int
    total: float
    steps: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class StepTiming:
    """Seconds of one step over all batches."""

    step: str
    median: float
    worst: float
    share: float
    """The step's share of the total time of all batches, from 0 to 1."""


def timing(batch: BatchRow, tasks: Iterable[Mapping[str, Any]]) -> BatchTiming | None:
    """The timing of a batch from its run's task instances (REST API objects); None until all tasks have ended."""
    at = batch.batch_time_ms / 1000
    spans: dict[str, tuple[float, float]] = {}
    for task in tasks:
        started, ended = _time(task.get("start_date")), _time(task.get("end_date"))
        if started is None or ended is None:
            return None
        # A run begins up to a second before its batch time, and waits for it.
        started, ended = max(started, at), max(ended, at)
        # The group of the outputs' tasks lasts from the first task's start to the last task's end.
        step = task["task_id"].partition(".")[0]
        first, last = spans.get(step, (started, ended))
        spans[step] = (min(first, started), max(last, ended))
    if not all(step in spans for step in STEPS):
        return None
    first = min(started for started, _ in spans.values())
    last = max(ended for _, ended in spans.values())
    steps = {WAITING: first - at}
    steps |= {step: spans[step][1] - spans[step][0] for step in STEPS}
    total = last - at
    steps[BETWEEN] = max(total - sum(steps.values()), 0.0)
    steps = {step: round(seconds, 3) for step, seconds in steps.items()}
    return BatchTiming(batch.batch_time_ms, batch.records, round(total, 3), steps)


def by_step(timings: Iterable[BatchTiming]) -> list[StepTiming]:
    """The timing of each step over all batches, in the order of the steps."""
    timings = list(timings)
    whole = sum(one.total for one in timings) or 1.0
    found = []
    for step in (WAITING, *STEPS, BETWEEN):
        seconds = [one.steps[step] for one in timings]
        if seconds:
            found.append(StepTiming(step, round(median(seconds), 3), max(seconds), round(sum(seconds) / whole, 3)))
    return found


def read_timings(api: Any, dag_id: str, batches: Iterable[BatchRow]) -> list[BatchTiming]:
    """The timings of these batches, from the tasks of their runs; ``api`` is a
    ``headrace.devstack.airflow_api.AirflowApi``."""
    wanted = {batch.batch_time_ms: batch for batch in batches}
    by_run: dict[str, list[Mapping[str, Any]]] = {}
    for task in _pages(api, f"/dags/{dag_id}/dagRuns/~/taskInstances", "task_instances"):
        by_run.setdefault(task["dag_run_id"], []).append(task)
    found = {}
    for run in _pages(api, f"/dags/{dag_id}/dagRuns", "dag_runs"):
        ended = _time(run["data_interval_end"])
        batch = wanted.get(round(ended * 1000)) if ended is not None else None
        one = timing(batch, by_run.get(run["dag_run_id"], ())) if batch is not None else None
        if one is not None:
            found[one.batch_time_ms] = one
    return [found[at] for at in sorted(found)]


def _pages(api: Any, path: str, items: str) -> Iterable[Mapping[str, Any]]:
    offset = 0
    while True:
        page = api.request("GET", path, params={"limit": _PAGE, "offset": offset})
        yield from page[items]
        offset += len(page[items])
        if not page[items] or offset >= page["total_entries"]:
            return


def _time(text: str | None) -> float | None:
    return None if text is None else datetime.fromisoformat(text).timestamp()
