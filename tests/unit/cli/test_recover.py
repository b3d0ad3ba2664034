"""`headrace streams recover`, on a stream's folder without its ledger, and beside it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from headrace.batch.allocation import allocate
from headrace.batch.checkpoint_writer import write_checkpoint
from headrace.cli.main import app
from headrace.clock import ManualClock
from headrace.ledger import Ledger
from headrace.stream import ConsoleOutput, KafkaInput, Stream
from headrace.stream_context import StreamContext

LONG_AGO_MS = 1_700_000_000_000


@pytest.fixture
def stream(tmp_path: Path) -> Stream:
    """A stream whose ledger was lost long ago."""
    made = Stream(
        name="shop",
        inputs=KafkaInput(id="clicks", bootstrap_servers="127.0.0.1:1", topics="clicks"),
        outputs=ConsoleOutput(),
        batch_interval="10 s",
        storage=tmp_path / "storage",
        ledger=f"sqlite:///{tmp_path}/ledger.db",
    )
    clock = ManualClock(LONG_AGO_MS)
    with Ledger.open(f"sqlite:///{tmp_path}/lost.db", clock=clock) as ledger:
        ledger.streams.register("shop", made.to_json(), batch_interval_ms=10_000, block_interval_ms=200)
        allocate(StreamContext(made, ledger), LONG_AGO_MS)
        attempt = ledger.attempts.begin("shop", LONG_AGO_MS, holder="task", way="connect", lease_ms=1)
        ledger.attempts.record_output(attempt, "console", {})
        ledger.attempts.complete(attempt)
        write_checkpoint(StreamContext(made, ledger), LONG_AGO_MS)
    return made


def run(stream: Stream, *arguments: str) -> Result:
    return CliRunner().invoke(app, ["streams", "recover", "shop", "--ledger", stream.ledger, *arguments])


def test_a_lost_ledger_is_rebuilt_after_a_dry_run_that_makes_none(stream: Stream, tmp_path: Path) -> None:
    storage = ("--storage", stream.storage.url)
    tried = run(stream, *storage, "--dry-run")
    assert tried.exit_code == 0, tried.output
    assert "Would write the ledger from checkpoints/" in tried.stdout
    assert not (tmp_path / "ledger.db").exists()
    done = run(stream, *storage, "--json")
    assert done.exit_code == 0, done.output
    answer = json.loads(done.stdout)
    assert (answer["dry_run"], answer["counts"]["batches_completed"]) == (False, 1)
    assert set(answer["steps"]) == {"ledger_rebuilt", "checkpoint_written"}
    assert "shop: reading the log" in done.stderr
    with Ledger.open(stream.ledger, create=False) as ledger:
        assert ledger.batches.get("shop", LONG_AGO_MS).completed_at_ms == LONG_AGO_MS
    # With the ledger there, it knows where the folder is.
    assert run(stream).stdout == "Nothing of stream shop is lost.\n"


def test_without_ledger_its_folder_must_be_named(stream: Stream) -> None:
    refused = run(stream)
    assert refused.exit_code == 2
    assert "--storage" in refused.output


def test_a_refused_recovery_is_explained_in_a_sentence(stream: Stream, tmp_path: Path) -> None:
    refused = run(stream, "--storage", str(tmp_path / "elsewhere"))
    assert refused.exit_code == 1
    assert "holds no checkpoint" in refused.stderr
    assert "Traceback" not in refused.output
    assert run(stream, "--storage", stream.storage.url, "--mode", "hope").exit_code == 2


def test_a_recorded_definition_counts_and_a_note_says_that_another_was_given(stream: Stream, tmp_path: Path) -> None:
    same, other = tmp_path / "same.json", tmp_path / "other.json"
    same.write_text(stream.to_json())
    other.write_text(stream.model_copy(update={"transform": "operator:itemgetter"}).to_json())
    note = "Note: the given definition differs from the recorded one"
    by_checkpoint = run(stream, "--definition", str(other), "--dry-run")
    assert note in by_checkpoint.stdout
    assert note not in run(stream, "--definition", str(same)).stdout
    with Ledger.open(stream.ledger, create=False) as ledger:
        assert ledger.streams.get("shop").definition == stream.to_json()
    by_ledger = run(stream, "--definition", str(other))
    assert note in by_ledger.stdout
    with Ledger.open(stream.ledger, create=False) as ledger:
        assert ledger.streams.get("shop").definition == stream.to_json()
