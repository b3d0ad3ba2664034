"""`TextFiles` over files that are rotated, copied, compressed, replaced or damaged."""

from __future__ import annotations

import bz2
import gzip
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.unit.receiver.waiting import eventually

from headrace.receiver import Receiver, TextFiles
from headrace.receiver.followed_files import FileProgress, Listing, is_part_of, is_rotated_name
from headrace.testing.receivers import RunningReceiver, run_receiver

Make = Callable[..., Callable[[], Receiver]]


@pytest.fixture
def lines(tmp_path: Path) -> Make:
    """Makes what makes a receiver of the lines of ``tmp_path``."""

    def make(pattern: str = "*", **given: Any) -> Callable[[], Receiver]:
        return lambda: TextFiles(str(tmp_path), pattern, **{"look_seconds": 0.01, **given})

    return make


def write(path: Path, *texts: str, mode: str = "w") -> None:
    with path.open(mode) as file:
        file.writelines(f"{text}\n" for text in texts)


def values(*running: RunningReceiver) -> list[str]:
    return [bytes(value or b"").decode() for each in running for value in each.values]  # type: ignore[arg-type]


def numbered(first: int, end: int) -> list[str]:
    """Lines of one length, so that lines end at the same bytes in every file."""
    return [f"{number:06}" for number in range(first, end)]


@pytest.mark.parametrize("pattern", ["*", "*.log"])
@pytest.mark.parametrize("restarts", [False, True])
def test_a_file_rotated_by_renaming_is_read_to_its_end(
    lines: Make, tmp_path: Path, pattern: str, restarts: bool
) -> None:
    """Its successor is read too."""
    log = tmp_path / "app.log"

    def rotate() -> None:
        write(log, *numbered(10, 12), mode="a")
        log.rename(tmp_path / "app.log.1")
        write(log, *numbered(12, 30))
        write(tmp_path / "app.log.1", "late", mode="a")

    write(log, *numbered(0, 10))
    with run_receiver(lines(pattern)) as first:
        first.wait_for(10)
        if not restarts:
            rotate()
            first.wait_for(31)
    if restarts:
        rotate()
    with run_receiver(lines(pattern), position=first.stored_position) as again:
        again.wait_for(31 - len(first.records))
        (tmp_path / "app.log.1").rename(tmp_path / "app.log.2")
        log.rename(tmp_path / "app.log.1")
        write(log, "new")
        again.wait_for(32 - len(first.records))
    assert sorted(values(first, again)) == sorted([*numbered(0, 30), "late", "new"])
    assert (first.errors, again.errors) == ([], [])


@pytest.mark.parametrize("pattern", ["*", "*.log"])
def test_a_file_copied_and_truncated_is_followed_in_the_copy(lines: Make, tmp_path: Path, pattern: str) -> None:
    log, copy = tmp_path / "app.log", tmp_path / "app.log-20261128"
    write(log, *numbered(0, 10))
    with run_receiver(lines(pattern)) as running:
        running.wait_for(10)
        # As logrotate's copytruncate does, with looks in between.
        copy.write_bytes(log.read_bytes()[:35])
        write(tmp_path / "look.log", "1")
        running.wait_for(11)
        shutil.copyfile(log, copy)
        write(tmp_path / "look.log", "2", mode="a")
        running.wait_for(12)
        # Not before the log is truncated: a copy has nothing that the log has not.
        os.truncate(log, 0)
        write(copy, "after the last look", mode="a")
        write(log, *numbered(100, 130), mode="a")
        running.wait_for(43)
    expected = [*numbered(0, 10), *numbered(100, 130), "1", "2", "after the last look"]
    assert sorted(values(running)) == sorted(expected)
    assert running.errors == []


