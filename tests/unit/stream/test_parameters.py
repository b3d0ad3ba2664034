from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headrace.stream import ConsoleOutput, KafkaInput, Stream
from headrace.stream.stream import ParameterError, merged_parameters, parse_parameters


def stream(tmp_path: Path) -> Stream:
    return Stream(
        name="clicks",
        inputs=KafkaInput(bootstrap_servers="localhost:9092", topics="clicks"),
        outputs=ConsoleOutput(),
        batch_interval="10 s",
        storage=str(tmp_path),
        ledger=f"sqlite:///{tmp_path}/ledger.db",
        parameters={"threshold": 3, "country": "NZ"},
    )


def test_what_a_run_gives_takes_the_place_of_the_streams(tmp_path: Path) -> None:
    assert merged_parameters(stream(tmp_path), {"threshold": 5}) == {"threshold": 5, "country": "NZ"}
    assert merged_parameters(stream(tmp_path), None) == {"threshold": 3, "country": "NZ"}


def test_a_name_that_the_stream_does_not_declare_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ParameterError, match=r"no parameter limit. Its parameters are country, threshold\."):
        merged_parameters(stream(tmp_path), {"limit": 1})


@pytest.mark.parametrize("given", [["threshold"], "threshold", 3])
def test_parameters_are_a_mapping(tmp_path: Path, given: Any) -> None:
    with pytest.raises(ParameterError, match="must be an object"):
        merged_parameters(stream(tmp_path), given)


def test_parameters_are_read_from_a_json_object() -> None:
    assert parse_parameters('{"threshold": 5}') == {"threshold": 5}
    for text in ("[1]", "{"):
        with pytest.raises(ParameterError):
            parse_parameters(text)
