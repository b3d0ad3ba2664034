"""What people and scripts are told."""

from __future__ import annotations

import io
import json
from typing import Any

from examples.demo.observing import Snapshot
from examples.demo.proof import Place, Proof
from examples.demo.report import Report
from examples.demo.timings import STEPS, BatchTiming
from examples.demo.view import LinesView, bars, make_view
from rich.console import Console


def printed(report: Report) -> str:
    out = io.StringIO()
    report.print(Console(file=out, width=120))
    return out.getvalue()


def report(**changes: Any) -> Report:
    counts = {"produced": 1000, "held": 1000, "read": 1000, "indexed": 999, "dead_lettered": 1}
    steps = dict.fromkeys(("before the run", *STEPS, "between tasks"), 1.0)
    timings = [BatchTiming(10_000, 500, 7.0, steps), BatchTiming(20_000, 500, 9.0, steps)]
    return Report(Proof(**{**counts, **changes}), {"truncated JSON": 1}, 2, timings, {"proof": 1.5})


def test_the_table_of_a_proof_that_holds() -> None:
    text = printed(report())
    assert "Proved" in text
    for line in (
        "records",
        "1,000",
        "lost",
        "doubled",
        "median batch",
        "8.0 s",
        "worst batch",
        "9.0 s",
        "generate_batch",
    ):
        assert line in text


def test_the_table_of_a_proof_that_fails() -> None:
    text = printed(report(lost=[Place("flights", 0, 7)], indexed=998))
    assert "The proof fails" in text
    assert "1 lost: flights+0+7" in text
    assert "Proved" not in text


def test_json() -> None:
    fields = json.loads(json.dumps(report(lost=[Place("flights", 0, 7)]).to_dict()))
    assert fields["holds"] is False
    assert fields["lost"] == 1
    assert fields["batches"]["median_seconds"] == 8.0
    assert next(step["step"] for step in fields["batches"]["steps"]) == "before the run"


def test_a_report_without_batches() -> None:
    empty = Report(Proof(0, 0, 0, 0, 0), {}, 0, [], {})
    assert not empty.holds
    assert "The proof fails" in printed(empty)
    assert empty.to_dict()["batches"]["worst_seconds"] is None


def test_lines_where_there_is_no_terminal(make_batch: Any) -> None:
    out = io.StringIO()
    view = make_view(Console(file=out, width=80))
    assert isinstance(view, LinesView)
    with view:
        view.stream(Snapshot(100, 100, "running", 100, 99, 1, [make_batch()]))
        view.stream(Snapshot(100, 100, "running", 100, 99, 1, [make_batch(), make_batch()]))
    (line,) = out.getvalue().splitlines()
    assert (
        "received 100 (receiver job running), indexed 99, dead-lettered 1, batches: 1 completed, 1 cleaned up" in line
    )


def test_bars_where_there_is_one(make_batch: Any) -> None:
    out = io.StringIO()
    Console(file=out, width=120).print(bars(Snapshot(100, 50, error="the newest batch failed")))
    assert "50" in out.getvalue()
    assert "the newest batch failed" in out.getvalue()
