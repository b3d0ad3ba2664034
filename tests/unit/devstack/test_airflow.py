from __future__ import annotations

import stat
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from headrace.devstack.airflow import Airflow


def test_components_that_start_at_once_get_the_same_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    airflow = Airflow(tmp_path / "airflow", database_url="sqlite://", dags_folder=tmp_path / "dags")
    make = airflow._new_secrets
    together = threading.Barrier(4)

    def made() -> dict[str, Any]:
        together.wait(30)
        return make()

    monkeypatch.setattr(airflow, "_new_secrets", made)
    with ThreadPoolExecutor(4) as pool:
        environments = list(pool.map(lambda _: airflow.environment(), range(4)))
    assert all(environment == environments[0] for environment in environments)
    files = sorted(path.name for path in airflow.folder.iterdir())
    assert files == ["secrets.json"], "no temporary file is left"
    assert stat.S_IMODE((airflow.folder / "secrets.json").stat().st_mode) == 0o600
