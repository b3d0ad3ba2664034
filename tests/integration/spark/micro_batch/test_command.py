"""The batch's command, run in the tests' process."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.integration.spark.micro_batch.conftest import Make

from headrace.spark.attempts.attempt import BatchResult
from headrace.spark.attempts.batch_attempt import BatchAttempt
from headrace.spark.attempts.batch_command import main
from headrace.stream import (
    ConsoleOutput,
)


@pytest.fixture
def command() -> Iterator[Callable[..., int]]:
    """Runs the batch's command in this process."""
    before = signal.getsignal(signal.SIGTERM)

    def run_command(batch: Any, time_ms: int, *more: str) -> int:
        return main(
            ["--ledger", batch.stream.ledger, "--stream", "clicks", "--batch-time", str(time_ms), "--json", *more]
        )

    yield run_command
    signal.signal(signal.SIGTERM, before)


def test_the_command_runs_only_the_given_outputs(
    command: Callable[..., int], make_batch_ledger: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    batch = make_batch_ledger(outputs=(ConsoleOutput(id="first"), ConsoleOutput(id="second")))
    time_ms = batch.allocate()
    assert command(batch, time_ms, "--outputs", "second") == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (list(result["outputs"]), result["state"]) == (["second"], "allocated")
    assert command(batch, time_ms) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (list(result["outputs"]), result["state"]) == (["first"], "completed")
    assert command(batch, time_ms, "--outputs", "second") == 0, "done before is done"
    assert command(batch, time_ms, "--outputs", "third") == 1
    assert "no output 'third'" in capsys.readouterr().err


def test_the_command_refuses_parameters_before_taking_the_batch(
    command: Callable[..., int], make_batch_ledger: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    batch = make_batch_ledger(parameters={"threshold": 3})
    time_ms = batch.allocate()
    for given in ('{"limit": 1}', "[]", "{"):
        assert command(batch, time_ms, "--parameters", given) == 1
    assert "has no parameter limit. Its parameters are threshold" in capsys.readouterr().err
    assert not batch.ledger.attempts.of_batch("clicks", time_ms)
    assert command(batch, time_ms, "--parameters", '{"threshold": 1}') == 0
    (attempt,) = batch.ledger.attempts.of_batch("clicks", time_ms)
    assert attempt.attributes["parameters"] == {"threshold": 1}


def test_an_attempt_begun_by_the_caller_has_its_rows_parameters(
    command: Callable[..., int], make_batch_ledger: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = make_batch_ledger(parameters={"threshold": 3, "limit": 1})
    given: list[dict[str, Any]] = []

    def noted(attempt: BatchAttempt) -> BatchResult:
        given.append(dict(attempt.parameters))
        return BatchResult("clicks", time_ms, 1, records=0, blocks=0, seconds=0.0)

    monkeypatch.setattr("headrace.spark.attempts.batch_command.run_attempt", noted)
    time_ms = batch.allocate()
    attempt = batch.ledger.attempts.begin(
        "clicks", time_ms, holder="test", way="submit", lease_ms=30_000, attributes={"parameters": {"threshold": 5}}
    )
    with pytest.raises(SystemExit):
        command(batch, time_ms, "--attempt", str(attempt.number), "--parameters", "{}")
    assert command(batch, time_ms, "--attempt", str(attempt.number)) == 0
    assert given == [{"threshold": 5, "limit": 1}]
