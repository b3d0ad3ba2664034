"""Options about dead letters that can only be mistakes are refused, before Elasticsearch is asked anything."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from headrace.cli.main import app
from headrace.hooks.ledger import register
from headrace.ledger import Ledger
from headrace.stream import ElasticsearchOutput, KafkaInput, Stream


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