def test_a_log_truncated_while_its_copy_is_compared_is_followed(
    lines: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "app.log"

    def truncated_meanwhile(path: Path, of: Path, progress: FileProgress) -> bool:
        os.truncate(of, 0)
        return is_part_of(path, of, progress)

    write(log, *numbered(0, 10))
    with run_receiver(lines()) as running:
        running.wait_for(10)
        monkeypatch.setattr("headrace.receiver.text_files.is_part_of", truncated_meanwhile)
        shutil.copyfile(log, tmp_path / ".making")
        (tmp_path / ".making").rename(tmp_path / "app.log.1")
        eventually(lambda: log.stat().st_size == 0)
        write(log, *numbered(100, 130), mode="a")
        running.wait_for(40)
    assert sorted(values(running)) == [*numbered(0, 10), *numbered(100, 130)]
    assert running.errors == []


@pytest.mark.parametrize(("end", "compress"), [(".gz", gzip.compress), (".bz2", bz2.compress)])
@pytest.mark.parametrize("former", ["app.log.1", "app.log.2"])
def test_a_rotated_file_that_is_compressed_is_not_read_again(
    lines: Make, tmp_path: Path, end: str, compress: Callable[[bytes], bytes], former: str
) -> None:
    old = tmp_path / "app.log.1"
    write(old, *numbered(0, 2_000))
    with run_receiver(lines()) as running:
        running.wait_for(2_000)
        packed = compress(old.read_bytes() + b"unread\n")
        # While it is written, the original is there.
        (tmp_path / f"{former}{end}").write_bytes(packed[: len(packed) // 2])
        write(tmp_path / "look", "1")
        running.wait_for(2_001)
        (tmp_path / f"{former}{end}").write_bytes(packed)
        old.unlink()
        running.wait_for(2_002)
        write(tmp_path / "look", "2", mode="a")
        running.wait_for(2_003)
    assert values(running)[2_000:] == ["1", "unread", "2"]
    with run_receiver(lines(), position=running.stored_position) as again:
        write(tmp_path / "look", "3", mode="a")
        again.wait_for(1)
    assert values(again) == ["3"]


@pytest.mark.parametrize("end", [".gz", ".bz2"])
def test_a_compressed_file_is_decompressed_by_its_extension(lines: Make, tmp_path: Path, end: str) -> None:
    compress = gzip.compress if end == ".gz" else bz2.compress
    texts = numbered(0, 5_000)
    # Of several parts, as `cat` makes it, and without a last line end.
    packed = compress("\n".join(texts[:100]).encode() + b"\n") + compress("\n".join(texts[100:]).encode())
    (tmp_path / f"a{end}").write_bytes(packed)
    with run_receiver(lines()) as running:
        running.wait_for(5_000)
    assert values(running) == texts
    assert running.errors == []
    with run_receiver(lines(), position=running.stored_position) as again:
        write(tmp_path / "b", "b")
        again.wait_for(1)
    assert values(again) == ["b"]


def test_a_compressed_file_is_read_on_when_it_is_complete(lines: Make, tmp_path: Path) -> None:
    """An incomplete one is an error until then."""
    texts = [f"{number} {number * 7919 % 10007}" for number in range(20_000)]
    packed = gzip.compress("".join(f"{text}\n" for text in texts).encode())
    file = tmp_path / "a.gz"
    file.write_bytes(packed[: len(packed) // 2])
    (tmp_path / "b.zst").write_bytes(b"(\xb5/\xfd")
    (tmp_path / "c.gz").write_bytes(b"no gzip at all")
    write(tmp_path / "d", "good")
    with run_receiver(lines()) as running:
        eventually(lambda: any("a.gz is damaged, or not complete" in error for error in running.errors))
        (errors,) = [error for error in running.errors if "a.gz" in error]
        assert "b.zst is compressed as .zst, which is not read" in errors
        assert "c.gz is damaged" in errors
        with file.open("ab") as more:
            more.write(packed[len(packed) // 2 :])
        running.wait_for(20_001)
    found = values(running)
    found.remove("good")
    assert found == texts


def test_a_last_line_without_an_end_is_stored_once_it_stays(lines: Make, tmp_path: Path) -> None:
    file = tmp_path / "a.csv"
    file.write_bytes(b"one\r\ntwo\n\nlast")
    with run_receiver(lines(last_line_seconds=0.2)) as running:
        running.wait_for(4)
        # Its end comes late: no line of its own.
        write(file, "", "next", mode="a")
        running.wait_for(5)
        assert running.errors == []
        with file.open("a") as half:
            half.write("half")
        running.wait_for(6)
        write(file, " and half", mode="a")
        running.wait_for(7)
        eventually(lambda: running.errors != [])
    assert values(running) == ["one", "two", "", "last", "next", "half", " and half"]
    assert "was continued at byte 24, in the middle of a line that was stored as the last one" in running.errors[0]


def test_a_line_that_is_being_written_is_not_stored_in_halves(lines: Make, tmp_path: Path) -> None:
    for seconds in (None, 60.0):
        file = tmp_path / f"a-{seconds}"
        with run_receiver(lines(file.name, last_line_seconds=seconds)) as running:
            with file.open("w", buffering=1) as half:
                half.write("one\ntwo th")
                half.flush()
                running.wait_for(1)
                half.write("ree\n")
            running.wait_for(2)
        assert values(running) == ["one", "two three"]


def test_names_that_spark_ignores_are_read_only_if_named(lines: Make, tmp_path: Path) -> None:
    """The pattern or the position may name them."""
    (tmp_path / "_temporary").mkdir()
    for name in (".part.tmp", "_SUCCESS", "part._COPYING_", "_temporary/part", "seen"):
        write(tmp_path / name, name)
    with run_receiver(lines("**/*")) as running:
        running.wait_for(1)
        (tmp_path / ".part.tmp").rename(tmp_path / "part")
        running.wait_for(2)
        (tmp_path / "part._COPYING_").rename(tmp_path / "copied")
        running.wait_for(3)
    assert values(running) == ["seen", ".part.tmp", "part._COPYING_"]
    with run_receiver(lines("_*")) as hidden:
        hidden.wait_for(1)
    assert values(hidden) == ["_SUCCESS"]
    # An earlier version read it.
    write(tmp_path / "_SUCCESS", "more", mode="a")
    with run_receiver(lines(), position={"_SUCCESS": 9, "seen": 5, "part": 11, "copied": 16}) as upgraded:
        upgraded.wait_for(1)
    assert values(upgraded) == ["more"]


def test_a_file_that_is_renamed_when_it_is_complete_is_read_once(lines: Make, tmp_path: Path) -> None:
    write(tmp_path / "part.tmp", "one", "two")
    with run_receiver(lines()) as running:
        running.wait_for(2)
        (tmp_path / "part.tmp").rename(tmp_path / "part")
        write(tmp_path / "look", "1")
        running.wait_for(3)
    assert values(running) == ["one", "two", "1"]
    assert list(running.stored_position) == ["part", "look"]


def test_a_file_of_an_old_position_is_followed_over_a_renaming(lines: Make, tmp_path: Path) -> None:
    """The file is renamed after the upgrade."""
    write(tmp_path / "app.log", "one", "two")
    with run_receiver(lines(), position={"app.log": 8, "gone.log": 3, "cut.log": -1}) as running:
        write(tmp_path / "look", "1")
        running.wait_for(1)
    assert running.stored_position["gone.log"] == 3
    (tmp_path / "app.log").rename(tmp_path / "app.log.1")
    write(tmp_path / "app.log", "three")
    with run_receiver(lines(), position=running.stored_position) as again:
        again.wait_for(1)
    assert (values(running), values(again), again.errors) == (["1"], ["three"], [])


def test_hard_and_symbolic_links_to_one_file_are_read_once(lines: Make, tmp_path: Path) -> None:
    write(tmp_path / "b", "one")
    os.link(tmp_path / "b", tmp_path / "c")
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "broken").symlink_to("nowhere")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "fifo")
    with run_receiver(lines()) as running:
        running.wait_for(1)
        write(tmp_path / "c", "two", mode="a")
        running.wait_for(2)
        write(tmp_path / "other", "three")
        running.wait_for(3)
    assert (values(running), running.errors) == (["one", "two", "three"], [])


def test_files_of_equal_contents_are_all_read(lines: Make, tmp_path: Path) -> None:
    """Spark reads each file, whatever others hold. Only names that rotation makes are compared with another's."""
    names = ["part-00000", "part-00001", "part-1", "part-10", "monday.csv", "tuesday.csv"]
    for name in names:
        write(tmp_path / name, "0")
    with run_receiver(lines()) as running:
        running.wait_for(6)
        (tmp_path / "monday.csv").unlink()
        write(tmp_path / "wednesday.csv", "0")
        running.wait_for(7)
    assert sorted((record.key or b"") for record in running.records) == sorted(  # type: ignore[type-var]
        name.encode() for name in [*names, "wednesday.csv"]
    )


def test_a_file_replaced_by_an_edited_copy_goes_on(lines: Make, tmp_path: Path) -> None:
    """It goes on where the lines are the same."""
    file = tmp_path / "a.txt"
    write(file, *numbered(0, 5))
    with run_receiver(lines()) as running:
        running.wait_for(5)
        write(tmp_path / ".a.tmp", *numbered(0, 6))
        (tmp_path / ".a.tmp").replace(file)
        running.wait_for(6)
        assert running.errors == []
        write(tmp_path / ".a.tmp", *numbered(50, 60))
        (tmp_path / ".a.tmp").replace(file)
        running.wait_for(16)
        eventually(lambda: running.errors != [])
    assert values(running) == [*numbered(0, 6), *numbered(50, 60)]
    assert "a.txt is another file than the one of which 42 bytes were read" in running.errors[0]


@pytest.mark.parametrize("change", ["longer", "same length", "shorter", "shorter, then regrown while it is down"])
def test_a_file_whose_stored_lines_changed_waits_for_a_person(lines: Make, tmp_path: Path, change: str) -> None:
    """The file is an error until then."""
    log = tmp_path / "app.log"
    write(log, *numbered(0, 10))
    with run_receiver(lines()) as running:
        running.wait_for(10)
        write(log, *numbered(10, {"longer": 30, "same length": 20}.get(change, 13)))
        eventually(lambda: running.errors != [])
    if "regrown" in change:
        write(log, *numbered(13, 40), mode="a")
    with run_receiver(lines(), position=running.stored_position) as again:
        eventually(lambda: again.errors != [])
        assert "it was truncated or replaced. It is not read any more until you give it another name" in again.errors[0]
        write(tmp_path / "other", "good")
        again.wait_for(1)
    with run_receiver(lines(), position=again.stored_position) as third:
        eventually(lambda: third.errors != [])
        size = len(log.read_text().split())
        log.rename(tmp_path / "decided.log")
        third.wait_for(size)
    assert values(third) == (tmp_path / "decided.log").read_text().split()


def test_a_definition_may_have_changed_files_read_from_the_start(lines: Make, tmp_path: Path) -> None:
    log = tmp_path / "app.log"
    write(log, *numbered(0, 10))
    with run_receiver(lines(changed="read")) as running:
        running.wait_for(10)
        write(log, *numbered(10, 13))
        running.wait_for(13)
        eventually(lambda: running.errors != [])
    assert values(running) == numbered(0, 13)
    assert "app.log has 21 bytes, and is not what it was when 70 were read" in running.errors[0]
    assert "It is read from its beginning" in running.errors[0]


def test_known_losses_with_a_deleted_file_are_reported(lines: Make, tmp_path: Path) -> None:
    file = tmp_path / "a"
    file.write_text("one\nhalf")
    with run_receiver(lines()) as running:
        running.wait_for(1)
        write(tmp_path / "look", "1")
        running.wait_for(2)
        file.unlink()
        eventually(lambda: running.errors != [])
    assert "a was deleted or moved out of the directory when 4 of its 8 bytes were read" in running.errors[0]


def test_a_long_line_stops_only_its_own_file(lines: Make, tmp_path: Path) -> None:
    """The limit can be raised."""
    (tmp_path / "a.bin").write_bytes(b"first\n" + b"x" * (2 << 20) + b"\nlast\n")
    write(tmp_path / "b", *numbered(0, 3_000))
    with run_receiver(lines()) as running:
        running.wait_for(3_001)
        eventually(lambda: running.errors != [])
        write(tmp_path / "b", "more", mode="a")
        running.wait_for(3_002)
    assert "a.bin has a line of more than 1048576 bytes at byte 6" in running.errors[0]
    with run_receiver(lines(max_line_bytes=4 << 20), position=running.stored_position) as again:
        again.wait_for(2)
    assert [len(value) for value in values(again)] == [2 << 20, 4]


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every file")
def test_a_file_that_may_not_be_read_stops_no_other(lines: Make, tmp_path: Path) -> None:
    write(tmp_path / "a", "secret")
    (tmp_path / "a").chmod(0)
    write(tmp_path / "b", "one")
    with run_receiver(lines()) as running:
        running.wait_for(1)
        eventually(lambda: any("a cannot be read" in error for error in running.errors))
        (tmp_path / "a").chmod(0o600)
        running.wait_for(2)


def test_a_full_position_takes_no_new_files_and_says_so(lines: Make, tmp_path: Path) -> None:
    names = [f"{'n' * 200}-{number:05}" for number in range(300)]
    for name in names:
        write(tmp_path / name, name)
    with run_receiver(lines()) as running:
        eventually(lambda: any("position of this receiver is full" in error for error in running.errors))
        taken = len(running.records)
        assert taken < 300
        for name in names[:100]:
            (tmp_path / name).unlink()
        running.wait_for(300)
    assert sorted(values(running)) == names


def test_a_name_of_another_receivers_file_is_an_error(tmp_path: Path) -> None:
    """With several receivers, files must keep their names."""

    def make() -> Receiver:
        return TextFiles(str(tmp_path), look_seconds=0.01)

    write(tmp_path / "a", "one")
    with run_receiver(make, index=0, receivers=2) as first, run_receiver(make, index=1, receivers=2) as second:
        eventually(lambda: len(first.records) + len(second.records) == 1)
        reads = first if first.records else second
        for number in range(10):
            (tmp_path / ("a" if number == 0 else f"b{number - 1}")).rename(tmp_path / f"b{number}")
            write(tmp_path / f"look{number}", "1")
            eventually(lambda number=number: f"look{number}".encode() in keys(first, second))  # type: ignore[misc]
        eventually(lambda: any("files must keep their names" in error for error in reads.errors))


def keys(*running: RunningReceiver) -> list[bytes | str | None]:
    return [record.key for each in running for record in each.records]


@pytest.mark.parametrize("pattern", ["/etc/*", "../*"])
def test_a_pattern_stays_in_the_directory(tmp_path: Path, pattern: str) -> None:
    with run_receiver(lambda: TextFiles(str(tmp_path), pattern)) as running:
        eventually(lambda: running.errors != [])
    assert "it must name files in the directory" in running.errors[0]


def test_patterns_find_what_a_shell_finds(tmp_path: Path) -> None:
    for name in ("a.log", "b.txt", "one/a.log", "one/two/a.log", ".git/a.log"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        write(tmp_path / name, "x")
    found = {
        pattern: list(Listing.of(tmp_path, pattern, ()).files)
        for pattern in ("*", "*.log", "*/*", "**/*.log", "one/**/a.log", "[ab].*", "**", "*a*a*a*a*a*a*a*a*b")
    }
    assert found == {
        "*": ["a.log", "b.txt"],
        "*.log": ["a.log"],
        "*/*": ["one/a.log"],
        "**/*.log": ["a.log", "one/a.log", "one/two/a.log"],
        "one/**/a.log": ["one/a.log", "one/two/a.log"],
        "[ab].*": ["a.log", "b.txt"],
        "**": [],
        "*a*a*a*a*a*a*a*a*b": [],
    }


@pytest.mark.parametrize(
    ("name", "is_rotated"),
    [("app.log.1", True), ("app.log-20261128", True), ("app.log.2.gz", True), ("app.log10", False), ("app.log", False)],
)
def test_names_that_rotation_makes(name: str, is_rotated: bool) -> None:
    assert is_rotated_name(name, "app.log") is is_rotated


def test_files_rotated_all_the_time_are_read_once_without_error(lines: Make, tmp_path: Path) -> None:
    """Some of the looks fall between two renames, or between the listing and the reading."""
    log = tmp_path / "app.log"
    with run_receiver(lines("*", look_seconds=0)) as running:
        for number in range(300):
            write(log, f"{number:06}", mode="a")
            for older in (2, 1):
                if (file := tmp_path / f"app.log.{older}").exists():
                    file.rename(tmp_path / f"app.log.{older + 1}")
            log.rename(tmp_path / "app.log.1")
            write(log, f"late {number:06}")
            running.wait_for(2 * number + 2)
    expected = [text for number in range(300) for text in (f"{number:06}", f"late {number:06}")]
    assert sorted(values(running)) == sorted(expected)
    assert running.errors == []
