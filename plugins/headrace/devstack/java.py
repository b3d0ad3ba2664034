"""Finds a Java that Kafka, Elasticsearch and Spark can run on."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from headrace.devstack.errors import JavaMissingError

OLDEST_JAVA = 17
"""Spark 4, Kafka 4 and Elasticsearch 8 all need 17."""


@dataclass(frozen=True, slots=True)
class Java:
    """A Java executable and its feature version (17, 21, ...)."""

    executable: Path
    version: int


def how_to_get_java(platform: str = sys.platform) -> str:
    """The command that installs a suitable Java on ``platform``."""
    if platform == "darwin":
        return f"Install it with `brew install openjdk@{OLDEST_JAVA}` and set JAVA_HOME as brew says."
    return (
        f"Install it with `apt-get install openjdk-{OLDEST_JAVA}-jre-headless` (Debian, Ubuntu), "
        f"`dnf install java-{OLDEST_JAVA}-openjdk-headless` (Fedora) or `apk add openjdk{OLDEST_JAVA}-jre` (Alpine), "
        "or set JAVA_HOME to one that is already there."
    )


def find_java(environ: Mapping[str, str] | None = None) -> Java:
    """The Java of JAVA_HOME, or else of PATH. Raises JavaMissingError if there is none or it is older than 17."""
    environ = os.environ if environ is None else environ
    executable = _executable(environ)
    try:
        done = subprocess.run([executable, "-version"], capture_output=True, text=True, timeout=60, check=False)
    except OSError as error:
        raise JavaMissingError(f"{executable} cannot be run: {error}.", remedy=how_to_get_java()) from error
    said = (done.stderr + done.stdout).strip()
    version_match = re.search(r'version "(\d+)(?:\.(\d+))?', said)
    if done.returncode != 0 or version_match is None:
        raise JavaMissingError(
            f"`{executable} -version` gave no version (exit {done.returncode}): {said[:500]!r}.",
            remedy=f"Java {OLDEST_JAVA} or newer is needed. {how_to_get_java()}",
        )
    # Java 8 reports its version as 1.8.
    version = int(version_match[2]) if version_match[1] == "1" and version_match[2] else int(version_match[1])
    if version < OLDEST_JAVA:
        raise JavaMissingError(
            f"{executable} is Java {version}; Java {OLDEST_JAVA} or newer is needed.", remedy=how_to_get_java()
        )
    return Java(Path(executable), version)


def _executable(environ: Mapping[str, str]) -> str:
    home = environ.get("JAVA_HOME")
    if home:
        executable = Path(home) / "bin" / "java"
        if not executable.is_file():
            raise JavaMissingError(
                f"JAVA_HOME is {home}, and there is no bin/java in it.",
                remedy=f"Correct or unset JAVA_HOME. Java {OLDEST_JAVA} or newer is needed. {how_to_get_java()}",
            )
        return str(executable)
    on_path = shutil.which("java", path=environ.get("PATH", os.defpath))
    if on_path is None:
        raise JavaMissingError(
            "No Java was found: JAVA_HOME is not set and there is no `java` on PATH. "
            f"Java {OLDEST_JAVA} or newer is needed.",
            remedy=how_to_get_java(),
        )
    return on_path
