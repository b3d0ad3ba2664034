"""Each thing that a stream needs and does not get is named, with its address and what to do."""

from __future__ import annotations

import gc
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from headrace.checks.connecting import (
    Checked,
    CheckedColumns,
    check_columns,
    check_ledger,
    check_part,
    check_shared_indices,
    check_storage,
)
from headrace.cli.main import app
from headrace.hooks.ledger import register
from headrace.kafka import client
from headrace.ledger import Ledger
from headrace.stream import (
    ConsoleOutput,
    ElasticsearchOutput,
    JsonDecoder,
    KafkaInput,
    KeyIds,
    ParquetOutput,
    RecordIds,
    Stream,
)

CLOSED = "127.0.0.1:1"


def make(tmp_path: Path, **fields: Any) -> Stream:
    return Stream(
        **{
            "name": "shop",
            "inputs": KafkaInput(bootstrap_servers=CLOSED, topics="clicks"),
            "outputs": ElasticsearchOutput(hosts=f"http://{CLOSED}", index="shop"),
            "batch_interval": "10 s",
            "storage": str(tmp_path / "storage"),
            "ledger": f"sqlite:///{tmp_path}/ledger.db",
            **fields,
        }
    )


class Elasticsearch:
    """Answers by path: (status, body)."""

    def __init__(self) -> None:
        self.answers: dict[str, tuple[int, Any]] = {}
        self.bodies: dict[str, Any] = {}
        answers, bodies = self.answers, self.bodies

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                path = self.path.partition("?")[0]
                bodies[path] = json.loads(self.rfile.read(int(self.headers.get("content-length") or 0)) or "null")
                status, body = answers.get(path, (404, {"error": {"type": "none"}}))
                data = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("content-type", "application/json")
                self.send_header("x-elastic-product", "Elasticsearch")
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            do_POST = do_GET  # noqa: N815 - the handler's name

            def log_message(self, *_: object) -> None:
                """Nothing."""

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def check(self, **options: Any) -> Checked:
        (checked,) = check_part(ElasticsearchOutput(hosts=f"http://{self.address}", index="shop", **options))
        assert self.address in checked.where
        return checked


@pytest.fixture
def elasticsearch() -> Iterator[Elasticsearch]:
    made = Elasticsearch()
    yield made
    made.server.shutdown()
    made.server.server_close()


def test_an_index_that_may_be_made_or_is_there_is_well(elasticsearch: Elasticsearch) -> None:
    assert elasticsearch.check().error is None
    elasticsearch.answers["/shop"] = (200, {"shop": {"settings": {"index": {"uuid": "u"}}}})
    assert elasticsearch.check().error is None


@pytest.mark.parametrize(
    ("version", "named"),
    [
        ({"number": "2.19.0", "distribution": "opensearch"}, "OpenSearch 2.19.0"),
        ({"number": "9.1.4"}, "Elasticsearch 9.1.4"),
    ],
)
def test_the_server_is_named_with_its_version_in_any_case(
    elasticsearch: Elasticsearch, version: dict[str, str], named: str
) -> None:
    """It is named whether the check passes or not."""
    elasticsearch.answers["/"] = (200, {"version": version})
    assert elasticsearch.check().where == f"http://{elasticsearch.address} ({named}), index shop"
    elasticsearch.answers["/shop"] = (403, {"error": {"type": "security_exception", "reason": "no"}})
    refused = elasticsearch.check()
    assert (refused.where, refused.error) == (
        f"http://{elasticsearch.address} ({named}), index shop",
        "The search server refuses a request for index 'shop' with 403, security_exception: no.",
    )


def test_an_index_that_is_read_only_is_named(elasticsearch: Elasticsearch) -> None:
    blocks = {"read_only_allow_delete": "true", "write": "false"}
    elasticsearch.answers["/shop/_settings"] = (200, {"shop": {"settings": {"index": {"blocks": blocks}}}})
    assert elasticsearch.check().error == "Index shop has the block read_only_allow_delete."


@pytest.mark.parametrize(("status", "remedy"), [(401, "login, API key or token"), (403, "Grant the connection's user")])
def test_a_refused_user_is_reported_in_elasticsearchs_words(
    elasticsearch: Elasticsearch, status: int, remedy: str
) -> None:
    elasticsearch.answers["/shop"] = (status, {"error": {"type": "security_exception", "reason": "no"}})
    checked = elasticsearch.check()
    assert f"with {status}, security_exception: no" in (checked.error or "")
    assert remedy in (checked.remedy or "")


def test_missing_privileges_are_listed(elasticsearch: Elasticsearch) -> None:
    reported = {"username": "joe", "has_all_requested": False, "index": {"shop": {"index": False, "create_doc": True}}}
    elasticsearch.answers["/_security/user/_has_privileges"] = (200, reported)
    assert elasticsearch.check().error == "The user joe lacks index on shop."


