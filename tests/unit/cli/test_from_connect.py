"""`headrace from-connect`: what it prints and writes, and its exit code. What a definition has is tested with it."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

from typer.testing import CliRunner, Result

from headrace.cli.main import app

CONNECTOR = {
    "connector.class": "io.confluent.connect.elasticsearch.ElasticsearchSinkConnector",
    "topics": "orders",
    "connection.url": "http://search:9200",
    "connection.password": "hunter2hunter2",
    "key.ignore": "true",
    "value.converter": "org.apache.kafka.connect.json.JsonConverter",
    "value.converter.schemas.enable": "false",
}
RENAMED = {
    "transforms": "r",
    "transforms.r.type": "org.apache.kafka.connect.transforms.ReplaceField$Value",
    "transforms.r.exclude": "id",
}


def run(*arguments: str, given: str | None = None) -> Result:
    return CliRunner().invoke(app, ["from-connect", *arguments], input=given)


def file_of(folder: Path, **more: Any) -> str:
    path = folder / "orders-sink.json"
    path.write_text(json.dumps({**CONNECTOR, **more}))
    return str(path)


def test_the_definition_is_printed(tmp_path: Path) -> None:
    result = run(file_of(tmp_path))
    assert result.exit_code == 0
    ast.parse(result.stdout)
    assert 'name="orders-sink"' in result.stdout, "a connector without a name has that of its file"
    assert "# - connection.password = ***: connection elasticsearch_default, password" in result.stdout
    assert result.stderr == "7 properties, 0 of them to decide.\n"


def test_the_transform_module_is_printed_after_it(tmp_path: Path) -> None:
    result = run(file_of(tmp_path, **RENAMED))
    definition, _, module = result.stdout.partition("# The end of the file. What follows is another one, ")
    assert 'transform="orders_sink_transform:documents"' in definition
    assert module.startswith("orders_sink_transform.py:\n")
    assert "def documents(records):" in module


def test_what_is_to_decide_is_told_and_exits_with_1(tmp_path: Path) -> None:
    result = run(file_of(tmp_path, **{"write.method": "upsert", "x\x1b[2Jy": "\x1b[2J"}))
    assert result.exit_code == 1
    assert "To decide: write.method = " in result.stderr
    assert "9 properties, 2 of them to decide." in result.stderr
    assert "UNDECIDED = [" in result.stdout
    assert "\x1b" not in result.stdout + result.stderr


def test_standard_input_and_a_worker_are_read(tmp_path: Path) -> None:
    worker = tmp_path / "worker.properties"
    worker.write_text("value.converter=org.apache.kafka.connect.storage.StringConverter\nconsumer.client.rack=a\n")
    given = json.dumps({key: value for key, value in CONNECTOR.items() if not key.startswith("value.")})
    assert run("-", given=given).exit_code == 1
    result = run("-", "--worker", str(worker), given=given)
    assert result.exit_code == 0
    assert "value_decoder=Utf8Decoder()" in result.stdout
    assert 'client={"client.rack": "a"}'.replace('"', "'") in result.stdout.replace('"', "'")


def test_a_file_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    (tmp_path / "orders.json").write_text(json.dumps(CONNECTOR), encoding="utf-8-sig")
    assert run(str(tmp_path / "orders.json")).exit_code == 0


def test_topics_of_a_pattern_are_given(tmp_path: Path) -> None:
    path = file_of(tmp_path, **{"topics": None, "topics.regex": "Shop.*"})
    assert run(path).exit_code == 1
    result = run(path, "--topics", "Shop.a, shop.b")
    assert result.exit_code == 0
    assert 'index={"Shop.a": "shop.a", "shop.b": "shop.b"},' in result.stdout


def test_files_are_written_and_none_is_replaced(tmp_path: Path) -> None:
    path, folder = file_of(tmp_path, **RENAMED), tmp_path / "dags"
    result = run(path, "--to", str(folder))
    assert (result.exit_code, result.stdout) == (0, "")
    assert {file.name for file in folder.iterdir()} == {"orders_sink.py", "orders_sink_transform.py"}
    (folder / "orders_sink.py").unlink()
    (folder / "orders_sink_transform.py").write_text("mine")
    again = run(path, "--to", str(folder))
    assert again.exit_code == 1
    assert "is there already" in again.stderr
    assert [file.read_text() for file in folder.iterdir()] == ["mine"]


def test_json_has_the_texts_and_each_answer(tmp_path: Path) -> None:
    result = run(file_of(tmp_path, **{"linger.ms": "5", "write.method": "upsert"}), "--json")
    assert result.exit_code == 1
    answered = json.loads(result.stdout)
    assert (answered["name"], answered["transform"]) == ("orders-sink", None)
    ast.parse(answered["definition"])
    properties = {each["name"]: each for each in answered["properties"]}
    assert properties["linger.ms"]["kind"] == "none"
    assert properties["linger.ms"]["to_decide"] is False
    assert properties["write.method"]["to_decide"] is True
    assert properties["connection.password"]["value"] == "***"


def test_a_file_that_is_no_connector_is_an_error(tmp_path: Path) -> None:
    assert "cannot be read: No such file" in run(str(tmp_path / "none.json")).stderr
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    assert "it is not UTF-8" in run(str(tmp_path / "bytes")).stderr
    result = run("-", given='{"connector.class": "io.acme.JdbcSink"}')
    assert result.exit_code == 1
    assert "'io.acme.JdbcSink', which is no sink" in result.stderr
