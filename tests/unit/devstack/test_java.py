from __future__ import annotations

from pathlib import Path

import pytest

from headrace.devstack.errors import JavaMissingError
from headrace.devstack.java import find_java, how_to_get_java


def _fake_java(folder: Path, says: str, code: int = 0) -> Path:
    java = folder / "bin" / "java"
    java.parent.mkdir(parents=True)
    java.write_text(f"#!/bin/sh\necho '{says}' >&2\nexit {code}\n")
    java.chmod(0o755)
    return java


def test_no_java_names_the_version_and_how_to_get_it(tmp_path: Path) -> None:
    with pytest.raises(JavaMissingError, match=r"Java 17 or newer is needed.*openjdk"):
        find_java({"PATH": str(tmp_path)})


def test_a_java_home_without_java_is_named(tmp_path: Path) -> None:
    with pytest.raises(JavaMissingError, match=r"JAVA_HOME is .*no bin/java"):
        find_java({"JAVA_HOME": str(tmp_path), "PATH": "/usr/bin"})


@pytest.mark.parametrize("text", ['openjdk version "11.0.2" 2019-01-15', 'java version "1.8.0_292"'])
def test_an_old_java_is_refused(tmp_path: Path, text: str) -> None:
    _fake_java(tmp_path, text)
    with pytest.raises(JavaMissingError, match=r"is Java (11|8); Java 17 or newer is needed"):
        find_java({"JAVA_HOME": str(tmp_path)})


def test_a_java_that_fails_is_quoted(tmp_path: Path) -> None:
    _fake_java(tmp_path, "no libjvm", code=6)
    with pytest.raises(JavaMissingError, match=r"exit 6.*no libjvm"):
        find_java({"JAVA_HOME": str(tmp_path)})


@pytest.mark.parametrize(
    ("text", "version"), [('openjdk version "17.0.9" 2023', 17), ('openjdk version "21" 2023', 21)]
)
def test_java_home_wins_and_its_version_is_read(tmp_path: Path, text: str, version: int) -> None:
    java = _fake_java(tmp_path, text)
    found = find_java({"JAVA_HOME": str(tmp_path), "PATH": "/usr/bin"})
    assert (found.executable, found.version) == (java, version)


def test_advice_fits_the_platform() -> None:
    assert "brew" in how_to_get_java("darwin")
    assert "apt-get" in how_to_get_java("linux")
