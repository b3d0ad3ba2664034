"""What the wheel and the source distribution hold."""

from __future__ import annotations

import email
import json
import re
import shutil
import subprocess
import tarfile
import zipfile
from pathlib import Path

from tests.integration.package.conftest import ADDRESS, ROOT, Distributions, uv

PACKAGE = ROOT / "plugins" / "headrace"
# Given to spark-submit; they travel inside the package.
APPLICATIONS = {"headrace/spark/applications/receiver.py", "headrace/spark/applications/micro_batch.py"}


def sources(folder: Path) -> set[str]:
    """The files of a folder that git knows, or would add."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", folder], cwd=ROOT, check=True, capture_output=True, text=True
    )
    return {line for line in listed.stdout.splitlines() if (ROOT / line).is_file()}


def metadata(text: bytes) -> tuple[dict[str, list[str]], str]:
    message = email.message_from_bytes(text)
    return {name: message.get_all(name, []) for name in set(message)}, str(message.get_payload())


def test_the_wheel_holds_the_package_and_nothing_else(distributions: Distributions) -> None:
    with zipfile.ZipFile(distributions.wheel) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    package = {name.removeprefix("plugins/") for name in sources(PACKAGE)}
    assert names == package | APPLICATIONS
    # Of what is no Python, by name: a rule that ignores one of these kinds of files would ignore them above too.
    assert {
        "headrace/py.typed",
        "headrace/devstack/jars.lock.json",
        "headrace/ledger/migrations/versions/0001_initial.py",
        "headrace/ledger/migrations/script.py.mako",
    } <= names


def test_the_wheel_names_what_it_bundles_and_has_the_licences(distributions: Distributions) -> None:
    """By PEP 639 and PEP 770. Every library of the page, by the version of its table."""
    vendor = PACKAGE / "ui" / "page" / "static" / "vendor"
    table = re.findall(r"^\| \[(\w+)\]\([^)]+\) \| ([\d.]+) \| (\S+) \|", (vendor / "README.md").read_text(), re.M)
    assert {name.lower() for name, _, _ in table} == {folder.parent.name for folder in vendor.glob("*/LICENSE")}
    with zipfile.ZipFile(distributions.wheel) as wheel:
        beside = {name.partition(".dist-info/")[2]: name for name in wheel.namelist() if ".dist-info/" in name}
        bill = json.loads(wheel.read(beside["sboms/bundled.cdx.json"]))
        notice = wheel.read(beside["licenses/NOTICE"]).decode()
    assert "licenses/LICENSE" in beside
    listed = {(each["name"], each["version"], each["licenses"][0]["license"]["id"]) for each in bill["components"]}
    assert listed == {(name.lower(), version, licence) for name, version, licence in table}
    for name, version, _ in table:
        assert f"licenses/plugins/headrace/ui/page/static/vendor/{name.lower()}/LICENSE" in beside
        assert f"{name} {version}" in notice


def test_the_source_distribution_holds_wheel_and_docs_sources(
    distributions: Distributions,
) -> None:
    """It holds exactly what builds the wheel and the documentation."""
    with tarfile.open(distributions.sdist) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    pages = {"README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "LICENSE", "NOTICE"}
    beside = pages | {"pyproject.toml", "hatch_build.py", ".gitignore", "PKG-INFO"}
    folders = ("plugins/headrace", "spark_jobs", "docs")
    assert names == beside | {name for folder in folders for name in sources(ROOT / folder)}


def test_the_image_has_what_the_package_is_built_from(tmp_path: Path) -> None:
    """docker/Dockerfile installs the package from what it has copied until then."""
    before, install, _ = (ROOT / "docker" / "Dockerfile").read_text().partition("--no-deps .")
    assert install
    context = (ROOT / ".dockerignore").read_text().splitlines()
    for line in before.splitlines():
        for name in line.split()[1:-1] if line.startswith("COPY") else ():
            source = ROOT / name
            assert f"!{name}" in context
            if source.is_dir():
                shutil.copytree(source, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(source, tmp_path / name)
    uv("build", "-q", "--wheel", "--no-build-isolation", "-o", tmp_path / "dist", tmp_path)
    assert list((tmp_path / "dist").glob("*.whl"))


def test_both_have_the_metadata_of_the_release(distributions: Distributions) -> None:
    with zipfile.ZipFile(distributions.wheel) as wheel:
        (name,) = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
        of_wheel = wheel.read(name)
    with tarfile.open(distributions.sdist) as sdist:
        (name,) = [name for name in sdist.getnames() if name.endswith("/PKG-INFO") and name.count("/") == 1]
        file = sdist.extractfile(name)
        assert file is not None
        of_sdist = file.read()
    fields, description = metadata(of_wheel)
    assert (fields, description) == metadata(of_sdist)
    assert f"Documentation, {ADDRESS}/tree/v{fields['Version'][0]}/docs" in fields["Project-URL"]
    assert "Framework :: Apache Airflow :: Provider" in fields["Classifier"]
    assert fields["License-Expression"] == ["Apache-2.0 AND MIT"]
    assert fields["Author-email"] == ["The headrace team <team@code.example>"]
    assert not re.findall(r"\]\((?!https?://|#)", description)
    assert f"({ADDRESS}/blob/" in description
