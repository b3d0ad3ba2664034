"""Fetches the servers' jars from Maven Central, with the Ivy that comes with pyspark, checks them, and finds a Java.

``jars.lock.json`` names every file of every bundle with its SHA-256: jars, and an archive where a server comes as one.
Every start checks that the files on disk are exactly these. ``python -m headrace.devstack.jars lock`` makes the lock
file again from ``BUNDLES``.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import xml.sax.saxutils
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from headrace.devstack.errors import JarsError, JavaMissingError, UnsupportedPlatformError
from headrace.devstack.state import exclusive
from headrace.errors import HeadraceError

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
        return f"Install it with `brew install openjdk@{OLDEST_JAVA}` and set JAVA_HOME as brew prints."
    return (
        # Debian 13 and newer Fedoras no longer have Java 17.
        "Install it with `apt-get install default-jre-headless` (Debian, Ubuntu), "
        f"`dnf install java-21-openjdk-headless` (Fedora) or `apk add openjdk{OLDEST_JAVA}-jre` (Alpine), "
        "or set JAVA_HOME to one that is already there."
    )


def find_java(environ: Mapping[str, str] | None = None) -> Java:
    """The Java of JAVA_HOME, or else of PATH. Raises JavaMissingError if there is none or it is older than 17."""
    return _java(_executable(os.environ if environ is None else environ))


def find_jdk(oldest: int, installed: Path = Path("/usr/lib/jvm")) -> Java:
    """A full JDK of this version or newer: `find_java`'s, or else the oldest of those in the folder ``installed``.

    Raises JavaMissingError.
    """
    candidates = [find_java()]
    for executable in installed.glob("*/bin/java"):
        with contextlib.suppress(JavaMissingError):
            candidates.append(_java(str(executable)))
    # A JRE has no jlink.
    suitable = [java for java in candidates if java.version >= oldest and java.executable.with_name("jlink").is_file()]
    if not suitable:
        raise JavaMissingError(
            f"No JDK {oldest} or newer was found in JAVA_HOME, PATH and {installed}.",
            remedy=f"Install one, such as openjdk-{oldest}-jdk-headless.",
        )
    return suitable[0] if suitable[0] is candidates[0] else min(suitable, key=lambda java: java.version)


def _java(executable: str) -> Java:
    try:
        done = subprocess.run([executable, "-version"], capture_output=True, text=True, timeout=60, check=False)
    except OSError as error:
        raise JavaMissingError(f"{executable} cannot be run: {error}.", remedy=how_to_get_java()) from error
    output = (done.stderr + done.stdout).strip()
    version_match = re.search(r'version "(\d+)(?:\.(\d+))?', output)
    if done.returncode != 0 or version_match is None:
        raise JavaMissingError(
            f"`{executable} -version` gave no version (exit {done.returncode}): {output[:500]!r}.",
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


LOCK_FILE = Path(__file__).with_name("jars.lock.json")

KAFKA_VERSION = "4.1.0"
ELASTICSEARCH_VERSION = "8.19.21"
"""8.19, because version 9 needs a full JDK 21."""
ELASTICSEARCH_9_VERSION = "9.1.0"
OPENSEARCH_VERSION = "2.19.6"
OPENSEARCH_3_VERSION = "3.3.2"
POSTGRES_VERSION = "17.5.0"
REGISTRY_VERSION = "2.6.13.Final"
DEBEZIUM_VERSION = "3.6.1.Final"


@dataclass(frozen=True, slots=True)
class Module:
    """A module of a Maven repository; ``transitive`` includes its dependencies.

    With a ``classifier``, its file is not a jar but the tar.gz of this classifier.
    """

    group: str
    name: str
    version: str
    transitive: bool = True
    classifier: str = ""

    @property
    def file(self) -> str:
        """The name of its own file."""
        return f"{self.name}-{self.version}" + (f"-{self.classifier}.tar.gz" if self.classifier else ".jar")


def _postgres(target: str) -> tuple[Module, ...]:
    return (Module("io.zonky.test.postgres", f"embedded-postgres-binaries-{target}", POSTGRES_VERSION, False),)


def _opensearch(version: str, *, log4j: str) -> tuple[Module, ...]:
    return (
        Module("org.opensearch", "opensearch", version),
        Module("org.opensearch.plugin", "transport-netty4-client", version),
        # The server's description leaves these out, and the server does not start without them.
        Module("org.opensearch", "opensearch-plugin-classloader", version),
        Module("org.apache.logging.log4j", "log4j-core", log4j),
    )


BUNDLES: Mapping[str, tuple[Module, ...]] = {
    # kafka_2.13 has a logging interface without an implementation; without slf4j-simple the broker dies silently.
    "kafka": (Module("org.apache.kafka", "kafka_2.13", KAFKA_VERSION), Module("org.slf4j", "slf4j-simple", "1.7.36")),
    "elasticsearch": (
        Module("org.elasticsearch", "elasticsearch", ELASTICSEARCH_VERSION),
        Module("org.elasticsearch.plugin", "transport-netty4", ELASTICSEARCH_VERSION),
    ),
    # Fetched only for who asks for a registry: larger than all other servers of the stack.
    "registry": (Module("io.apicurio", "apicurio-registry-app", REGISTRY_VERSION, False, "all"),),
    # The others are for tests only: no server of the local stack.
    "elasticsearch-9": (
        Module("org.elasticsearch", "elasticsearch", ELASTICSEARCH_9_VERSION),
        Module("org.elasticsearch.plugin", "transport-netty4", ELASTICSEARCH_9_VERSION),
    ),
    "opensearch": _opensearch(OPENSEARCH_VERSION, log4j="2.25.4"),
    "opensearch-3": _opensearch(OPENSEARCH_3_VERSION, log4j="2.21.0"),
    "connect": (
        Module("org.apache.kafka", "connect-runtime", KAFKA_VERSION),
        Module("org.slf4j", "slf4j-simple", "1.7.36"),
    ),
    "debezium-postgres": (Module("io.debezium", "debezium-connector-postgres", DEBEZIUM_VERSION),),
    # Confluent's converter is not on Maven Central; this one writes the same bytes.
    "connect-avro": (Module("io.apicurio", "apicurio-registry-utils-converter", REGISTRY_VERSION),),
    "postgres-linux-amd64": _postgres("linux-amd64"),
    "postgres-linux-arm64v8": _postgres("linux-arm64v8"),
    "postgres-darwin-amd64": _postgres("darwin-amd64"),
    "postgres-darwin-arm64v8": _postgres("darwin-arm64v8"),
}


def postgres_bundle(system: str | None = None, machine: str | None = None) -> str:
    """The name of the bundle with Postgres' binaries for a platform, by default this one; UnsupportedPlatformError."""
    system = (system or platform.system()).lower()
    machine = (machine or platform.machine()).lower()
    processor = {"x86_64": "amd64", "amd64": "amd64", "aarch64": "arm64v8", "arm64": "arm64v8"}.get(machine)
    bundle = f"postgres-{system}-{processor}"
    if bundle not in BUNDLES:
        raise UnsupportedPlatformError(
            f"There are no Postgres binaries for {system} on {machine}.",
            remedy="Run a Postgres of your own and give its URL as the stream's ledger.",
        )
    return bundle


