"""A checkpoint that somebody forged who may write into the folder: no copy of a definition in it brings code along."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from headrace.batch.checkpoint import checkpoint_now, checkpoint_paths
from headrace.batch.manifest import decode_document, encode_document
from headrace.batch.recover import recover
from headrace.ledger import Ledger
from headrace.ledger.tables import Declared
from headrace.stream import ConsoleOutput, KafkaInput, ReceiverInput, Stream
from headrace.stream.stream import code_in
from headrace.stream_context import StreamContext
from headrace.wal.storage import open_storage

EVIL = {"transform": "evil:run", "spark": {"py_files": ["/shared/evil.py"]}}
CODE = ['spark.py_files: ["/shared/evil.py"]', "transform: evil:run"]


@pytest.fixture
def stream(tmp_path: Path) -> Stream:
    return Stream(
        name="shop",
        inputs=KafkaInput(id="records", bootstrap_servers="nowhere:1", topics="clicks"),
        outputs=ConsoleOutput(),
        transform="shop.model:prices",
        batch_interval="10 s",
        storage=str(tmp_path / "storage"),
        ledger=f"sqlite:///{tmp_path}/lost.db",
    )


def forge(stream: Stream, change: Callable[[dict[str, Any]], None]) -> None:
    """Two deployments and a checkpoint, which is changed then; the ledger is lost."""
    with Ledger.open(stream.ledger) as ledger:
        for definition in (Stream(**{**json.loads(stream.to_json()), "block_interval": "250 ms"}), stream):
            ledger.streams.register(stream.name, **Declared.by(definition).columns())
        context = StreamContext(stream, ledger)
        checkpoint_now(context, ledger.now_ms() // 10_000 * 10_000)
        folder = open_storage(stream.folder_url)
        (path,) = checkpoint_paths(folder)
        document = decode_document(folder.read(path))
        change(document["state"])
        folder.write_atomically(path, encode_document(document))


def with_code(definition: str) -> str:
    fields = json.loads(definition)
    return json.dumps({**fields, **EVIL, "spark": {**fields["spark"], **EVIL["spark"]}})


def forge_current_revision(state: dict[str, Any]) -> None:
    state["revisions"][-1]["definition"] = with_code(state["revisions"][-1]["definition"])


def forge_older_revision(state: dict[str, Any]) -> None:
    state["revisions"][0]["definition"] = with_code(state["revisions"][0]["definition"])


def forge_all_revisions(state: dict[str, Any]) -> None:
    for row in (state["stream"], *state["revisions"]):
        row["definition"] = with_code(row["definition"])


def forge_replay(state: dict[str, Any]) -> None:
    row = {"target": "march", "revision": 1, "definition": with_code(state["stream"]["definition"])}
    state["replay_definitions"].append({**row, "created_at_ms": 1})


def forge_receiver(state: dict[str, Any]) -> None:
    source = ReceiverInput(id="records", receiver="evil:Receiver")
    evil = Stream.from_json(state["stream"]["definition"]).model_copy(update={"inputs": (source,)})
    state["stream"]["definition"] = evil.to_json()


FORGERIES = [forge_current_revision, forge_older_revision, forge_all_revisions, forge_replay, forge_receiver]


def definitions(ledger: Ledger) -> list[str]:
    return [
        ledger.streams.get("shop").definition,
        *(row.definition for row in ledger.streams.newest_revisions("shop", 100)),
        *(row.definition for row in ledger.results.replay_definitions("shop")),
    ]


@pytest.mark.parametrize("change", FORGERIES)
def test_no_copy_of_a_definition_brings_code_nobody_accepted(
    stream: Stream, tmp_path: Path, change: Callable[[dict[str, Any]], None]
) -> None:
    forge(stream, change)
    asked: list[str] = []

    def accept(code: Sequence[str]) -> bool:
        asked.extend(code)
        return False

    with Ledger.open(f"sqlite:///{tmp_path}/new.db") as ledger:
        report = recover(
            "shop", ledger, open_storage(stream.folder_url), definition=stream, accept_code=accept, force=True
        )
        allowed = set(stream.named_code)
        assert all(allowed.issuperset(code_in(json.loads(text))) for text in definitions(ledger))
        row = ledger.streams.get("shop")
        assert row.definition == stream.to_json()
        # What a process of this revision runs, after the next deployment too.
        assert ledger.streams.at_revision("shop", row.revision).definition == stream.to_json()
        if change is not forge_current_revision:
            assert any("evil:" in code for code in asked)
            assert any("evil:" in notice for notice in report.notices)


def test_code_of_earlier_definitions_is_kept_if_a_person_accepts(stream: Stream, tmp_path: Path) -> None:
    forge(stream, forge_older_revision)
    with Ledger.open(f"sqlite:///{tmp_path}/new.db") as ledger:
        recover(
            "shop",
            ledger,
            open_storage(stream.folder_url),
            definition=stream,
            accept_code=lambda code: sorted(code) == CODE,
            force=True,
        )
        assert any("evil:run" in text for text in definitions(ledger))
        assert ledger.streams.get("shop").definition == stream.to_json()
