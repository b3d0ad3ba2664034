"""Options about dead letters that can only be mistakes are refused, before Elasticsearch is asked anything."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from headrace.cli.main import app
from headrace.clock import ManualClock
from headrace.elasticsearch.dead_letter_index import LetterFilter
from headrace.hooks.ledger import register
from headrace.ledger import Ledger
from headrace.stream import ElasticsearchOutput, KafkaInput, Stream
from headrace.stream.stream import replayed
from headrace.views.dead_letters import DeadLettersOf


@pytest.fixture(scope="module")
def ledger_url(tmp_path_factory: pytest.TempPathFactory) -> str:
    tmp_path = tmp_path_factory.mktemp("dlq")
    stream = Stream(
        name="shop",
        inputs=KafkaInput(bootstrap_servers="127.0.0.1:1", topics="clicks"),
        outputs=ElasticsearchOutput(hosts="http://127.0.0.1:1", index="shop"),
        batch_interval="10 s",
        storage=tmp_path / "storage",
        ledger=f"sqlite:///{tmp_path}/ledger.db",
    )
    with Ledger.open(stream.ledger) as ledger:
        register(ledger, stream)
    return stream.ledger


@pytest.mark.parametrize("command", ["list", "replay"])
@pytest.mark.parametrize(
    ("options", "option", "says"),
    [
        ("--batch x", "--batch", "'x' is no time: give ISO 8601"),
        ("--batch 2026-11-21T14:05:03Z", "--batch", "2026-11-21T14:05:03Z is no batch time: the one before it is"),
        ("--from x", "--from", "'x' is no time"),
        ("--until x", "--until", "'x' is no time"),
        ("--from 20000 --until 10000", "--from", "is later than --until"),
        ("--batch 10000 --from 10000", "--batch", "either --batch or --from"),
        ("--offset 9-1", "--offset", "'9-1' ends before it begins"),
        ("--offset 9-x", "--offset", "neither an offset nor a range"),
        ("--offset -1", "--offset", "neither an offset nor a range"),
        ("--index logs-${topic}", "--index", "'logs-${topic}' has '${topic}', as a placeholder"),
        ("--offset 9²", "--offset", "neither an offset nor a range"),
    ],
)
def test_a_mistaken_option_is_refused_by_its_name(
    ledger_url: str, command: str, options: str, option: str, says: str
) -> None:
    result = CliRunner().invoke(app, ["dead-letters", command, "shop", *options.split(), "--ledger", ledger_url])
    assert result.exit_code == 2, result.output
    text = " ".join(result.output.replace("│", "").split())
    assert f"Invalid value for {option}" in text
    assert says in text


class Kept:
    """Stands in for an index of dead letters."""

    def __init__(self) -> None:
        self.asked: list[LetterFilter] = []

    def find(self, wanted: LetterFilter, *_: Any, **__: Any) -> list[Any]:
        self.asked.append(wanted)
        return []

    def reasons(self, _: LetterFilter) -> dict[str, int]:
        return {}


@pytest.mark.parametrize(
    ("index", "letters"), [("shop", "letters"), ("shop-v2", "letters-of-v2"), ("shop-v3", "letters")]
)
def test_letters_of_a_replay_are_looked_up_where_it_wrote_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, index: str, letters: str
) -> None:
    """A replay of an output with a dead-letter index of its own must name another."""
    stream = Stream(
        name="shop",
        inputs=KafkaInput(bootstrap_servers="127.0.0.1:1", topics="clicks"),
        outputs=ElasticsearchOutput(hosts="http://127.0.0.1:1", index="shop", dead_letter_index="letters"),
        batch_interval="10 s",
        storage=tmp_path / "storage",
        ledger=f"sqlite:///{tmp_path}/ledger.db",
    )
    clock = ManualClock(1_700_000_000_000)
    # The older replay is the last one by its name; the definition of the newest does not load.
    replays = {
        target: replayed(stream, {"elasticsearch": {"index": "shop-v2", "dead_letter_index": f"letters-of-{target}"}})
        for target in ("v9", "v2")
    }
    definitions = {target: replay.to_json() for target, replay in replays.items()}
    definitions["w"] = '{"outputs": [{"id": "elasticsearch"}]}'
    with Ledger.open(stream.ledger, clock=clock) as ledger:
        register(ledger, stream)
        at_ms = clock.now_ms() + 10_000
        clock.advance(15_000)
        ledger.allocations.allocate("shop", at_ms, manifest_uri="m", manifest_sha256="0")
        for target, definition in definitions.items():
            clock.advance(1_000)
            ledger.replays.begin(
                "shop", at_ms, target=target, definition=definition, outputs=["elasticsearch"],
                holder="test", way="submit", lease_ms=60_000,
            )  # fmt: skip
    kept = Kept()

    @contextlib.contextmanager
    def opened(_: DeadLettersOf) -> Iterator[Kept]:
        yield kept

    monkeypatch.setattr(DeadLettersOf, "opened", opened)
    arguments = ["dead-letters", "list", "shop", "--index", index, "--json", "--ledger", stream.ledger]
    (reported,) = json.loads(CliRunner().invoke(app, arguments).stdout)
    assert reported["index"] == letters
    assert [wanted.index for wanted in kept.asked] == [index], "an index of letters may have those of several replays"
