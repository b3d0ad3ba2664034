"""The API over a seeded ledger, without Airflow: one ledger a session, and one of its own for tests that change it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from tests.support.page_server import NoAirflow
from tests.support.seeded_ledger import SITUATIONS, seed

from headrace.ledger import Ledger
from headrace.ui.api.app import create_app
from headrace.views.streams import Placed

BATCHES = 60


@dataclass
class Api:
    """A client of the API below `/headrace/api/v1`, and the Airflow that it believes in."""

    client: TestClient
    airflow: NoAirflow
    app: FastAPI
    url: str

    def get(self, path: str, status: int = 200, *, user: str = "admin", **params: Any) -> Any:
        answer = self.client.get(f"/headrace/api/v1{path}", params=params, headers={"X-User": user})
        assert answer.status_code == status, answer.text
        return answer.json()

    def post(self, path: str, body: Any = None, status: int = 200, *, user: str = "op", **headers: str) -> Any:
        answer = self.client.post(f"/headrace/api/v1{path}", json=body or {}, headers={"X-User": user, **headers})
        assert answer.status_code == status, answer.text
        return answer.json()

    def ledger(self) -> Ledger:
        return Ledger.open(self.url)


@pytest.fixture(scope="session")
def seeded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A ledger with one stream of each situation: "orders" is well, "orders-3" is failing."""
    path = tmp_path_factory.mktemp("api") / "ledger.db"
    with Ledger.open(f"sqlite:///{path}") as ledger:
        seed(ledger, streams=len(SITUATIONS), batches=BATCHES)
    return path


def _api(url: str) -> Iterator[Api]:
    with Ledger.open(url) as ledger:
        names = [row.name for row in ledger.streams.all()]
    streams = [Placed(name, url, f"{name}_batches", f"{name}_receiver", (f"{name}_v2",)) for name in names]
    airflow = NoAirflow(streams=streams)
    root = FastAPI()
    # A busy machine is no reason for a 503 here.
    app = create_app(airflow, ledger_seconds=600)
    root.mount("/headrace", app)
    yield Api(TestClient(root), airflow, app, url)
    app.state.ledgers.close()


@pytest.fixture
def api(seeded: Path) -> Iterator[Api]:
    """For tests that only read."""
    yield from _api(f"sqlite:///{seeded}")


@pytest.fixture
def own_api(seeded: Path, tmp_path: Path) -> Iterator[Api]:
    """For tests that change the ledger."""
    shutil.copy(seeded, tmp_path / "ledger.db")
    yield from _api(f"sqlite:///{tmp_path}/ledger.db")
