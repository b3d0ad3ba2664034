from __future__ import annotations

import hashlib
import re
from pathlib import Path

import pytest

from headrace.devstack import jars
from headrace.devstack.errors import JarsError, JavaMissingError, UnsupportedPlatformError
from headrace.devstack.jars import find_java, find_jdk, how_to_get_java


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was fetched; the registry has a.jar and b.jar for every bundle."""
    calls: list[str] = []

    def retrieve(bundle: str, folder: Path, _cache: Path) -> None:
        calls.append(bundle)
        (folder / "a.jar").write_bytes(b"a")
        (folder / "b.jar").write_bytes(b"b")

    monkeypatch.setattr(jars, "_retrieve", retrieve)
    return calls


def test_all_bundles_are_fetched_before_they_are_needed(
    tmp_path: Path, fetched: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    both = {"a.jar": _sha256(b"a"), "b.jar": _sha256(b"b")}
    bundles = ["kafka", "elasticsearch", jars.postgres_bundle()]
    monkeypatch.setattr(jars, "read_lock", lambda: dict.fromkeys(bundles, both))
    reported: list[str] = []
    jars.fetch_all(reported.append, cache=tmp_path)
    assert fetched == bundles
    assert [bundle in text for bundle, text in zip(bundles, reported, strict=True)] == [True, True, True]

    jars.fetch_all(reported.append, cache=tmp_path)
    assert (fetched, len(reported)) == (bundles, 3), "nothing to do, nothing to tell"

    monkeypatch.setattr(jars, "read_lock", lambda: dict.fromkeys([*bundles, "registry"], both))
    jars.fetch_all(reported.append, ["registry"], cache=tmp_path)
    assert fetched == [*bundles, "registry"]
    assert "registry (4 of 4)" in reported[3]


_GOOD = {"kafka": {"a.jar": _sha256(b"a"), "b.jar": _sha256(b"b")}}


def test_jars_are_fetched_once(tmp_path: Path, fetched: list[str]) -> None:
    first = jars.bundle_jars("kafka", cache=tmp_path, lock=_GOOD)
    second = jars.bundle_jars("kafka", cache=tmp_path, lock=_GOOD)
    assert first == second
    assert [jar.name for jar in first] == ["a.jar", "b.jar"]
    assert fetched == ["kafka"]


@pytest.mark.parametrize(
    ("wanted", "problem"),
    [
        ({"a.jar": _sha256(b"a"), "b.jar": _sha256(b"other")}, r"b\.jar has SHA-256 \w+, the lock file says \w+"),
        ({"a.jar": _sha256(b"a")}, r"b\.jar is not in the lock file"),
        ({"a.jar": _sha256(b"a"), "b.jar": _sha256(b"b"), "c.jar": "0"}, r"c\.jar is missing"),
    ],
)
def test_other_jars_than_the_lock_files_are_refused(
    tmp_path: Path, fetched: list[str], wanted: dict[str, str], problem: str
) -> None:
    with pytest.raises(JarsError, match=problem):
        jars.bundle_jars("kafka", cache=tmp_path, lock={"kafka": wanted})
    assert not list((tmp_path / "jars").glob("**/*.jar")), "a refused jar stays nowhere"


def test_a_jar_changed_after_download_is_refused(tmp_path: Path, fetched: list[str]) -> None:
    (jar, _) = jars.bundle_jars("kafka", cache=tmp_path, lock=_GOOD)
    jar.write_bytes(b"evil")
    with pytest.raises(JarsError, match=r"a\.jar has SHA-256"):
        jars.bundle_jars("kafka", cache=tmp_path, lock=_GOOD)


def test_a_bundle_without_lock_is_refused(tmp_path: Path) -> None:
    with pytest.raises(JarsError, match="no jars for 'kafka'"):
        jars.bundle_jars("kafka", cache=tmp_path, lock={})


def test_an_unreadable_lock_file_says_how_to_make_it(tmp_path: Path) -> None:
    with pytest.raises(JarsError, match=r"cannot be read.*headrace\.devstack\.jars lock"):
        jars.read_lock(tmp_path / "none.json")


def test_the_lock_file_locks_every_bundle() -> None:
    lock = jars.read_lock()
    assert set(lock) == set(jars.BUNDLES)
    for bundle, wanted in lock.items():
        assert all(re.fullmatch(r"[0-9a-f]{64}", digest) for digest in wanted.values()), bundle
        for module in jars.BUNDLES[bundle]:
            assert module.file in wanted


def test_an_archive_is_asked_for_by_its_classifier() -> None:
    (module,) = jars.BUNDLES["registry"]
    assert module.file == f"apicurio-registry-app-{jars.REGISTRY_VERSION}-all.tar.gz"
    description = jars._ivy_description("registry")
    assert '<artifact name="apicurio-registry-app" type="tar.gz" m:classifier="all"/>' in description
    assert "<artifact" not in jars._ivy_description("kafka")


def test_a_folder_is_unpacked_once_and_as_a_whole(tmp_path: Path) -> None:
    def fail(into: Path) -> None:
        (into / "half").touch()
        raise OSError("the disk is full")

    with pytest.raises(OSError, match="full"):
        jars.unpack_once(tmp_path / "registry-1.2", fail)
    assert [path.name for path in tmp_path.iterdir()] == ["registry-1.2.lock"]
    jars.unpack_once(tmp_path / "registry-1.2", lambda into: (into / "whole").touch())
    jars.unpack_once(tmp_path / "registry-1.2", fail)
    assert [path.name for path in (tmp_path / "registry-1.2").iterdir()] == ["whole"]


def test_the_lock_file_names_no_place_on_a_network() -> None:
    assert "//" not in jars.LOCK_FILE.read_text()


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"HEADRACE_CACHE": "/a", "XDG_CACHE_HOME": "/b"}, Path("/a")),
        ({"XDG_CACHE_HOME": "/b"}, Path("/b/headrace")),
        ({}, Path.home() / ".cache" / "headrace"),
    ],
)
def test_the_cache_is_where_the_environment_says(environ: dict[str, str], expected: Path) -> None:
    assert jars.cache_dir(environ) == expected


def test_postgres_is_chosen_by_platform() -> None:
    assert jars.postgres_bundle("Linux", "x86_64") == "postgres-linux-amd64"
    assert jars.postgres_bundle("Darwin", "arm64") == "postgres-darwin-arm64v8"
    with pytest.raises(UnsupportedPlatformError, match="sunos on sparc"):
        jars.postgres_bundle("SunOS", "sparc")


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
    installation = find_java({"JAVA_HOME": str(tmp_path), "PATH": "/usr/bin"})
    assert (installation.executable, installation.version) == (java, version)


def test_a_newer_jdk_is_found_among_the_installed_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _fake_java(tmp_path / "home", 'openjdk version "17.0.9"')
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "home"))
    installed = tmp_path / "jvm"
    for name, version, tool in [("a", "25", "jlink"), ("b", "21", "other"), ("c", "24", "jlink"), ("d", "11", "jlink")]:
        _fake_java(installed / name, f'openjdk version "{version}"').with_name(tool).touch()
    assert find_jdk(21, installed).executable == installed / "c" / "bin" / "java", "21 is no full JDK"
    with pytest.raises(JavaMissingError, match="No JDK 26 or newer"):
        find_jdk(26, installed)
    (tmp_path / "home" / "bin" / "jlink").touch()
    assert find_jdk(17, installed).version == 17, "JAVA_HOME wins"


def test_advice_fits_the_platform() -> None:
    assert "brew" in how_to_get_java("darwin")
    assert "apt-get" in how_to_get_java("linux")
