"""How times and durations are told: batch times in ISO 8601 and UTC, durations in seconds, whatever their size."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import headrace.cli
from headrace.cli.output import duration_text, echo, print_json, print_table
from headrace.clock import time_text


@pytest.mark.parametrize(
    ("at_ms", "reported"),
    [
        (1_430_647_180_000, "2015-05-03T09:59:40Z"),
        (1_430_647_180_123, "2015-05-03T09:59:40.123Z"),
        (1_430_647_180_100, "2015-05-03T09:59:40.100Z"),
        (0, "1970-01-01T00:00:00Z"),
        (None, "-"),
    ],
)
def test_a_batch_time_has_milliseconds_where_it_has_any(at_ms: int | None, reported: str) -> None:
    assert time_text(at_ms) == reported


@pytest.mark.parametrize(
    ("took_ms", "reported"),
    [
        (0, "0.0 s"),
        (40, "0.0 s"),
        (900, "0.9 s"),
        (1_000, "1.0 s"),
        (60_000, "60.0 s"),
        (3_600_000, "3600.0 s"),
        (86_400_000, "86400.0 s"),
    ],
)
def test_durations_are_in_seconds_so_that_they_compare(took_ms: int, reported: str) -> None:
    assert duration_text(5_000, 5_000 + took_ms) == reported


def test_what_has_not_ended_has_no_duration() -> None:
    assert duration_text(5_000, None) == "-"
    assert duration_text(None, 5_000) == "-"


def test_json_has_each_time_in_iso_8601_beside_its_milliseconds(capsys: pytest.CaptureFixture[str]) -> None:
    print_json([{"batch_time_ms": 1_700_000_000_200, "lease_ms": 30_000, "ended_at_ms": None}, {"inner": {"at_ms": 0}}])
    assert json.loads(capsys.readouterr().out) == [
        {
            "batch_time_ms": 1_700_000_000_200,
            "batch_time": "2023-11-14T22:13:20.200Z",
            "lease_ms": 30_000,
            "ended_at_ms": None,
        },
        {"inner": {"at_ms": 0}},
    ]


def test_json_has_no_times_added_to_rows_of_a_user(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"event_time_ms": 1_700_000_000_200, "at": {"seen_ms": 1_700_000_000_200}}]
    print_json({"batch_time_ms": 1_700_000_000_200, "rows": rows}, without_times=("rows",))
    printed = json.loads(capsys.readouterr().out)
    assert printed["rows"] == rows
    assert printed["batch_time"] == "2023-11-14T22:13:20.200Z"


def test_json_has_numbers_that_are_not_finite_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    print_json([float("nan"), {"inner": float("inf")}, -float("inf"), 0.5])
    printed = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert printed == ["NaN", {"inner": "Infinity"}, "-Infinity", 0.5]


def test_text_of_others_does_not_control_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    bad = "a\x1b]0;title\x07b\x9b2Jc\u202ed"
    echo(f"Stream {bad}")
    echo(f"Error: {bad}", err=True)
    print_table(["error"], [[bad]])
    printed = capsys.readouterr()
    for text in (printed.out, printed.err):
        assert not [character for character in text if not character.isprintable() and character != "\n"]
        assert r"a\x1b]0;title\x07b\x9b2Jc\u202ed" in text


def test_commands_print_by_no_other_way() -> None:
    folder = Path(headrace.cli.__file__).parent
    calls = {path.name: path.read_text().count("typer.echo(") for path in folder.glob("*.py")}
    # JSON that is for a file or a server, without times added to it.
    others = {"mapping.py": 1, "streams.py": 1}
    assert {name: number for name, number in calls.items() if number} == {"output.py": 2, **others}