@pytest.mark.parametrize(
    ("options", "more"),
    [({}, []), ({"document_ids": KeyIds()}, ["delete"]), ({"refresh": True}, ["maintenance"])],
)
def test_the_privileges_are_those_that_the_output_needs(
    elasticsearch: Elasticsearch, options: dict[str, Any], more: list[str]
) -> None:
    elasticsearch.check(**options)
    asked = elasticsearch.bodies["/_security/user/_has_privileges"]["index"]
    needed = ["create_doc", "index", "read", "view_index_metadata"]
    assert asked == [
        {"names": ["shop"], "privileges": [*needed, *more]},
        {"names": ["shop-dead-letters"], "privileges": [*needed, "delete"]},
    ]


@pytest.mark.parametrize(("ids", "wrong"), [(RecordIds(), 1), (KeyIds(), 0)])
def test_outputs_of_equal_ids_and_one_index_are_found(
    elasticsearch: Elasticsearch, tmp_path: Path, ids: Any, wrong: int
) -> None:
    """They are found even if they give the one index by two names."""
    for name in ("shop", "sales"):
        elasticsearch.answers[f"/{name}"] = (200, {"shop-1": {"settings": {"index": {"uuid": "u"}}}})
    port = elasticsearch.server.server_port
    outputs = (
        ElasticsearchOutput(id="one", hosts=f"http://127.0.0.1:{port}", index="shop"),
        ElasticsearchOutput(id="two", hosts=f"http://localhost:{port}", index="sales", document_ids=ids),
        ElasticsearchOutput(id="away", hosts=f"http://{CLOSED}", index="shop"),
    )
    checks = list(check_shared_indices(make(tmp_path, outputs=outputs)))
    assert [(check.name, "Output one writes into the same index" in (check.error or "")) for check in checks] == [
        ("output two", True)
    ] * wrong


def test_an_elasticsearch_that_is_away(tmp_path: Path) -> None:
    (checked,) = check_part(make(tmp_path).outputs[0])
    assert checked.where == f"http://{CLOSED}, index shop"
    assert "no answer from" in (checked.error or "")


def test_a_kafka_that_is_away_is_named_in_the_clients_own_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "HOPE_SECONDS", 0.2)
    (checked,) = check_part(make(tmp_path).inputs[0])
    assert checked.where == CLOSED
    assert f"Kafka at {CLOSED} cannot be asked" in (checked.error or "")
    assert "Connection refused" in (checked.error or "")
    assert "after" not in (checked.error or ""), "the same error has the same text"


def test_an_undefined_connection_is_reported(tmp_path: Path) -> None:
    (checked,) = check_part(KafkaInput(connection="kafka_nowhere", topics="clicks"))
    assert checked.where == "connection kafka_nowhere"
    assert "AIRFLOW_CONN_KAFKA_NOWHERE" in (checked.remedy or "")


def test_a_folder_that_cannot_be_written_to_is_named(tmp_path: Path) -> None:
    assert check_storage(make(tmp_path)).error is None
    assert not (tmp_path / "storage").exists(), "whoever makes it is to own it"
    (tmp_path / "file").write_text("")
    stream = make(tmp_path, storage=f"{tmp_path}/file/storage", outputs=ParquetOutput(path=f"{tmp_path}/file"))
    assert f"{tmp_path}/file is a file" in (check_storage(stream).error or "")
    (checked,) = check_part(stream.outputs[0])
    assert checked.error is not None
    (tmp_path / "storage").mkdir()
    assert check_storage(make(tmp_path)).error is None
    assert list((tmp_path / "storage").iterdir()) == []


def test_a_ledger_that_would_lose_a_renamed_outputs_records(tmp_path: Path) -> None:
    for output in (ConsoleOutput(), ConsoleOutput(id="screen", renamed_from="console")):
        stream = make(tmp_path, outputs=output)
        with Ledger.open(stream.ledger) as ledger:
            register(ledger, stream)
        assert check_ledger(stream).error is None
    assert "would lose its records" in str(check_ledger(make(tmp_path, outputs=ConsoleOutput(id="screen"))).error)


def test_a_ledger_that_cannot_be_made_or_opened(tmp_path: Path) -> None:
    assert check_ledger(make(tmp_path)).error is None
    assert not (tmp_path / "ledger.db").exists()
    (tmp_path / "file").write_text("")
    assert check_ledger(make(tmp_path, ledger=f"sqlite:///{tmp_path}/file/ledger.db")).error is not None
    (tmp_path / "broken.db").write_text("no database, and long enough to be taken for one" * 30)
    assert check_ledger(make(tmp_path, ledger=f"sqlite:///{tmp_path}/broken.db")).error is not None


def columns_of(tmp_path: Path, address: str, **fields: Any) -> CheckedColumns:
    source = KafkaInput(bootstrap_servers=CLOSED, topics="clicks", value_decoder=JsonDecoder(fields="n STRING, m INT"))
    output = ElasticsearchOutput(hosts=f"http://{address}", index="shop")
    (found,) = check_columns(make(tmp_path, **{"inputs": source, "outputs": output, **fields}), {})
    return found


