"""`headrace streams recover` on a stream's folder without its ledger and beside it, and `headrace ledger migrate`."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from tests.unit.ledger.next_schema import NEWER, OLDER, install_next_schema
from typer.testing import CliRunner, Result

from headrace.batch.allocation import allocate
from headrace.batch.checkpoint import read_newest, write_checkpoint
from headrace.cli.main import app
from headrace.clock import ManualClock
from headrace.ledger import Ledger
from headrace.ledger.database import HEAD
from headrace.stream import ConsoleOutput, KafkaInput, Listener, SparkSettings, Stream
from headrace.stream_context import StreamContext
from headrace.wal.storage import open_storage

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


def test_a_lost_ledger_is_rebuilt_after_a_dry_run_without_one(stream: Stream, tmp_path: Path) -> None:
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


def test_a_definition_in_a_module_of_the_current_folder_is_found(
    stream: Stream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [folder for folder in sys.path if folder])
    monkeypatch.chdir(tmp_path)
    text = f"from headrace.stream import Stream\nstream = Stream.from_json({stream.to_json()!r})\n"
    Path("shop_of_this_folder.py").write_text(text)
    done = run(stream, "--definition", "shop_of_this_folder:stream", "--dry-run")
    assert done.exit_code == 0, done.output
    assert "Would write the ledger from checkpoints/" in done.stdout


def test_a_ledger_that_is_not_lost_keeps_its_definition(stream: Stream, tmp_path: Path) -> None:
    """A note says that the definition was kept."""
    same, other = tmp_path / "same.json", tmp_path / "other.json"
    same.write_text(stream.to_json())
    other.write_text(stream.model_copy(update={"transform": "operator:itemgetter"}).to_json())
    note = "Note: the given definition differs from"
    assert note not in run(stream, "--definition", str(same)).stdout
    assert note in run(stream, "--definition", str(other)).stdout
    with Ledger.open(stream.ledger, create=False) as ledger:
        assert ledger.streams.get("shop").definition == stream.to_json()


def forge(stream: Stream, **changed: object) -> Stream:
    """A checkpoint of somebody who can write into the stream's folder: another definition, newer than any DAG's."""
    folder = open_storage(stream.storage.url).below("shop")
    forged = stream.model_copy(update=changed)
    newest = read_newest(folder)
    row = newest.state["stream"] | {"definition": forged.to_json(), "declared_at_ms": 9_000_000_000_000}
    revisions = [{**revision, "definition": forged.to_json()} for revision in newest.state["revisions"]]
    written_at_ms, state = newest.written_at_ms + 1, {**newest.state, "stream": row, "revisions": revisions}
    replace(newest, written_at_ms=written_at_ms, state=state).write(folder)
    return forged


def test_the_given_definition_counts_and_not_the_folders_own(stream: Stream, tmp_path: Path) -> None:
    forge(stream, transform="evil:run", spark=SparkSettings(py_files=("/stream/evil.py",)))
    own = tmp_path / "own.json"
    own.write_text(stream.to_json())
    done = run(stream, "--storage", stream.storage.url, "--definition", str(own))
    assert done.exit_code == 0, done.output
    assert "the given definition differs from that of the checkpoint; the given one is used" in done.stdout
    with Ledger.open(stream.ledger, create=False) as ledger:
        row = ledger.streams.get("shop")
        assert row.definition == stream.to_json()
        assert ledger.streams.at_revision("shop", row.revision).definition == stream.to_json()
        # What the file says of its own age would keep the DAG's definition from becoming the newest.
        assert row.declared_at_ms == 0


def test_code_that_the_folder_names_is_shown_and_asked_for(stream: Stream, monkeypatch: pytest.MonkeyPatch) -> None:
    forged = forge(
        stream,
        transform="evil:run",
        listeners=(Listener(reference="evil:Listener"),),
        spark=SparkSettings(py_files=("/stream/evil.py",), conf={"spark.jars": "/stream/evil.jar"}),
    )
    named = (
        "transform: evil:run",
        "listeners.0.reference: evil:Listener",
        'spark.py_files: ["/stream/evil.py"]',
        'spark.conf: {"spark.jars": "/stream/evil.jar"}',
    )
    storage = ("--storage", stream.storage.url)
    tried = run(stream, *storage, "--dry-run")
    assert tried.exit_code == 0, tried.output
    assert all(text in tried.stdout for text in named)
    refused = run(stream, *storage)
    assert refused.exit_code == 1
    assert all(text in refused.stderr for text in named)
    assert "--accept-code" in refused.stderr
    with Ledger.open(stream.ledger, create=False) as ledger:
        assert ledger.streams.all() == []
    monkeypatch.setattr("headrace.cli.repair._accepts", lambda code: set(code) == set(named))
    assert run(stream, *storage).exit_code == 0
    with Ledger.open(stream.ledger, create=False) as ledger:
        row = ledger.streams.get("shop")
        assert (row.definition, row.declared_at_ms) == (forged.to_json(), 0)


def test_code_is_accepted_without_a_question(stream: Stream) -> None:
    forge(stream, transform="evil:run")
    assert run(stream, "--storage", stream.storage.url, "--accept-code").exit_code == 0


def migrated(url: str, *arguments: str) -> str:
    result = CliRunner().invoke(app, ["ledger", "migrate", "--ledger", url, *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_an_empty_place_becomes_a_ledger_and_is_left_alone_then(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/new/ledger.db"
    assert migrated(url) == f"Made a ledger of schema {HEAD}.\n"
    assert migrated(url) == f"The ledger's schema is {HEAD} already.\n"
    assert json.loads(migrated(url, "--json")) == {"ledger": url, "before": HEAD, "after": HEAD}


def test_an_older_ledger_is_migrated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"sqlite:///{tmp_path}/ledger.db"
    Ledger.open(url).close()
    install_next_schema(monkeypatch, tmp_path)
    assert migrated(url) == f"Migrated the ledger from schema {OLDER} to {NEWER}.\n"