def cache_dir(environ: Mapping[str, str] | None = None) -> Path:
    """The folder for downloads: $HEADRACE_CACHE, $XDG_CACHE_HOME/headrace or ~/.cache/headrace."""
    environ = os.environ if environ is None else environ
    if environ.get("HEADRACE_CACHE"):
        return Path(environ["HEADRACE_CACHE"]).expanduser().absolute()
    base = environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache").absolute() / "headrace"


def bundle_jars(
    bundle: str, *, cache: Path | None = None, lock: Mapping[str, Mapping[str, str]] | None = None
) -> list[Path]:
    """The paths of the files of ``bundle``, fetched if they are not in the cache yet, and checked in either case.

    Raises JarsError if the lock file has no such bundle, or if the jars differ from the lock file.
    """
    cache = cache_dir() if cache is None else cache
    wanted = (read_lock() if lock is None else lock).get(bundle)
    if not wanted:
        raise JarsError(f"The lock file {LOCK_FILE.name} has no jars for {bundle!r}.", remedy=_REMAKE)
    folder = _folder(bundle, wanted, cache)
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Locked, so that parallel tests and a first `headrace stack up` fetch only once.
    with exclusive(folder.with_suffix(".lock")):
        if not folder.is_dir():
            _fetch_checked(bundle, wanted, folder, cache)
        else:
            check_jars(bundle, folder, wanted)
    return [folder / name for name in sorted(wanted)]


