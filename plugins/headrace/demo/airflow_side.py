"""Airflow's REST API, as a script would use it."""

from __future__ import annotations

import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from headrace.clock import Clock, SystemClock
from headrace.demo.errors import DemoError

_SECONDS = 30.0
_PAGE = 100
_UNAUTHORIZED = 401
_NOT_FOUND = 404


@dataclass(frozen=True, slots=True)
class TaskInstance:
    """One task of one run; ``started`` and ``ended`` are None before that."""

    dag_id: str
    run_id: str
    task_id: str
    try_number: int
    state: str | None
    started: datetime | None
    ended: datetime | None

    @property
    def seconds(self) -> float | None:
        """How long it took; None if it has not ended."""
        if self.started is None or self.ended is None:
            return None
        return (self.ended - self.started).total_seconds()


@dataclass(frozen=True, slots=True)
class DagRun:
    """One run of a DAG. ``batch_time`` is the end of its data interval."""

    dag_id: str
    run_id: str
    state: str
    batch_time: datetime | None


class AirflowSide:
    """An Airflow at ``url``, logged in as a person would."""

    def __init__(self, url: str, login: str, password: str) -> None:
        self._url = url.rstrip("/")
        self._login = login
        self._password = password
        self._token: str | None = None

    def wait_for_dag(self, dag_id: str, *, seconds: float, clock: Clock | None = None) -> None:
        """Wait until the dag processor has parsed the DAG.

        Raises:
            DemoError: it took too long; the import errors, if there are any, are told.
        """
        clock = clock or SystemClock()
        deadline = clock.monotonic() + seconds
        while True:
            try:
                self.call("GET", f"/api/v2/dags/{dag_id}")
                return
            except NotFoundError:
                if clock.monotonic() < deadline:
                    _pause(clock)
                    continue
            errors = "\n".join(self.import_errors()) or "There are no import errors."
            raise DemoError(f"Airflow does not know the DAG {dag_id} after {seconds:g} s. {errors}")

    def import_errors(self) -> Iterator[str]:
        """What went wrong when Airflow imported DAG files."""
        for error in self.call("GET", "/api/v2/importErrors")["import_errors"]:
            yield f"{error['filename']}: {error['stack_trace']}"

    def pause(self, dag_id: str, paused: bool = True) -> None:
        """Pause the DAG, or let it run."""
        self.call("PATCH", f"/api/v2/dags/{dag_id}?update_mask=is_paused", {"is_paused": paused})

    def runs(self, dag_id: str) -> Iterator[DagRun]:
        """All runs of the DAG, the newest first."""
        for run in self._pages(f"/api/v2/dags/{dag_id}/dagRuns?order_by=-run_after", "dag_runs"):
            yield DagRun(dag_id, run["dag_run_id"], run["state"], _time(run["data_interval_end"]))

    def task_instances(self, dag_id: str, run_id: str = "~") -> Iterator[TaskInstance]:
        """The tasks of a run, or of all runs of the DAG; each as its newest try left it."""
        path = f"/api/v2/dags/{dag_id}/dagRuns/{urllib.parse.quote(run_id, safe='~')}/taskInstances"
        for task in self._pages(path, "task_instances"):
            yield TaskInstance(
                dag_id,
                task["dag_run_id"],
                task["task_id"],
                task["try_number"],
                task["state"],
                _time(task["start_date"]),
                _time(task["end_date"]),
            )

    def log(self, task: TaskInstance) -> str:
        """What a task wrote to its log."""
        run = urllib.parse.quote(task.run_id, safe="")
        path = f"/api/v2/dags/{task.dag_id}/dagRuns/{run}/taskInstances/{task.task_id}/logs/{max(task.try_number, 1)}"
        return "\n".join(_line(entry) for entry in self.call("GET", path)["content"])

    def call(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        """One request; the answer's JSON.

        Raises:
            DemoError: Airflow cannot be reached or refuses.
            NotFoundError: 404.
        """
        if self._token is None:
            self._token = self._request(
                "POST", "/auth/token", {"username": self._login, "password": self._password}, None
            )["access_token"]
        try:
            return self._request(method, path, body, self._token)
        except _UnauthorizedError:
            self._token = None  # it has expired
            raise

    def _pages(self, path: str, items: str) -> Iterator[dict[str, Any]]:
        offset = 0
        while True:
            mark = "&" if "?" in path else "?"
            page = self.call("GET", f"{path}{mark}limit={_PAGE}&offset={offset}")
            yield from page[items]
            offset += len(page[items])
            if not page[items] or offset >= page["total_entries"]:
                return

    def _request(self, method: str, path: str, body: dict[str, Any] | None, token: str | None) -> Any:
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if token is not None:
            headers["Authorization"] = f"Bearer {token}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._url + path, data, headers, method=method)  # noqa: S310 - the stack's own
        try:
            with urllib.request.urlopen(request, timeout=_SECONDS) as response:  # noqa: S310
                return json.load(response)
        except urllib.error.HTTPError as error:
            told = f"Airflow answers {error.code} to {method} {path}: {error.read(2_000).decode(errors='replace')}"
            kind = {_NOT_FOUND: NotFoundError, _UNAUTHORIZED: _UnauthorizedError}.get(error.code, DemoError)
            raise kind(told) from None
        except OSError as error:
            raise DemoError(f"Airflow at {self._url} does not answer: {error}.") from error


class NotFoundError(DemoError):
    """Airflow knows no such thing (yet)."""


class _UnauthorizedError(DemoError):
    """The token is not valid, or not any more."""


def _line(entry: Any) -> str:
    return str(entry.get("event", entry)) if isinstance(entry, dict) else str(entry)


def _time(text: str | None) -> datetime | None:
    return None if text is None else datetime.fromisoformat(text)


def _pause(clock: Clock) -> None:
    import threading

    clock.wait(threading.Event(), 0.5)
