"""One batch's folder: whole, replaced as a whole, and closed to attempts of the past."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from headrace.spark.outputs import parquet
from headrace.spark.outputs.parquet import Claim, OutputFolderError, WrittenFile
from headrace.spark.outputs.writer import AttemptReplacedError


@pytest.fixture
def claim(tmp_path: Path) -> Claim:
    return Claim(str(tmp_path / "new" / "clicks"), "clicks", "parquet", "", 1000, 1, "aaaa")


def put(claim: Claim, name: str, text: str = "rows") -> WrittenFile:
    claim.unpublished(name).write_text(text)
    return WrittenFile(name, len(text), len(text))


def published(claim: Claim) -> dict[str, str]:
    return {file.name: file.read_text() for file in claim.published.glob("*.parquet")}


def hidden(claim: Claim) -> list[str]:
    """What attempts left, without the replaced files that readers may still list."""
    names = [path.name for path in (Path(claim.path) / parquet.HIDDEN).iterdir()]
    return sorted(name for name in names if not name.startswith("trash."))


def test_files_appear_together_and_nothing_else_is_left(claim: Claim) -> None:
    claim.take()
    files = [put(claim, "a.parquet"), put(claim, "b.parquet", "more")]
    put(claim, "of-a-task-that-did-not-count.parquet")
    assert not claim.published.exists()
    claim.publish(files)
    assert published(claim) == {"a.parquet": "rows", "b.parquet": "more"}
    record = json.loads((claim.published / parquet.RECORD).read_text())
    assert (record["attempt"], record["rows"], len(record["files"])) == (1, 8, 2)
    assert sorted(path.name for path in Path(claim.path).iterdir()) == [parquet.HIDDEN, "batch_time=1000"]
    assert hidden(claim) == []


def test_a_repeat_replaces_the_files_of_before(claim: Claim, monkeypatch: pytest.MonkeyPatch) -> None:
    for attempt, exchange in ((1, True), (2, True), (3, False)):
        if not exchange:
            monkeypatch.setattr(parquet, "_exchange", lambda one, other: False)
        again = replace(claim, attempt=attempt, token=str(attempt))
        again.take()
        again.publish([put(again, f"{attempt}.parquet")])
        assert published(claim) == {f"{attempt}.parquet": "rows"}
        assert hidden(claim) == []


def test_a_reader_never_lists_a_mixture(claim: Claim) -> None:
    """Also not while it is replaced again and again: the exchange is atomic."""
    claim.take()
    claim.publish([put(claim, f"{part}-0.parquet") for part in range(3)])
    seen: set[tuple[str, ...]] = set()
    done = threading.Event()

    def read() -> None:
        while not done.is_set():
            seen.add(tuple(sorted(path.name for path in claim.published.glob("*.parquet"))))

    reader = threading.Thread(target=read)
    reader.start()
    for attempt in range(1, 60):
        again = replace(claim, attempt=attempt + 1, token=str(attempt))
        again.take()
        again.publish([put(again, f"{part}-{attempt}.parquet") for part in range(3)])
    done.set()
    reader.join()
    assert len(seen) > 1
    for names in seen:
        assert len({name.partition("-")[2] for name in names}) == 1
        assert len(names) == 3


def test_a_replaced_attempt_cannot_write_publish_or_claim(claim: Claim) -> None:
    later = replace(claim, attempt=2, token="bbbb")
    claim.take()
    files = [put(claim, "old.parquet")]
    later.take()
    with pytest.raises(FileNotFoundError):
        claim.unpublished("late.parquet").open("xb")
    with pytest.raises(AttemptReplacedError):
        claim.publish(files)
    with pytest.raises(AttemptReplacedError, match="Attempt 2"):
        claim.take()
    later.publish([put(later, "new.parquet")])
    with pytest.raises(AttemptReplacedError):
        claim.publish(files)
    with pytest.raises(AttemptReplacedError, match="Attempt 2 at batch 1970-01-01T00:00:01Z"):
        replace(claim, token="cccc").take()
    claim.drop()
    assert published(claim) == {"new.parquet": "rows"}
    assert hidden(claim) == []


def test_two_attempts_at_once_publish_once(claim: Claim) -> None:
    """However they interleave, what stands in the end is the later attempt's."""
    for batch_time_ms in range(30):
        attempts = [replace(claim, batch_time_ms=batch_time_ms, attempt=n, token=str(n)) for n in (1, 2)]
        outcomes: dict[int, str] = {}
        barrier = threading.Barrier(2)

        def run(attempt: Claim, outcomes: dict[int, str] = outcomes, barrier: threading.Barrier = barrier) -> None:
            barrier.wait()
            try:
                attempt.take()
                attempt.publish([put(attempt, f"{attempt.attempt}.parquet")])
                outcomes[attempt.attempt] = "published"
            except (AttemptReplacedError, FileNotFoundError):
                outcomes[attempt.attempt] = "refused"

        threads = [threading.Thread(target=run, args=(attempt,)) for attempt in attempts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert outcomes[2] == "published"
        assert published(attempts[0]) == {"2.parquet": "rows"}


def test_a_killed_attempt_leaves_readers_nothing(claim: Claim) -> None:
    """The next attempt removes what is left."""
    code = (
        "import sys; sys.path[:0] = []\n"
        "from headrace.spark.outputs.parquet import Claim, WrittenFile\n"
        "import headrace.spark.outputs.parquet as module, os\n"
        f"claim = Claim({claim.path!r}, 'clicks', 'parquet', '', 1000, 1, 'dead')\n"
        "claim.take()\n"
        "claim.unpublished('a.parquet').write_text('rows')\n"
        "module._exchange = lambda one, other: os.kill(os.getpid(), 9)\n"
        "claim.published.mkdir(); (claim.published / 'x.parquet').write_text('before')\n"
        "claim.publish([WrittenFile('a.parquet', 4, 4)])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False)
    assert done.returncode == -signal.SIGKILL
    assert published(claim) == {"x.parquet": "before"}
    assert hidden(claim) == ["1000..1.dead"]
    again = replace(claim, attempt=2)
    again.take()
    assert hidden(claim) == ["1000..2.aaaa"]
    again.publish([put(again, "b.parquet")])
    assert published(claim) == {"b.parquet": "rows"}


def test_leftovers_of_other_batches_go_after_a_day(claim: Claim) -> None:
    old, young = replace(claim, batch_time_ms=1), replace(claim, batch_time_ms=2)
    for other in (old, young):
        other.take()
        put(other, "a.parquet")
    for path in (old.folder, *old.folder.iterdir()):
        os.utime(path, (time.time() - 90_000,) * 2)
    claim.take()
    claim.publish([put(claim, "a.parquet")])
    assert hidden(claim) == [young.folder.name]


def test_replaced_files_go_with_the_next_batch_after_a_minute(claim: Claim, monkeypatch: pytest.MonkeyPatch) -> None:
    for attempt in (1, 2):
        again = replace(claim, attempt=attempt)
        again.take()
        again.publish([put(again, f"{attempt}.parquet")])
    (trash,) = (Path(claim.path) / parquet.HIDDEN).iterdir()
    assert [file.name for file in trash.rglob("*.parquet")] == ["1.parquet"]
    now = time.time()
    for later in (50, 70):
        monkeypatch.setattr(time, "time", lambda later=later: now + later)
        other = replace(claim, batch_time_ms=later)
        other.take()
        other.publish([put(other, "a.parquet")])
        assert trash.exists() is (later == 50)


def test_a_folder_of_another_output_is_left_alone(claim: Claim) -> None:
    claim.take()
    claim.publish([put(claim, "a.parquet")])
    for other in (replace(claim, stream="orders"), replace(claim, output="copy")):
        with pytest.raises(OutputFolderError, match="belongs to output 'parquet' of stream 'clicks'"):
            replace(other, attempt=2).take()
    assert published(claim) == {"a.parquet": "rows"}
    assert hidden(claim) == []


def test_replays_number_their_attempts_by_themselves(claim: Claim) -> None:
    first = replace(claim, attempt=5, target="week 1/a.b")
    first.take()
    first.publish([put(first, "a.parquet")])
    second = replace(claim, attempt=1, target="week 2")
    second.take()
    second.publish([put(second, "b.parquet")])
    assert published(claim) == {"b.parquet": "rows"}


def test_a_replay_does_not_replace_the_streams_own_files(claim: Claim) -> None:
    """Its definition may name the folder otherwise, for example by a symbolic link."""
    claim.take()
    claim.publish([put(claim, "a.parquet")])
    with pytest.raises(OutputFolderError, match="files of stream 'clicks' itself, which the replay 'v2'"):
        replace(claim, target="v2").take()
    assert published(claim) == {"a.parquet": "rows"}
    assert hidden(claim) == []


def test_a_stream_moved_to_a_replays_folder_replaces_its_files(claim: Claim) -> None:
    replay = replace(claim, target="v2", attempt=7)
    replay.take()
    replay.publish([put(replay, "a.parquet")])
    claim.take()
    claim.publish([put(claim, "b.parquet")])
    assert published(claim) == {"b.parquet": "rows"}


def test_what_a_task_did_not_write_to_its_end_is_not_published(claim: Claim) -> None:
    claim.take()
    file = put(claim, "a.parquet")
    with pytest.raises(OutputFolderError, match="bytes instead of"):
        claim.publish([replace(file, size=99)])
    assert not claim.published.exists()


def test_an_unwritable_output_path_is_an_error_with_the_path(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputFolderError, match="'parquet' cannot claim batch 1970-01-01T00:00:01Z"):
        Claim(f"{tmp_path}/file/clicks", "clicks", "parquet", "", 1000, 1, "aaaa").take()