def fetch_all(progress: Callable[[str], None], more: Collection[str] = (), *, cache: Path | None = None) -> None:
    """Fetch the jars that the embedded stack needs on this platform; report each bundle that is not there yet.

    ``more`` names further bundles.

    If there are no Postgres binaries for the platform, report that and fetch the other bundles. Raises JarsError.
    """
    bundles = ["kafka", "elasticsearch"]
    try:
        bundles.append(postgres_bundle())
    except UnsupportedPlatformError as error:
        progress(str(error))
    bundles += more
    lock = read_lock()
    for number, bundle in enumerate(bundles, 1):
        if not _folder(bundle, lock.get(bundle, {}), cache_dir() if cache is None else cache).is_dir():
            progress(f"Fetching the jars of {bundle} ({number} of {len(bundles)}), once; this can take minutes")
        bundle_jars(bundle, cache=cache, lock=lock)


def unpack_once(folder: Path, unpack: Callable[[Path], None]) -> None:
    """Have ``unpack`` fill ``folder`` if it is not there yet. A folder that is there is complete."""
    with exclusive(folder.with_name(f"{folder.name}.lock")):
        if folder.is_dir():
            return
        partial = Path(tempfile.mkdtemp(prefix=f"{folder.name}-", dir=folder.parent))
        try:
            unpack(partial)
            partial.chmod(0o755)
            partial.rename(folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)


def check_jars(bundle: str, folder: Path, wanted: Mapping[str, str]) -> None:
    """Raise JarsError unless ``folder`` holds exactly the files of ``wanted`` (name to SHA-256)."""
    digests = {file.name: _sha256(file) for file in folder.iterdir()}
    problems = [
        *(f"{name} is missing" for name in sorted(wanted.keys() - digests.keys())),
        *(f"{name} is not in the lock file" for name in sorted(digests.keys() - wanted.keys())),
        *(
            f"{name} has SHA-256 {digests[name]}, the lock file says {wanted[name]}"
            for name in sorted(digests.keys() & wanted.keys())
            if digests[name] != wanted[name]
        ),
    ]
    if problems:
        raise JarsError(
            f"The jars of {bundle} in {folder} are not those of {LOCK_FILE.name}: {'; '.join(problems)}.",
            remedy="The jars were not run. If a download was damaged, delete that folder and try again; "
            f"if versions were changed on purpose: {_REMAKE}",
        )


def read_lock(path: Path = LOCK_FILE) -> dict[str, dict[str, str]]:
    """The lock file: bundle to file name to SHA-256."""
    try:
        lock: dict[str, dict[str, str]] = json.loads(path.read_text())["bundles"]
    except (OSError, ValueError, KeyError) as error:
        raise JarsError(f"The lock file {path} cannot be read: {error}.", remedy=_REMAKE) from error
    return lock


def make_lock(path: Path = LOCK_FILE, *, cache: Path | None = None) -> None:
    """Fetch every bundle and write the lock file from the fetched jars."""
    cache = cache_dir() if cache is None else cache
    bundles: dict[str, dict[str, str]] = {}
    for bundle in BUNDLES:
        with tempfile.TemporaryDirectory() as folder:
            _retrieve(bundle, Path(folder), cache)
            bundles[bundle] = {file.name: _sha256(file) for file in sorted(Path(folder).iterdir())}
    path.write_text(json.dumps({"bundles": bundles}, indent=2) + "\n")


