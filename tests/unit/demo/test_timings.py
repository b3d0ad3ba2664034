"""Where a batch's time went."""

from __future__ import annotations

from typing import Any

from examples.demo.timings import BETWEEN, STEPS, WAITING, by_step, read_timings, timing


def iso(seconds: float) -> str:
    return f"1970-01-01T00:00:{seconds:06.3f}Z"


def task(task_id: str, started: float | None, ended: float | None, run: str = "run") -> dict[str, Any]:
    return {
        "task_id": task_id,
        "dag_run_id": run,
        "start_date": None if started is None else iso(started),
        "end_date": None if ended is None else iso(ended),
    }


def tasks(at: float, run: str = "run") -> list[dict[str, Any]]:
    """Five tasks of half a second, half a second apart, the first one second after ``at``."""
    ids = [step.replace("generate_batch", "generate_batch.one") for step in STEPS]
    return [task(task_id, at + 1 + number, at + 1.5 + number, run) for number, task_id in enumerate(ids)]


def test_a_batch(make_batch: Any) -> None:
    measured = timing(make_batch(), tasks(10.0))
    assert measured is not None
    assert measured.total == 5.5
    assert measured.steps[WAITING] == 1.0
    assert measured.steps["generate_batch"] == 0.5
    assert measured.steps[BETWEEN] == 2.0
    assert sum(measured.steps.values()) == measured.total


def test_what_a_run_does_before_its_batch_time_does_not_count(make_batch: Any) -> None:
    measured = timing(make_batch(), tasks(8.7))
    assert measured is not None
    assert measured.total == 4.2
    assert measured.steps[WAITING] == 0.0
    assert measured.steps["await_blocks"] == 0.2
    assert round(sum(measured.steps.values()), 3) == measured.total


def test_a_batch_whose_cleanup_has_not_ended_has_no_timing(make_batch: Any) -> None:
    assert timing(make_batch(), [*tasks(10.0)[:-1], task("cleanup", 15.0, None)]) is None


def test_outputs_that_are_written_side_by_side_count_once(make_batch: Any) -> None:
    side_by_side = [*tasks(10.0), task("generate_batch.two", 13.2, 14.0)]
    measured = timing(make_batch(), side_by_side)
    assert measured is not None
    assert measured.steps["generate_batch"] == 1.0
    assert timing(make_batch(), [*tasks(10.0), task("generate_batch.two", 13.2, None)]) is None


def test_by_step(make_batch: Any) -> None:
    one, two = timing(make_batch(), tasks(10.0)), timing(make_batch(batch_time_ms=20_000), tasks(22.0))
    assert one is not None
    assert two is not None
    steps = {step.step: step for step in by_step([one, two])}
    assert steps[WAITING].median == 2.0
    assert steps[WAITING].worst == 3.0
    assert round(sum(step.share for step in steps.values()), 2) == 1.0


def test_no_batches_have_no_steps() -> None:
    assert by_step([]) == []


class Api:
    """Airflow's API in pages of one item each."""

    def __init__(self, **items: list[dict[str, Any]]) -> None:
        self._items = items

    def request(self, _method: str, path: str, params: dict[str, int]) -> dict[str, Any]:
        name = "task_instances" if path.endswith("taskInstances") else "dag_runs"
        items = self._items[name]
        return {name: items[params["offset"] : params["offset"] + 1], "total_entries": len(items)}


def test_runs_and_batches_meet_by_the_end_of_the_data_interval(make_batch: Any) -> None:
    api = Api(
        task_instances=[*tasks(10.0, "a"), *tasks(20.0, "b")],
        dag_runs=[
            {"dag_run_id": "a", "data_interval_end": iso(10)},
            {"dag_run_id": "b", "data_interval_end": iso(20)},
            {"dag_run_id": "without", "data_interval_end": None},
        ],
    )
    timings = read_timings(api, "flights_batches", [make_batch(batch_time_ms=20_000, records=7)])
    assert [(one.batch_time_ms, one.records, one.total) for one in timings] == [(20_000, 7, 5.5)]
