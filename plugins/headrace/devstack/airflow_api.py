"""A small client of Airflow's REST API (v2), for the demo, the tests and the command `batches run`."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Collection, Mapping
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

import tenacity

from headrace.devstack.errors import LocalStackError

_POLL_SECONDS = 0.5
_FINISHED = ("success", "failed")


class AirflowApiError(LocalStackError):
    """Airflow answered with an error; ``status`` is the HTTP status, 0 if there was no answer."""

    def __init__(self, what: str, status: int) -> None:
        super().__init__(what)
        self.status = status


def _is_of_a_busy_machine(error: BaseException) -> bool:
    """Airflow answers with a 500 where its database has ended a transaction, which a busy machine leaves open for too
    long. Or it does not answer in time."""
    return isinstance(error, AirflowApiError) and (
        error.status == http.client.INTERNAL_SERVER_ERROR or isinstance(error.__cause__, TimeoutError)
    )


# Only for calls that change nothing: one that was not answered may have been carried out.
_read_again = tenacity.retry(
    retry=tenacity.retry_if_exception(_is_of_a_busy_machine),
    stop=tenacity.stop_after_attempt(4),
    wait=tenacity.wait_fixed(_POLL_SECONDS),
    reraise=True,
)


class RunFailedError(LocalStackError):
    """A DAG run did not reach a wanted state; the text lists its tasks, and the end of the logs of unfinished ones."""


class AirflowApi:
    """A client of the Airflow at ``url`` for one user. Not thread-safe.

    The URL is of the scheme http or https; a path of its own, as behind a proxy, comes before those of Airflow.
    """

    def __init__(self, url: str, user: str, password: str, *, timeout: float = 30.0) -> None:
        parts = urlsplit(url)
        self._connect = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._address = (parts.hostname or "", parts.port or self._connect.default_port)
        self._url = url.rstrip("/")
        self._base = parts.path.rstrip("/")
        self._login = {"username": user, "password": password}
        self._timeout = timeout
        self._token: str | None = None

    def health(self) -> dict[str, Any]:
        """State and last heartbeat of the metadata database, scheduler, triggerer and DAG processor."""
        return dict(self._call("GET", "/api/v2/monitor/health", None, None))

    def request(self, method: str, path: str, body: object = None, params: Mapping[str, object] | None = None) -> Any:
        """Call ``/api/v2<path>``, or ``/<path>`` for a path written as ``//<path>``. Returns the decoded JSON, or the
        text if it is not JSON. A GET and a log-in that get a 500, or no answer in time, are repeated three times."""
        path = path.removeprefix("/") if path.startswith("//") else f"/api/v2{path}"
        if params:
            path = f"{path}?{urlencode(params, doseq=True)}"
        if self._token is None:
            self._token = self._log_in()
        call = _read_again(self._call) if method == "GET" else self._call
        try:
            return call(method, path, body, self._token)
        except AirflowApiError as error:
            if error.status != http.client.UNAUTHORIZED:
                raise
        # The token has expired, or the secrets have changed.
        self._token = self._log_in()
        return call(method, path, body, self._token)

    def dags(self) -> list[str]:
        """The ids of the DAGs that Airflow knows."""
        return [dag["dag_id"] for dag in self.request("GET", "/dags", params={"limit": 100})["dags"]]

    def import_errors(self) -> dict[str, str]:
        """File name to stack trace of the DAG files that could not be imported."""
        errors = self.request("GET", "/importErrors", params={"limit": 100})["import_errors"]
        return {error["filename"]: error["stack_trace"] for error in errors}

    def wait_for_dag(self, dag_id: str, *, timeout: float = 120.0) -> dict[str, Any]:
        """Wait until Airflow has parsed ``dag_id``. AirflowApiError with all import errors after ``timeout`` s."""
        deadline = time.monotonic() + timeout
        while True:
            try:
                return dict(self.request("GET", f"/dags/{quote(dag_id)}"))
            except AirflowApiError as error:
                if error.status != http.client.NOT_FOUND:
                    raise
            errors = self.import_errors()
            if time.monotonic() > deadline:
                raise AirflowApiError(
                    f"Airflow has no DAG {dag_id!r} after {timeout:.0f} s; it has {self.dags()}, and these files "
                    f"cannot be imported: {json.dumps(errors, indent=1) if errors else 'none'}.",
                    http.client.NOT_FOUND,
                )
            time.sleep(_POLL_SECONDS)

    def unpause(self, dag_id: str) -> None:
        """Let ``dag_id`` run."""
        self.request("PATCH", f"/dags/{quote(dag_id)}", {"is_paused": False})

    def pause(self, dag_id: str) -> None:
        """Keep ``dag_id`` from starting runs."""
        self.request("PATCH", f"/dags/{quote(dag_id)}", {"is_paused": True})

    def trigger(
        self,
        dag_id: str,
        *,
        conf: Mapping[str, Any] | None = None,
        logical_date: datetime | None = None,
        run_id: str | None = None,
        data_interval: tuple[datetime, datetime] | None = None,
    ) -> str:
        """Start a run and return its id. The default of ``logical_date`` is now."""
        body: dict[str, Any] = {"logical_date": (logical_date or datetime.now(UTC)).isoformat(), "conf": conf or {}}
        if run_id is not None:
            body["dag_run_id"] = run_id
        if data_interval is not None:
            body["data_interval_start"], body["data_interval_end"] = (end.isoformat() for end in data_interval)
        return str(self.request("POST", f"/dags/{quote(dag_id)}/dagRuns", body)["dag_run_id"])

    def runs(self, dag_id: str, *, limit: int = 100) -> list[dict[str, Any]]:
        """The runs of ``dag_id``, the newest first."""
        params = {"limit": limit, "order_by": "-run_after"}
        return list(self.request("GET", f"/dags/{quote(dag_id)}/dagRuns", params=params)["dag_runs"])

    def run(self, dag_id: str, run_id: str) -> dict[str, Any]:
        """One run; its `state` is queued, running, success or failed."""
        return dict(self.request("GET", _run(dag_id, run_id)))

    def wait_for_run(
        self, dag_id: str, run_id: str, *, states: Collection[str] = ("success",), timeout: float = 600.0
    ) -> dict[str, Any]:
        """Wait until the run is in one of ``states``. RunFailedError if it ends in another state, or after ``timeout``
        seconds."""
        deadline = time.monotonic() + timeout
        while True:
            run = self.run(dag_id, run_id)
            if run["state"] in states:
                return run
            late = time.monotonic() > deadline
            if run["state"] in _FINISHED or late:
                raise RunFailedError(
                    f"Run {run_id} of {dag_id} is {run['state']}{f' after {timeout:.0f} s' if late else ''}, "
                    f"not {' or '.join(states)}.\n{self._explain(dag_id, run_id)}"
                )
            time.sleep(_POLL_SECONDS)

    def task_instances(self, dag_id: str, run_id: str) -> list[dict[str, Any]]:
        """The run's task instances, with `task_id`, `state`, `try_number`."""
        return list(
            self.request("GET", f"{_run(dag_id, run_id)}/taskInstances", params={"limit": 100})["task_instances"]
        )

    def task_states(self, dag_id: str, run_id: str) -> dict[str, str | None]:
        """The state of each of the run's tasks, by task id."""
        return {task["task_id"]: task["state"] for task in self.task_instances(dag_id, run_id)}

    def task_log(self, dag_id: str, run_id: str, task_id: str, *, try_number: int = 1) -> str:
        """The log of one try of a task, one line for each event."""
        path = f"{_run(dag_id, run_id)}/taskInstances/{quote(task_id)}/logs/{try_number}"
        content = self.request("GET", path, params={"full_content": True})["content"]
        if isinstance(content, str):
            return content
        return "\n".join(_line(event) for event in content)

    def xcom(self, dag_id: str, run_id: str, task_id: str, key: str = "return_value") -> Any:
        """The XCom value that a task has pushed under ``key``."""
        path = f"{_run(dag_id, run_id)}/taskInstances/{quote(task_id)}/xcomEntries/{quote(key)}"
        return self.request("GET", path, params={"deserialize": True})["value"]

    def clear(self, dag_id: str, run_id: str, task_ids: Collection[str] | None = None, **options: object) -> None:
        """Clear tasks of a run (all by default), so that they run again."""
        body = {"dry_run": False, "dag_run_id": run_id, "only_failed": False, "reset_dag_runs": True} | options
        if task_ids is not None:
            body["task_ids"] = list(task_ids)
        self.request("POST", f"/dags/{quote(dag_id)}/clearTaskInstances", body)

    def backfill(self, dag_id: str, start: datetime, end: datetime, **options: object) -> int:
        """Create a backfill of the logical dates from ``start`` to ``end`` (inclusive), and return its id."""
        body = {"dag_id": dag_id, "from_date": start.isoformat(), "to_date": end.isoformat()} | options
        return int(self.request("POST", "/backfills", body)["id"])

    def _explain(self, dag_id: str, run_id: str) -> str:
        tasks = self.task_instances(dag_id, run_id)
        parts = ["Tasks: " + ", ".join(f"{task['task_id']}={task['state']}" for task in tasks)]
        for task in tasks:
            if task["state"] in ("failed", "up_for_retry", "running"):
                log = self.task_log(dag_id, run_id, task["task_id"], try_number=task["try_number"])
                parts.append(f"--- {task['task_id']}, try {task['try_number']}:\n" + "\n".join(log.splitlines()[-30:]))
        return "\n".join(parts)

    def _log_in(self) -> str:
        return str(_read_again(self._call)("POST", "/auth/token", self._login, None)["access_token"])

    def _call(self, method: str, path: str, body: object, token: str | None) -> Any:
        headers = {"Accept": "application/json", "Content-Type": "application/json"}
        if token is not None:
            headers["Authorization"] = f"Bearer {token}"
        where = f"{method} {self._url}{path.partition('?')[0]}"
        connection = self._connect(*self._address, timeout=self._timeout)
        try:
            connection.request(method, self._base + path, None if body is None else json.dumps(body), headers)
            answer = connection.getresponse()
            text = answer.read().decode()
        except (OSError, http.client.HTTPException) as error:
            raise AirflowApiError(f"{where} got no answer: {type(error).__name__}: {error}.", 0) from error
        finally:
            connection.close()
        if answer.status >= http.client.BAD_REQUEST:
            why = _detail(text)
            raise AirflowApiError(f"{where} was answered {answer.status} {answer.reason}: {why}", answer.status)
        if not text:
            return None
        try:
            return json.loads(text)
        except ValueError:
            return text


def _detail(text: str) -> str:
    """The reason in an error's answer: the texts of Airflow and headrace are the value of "detail"."""
    try:
        detail = json.loads(text)["detail"]
    except (ValueError, LookupError, TypeError):
        detail = text
    return detail if isinstance(detail, str) else text[:2000]


def _run(dag_id: str, run_id: str) -> str:
    return f"/dags/{quote(dag_id)}/dagRuns/{quote(run_id, safe='')}"


def _line(event: Any) -> str:
    if not isinstance(event, dict):
        return str(event)
    text = " ".join(str(event[key]) for key in ("timestamp", "level", "event") if event.get(key))
    for error in event.get("error_detail") or []:
        text += f"\n  {error.get('exc_type')}: {error.get('exc_value')}"
    return text