def _folder(bundle: str, wanted: Mapping[str, str], cache: Path) -> Path:
    # The folder depends on the lock file's content, which may differ between versions of headrace.
    digest = hashlib.sha256(json.dumps(wanted, sort_keys=True).encode()).hexdigest()[:12]
    return cache / "jars" / f"{bundle}-{digest}"


def _fetch_checked(bundle: str, wanted: Mapping[str, str], folder: Path, cache: Path) -> None:
    partial = Path(tempfile.mkdtemp(prefix=f"{bundle}-", suffix=".partial", dir=folder.parent))
    try:
        _retrieve(bundle, partial, cache)
        check_jars(bundle, partial, wanted)
        partial.chmod(0o755)
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _retrieve(bundle: str, folder: Path, cache: Path) -> None:
    """Fetch the bundle's jars into ``folder`` with Ivy; HEADRACE_IVY_SETTINGS may name settings with a mirror."""
    java = find_java()
    ivy_cache = cache / "ivy"
    ivy_cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        description = Path(scratch) / "ivy.xml"
        description.write_text(_ivy_description(bundle))
        command = [str(java.executable), "-XX:TieredStopAtLevel=1", "-jar", str(_ivy_jar()), "-cache", str(ivy_cache)]
        if settings := os.environ.get("HEADRACE_IVY_SETTINGS"):
            command += ["-settings", settings]
        command += ["-ivy", str(description), "-confs", "default"]
        command += ["-retrieve", f"{folder}/[artifact]-[revision](-[classifier]).[ext]"]
        # Locked, because Ivy's cache does not support concurrent use.
        with exclusive(ivy_cache / "headrace.lock"):
            done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0 or not any(folder.iterdir()):
        lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
        raise JarsError(
            f"Ivy could not fetch the jars of {bundle} (exit {done.returncode}):\n" + "\n".join(lines[-15:]) + "\n",
            remedy="Check that Maven Central is reachable from here. To use a mirror, name an Ivy settings file in "
            "HEADRACE_IVY_SETTINGS.",
        )


def _ivy_description(bundle: str) -> str:
    quote = xml.sax.saxutils.quoteattr
    dependencies = "".join(
        f"    <dependency org={quote(module.group)} name={quote(module.name)} rev={quote(module.version)} "
        f'conf="default->{"default" if module.transitive else "master"}">{_archive(module)}</dependency>\n'
        for module in BUNDLES[bundle]
    )
    return (
        '<ivy-module version="2.0" xmlns:m="http://ant.apache.org/ivy/maven">\n'
        f'  <info organisation="headrace" module={quote(bundle)}/>\n'
        f'  <configurations><conf name="default"/></configurations>\n  <dependencies>\n{dependencies}'
        "  </dependencies>\n</ivy-module>\n"
    )


def _archive(module: Module) -> str:
    if not module.classifier:
        return ""
    quote = xml.sax.saxutils.quoteattr
    return f'<artifact name={quote(module.name)} type="tar.gz" m:classifier={quote(module.classifier)}/>'


@cache
def _ivy_jar() -> Path:
    # find_spec, because importing pyspark takes a second.
    spec = find_spec("pyspark")
    jars = Path(spec.origin).parent / "jars" if spec and spec.origin else None
    ivy_jars = sorted(jars.glob("ivy-*.jar")) if jars else []
    if not ivy_jars:
        raise JarsError("pyspark's Ivy jar was not found.", remedy="Install pyspark (not only pyspark-client).")
    return ivy_jars[-1]


def _sha256(jar: Path) -> str:
    with jar.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


_REMAKE = "Write the lock file again with `python -m headrace.devstack.jars lock` and review the difference."


def main(arguments: list[str]) -> None:
    """Run `lock` (make the lock file again) or `fetch` (what the stack needs on this machine, and bundles by name)."""
    if arguments == ["lock"]:
        make_lock()
    elif arguments[:1] == ["fetch"]:
        try:
            fetch_all(lambda text: print(text, flush=True), arguments[1:])
        except HeadraceError as error:
            sys.exit(str(error))
    else:
        sys.exit("usage: python -m headrace.devstack.jars lock | fetch [BUNDLE…]")


if __name__ == "__main__":
    main(sys.argv[1:])