def test_a_conflict_of_a_column_fails_the_check(tmp_path: Path, elasticsearch: Elasticsearch) -> None:
    mappings = {"properties": {"n": {"type": "long"}}}
    elasticsearch.answers["/shop"] = (200, {"shop-1": {"mappings": mappings, "aliases": {"shop": {}}}})
    found = columns_of(tmp_path, elasticsearch.address)
    assert (found.exists, found.as_recorded, found.index) == (True, True, "shop-1")
    assert found.checked == Checked(
        "output elasticsearch, columns",
        "index shop-1, 2 fields, of which the index has 1",
        "The index refuses documents. 'n': a text that is no number is refused: the field is a long.",
        "Correct the transform or the decoder, or write to a new index (`headrace mapping` makes its mapping).",
    )


def test_columns_of_a_missing_index_are_those_of_its_template(tmp_path: Path, elasticsearch: Elasticsearch) -> None:
    settings = {"index": {"mapping": {"total_fields": {"limit": "2"}}}}
    template = {"mappings": {"dynamic": "true"}, "settings": settings}
    elasticsearch.answers["/_index_template/_simulate_index/shop"] = (200, {"template": template})
    found = columns_of(tmp_path, elasticsearch.address)
    assert [(field.path, field.new) for field in found.fields] == [("n", "text"), ("m", "long")]
    assert found.conflicts == (
        "the index has 0 fields, and the documents add 3: that is beyond index.mapping.total_fields.limit, 2",
    )
    assert found.checked is not None
    assert found.checked.error is not None


def test_columns_of_templates_that_may_not_be_seen(tmp_path: Path, elasticsearch: Elasticsearch) -> None:
    refusal = {"error": {"type": "security_exception", "reason": "no"}}
    elasticsearch.answers["/_index_template/_simulate_index/shop"] = (403, refusal)
    found = columns_of(tmp_path, elasticsearch.address)
    assert (found.exists, found.fields, found.checked) == (None, (), None)
    assert "security_exception" in str(found.unknown)


def test_columns_that_nothing_declares_are_unknown(tmp_path: Path) -> None:
    source = KafkaInput(bootstrap_servers=CLOSED, topics="clicks")
    assert "are values of the type BINARY" in str(columns_of(tmp_path, CLOSED, inputs=source).unknown)
    found = columns_of(tmp_path, CLOSED, transform="headrace.clock:time_text")
    assert found.unknown is not None
    assert found.unknown.startswith(
        "The columns of output 'elasticsearch' are made by its transform headrace.clock:time_text: they are known when "
        "Spark has called it. `streams check --connect --spark` and `mapping` call it, without records."
    )


def test_the_command_shows_the_columns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, elasticsearch: Elasticsearch
) -> None:
    monkeypatch.setattr(client, "HOPE_SECONDS", 0.2)
    elasticsearch.answers["/_index_template/_simulate_index/shop"] = (200, {})
    elasticsearch.answers["/_template"] = (200, {})
    source = KafkaInput(bootstrap_servers=CLOSED, topics="clicks", value_decoder=JsonDecoder(fields="n STRING, m INT"))
    output = ElasticsearchOutput(hosts=f"http://{elasticsearch.address}", index="shop")
    definition = tmp_path / "shop.json"
    definition.write_text(make(tmp_path, inputs=source, outputs=output).to_json())
    printed = CliRunner().invoke(app, ["streams", "check", str(definition), "--connect"]).stdout
    assert "There is no index shop yet. The table has what a new one gets from its templates." in printed
    assert "ok     output elasticsearch, columns: index shop, 2 fields, of which the index has 0" in printed
    (row,) = [line.split() for line in printed.splitlines() if line.startswith(" m ") or line.startswith("m ")]
    assert row == ["m", "INT", "integer", "-", "long", "-"]
    answer = json.loads(CliRunner().invoke(app, ["streams", "check", str(definition), "--connect", "--json"]).stdout)
    (columns,) = answer["columns"]
    assert (columns["output"], columns["exists"], len(columns["fields"])) == ("elasticsearch", False, 2)
    assert columns["fields"][1] == {
        **{"path": "m", "column": "INT", "form": "integer", "index": None, "new": "long"},
        **{"conflict": None, "note": None},
    }


def test_the_command_lists_every_check_and_fails_where_one_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(client, "HOPE_SECONDS", 0.2)
    definition = tmp_path / "shop.json"
    definition.write_text(make(tmp_path, outputs=ConsoleOutput()).to_json())
    # A client that another test has left, in the frames of an error, writes to standard error too.
    gc.collect()
    capfd.readouterr()
    reported = CliRunner().invoke(app, ["streams", "check", str(definition), "--connect"])
    assert reported.exit_code == 1
    assert f"FAILED input records: {CLOSED}: Kafka at {CLOSED} cannot be asked" in reported.stdout
    assert "ok     storage" in reported.stdout
    assert "bootstrap" not in capfd.readouterr().err, "librdkafka's log hides the results"
    answer = CliRunner().invoke(app, ["streams", "check", str(definition), "--connect", "--json"])
    assert answer.exit_code == 1
    checks = {check["name"]: check["error"] for check in json.loads(answer.stdout)["checks"]}
    assert [name for name, error in checks.items() if error] == ["input records"]
    assert CliRunner().invoke(app, ["streams", "check", str(definition)]).exit_code == 0
