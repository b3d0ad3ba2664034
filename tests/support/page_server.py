"""Serves the page and the API over a ledger without Airflow, for work on the page and for its tests.

    python -m tests.support.seeded_ledger sqlite:////tmp/ledger.db
    python -m tests.support.page_server sqlite:////tmp/ledger.db --port 8090          # then http://127.0.0.1:8090/headrace/

Everyone is the user named by the header ``X-User`` (by default admin): "viewer" may read, all others may also operate.
It binds to the loopback address and is no part of the package.
"""

from __future__ import annotations

import argparse
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI, HTTPException, Request

from headrace.ui.api.airflow_side import Caller, Interval, Run
from headrace.ui.api.app import create_app
from headrace.views.stream_state import DagFacts
from headrace.views.streams import Placed


@dataclass
class NoAirflow:
    """An `AirflowSide` with fixed answers. ``ledger_urls`` are read as if the configuration named them."""

    ledger_urls: Collection[str] = ()
    streams: list[Placed] = field(default_factory=list)
    dags: dict[str, DagFacts] = field(default_factory=dict)
    hidden: set[str] = field(default_factory=set)
    runs: dict[tuple[str, int], Run] = field(default_factory=dict)
    done: list[tuple[str, str, Any]] = field(default_factory=list)
    token: str = ""

    async def caller(self, request: Request) -> Caller:
        name = request.headers.get("x-user", "admin")
        if name == "anonymous":
            raise HTTPException(401, "Not authenticated")
        return Caller(name)

    def may(self, caller: Caller, method: str, dag_id: str, *, runs: bool = False) -> bool:
        return dag_id not in self.hidden and (method == "GET" or caller.name != "viewer")

    def declared(self) -> Collection[Placed]:
        return self.streams

    def ledgers(self) -> Collection[str]:
        return self.ledger_urls

    def metrics_token(self) -> str:
        return self.token

    def environ(self, reference: str) -> Mapping[str, str] | None:
        return None

    def connection(self, conn_id: str) -> Mapping[str, str]:
        return {}

    def facts(self, dag_ids: Collection[str]) -> Mapping[str, DagFacts]:
        known = {dag_id: DagFacts(dag_id, running=1) for dag_id in dag_ids}
        return known | {dag_id: facts for dag_id, facts in self.dags.items() if dag_id in known}

    def run(self, dag_id: str, run_id: str) -> Run | None:
        return next((run for run in self.runs.values() if (run.dag_id, run.run_id) == (dag_id, run_id)), None)

    def run_ending(self, dag_id: str, ended_ms: int) -> Run | None:
        return self.runs.get((dag_id, ended_ms))

    async def clear(self, request: Request, run: Run, *, reason: str | None) -> None:
        self.done.append(("clear", run.run_id, reason))

    async def trigger(self, request: Request, dag_id: str, interval: Interval, conf: Mapping[str, Any]) -> Run:
        self.done.append(("trigger", dag_id, dict(conf)))
        return Run(dag_id, f"headrace__{interval.batch_time_ms}", "queued")

    def batch_time_of(self, dag_id: str, run_id: str) -> int | None:
        return next((ms for (dag, ms), run in self.runs.items() if (dag, run.run_id) == (dag_id, run_id)), None)


def application(*ledger_urls: str) -> FastAPI:
    """The page and the API below ``/headrace``, as Airflow mounts them."""
    root = FastAPI()
    root.mount("/headrace", create_app(NoAirflow(ledger_urls)))
    return root


def main() -> None:
    """The command."""
    import uvicorn

    parser = argparse.ArgumentParser(description="Serve the page over ledgers, without Airflow.")
    parser.add_argument("ledgers", nargs="+", help="their URLs")
    parser.add_argument("--port", type=int, default=8090)
    asked = parser.parse_args()
    uvicorn.run(application(*asked.ledgers), host="127.0.0.1", port=asked.port, log_level="warning")


if __name__ == "__main__":
    main()
