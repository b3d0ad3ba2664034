"""The example of an output in a package of its own: whose file is published, of several attempts at a batch."""

from __future__ import annotations

from pathlib import Path

import pytest
from examples.extensions.ndjson_output.headrace_ndjson import Claim, NdjsonOutput, check_folder_of, datasets_of
from tests.unit.stream.definitions import fields

from headrace.spark.outputs.writer import AttemptReplacedError
from headrace.stream import Stream, StreamDefinitionError
from headrace.stream.outputs import Dataset


def written(claim: Claim) -> Claim:
    claim.take()
    with claim.open() as file:
        file.write(str(claim.attempt).encode())
    return claim


def published(folder: Path) -> str:
    return (folder / "1000.ndjson").read_text()


def test_a_later_attempt_replaces_the_file(tmp_path: Path) -> None:
    for number in (1, 2):
        written(Claim(tmp_path, 1000, "", number)).publish()
        assert published(tmp_path) == str(number)
    assert [claim.name for claim in (tmp_path / ".claims" / "1000.").iterdir()] == ["2"]


@pytest.mark.parametrize("later_has_published", [False, True])
def test_a_fenced_attempt_publishes_nothing(tmp_path: Path, later_has_published: bool) -> None:
    fenced, later = Claim(tmp_path, 1000, "", 9), Claim(tmp_path, 1000, "", 10)
    written(fenced)
    written(later)
    if later_has_published:
        later.publish()
    with pytest.raises(AttemptReplacedError, match="has replaced attempt 9"):
        fenced.publish()
    with pytest.raises(AttemptReplacedError):
        fenced.open()
    with pytest.raises(AttemptReplacedError):
        fenced.take()
    if not later_has_published:
        later.publish()
    assert published(tmp_path) == "10"


def test_attempts_of_a_replay_and_of_batches_are_numbered_apart(tmp_path: Path) -> None:
    written(Claim(tmp_path, 1000, "", 5))
    written(Claim(tmp_path, 10001, "", 7))
    written(Claim(tmp_path, 1000, "again", 6))
    written(Claim(tmp_path, 1000, "", 5)).publish()
    assert published(tmp_path) == "5"


def test_two_outputs_into_one_folder_are_refused(tmp_path: Path) -> None:
    path = str(tmp_path)
    with pytest.raises(StreamDefinitionError, match=r"outputs\.second\.path: .* is also the folder of output first"):
        Stream(**fields(outputs=(NdjsonOutput(id="first", path=path), NdjsonOutput(id="second", path=path))))


def test_a_folder_that_cannot_be_made_is_reported_by_the_check(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (checked,) = check_folder_of(NdjsonOutput(path=f"{tmp_path}/file/below"))
    assert checked.name == "output ndjson"
    assert "is a file" in str(checked.error)


@pytest.mark.parametrize(("counts", "rows"), [({"rows": 2, "bytes": 9}, 2), ({"records": 0}, 0), ({"skipped": "x"}, 0)])
def test_the_dataset_has_the_rows_of_a_batch_the_writer_missed(counts: dict[str, int | str], rows: int) -> None:
    assert datasets_of(NdjsonOutput(path="/data/lines"), counts, None) == {Dataset("file", "/data/lines"): rows}
