"""`headrace mapping` prints the body of a request; the integration tests send it to real servers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from headrace.cli.main import app
from headrace.hooks.ledger import register
from headrace.ledger import Ledger
from headrace.stream import (
    DeadLetterTopic,
    DebeziumDecoder,
    ElasticsearchOutput,
    JsonDecoder,
    KafkaInput,
    Stream,
    Utf8Decoder,
)

CLOSED = "127.0.0.1:1"
PROPERTIES = {"n": {"type": "long"}, "at": {"type": "date", "format": "strict_date_optional_time"}}


@pytest.fixture(autouse=True)
def no_ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.delenv("HEADRACE_LEDGER", raising=False)


def make(tmp_path: Path, *, decoder: Any = None, **fields: Any) -> Stream:
    decoder = decoder or JsonDecoder(fields="n INT, at TIMESTAMP")
    return Stream(
        **{
            "name": "shop",
            "inputs": KafkaInput(bootstrap_servers=CLOSED, topics="clicks", value_decoder=decoder),
            "outputs": ElasticsearchOutput(hosts=f"http://{CLOSED}", index="clicks"),
            "batch_interval": "10 s",
            "storage": str(tmp_path / "storage"),
            "ledger": f"sqlite:///{tmp_path}/ledger.db",
            **fields,
        }
    )


def run(stream: Stream, *arguments: str) -> Result:
    Path("shop.json").write_text(stream.to_json())
    return CliRunner().invoke(app, ["mapping", "shop.json", *arguments])


def test_the_body_alone_is_printed(tmp_path: Path) -> None:
    stream = make(tmp_path)
    printed = [json.loads(run(stream, *more).stdout) for more in ((), ("--as", "index-template"))]
    body = {"mappings": {"properties": PROPERTIES}}
    assert printed == [body, {"index_patterns": ["clicks"], "priority": 500, "template": body}]
    told = json.loads(run(stream, "--as", "component-template", "--json").stdout)
    assert told == {
        "output": "elasticsearch",
        "index": "clicks",
        "path": "/_component_template/clicks",
        "body": {"template": body},
    }


def test_indices_that_records_name_have_a_template(tmp_path: Path) -> None:
    def output(**letters: str) -> ElasticsearchOutput:
        index = "logs-{timestamp:%Y.%m.%d}"
        return ElasticsearchOutput(hosts=f"http://{CLOSED}", index=index, **letters)

    stream = make(tmp_path, outputs=output(dead_letter_index="refused"))
    told = json.loads(run(stream, "--as", "index-template", "--json").stdout)
    assert told["body"]["index_patterns"] == ["logs-*"]
    assert (told["index"], told["path"]) == ("logs-{timestamp:%Y.%m.%d}", "/_index_template/logs")
    assert "there is no one index to create" in run(stream).stderr
    of_letters = run(make(tmp_path, outputs=output()), "--as", "index-template")
    assert of_letters.exit_code == 1
    assert "would also be for dead letters, in logs-dead-letters" in of_letters.stderr


def test_no_template_is_for_all_indices_of_the_cluster(tmp_path: Path) -> None:
    letters = DeadLetterTopic(topic="refused", bootstrap_servers=CLOSED)
    output = ElasticsearchOutput(hosts=f"http://{CLOSED}", index="{topic}", dead_letter_topic=letters)
    stream = make(tmp_path, outputs=output)
    refused = run(stream, "--as", "index-template", "--apply")
    assert refused.exit_code == 1
    assert "would be for others of the cluster too" in refused.stderr
    part = json.loads(run(stream, "--as", "component-template", "--json").stdout)
    assert part["path"] == "/_component_template/elasticsearch"


def test_a_decoded_document_has_its_own_form(tmp_path: Path) -> None:
    """A DebeziumDecoder's rows are written by headrace, and not as the record has them."""
    printed = json.loads(run(make(tmp_path, decoder=DebeziumDecoder(fields="id INT, at TIMESTAMP"))).stdout)
    assert printed["mappings"]["properties"] == {"id": {"type": "long"}, "at": {"type": "date"}}


def test_a_stream_of_the_ledger_is_found_by_its_name(tmp_path: Path) -> None:
    stream = make(tmp_path)
    with Ledger.open(stream.ledger) as ledger:
        register(ledger, stream)
    printed = CliRunner().invoke(app, ["mapping", "shop", "--ledger", stream.ledger])
    assert json.loads(printed.stdout)["mappings"]["properties"] == PROPERTIES
    nowhere = CliRunner().invoke(app, ["mapping", "shop"])
    assert (nowhere.exit_code, nowhere.stdout) == (1, "")
    assert "It is not known where the ledger is." in nowhere.stderr


@pytest.mark.parametrize(
    ("decoder", "fields", "arguments", "reason"),
    [
        (Utf8Decoder(), {}, (), "are values of the type STRING, so their fields are not known"),
        (JsonDecoder(fields="_id INT"), {}, (), "'_id': the name is the server's own"),
        (None, {}, ("--output", "other"), "has no Elasticsearch output 'other'"),
        (
            None,
            {"outputs": [ElasticsearchOutput(id=n, hosts=f"http://{CLOSED}", index=n) for n in ("a", "b")]},
            (),
            "Name the output: a, b.",
        ),
    ],
)
def test_what_has_no_mapping_says_why(
    tmp_path: Path, decoder: Any, fields: Any, arguments: tuple[str, ...], reason: str
) -> None:
    printed = run(make(tmp_path, decoder=decoder, **fields), *arguments)
    assert (printed.exit_code, printed.stdout) == (1, "")
    assert reason in printed.stderr


def test_what_it_is_sent_as_is_one_of_three(tmp_path: Path) -> None:
    printed = run(make(tmp_path), "--as", "alias")
    assert printed.exit_code == 2
    told = " ".join(printed.stderr.replace("│", "").split())
    assert "'alias' is none of mapping, index-template, component-template" in told


def test_a_server_that_does_not_answer_is_an_error(tmp_path: Path) -> None:
    printed = run(make(tmp_path), "--apply")
    assert (printed.exit_code, printed.stdout) == (1, "")
    assert CLOSED in printed.stderr
