"""What the API needs of Airflow: who calls and what they may do, the streams that its DAGs declare, and their runs.

`headrace.ui.api.airflow_server` implements it inside Airflow's API server. The page's development server and unit tests
have their own, so that the rest of the API can be tried without Airflow.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from fastapi import Request

from headrace.views.stream_state import DagFacts
from headrace.views.streams import Placed


@dataclass(frozen=True, slots=True)
class Caller:
    """An authenticated user. ``user`` is Airflow's own object, ``name`` is for the audit."""

    name: str
    user: Any = None


@dataclass(frozen=True, slots=True)
class Run:
    """A DAG run. ``conf`` is what it was asked for when it was triggered."""

    dag_id: str
    run_id: str
    state: str
    conf: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Interval:
    """The data interval of a batch time, which is its end."""

    batch_time_ms: int
    interval_ms: int

    @property
    def start_ms(self) -> int:
        """Its first millisecond."""
        return self.batch_time_ms - self.interval_ms


class AirflowSide(Protocol):
    """Airflow, as the API sees it. Calls may block."""

    async def caller(self, request: Request) -> Caller:
        """Return who calls.

        Raises:
            HTTPException: 401 if the caller is not logged in, 403 if the token is invalid.
        """
        ...

    def may(self, caller: Caller, method: str, dag_id: str, *, runs: bool = False) -> bool:
        """Whether the caller may do this ("GET", "PUT", "POST") to the DAG, or to its runs; false if there is none."""
        ...

    def declared(self) -> Collection[Placed]:
        """Return the streams of all DAGs, whatever the caller's rights; some seconds old at most."""
        ...

    def ledgers(self) -> Collection[str]:
        """Return the ledgers that the configuration and the connections name beside those of the DAGs."""
        ...

    def metrics_token(self) -> str:
        """Return the token with which a scraper gets the metrics of all streams; "" if there is none."""
        ...

    def environ(self, reference: str) -> Mapping[str, str] | None:
        """Return the environment in which the connection of a ledger ``connection:<id>`` is looked up; None if it is a
        URL.

        Raises:
            ConnectionNotFoundError: Airflow has no such connection, or its secrets backend refuses it.
            HeadraceError: a DAG names a server, or the connection to one, with which this process does not log in.
        """
        ...

    def connection(self, conn_id: str) -> Mapping[str, str]:
        """Return the environment in which a connection of a stream's definition is looked up.

        Raises ConnectionNotFoundError as `environ`.
        """
        ...

    def facts(self, dag_ids: Collection[str]) -> Mapping[str, DagFacts]:
        """Return whether these DAGs are paused, and their running and failed runs; unknown DAGs are left out."""
        ...

    def run(self, dag_id: str, run_id: str) -> Run | None:
        """Return a run, None if it does not exist."""
        ...

    def run_ending(self, dag_id: str, ended_ms: int) -> Run | None:
        """Return the newest run whose data interval ends then."""
        ...

    async def clear(self, request: Request, run: Run, *, reason: str | None) -> None:
        """Clear all tasks of a run with the caller's rights, so that it runs again.

        Raises:
            HTTPException: Airflow refuses it.
        """
        ...

    async def trigger(self, request: Request, dag_id: str, interval: Interval, conf: Mapping[str, Any]) -> Run:
        """Start a run for a batch time with the caller's rights.

        Raises:
            HTTPException: Airflow refuses it.
        """
        ...

    def batch_time_of(self, dag_id: str, run_id: str) -> int | None:
        """Return the end of a run's data interval in milliseconds, None if there is no such run or interval."""
        ...
