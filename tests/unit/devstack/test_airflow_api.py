from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from headrace.devstack.airflow_api import AirflowApi, AirflowApiError, RunFailedError

Answer = Callable[[str, str, Any], tuple[int, Any]]


class _FakeAirflow:
    """Hands out numbered tokens, of which only the last is good, and answers by ``answer``."""

    def __init__(self) -> None:
        self.tokens = 0
        self.seen: list[tuple[str, str, Any]] = []
        self.answer: Answer = lambda _method, _path, _body: (200, {})

    def handle(self, method: str, path: str, body: Any, authorization: str | None) -> tuple[int, Any]:
        if path == "/auth/token":
            if body != {"username": "admin", "password": "secret"}:
                return 401, {"detail": "Invalid credentials"}
            self.tokens += 1
            return 201, {"access_token": f"t{self.tokens}"}
        if authorization != f"Bearer t{self.tokens}":
            return 401, {"detail": "expired"}
        self.seen.append((method, path, body))
        return self.answer(method, path, body)


@pytest.fixture
def airflow() -> Iterator[tuple[_FakeAirflow, str]]:
    fake = _FakeAirflow()

    class Handler(BaseHTTPRequestHandler):
        def _any(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(length)) if length else None
            status, answer = fake.handle(self.command, self.path, body, self.headers.get("Authorization"))
            content = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST = do_PATCH = _any  # noqa: N815 - http.server's names

        def log_message(self, *_: object) -> None:  # type: ignore[override]
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield fake, f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_the_client_logs_in_once_and_when_the_token_expires(airflow: tuple[_FakeAirflow, str]) -> None:
    fake, url = airflow
    api = AirflowApi(url, "admin", "secret")
    api.unpause("d")
    api.pause("d")
    assert fake.tokens == 1
    fake.tokens = 7
    api.unpause("d")
    assert fake.tokens == 8
    assert fake.seen[0] == ("PATCH", "/api/v2/dags/d", {"is_paused": False})


def test_after_an_internal_error_a_read_is_repeated_not_a_change(airflow: tuple[_FakeAirflow, str]) -> None:
    fake, url = airflow
    api = AirflowApi(url, "admin", "secret")
    answers = iter([(500, {"detail": "Database error"}), (200, {"state": "success"})])
    fake.answer = lambda _method, _path, _body: next(answers)
    assert api.run("d", "r")["state"] == "success"
    fake.answer = lambda _method, _path, _body: (500, {"detail": "Database error"})
    for ask, times in ((lambda: api.run("d", "r"), 4), (lambda: api.pause("d"), 1)):
        fake.seen.clear()
        with pytest.raises(AirflowApiError, match="500"):
            ask()
        assert len(fake.seen) == times


def test_a_log_in_or_a_read_without_an_answer_is_repeated(airflow: tuple[_FakeAirflow, str]) -> None:
    fake, url = airflow
    slow = iter(["/auth/token", "/api/v2/dags/d/dagRuns/r"])
    waits_at, released = next(slow), threading.Event()
    real = fake.handle

    def handle(method: str, path: str, body: Any, authorization: str | None) -> tuple[int, Any]:
        nonlocal waits_at
        if path == waits_at:
            waits_at = next(slow, "")
            released.wait(60)
        return real(method, path, body, authorization)

    fake.handle = handle  # type: ignore[method-assign]
    fake.answer = lambda _method, _path, _body: (200, {"state": "success"})
    try:
        # The first log-in is not answered, and then the first read.
        assert AirflowApi(url, "admin", "secret", timeout=0.5).run("d", "r")["state"] == "success"
        waits_at = "/api/v2/dags/d"
        with pytest.raises(AirflowApiError, match=r"PATCH .* got no answer: TimeoutError"):
            AirflowApi(url, "admin", "secret", timeout=0.5).pause("d")
    finally:
        released.set()


def test_a_wrong_password_is_reported_without_the_password(airflow: tuple[_FakeAirflow, str]) -> None:
    _, url = airflow
    with pytest.raises(AirflowApiError, match=r"/auth/token was answered 401.*Invalid credentials") as raised:
        AirflowApi(url, "admin", "wrong-one").dags()
    assert "wrong-one" not in str(raised.value)


def test_a_missing_server_is_reported() -> None:
    with pytest.raises(AirflowApiError, match="got no answer: ConnectionRefusedError"):
        AirflowApi("http://127.0.0.1:9", "admin", "secret").health()


def test_a_missing_dag_comes_with_the_import_errors(airflow: tuple[_FakeAirflow, str]) -> None:
    fake, url = airflow

    def answer(_method: str, path: str, _body: Any) -> tuple[int, Any]:
        if path.startswith("/api/v2/importErrors"):
            return 200, {"import_errors": [{"filename": "bad.py", "stack_trace": "NameError: oops"}]}
        return (200, {"dags": [{"dag_id": "other"}]}) if path.startswith("/api/v2/dags?") else (404, {"detail": "no"})

    fake.answer = answer
    with pytest.raises(AirflowApiError, match=r"no DAG 'd'.*'other'[^$]*NameError: oops"):
        AirflowApi(url, "admin", "secret").wait_for_dag("d", timeout=0)


def test_a_failed_run_comes_with_the_failed_tasks_log(airflow: tuple[_FakeAirflow, str]) -> None:
    fake, url = airflow

    def answer(_method: str, path: str, _body: Any) -> tuple[int, Any]:
        if "/logs/" in path:
            return 200, {"content": [{"event": "boom", "level": "error"}]}
        if "taskInstances" in path:
            return 200, {"task_instances": [{"task_id": "t", "state": "failed", "try_number": 2}]}
        return 200, {"state": "failed"}

    fake.answer = answer
    with pytest.raises(
        RunFailedError, match=r"Run r of d is failed, not success[^$]*t=failed[^$]*try 2[^$]*error boom"
    ):
        AirflowApi(url, "admin", "secret").wait_for_run("d", "r")


def test_run_ids_with_signs_are_quoted(airflow: tuple[_FakeAirflow, str]) -> None:
    fake, url = airflow
    fake.answer = lambda _method, _path, _body: (200, {"state": "success"})
    AirflowApi(url, "admin", "secret").run("d", "manual__2026-01-01T00:00:00+00:00")
    assert fake.seen[0][1] == "/api/v2/dags/d/dagRuns/manual__2026-01-01T00%3A00%3A00%2B00%3A00"
