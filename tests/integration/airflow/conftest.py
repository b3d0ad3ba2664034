from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from headrace.ledger import Ledger
from headrace.local.airflow import Airflow

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[2]


def _until(condition: Callable[[], object], seconds: float = 60.0, what: str = "it") -> object:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        found = condition()
        if found:
            return found
        time.sleep(0.25)
    raise AssertionError(f"{what} did not happen in {seconds} s")


@pytest.fixture
def until() -> Callable[..., object]:
    return _until


class Installation:
    """A real Airflow with the stream `flights`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.fail_if = folder / "fail"
        dags = folder / "dags"
        dags.mkdir()
        shutil.copy(HERE / "flights_dags.py", dags)
        self.airflow = Airflow(
            folder / "airflow",
            database_url=f"sqlite:///{folder}/airflow.db",
            dags_folder=dags,
            plugins_folder=REPOSITORY / "plugins",
            environment={
                "HEADRACE_TOYS": str(HERE),
                "HEADRACE_FOLDER": str(folder),
                "FAIL_IF": str(self.fail_if),
            },
        )
        self.url = f"sqlite:///{folder}/ledger.db"

    @property
    def api(self):
        return self.airflow.api()

    def ledger(self) -> Ledger:
        return Ledger.open(self.url)


@pytest.fixture(scope="module")
def installation() -> Iterator[Installation]:
    folder = Path(tempfile.mkdtemp(prefix="headrace-airflow-"))
    made = Installation(folder)
    try:
        with made.airflow:
            made.api.wait_for_dag("flights_receiver")
            made.api.wait_for_dag("flights_batches")
            yield made
    finally:
        shutil.rmtree(folder, ignore_errors=True)
