from __future__ import annotations

import sys
import uuid
from pathlib import Path
from typing import Any

import pytest

from headrace.elasticsearch.dead_letter_index import StoredLetter
from headrace.elasticsearch.errors import LettersNotReplayableError
from headrace.spark.letter_reading import ThroughTheTransform
from headrace.stream import ColumnIds, ElasticsearchOutput, KafkaInput, SparkSettings, State, Stream, Window


def stream(folder: Path, **fields: Any) -> Stream:
    return Stream(
        **{
            "name": "shop",
            "inputs": KafkaInput(bootstrap_servers="localhost:9", topics="clicks"),
            "outputs": ElasticsearchOutput(hosts="http://localhost:1", index="clicks", **fields.pop("output", {})),
            "batch_interval": "10 s",
            "storage": folder / "storage",
            "ledger": f"sqlite:///{folder}/ledger.db",
            **fields,
        }
    )


def reader(declared: Stream) -> ThroughTheTransform:
    (output,) = declared.outputs
    assert isinstance(output, ElasticsearchOutput)

    def no_session() -> Any:
        raise AssertionError("nothing is read here")

    return ThroughTheTransform(declared, output, no_session)


@pytest.mark.parametrize(
    ("output", "why"),
    [
        ({"document_ids": ColumnIds(columns=("word",))}, "ids of columns"),
        ({"document_ids": ColumnIds(columns=("word",), with_batch_time=False)}, "ids of columns"),
        ({"window": Window(length="20 s")}, "reads a window"),
    ],
)
def test_what_is_made_of_many_records_is_not_made_of_one(tmp_path: Path, output: dict[str, Any], why: str) -> None:
    with pytest.raises(LettersNotReplayableError, match=why):
        reader(stream(tmp_path, output=output))


def test_nor_is_what_is_made_of_the_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    name = f"stateful_{uuid.uuid4().hex}"
    (tmp_path / f"{name}.py").write_text("def changed(records, changes):\n    return changes\n\ndef update(r): ...\n")
    declared = stream(
        tmp_path,
        transform=f"{name}:changed",
        state=State(update=f"{name}:update", fields="word STRING", keys="word"),
        spark=SparkSettings(py_files=(str(tmp_path / f"{name}.py"),)),
    )
    with pytest.raises(LettersNotReplayableError, match="takes the state"):
        reader(declared)


RECORD = {"topic": "clicks", "partition": 0, "offset": 1, "headers": [], "value": "e30=", "value_bytes": 2}


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        (RECORD, None),
        ({**RECORD, "topic": None}, "of no record"),
        ({**RECORD, "value": None}, "run its batch again"),
    ],
)
def test_a_letter_needs_its_record(tmp_path: Path, fields: dict[str, Any], why: str | None) -> None:
    reported = reader(stream(tmp_path)).cannot(StoredLetter("x", 0, 1, fields))
    assert reported is None if why is None else why in str(reported)


def test_with_several_inputs_its_topic_has_to_be_of_one(tmp_path: Path) -> None:
    inputs = [KafkaInput(id=each, bootstrap_servers="localhost:9", topics=each) for each in ("clicks", "orders")]
    name = f"both_{uuid.uuid4().hex}"
    (tmp_path / f"{name}.py").write_text("def both(clicks, orders):\n    return clicks\n")
    spark = SparkSettings(py_files=(str(tmp_path / f"{name}.py"),))
    declared = stream(tmp_path, inputs=inputs, transform=f"{name}:both", spark=spark)
    assert reader(declared).cannot(StoredLetter("x", 0, 1, RECORD)) is None
    assert "its topic" in str(reader(declared).cannot(StoredLetter("x", 0, 1, {**RECORD, "topic": "views"})))
