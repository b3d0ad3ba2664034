"""`headrace batches show STREAM TIME`: one batch, told from a real ledger."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from headrace.batch.allocation import allocate
from headrace.cli.main import app
from headrace.cli.output import time_text
from headrace.hooks.ledger import register
from headrace.ledger import Ledger
from headrace.stream import ConsoleOutput, KafkaInput, Stream
from headrace.stream_context import StreamContext

INTERVAL_MS = 10_000


@pytest.fixture
def stream(tmp_path: Path) -> Stream:
    return Stream(
        name="shop",
        inputs=KafkaInput(bootstrap_servers="127.0.0.1:1", topics="clicks"),
        outputs=[ConsoleOutput(), ConsoleOutput(id="second")],
        batch_interval="10 s",
        storage=tmp_path / "storage",
        ledger=f"sqlite:///{tmp_path}/ledger.db",
    )


@pytest.fixture
def batch_time_ms(stream: Stream) -> int:
    """A batch whose one output succeeded, whose other failed, and which was replayed."""
    with Ledger.open(stream.ledger) as ledger:
        register(ledger, stream)
        time_ms = ledger.now_ms() // INTERVAL_MS * INTERVAL_MS
        allocate(StreamContext(stream, ledger), time_ms)
        claim: dict[str, Any] = {"way": "connect", "lease_ms": 60_000}
        first = ledger.attempts.begin("shop", time_ms, holder="one", outputs=["console"], **claim)
        ledger.attempts.record_output(first, "console", {"printed": 7})
        ledger.attempts.complete(first, code_version="shop:show 3f9c2a10")
        second = ledger.attempts.begin("shop", time_ms, holder="two", outputs=["second"], **claim)
        ledger.attempts.fail(second, "the paper is out")
        replay = ledger.replays.begin(
            "shop", time_ms, target="v2", definition=stream.to_json(), outputs=["console"], holder="three", **claim
        )
        ledger.attempts.record_output(replay, "console", {"printed": 8})
        ledger.attempts.complete(replay)
    return time_ms


def shown(stream: Stream, batch_time_ms: int, *options: str) -> str:
    command = ["batches", "show", "shop", str(batch_time_ms)]
    result = CliRunner().invoke(app, [*command, "--ledger", stream.ledger, *options])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_people_read_what_became_of_each_output_and_attempt(stream: Stream, batch_time_ms: int) -> None:
    text = shown(stream, batch_time_ms)
    assert "failed. It holds 0 records in 0 blocks." in text
    assert "it is read from the log" in text
    lines = text.splitlines()
    (console,) = [line for line in lines if line.strip().startswith("console")]
    assert "completed" in console
    assert "printed 7" in console
    assert "shop:show 3f9c2a10" in console
    (failed,) = [line for line in lines if line.strip().startswith("second")]
    assert "the paper is out" in failed
    (replayed,) = [line for line in lines if " v2 " in line]
    assert "three" in replayed


def test_the_run_that_completed_what_another_one_failed_is_named(stream: Stream, batch_time_ms: int) -> None:
    assert "completed the batch at" not in shown(stream, batch_time_ms)
    with Ledger.open(stream.ledger) as ledger:
        claim: dict[str, Any] = {"way": "connect", "lease_ms": 60_000, "attributes": {"run_id": "scheduled__5"}}
        last = ledger.attempts.begin("shop", batch_time_ms, holder="later", **claim)
        ledger.attempts.record_output(last, "second", {})
        ledger.attempts.complete(last)
        ended_ms = ledger.attempts.of_batch("shop", batch_time_ms)[-1].ended_at_ms
    text = shown(stream, batch_time_ms)
    assert "The run two failed at" in text
    assert f"The run scheduled__5 completed the batch at {time_text(ended_ms)}." in text


def test_scripts_read_the_same(stream: Stream, batch_time_ms: int) -> None:
    reported = json.loads(shown(stream, batch_time_ms, "--json"))
    assert reported["origin"]["source"] == "log"
    assert [(output["output_id"], output["state"]) for output in reported["outputs"]] == [
        ("console", "completed"),
        ("second", "failed"),
    ]
    assert [attempt["target"] for attempt in reported["attempts"]] == ["", "", "v2"]


def test_the_definition_and_the_index_of_each_output_and_attempt_are_shown(stream: Stream, batch_time_ms: int) -> None:
    reported = json.loads(shown(stream, batch_time_ms, "--json"))
    assert [output["revision"] for output in reported["outputs"]] == [1, 1]
    assert [attempt["revision"] for attempt in reported["attempts"]] == [1, 1, None]
    assert "different definitions" not in shown(stream, batch_time_ms)
    with Ledger.open(stream.ledger) as ledger:
        revision = register(ledger, stream.model_copy(update={"parameters": {"deployed": "again"}}))
        claim: dict[str, Any] = {"way": "connect", "lease_ms": 60_000, "holder": "four", "revision": revision}
        again = ledger.attempts.begin("shop", batch_time_ms, outputs=["second"], **claim)
        ledger.attempts.record_output(again, "second", {"indexed": 7, "index": "orders-2026-11"})
        ledger.attempts.complete(again)
        register(ledger, stream)
    text = shown(stream, batch_time_ms)
    assert "The outputs of this batch were written under different definitions of the stream: 1, 2." in text
    (second,) = [line for line in text.splitlines() if line.strip().startswith("second")]
    assert second.split() == ["second", "completed", "4", "2", "orders-2026-11", "indexed", "7", "-", "-"]
    assert [output["revision"] for output in json.loads(shown(stream, batch_time_ms, "--json"))["outputs"]] == [1, 2]


def test_what_a_batch_took_over_is_shown_on_both_sides(stream: Stream) -> None:
    coalescing = stream.model_copy(update={"name": "shop", "coalesce": True})
    with Ledger.open(stream.ledger) as ledger:
        register(ledger, coalescing)
        last_ms = ledger.now_ms() // INTERVAL_MS * INTERVAL_MS
        first_ms = last_ms - INTERVAL_MS
        ledger.allocations.allocate(
            "shop", last_ms, manifest_uri="m", manifest_sha256="0", blocks_expected=0, absorb=[first_ms]
        )
    assert "It took over the blocks of 1 earlier batch time(s) that no run had taken" in shown(stream, last_ms)
    assert "took its blocks over." in shown(stream, first_ms)


def test_a_time_that_is_not_allocated_is_shown_too(stream: Stream, batch_time_ms: int) -> None:
    later_ms = batch_time_ms + INTERVAL_MS
    assert "is not allocated yet; the log holds nothing for it" in shown(stream, later_ms)
    assert json.loads(shown(stream, later_ms, "--json")) == {"batch": None, "waiting": None}


@pytest.mark.parametrize("option", ["", "--json"])
def test_a_time_that_is_no_batch_time_is_refused(stream: Stream, batch_time_ms: int, option: str) -> None:
    command = ["batches", "show", "shop", str(batch_time_ms + 1), "--ledger", stream.ledger, *filter(None, [option])]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 2
    assert "BATCH_TIME" in result.output
    assert f"the one before it is {time_text(batch_time_ms)}" in " ".join(result.output.replace("│", "").split())
