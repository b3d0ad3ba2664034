"""The benchmarks' figures: what misses a bound, and how the page shows them."""

from __future__ import annotations

import json
import runpy
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
from benchmarks import __main__ as benchmarks
from benchmarks.latency import STREAM, begin, dag_file
from benchmarks.link_faults import longest_pause, too_slow
from benchmarks.measures import Measure, Speed, Unit, print_measures
from benchmarks.report import BEGIN, END, Row, write_page


@pytest.mark.parametrize(
    "options", [{}, {"single_task": True, "batch_by": "timestamp", "postgres": True}], ids=["default", "others"]
)
def test_the_dag_file_of_the_benchmarks_defines_their_stream(options: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "orders.py"
    path.write_text(dag_file(**options))
    found = runpy.run_path(str(path))
    assert found["stream"].name == STREAM
    assert found["batches"].dag_id == f"{STREAM}_batches"
    assert found["again"].dag_id == f"{STREAM}_replay_again"
    assert found["stream"].batch_by == options.get("batch_by", "arrival")


def test_a_part_that_fails_costs_no_figures_of_the_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(part: str, rounds: int) -> list[Measure]:
        if part == "scan":
            raise subprocess.CalledProcessError(1, part)
        return [Measure(part, "s", (1.0,), "limit", (2.0,))]

    monkeypatch.setattr(benchmarks, "run", run)
    with pytest.raises(SystemExit, match=r"Failed: scan\. Missed bounds: none\."):
        benchmarks.main(["idle", "scan", "restart"], rounds=1, as_json=True, write=False)
    printed = json.loads(capsys.readouterr().out)
    assert [figure["name"] for figure in printed["figures"]] == ["idle", "restart"]
    assert printed["failed"] == ["scan"]


@pytest.mark.parametrize("batches", [True, False])
def test_a_benchmarks_batches_run_unless_it_lets_them_run_later(batches: bool) -> None:
    unpaused: list[str] = []
    api = SimpleNamespace(wait_for_dag=lambda _: None, unpause=unpaused.append)
    stack: Any = SimpleNamespace(
        start=lambda: None,
        kafka=SimpleNamespace(bootstrap_servers="nowhere:9"),
        elasticsearch=SimpleNamespace(),
        airflow=SimpleNamespace(api=lambda: api),
    )
    with patch("benchmarks.latency.create_topic"):
        begin(stack, batches=batches)
    assert unpaused == [f"{STREAM}_receiver", *([f"{STREAM}_batches"] if batches else [])]


def row(unit: Unit, figures: tuple[float, ...], others: tuple[float, ...], bound: float | None) -> Row:
    return Row(Measure("work", unit, figures, "limit", others), goal=0.8, bound=bound)


def test_the_ratio_is_the_median_of_the_rounds() -> None:
    measure = Measure("work", "records/s", (10.0, 50.0, 60.0), "limit", (100.0, 100.0, 100.0))
    assert measure.ratio == 0.5
    assert measure.ratios == [0.1, 0.5, 0.6]
    assert Measure.from_dict({"name": "w", "unit": "s", "figures": [1.0], "other": "o", "others": [2.0]}).ratio == 0.5


def test_figures_come_with_the_machines_speed(capsys: pytest.CaptureFixture[str]) -> None:
    measure = Measure("work", "s", (1.0,), "limit", (2.0,))
    print_measures([measure], as_json=True)
    (fields,) = json.loads(capsys.readouterr().out)
    found = Measure.from_dict(fields)
    assert found.speed is not None
    assert found.speed.sha256_mb > 1 and found.speed.fdatasync_ms > 0
    assert Row.of(found, {}).cells()[-1] == str(found.speed)
    assert str(Speed(1234.5, 0.8123)) == "SHA-256 1,234 MB/s, fdatasync 0.812 ms"
    print_measures([measure], as_json=False)
    assert "This machine: SHA-256" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("unit", "figure", "bound", "is_missed"),
    [
        ("records/s", 49.0, 0.5, True),
        ("records/s", 51.0, 0.5, False),
        ("s", 151.0, 1.5, True),
        ("s", 149.0, 1.5, False),
        ("CPU s per million records", 151.0, 1.5, True),
        ("records/s", 1.0, None, False),
    ],
)
def test_a_bound_is_missed_on_its_bad_side(unit: Unit, figure: float, bound: float | None, is_missed: bool) -> None:
    assert row(unit, (figure,), (100.0,), bound).is_missed is is_missed


def test_bounds_are_found_by_name_and_what_stands_beside() -> None:
    measure = Measure("work", "s", (1.0,), "limit", (1.0,))
    assert Row.of(measure, {"work / limit": {"goal": 0.8, "bound": 0.5}}) == Row(measure, 0.8, 0.5)
    assert Row.of(measure, {"work / peer": {"goal": 0.8, "bound": 0.5}}) == Row(measure, None, None)


def test_the_page_keeps_its_text_and_gets_the_new_figures(tmp_path: Path) -> None:
    page = tmp_path / "performance.md"
    (tmp_path / "images").mkdir()
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    rows = [row("records/s", (10.0, 50.0, 60.0), (100.0, 100.0, 100.0), 0.4)]
    write_page(rows, "2 cores", tmp_path)
    write_page(rows, "2 cores", tmp_path)
    text = page.read_text()
    assert text.startswith(f"before\n{BEGIN}") and text.endswith(f"{END}\nafter\n")
    assert "old" not in text
    assert text.count("| work | 50 records/s | limit | 100 | 0.50 | 0.10 to 0.60 | at least 0.8 |  |") == 1
    assert (tmp_path / "images" / "performance.svg").read_text().lstrip().startswith("<?xml")


@pytest.mark.parametrize(
    ("begin", "end", "pause"),
    [(0.0, 30.0, 20.0), (6.0, 8.0, 20.0), (26.0, 30.0, 10.0), (36.0, 40.0, 15.0)],
    ids=["within", "longer than the time", "not before it", "not over yet"],
)
def test_a_pause_counts_whole_if_it_is_partly_in_the_time(
    begin: float, end: float, pause: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.monotonic", lambda: 50.0)
    steps = {
        ("clicks", 0): [(0.0, 1), (5.0, 2), (25.0, 3), (35.0, 4)],
        ("clicks", 1): [(time, 1) for time in range(36)],
    }
    assert longest_pause(steps, begin, end) == pause


def test_a_stream_that_goes_on_after_the_limit_is_named() -> None:
    figures = {"in time": (19.9,), "once too late": (3.0, 20.1), "pause of Kafka itself": (31.0,)}
    measures = [Measure(name, "s", each, "limit", (20.0,) * len(each)) for name, each in figures.items()]
    assert too_slow(measures) == ["once too late"]
