"""One batch of a seeded ledger as the API, the command (JSON and table) and the metrics show it: the same values."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from tests.support.seeded_ledger import SITUATIONS
from tests.unit.ui.api.conftest import Api, api, seeded
from tests.unit.views.metrics.scraping import scrape, value
from typer.testing import CliRunner

from headrace.cli.main import app
from headrace.clock import time_text

__all__ = ["api", "seeded"]

STREAMS = ("orders", *(f"orders-{number}" for number in range(2, len(SITUATIONS) + 1)))


def shown(api: Api, stream: str, time: str, *options: str) -> str:
    result = CliRunner().invoke(app, ["batches", "show", stream, time, "--ledger", api.url, *options])
    assert result.exit_code == 0, result.output
    return result.output


def tables(text: str) -> dict[str, list[dict[str, str]]]:
    """The rows of each table, by its first heading."""
    found: dict[str, list[dict[str, str]]] = {}
    lines = text.splitlines()
    for number, line in enumerate(lines[:-1]):
        if set(lines[number + 1].strip()) != {"─"}:
            continue
        headings = re.split(r"\s{2,}", line.strip())
        rows = found[headings[0]] = []
        for row in lines[number + 2 :]:
            if not row.strip():
                break
            rows.append(dict(zip(headings, re.split(r"\s{2,}", row.strip()), strict=True)))
    return found


def seconds(rows: Any, begin: str, end: str) -> float | None:
    """The time between two of a batch; None if the later one is not there, as in a seeded batch that started late."""
    if rows[begin] is None or rows[end] is None or rows[end] < rows[begin]:
        return None
    return round((rows[end] - rows[begin]) / 1000, 3)


def assert_same(answer: Any, rows: Any, text: str) -> None:
    """What the API answers about a batch is in the rows of `batches show --json` and in its table."""
    batch, table = rows["batch"], tables(text)
    assert f"Batch {time_text(batch['batch_time_ms'])} of {batch['stream']}: {answer['state']}. " in text
    assert f"It holds {answer['records']:,} records in {batch['blocks']:,} blocks." in text
    names = ("state", "records", "built", "late_records", "code_version", "revision", "absorbed_by_ms")
    assert {name: answer[name.removesuffix("_ms")] for name in names} == {name: batch[name] for name in names}
    assert (answer["attempts"], answer["absorbed"]) == (batch["attempt"], len(batch["absorbed"]))
    assert answer["error"] is None or f"Error: {answer['error']}" in text
    if batch["state"] == "completed":
        delays = {
            "scheduling_delay": seconds(batch, "batch_time_ms", "started_at_ms"),
            "processing_time": seconds(batch, "started_at_ms", "completed_at_ms"),
            "total_delay": seconds(batch, "batch_time_ms", "completed_at_ms"),
        }
        assert {name: answer[name] for name in delays} == delays
    offsets = [
        (block_range["from_offset"], block_range["until_offset"], block_range["records"])
        for block_range in answer["ranges"]
    ]
    assert offsets == [(each["from_offset"], each["until_offset"], each["records"]) for each in rows["inputs"]]
    numbers = [
        tuple(int(row[name].replace(",", "")) for name in ("from", "until", "records")) for row in table["input"]
    ]
    assert numbers == offsets
    own = [output for output in answer["outputs"] if output["target"] is None]
    assert [(row["output"], row["state"]) for row in table["output"]] == [
        (output["id"], output["state"]) for output in own
    ]
    recorded = {output["attempt"]: output["counts"] for output in own if output["attempt"] is not None}
    assert recorded == {output["attempt"]: output["counts"] for output in rows["outputs"]}
    attempts = [(attempt["number"], attempt["state"], attempt["error"]) for attempt in answer["all_attempts"]]
    assert attempts == [(attempt["number"], attempt["state"], attempt["error"]) for attempt in rows["attempts"]]
    for row, each in zip(table["attempt"], answer["all_attempts"], strict=True):
        took = "-" if each["duration"] is None else f"{each['duration']:.1f} s"
        assert (row["attempt"], row["state"], row["took"], row["holder"]) == (
            str(each["number"]),
            each["state"],
            took,
            each["holder"],
        )


@pytest.mark.parametrize("stream", STREAMS)
def test_last_completed_batch_is_the_same_everywhere(api: Api, stream: str) -> None:
    """The page, the command and the metrics agree."""
    listed = next(each for each in api.get("/streams")["streams"] if each["name"] == stream)
    last = listed["last_completed_batch"]
    answer = api.get(f"/streams/{stream}/batches/{last['batch_time']}")
    assert {name: answer[name] for name in last} == last
    rows = json.loads(shown(api, stream, last["batch_time"], "--json"))
    assert_same(answer, rows, shown(api, stream, last["batch_time"]))
    with api.ledger() as ledger:
        samples = scrape(ledger)
    delays = {
        "scheduling_delay": "headrace_last_batch_scheduling_delay_seconds",
        "processing_time": "headrace_last_batch_processing_seconds",
        "total_delay": "headrace_last_batch_total_delay_seconds",
    }
    of_stream = (("stream", stream),)
    assert {name: samples.get((metric, of_stream)) for name, metric in delays.items()} == {
        name: answer[name] for name in delays
    }
    assert value(samples, "headrace_last_batch_records", stream=stream) == answer["records"]
    last_ms = value(samples, "headrace_last_completed_batch_timestamp_seconds", stream=stream) * 1000
    assert last_ms == rows["batch"]["batch_time_ms"]


def test_unfinished_batches_are_the_same_in_page_and_command(api: Api) -> None:
    states = set()
    for stream in STREAMS:
        for line in api.get(f"/streams/{stream}/batches", limit=20)["batches"]:
            if line["state"] != "completed":
                states.add(line["state"])
                answer = api.get(f"/streams/{stream}/batches/{line['batch_time']}")
                rows = json.loads(shown(api, stream, line["batch_time"], "--json"))
                assert_same(answer, rows, shown(api, stream, line["batch_time"]))
    assert "failed" in states
