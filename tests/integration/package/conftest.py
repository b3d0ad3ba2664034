"""Both distributions of the package, and an environment in which the wheel is installed beside Airflow."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
UV = Path(sys.executable).with_name("uv")
AUTHOR = "The headrace team <team@code.example>"
ADDRESS = "https://code.example/team/headrace"
# Nothing of the repository: neither its folders on the path, nor the virtual environment of the tests.
NOT_PASSED_ON = {"PYTHONPATH", "VIRTUAL_ENV", "PYTHONDONTWRITEBYTECODE", "HEADRACE_LEDGER"}


@dataclass(frozen=True)
class Distributions:
    wheel: Path
    sdist: Path


@dataclass(frozen=True)
class Environment:
    """A virtual environment, and a folder outside the repository in which its commands run."""

    folder: Path
    home: Path

    def run(self, command: str, *arguments: str | Path) -> str:
        """The output of a command of this environment, which must succeed."""
        ran = subprocess.run(
            [self.folder / "bin" / command, *arguments],
            cwd=self.home,
            env=self.variables,
            capture_output=True,
            text=True,
            check=False,
            timeout=280,
        )
        assert ran.returncode == 0, f"{command} {arguments}\n{ran.stdout}\n{ran.stderr}"
        return ran.stdout

    @property
    def variables(self) -> dict[str, str]:
        inherited = {name: value for name, value in os.environ.items() if name not in NOT_PASSED_ON}
        inherited = {name: value for name, value in inherited.items() if not name.startswith("AIRFLOW")}
        return inherited | {
            "PATH": f"{self.folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
            "AIRFLOW_HOME": str(self.home / "airflow"),
            "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
            "AIRFLOW__CORE__DAGS_FOLDER": str(self.home / "dags"),
        }


def uv(*arguments: str | Path, **variables: str) -> None:
    subprocess.run([UV, *arguments], env=os.environ | variables, check=True, capture_output=True, timeout=280)


def link_distribution(name: str, environment: Path) -> None:
    """Give ``environment`` a distribution of the tests' environment, by hard links.

    For those that have no wheels in the registry: to build pyspark takes minutes.
    """
    (site,) = environment.glob("lib/python3*/site-packages")
    for file in metadata.distribution(name).files or []:
        source, target = Path(str(file.locate())), Path(os.path.normpath(site / file))
        if source.is_file() and not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                target.hardlink_to(source)
            except OSError:
                shutil.copy(source, target)


@pytest.fixture(scope="session")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> Distributions:
    """The source distribution of this tree, as a release builds it, and the wheel that is built from it."""
    sdists, wheels = tmp_path_factory.mktemp("sdist"), tmp_path_factory.mktemp("wheel")
    uv(
        "build",
        "-q",
        "--sdist",
        "--no-build-isolation",
        "-o",
        sdists,
        ROOT,
        HEADRACE_REPOSITORY=f"{AUTHOR} ({ADDRESS})",
    )
    (sdist,) = sdists.glob("*.tar.gz")
    # From the source distribution alone, without the address of the repository.
    uv("build", "-q", "--wheel", "--no-build-isolation", "-o", wheels, sdist)
    (wheel,) = wheels.glob("*.whl")
    return Distributions(wheel, sdist)


def install(folder: Path, requirement: str, distribution: Path) -> None:
    """Install a release, by its name, from an index that has only this ``distribution`` of it."""
    # It has the same version whatever it was built from: without this, an older build may be in the cache.
    install = ("pip", "install", "-q", "-c", ROOT / "requirements.txt", "--refresh-package", "headrace", requirement)
    index = {"VIRTUAL_ENV": str(folder), "UV_FIND_LINKS": str(distribution.parent)}
    try:
        # The environment of the tests left all wheels in uv's cache.
        uv(*install, "--offline", **index)
    except subprocess.CalledProcessError:
        uv(*install, **index)


@pytest.fixture(scope="session")
def environment(distributions: Distributions, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """The wheel with its extras, in the pinned versions."""
    folder = tmp_path_factory.mktemp("environment") / "venv"
    uv("venv", "-q", "--python", sys.executable, folder)
    for name in ("pyspark", "pyspark-client"):
        link_distribution(name, folder)
    install(folder, "headrace[airflow,s3]==0.1.0", distributions.wheel)
    return Environment(folder, tmp_path_factory.mktemp("home"))


@pytest.fixture(scope="session")
def executor(distributions: Distributions, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """The source distribution without an extra: what an executor needs."""
    folder = tmp_path_factory.mktemp("executor") / "venv"
    uv("venv", "-q", "--python", sys.executable, folder)
    link_distribution("pyspark", folder)
    install(folder, "headrace==0.1.0", distributions.sdist)
    return Environment(folder, tmp_path_factory.mktemp("home"))
